"""Fills in what the dashboard shows: from membership, books, counters and directories.

Made when somebody looks, once a second for all who do: O(workers + rows shown), nothing a request.
Must never: hold a prompt, or decide anything. Read `gateway/overview.py` for the records,
`gateway/live.py` for who asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice

from trunkline.assembly import Core
from trunkline.control.fleets import Members
from trunkline.control.views import MemberView
from trunkline.core.records import Instant
from trunkline.gateway.accounts import Accounts
from trunkline.gateway.beginnings import Beginning
from trunkline.gateway.counters import Counters
from trunkline.gateway.foregone import Comparison
from trunkline.gateway.front import Front
from trunkline.gateway.metrics import HistogramView
from trunkline.gateway.overview import (
    SHOWN_DECISIONS,
    SHOWN_PREFIXES,
    DecisionFilter,
    DecisionShown,
    Foregone,
    Integrity,
    Overview,
    PrefixShown,
    Quantiles,
    Traffic,
    WorkerShown,
)
from trunkline.gateway.receipts import Receipt
from trunkline.model_half import Half
from trunkline.operations import BREAKER, MODE, state_of
from trunkline.ports.clock import Clock

SHOWN_RUNNING = 10
MAX_WALKED = 2_000
"""Of the kept choices, in search of such as have ended: 0.1 ms."""
PREFIX_DIGITS = 32
"""Of a block key's 64: as good a name, and no key."""


class Overviews:
    """The `OverviewSource` of a gateway."""

    def __init__(
        self,
        *,
        membership: Members,
        cores: Sequence[Core],
        counters: Counters,
        waiting: Callable[[], int],
        clock: Clock,
    ) -> None:
        """`waiting()`: requests that wait for their tenant's turn."""
        self._membership = membership
        self._cores = cores
        self._counters = counters
        self._waiting = waiting
        self._clock = clock
        self._began = clock.now()
        self._receipts = cores[0].picker.receipts  # where all share one book
        self._comparison = Comparison(self._receipts.ended_lately)

    @property
    def _accounts(self) -> Accounts:
        return self._cores[0].picker.accounts

    def overview(self) -> Overview:
        now, views = self._clock.now(), self._membership.views()
        return Overview(
            at_ms=self._clock.wall() * 1_000.0,
            up_ms=now - self._began,
            processes=1,
            workers=[_worker_shown(view, self._accounts) for view in views],
            traffic=self._traffic(self._comparison.look(now)),
            integrity=self._integrity(views),
            prefixes=[
                self._prefix_shown(one, now)
                for one in self._accounts.beginnings.hottest(now, SHOWN_PREFIXES)
            ],
            decisions=[_decision_shown(receipt) for receipt in self._latest()],
        )

    def chosen(self, wanted: DecisionFilter) -> list[DecisionShown]:
        found = (r for r in self._receipts.newest_first() if _is_wanted(r, wanted))
        return [_decision_shown(receipt) for receipt in islice(found, wanted.limit)]

    def _latest(self) -> Iterator[Receipt]:
        """Where much is asked, the latest all run still: of those only some, for what came true."""
        running = shown = 0
        for receipt in islice(self._receipts.newest_first(), MAX_WALKED):
            if receipt.outcome is None:
                running += 1
                if running > SHOWN_RUNNING:
                    continue
            yield receipt
            shown += 1
            if shown == SHOWN_DECISIONS:
                return

    def _traffic(self, foregone: Foregone) -> Traffic:
        counters, accounts = self._counters, self._accounts
        finished: dict[str, int] = {}
        for (_, code), count in counters.requests.items():
            finished[code] = finished.get(code, 0) + count
        ttft = counters.ttft.view()
        return Traffic(
            requests=finished,
            active=counters.active_requests,
            waiting=self._waiting(),
            refused=sum(counters.refusals.values()),
            decisions=accounts.decisions,
            reasons=dict(accounts.reasons),
            prompt_tokens=accounts.prompt_tokens,
            promised_tokens=accounts.predicted_tokens,
            hit_tokens=max(0, accounts.reused_tokens - accounts.recomputed_tokens),
            saved_prefill_ms=round(accounts.saved_prefill_ms, 1),
            net_saved_ms=round(accounts.net_saved_ms, 1),
            over_claims=accounts.over_claims,
            ttft=from_buckets(ttft),
            ttft_count=sum(ttft.counts),
            foregone=foregone,
        )

    def _integrity(self, views: Sequence[MemberView]) -> Integrity:
        found = [view.check.examination for view in views]
        desks = [core.picker.desk for core in self._cores]
        return Integrity(
            false_hits=self._accounts.false_hits,
            leaking=sum(one is not None and one.leaks for one in found),
            tested=sum(one is not None for one in found),
            workers=len(views),
            refused_pulls=sum(desk.sources.wrong_bytes for desk in desks if desk is not None),
        )

    def _prefix_shown(self, one: Beginning, now: Instant) -> PrefixShown:
        holders = None
        if one.lead is not None:
            lead, tag = one.lead, one.lead.namespace.tag
            knowing = (c.directory for c in self._cores if c.directory.knows_namespace(tag))
            holders = sum(
                blocks >= len(lead) for each in knowing for blocks in each.match(lead).expected
            )
        return PrefixShown(
            prefix=one.key.hex()[:PREFIX_DIGITS],
            tokens=one.tokens,
            requests=round(one.requests(now), 1),
            holders=holders,
        )


def overviews_of(members: Members, halves: Sequence[Half], front: Front, clock: Clock) -> Overviews:
    """That of a whole gateway."""
    lines = [half.line for half in halves if half.line is not None]
    return Overviews(
        membership=members,
        cores=[half.core for half in halves],
        counters=front.counters,
        waiting=lambda: sum(line.waiting_count for line in lines),
        clock=clock,
    )


def _worker_shown(view: MemberView, accounts: Accounts) -> WorkerShown:
    ranks = view.ranks
    hits = [accounts.hits[rank.worker] for rank in ranks if rank.worker in accounts.hits]
    told = [rank for rank in ranks if rank.feed_state != "none"]
    worst = min(told, key=lambda rank: rank.believed_share, default=None)
    return WorkerShown(
        worker=view.name,
        state=state_of(view),
        mode=MODE[view.mode],
        reason=view.reason,
        model=view.model_id,
        engine=view.engine.value,
        breaker=BREAKER[view.breaker],
        alarms=sorted({alarm.kind.value for alarm in view.alarms}),
        load_ms=round(max((rank.queue_ms for rank in ranks), default=0.0), 1),
        active=sum(rank.in_flight for rank in ranks),
        chosen=sum(accounts.selections.get(rank.worker, 0) for rank in ranks),
        prompt_tokens=sum(prompt for prompt, _ in hits),
        hit_tokens=sum(hit for _, hit in hits),
        capacity_blocks=view.capacity_blocks,
        held_blocks=sum(rank.held_blocks for rank in ranks),
        tiers=dict(sum((Counter(rank.held_in_tiers) for rank in ranks), Counter[str]())),
        memory=None if view.load is None else view.load.memory_ratio,
        expected_blocks=sum(rank.predicted_blocks for rank in ranks),
        feed="none" if worst is None else worst.feed_state,
        believed=None if worst is None else round(worst.believed_share, 3),
        incarnation=max((rank.incarnation for rank in ranks), default=0),
    )


def _is_wanted(receipt: Receipt, wanted: DecisionFilter) -> bool:
    decision, outcome = receipt.decision, receipt.outcome
    end = "running" if outcome is None else outcome.end
    return (
        (not wanted.reason or decision.reason.value == wanted.reason)
        and (not wanted.end or end == wanted.end)
        and (wanted.text in decision.request_id or wanted.text in decision.worker)
    )


def _decision_shown(receipt: Receipt) -> DecisionShown:
    decision, outcome = receipt.decision, receipt.outcome
    candidates, index = decision.candidates, decision.choice
    waits_ms = candidates.queue_ms[index] + candidates.transfer_ms[index]
    first_ms = None if outcome is None else outcome.first_byte_ms
    return DecisionShown(
        request=decision.request_id,
        at_ms=round(receipt.at * 1_000.0),
        worker=decision.worker,
        reason=decision.reason.value,
        plan=decision.plan.value,
        prompt_tokens=decision.prompt_tokens,
        matched_tokens=decision.matched_tokens,
        pulled_tokens=decision.pulled_tokens,
        net_ms=round(decision.gain.time_ms, 2),
        predicted_ms=round(waits_ms + decision.miss_ms, 2),
        end="" if outcome is None else outcome.end,
        first_ms=None if first_ms is None else round(first_ms, 2),
        is_stream=outcome is not None and outcome.is_stream,
        took_ms=None if outcome is None else round(outcome.took_ms, 2),
        reused_tokens=None if outcome is None else outcome.reused_tokens,
    )


def from_buckets(seen: HistogramView) -> Quantiles | None:
    """Estimates, as a monitoring system makes them: evenly spread inside each bucket."""
    count = sum(seen.counts)
    if not count:
        return None
    cumulated = list(accumulate(seen.counts))

    def at(share: float) -> float:
        rank = share * count
        bucket = bisect_left(cumulated, rank)
        if bucket >= len(seen.bounds):
            return seen.bounds[-1] * 1_000.0
        low = seen.bounds[bucket - 1] if bucket else 0.0
        before = cumulated[bucket - 1] if bucket else 0
        inside = (rank - before) / seen.counts[bucket]
        return round((low + (seen.bounds[bucket] - low) * inside) * 1_000.0, 2)

    return Quantiles(p50=at(0.50), p95=at(0.95), p99=at(0.99))
