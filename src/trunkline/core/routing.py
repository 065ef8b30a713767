"""One routing choice: hard filters, prices, a policy, and the record of why.

The router does not know the directory: it is given, for each slot, how many leading tokens of the
prompt are there. It does not know time or sockets either; production, the simulator and replay run
this code. Read `decision.py` for the record and `policies.py` for the ways to choose.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from trunkline.core.cost import CostColumns, CostModel, Source, common_tokens
from trunkline.core.debts import Owed
from trunkline.core.decision import Candidates, Decision, Exclusion, Gain
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.policies import POLICIES, CacheAware, Choice, Question
from trunkline.core.records import BootInstant, Instant, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What routing needs of a request.

    `matched_tokens` is indexed by `Slot`, None where nothing is known of the prompt; `home_key` (32
    bytes) places a prefix that nobody holds: the chain value at its first checkpoint. Or that of a
    session, for a prompt that is not known.
    """

    request_id: str
    prompt_tokens: int
    matched_tokens: list[int] | None
    home_key: bytes | None = None
    source_tokens: list[int] | None = None
    """By `Slot`: leading tokens that could be pulled from there, below 0 for a worker that cannot
    pull either. None where nothing is pulled.
    """
    owed: Owed | None = None
    """What of these a source still owes, and for how long. None where they are all there."""
    most_pulled_tokens: int = 1 << 62
    """Of one pull: what needs more is computed."""


class Router:
    """Chooses among the workers of one fleet by a named policy."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        cost: CostModel,
        policy: str,
        rng: random.Random,
        max_copies: int = 64,
    ) -> None:
        """What `max_copies` workers hold alike is not pulled any more: whoever lacks it is sent
        elsewhere, or computes. Raises ValueError for a policy that is not in `POLICIES`.
        """
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")
        self._fleet = fleet
        self._cost = cost
        self._policy_name = policy
        self._policy = POLICIES[policy](fleet.ring, rng)
        self._max_copies = max_copies
        self._may_pull = POLICIES[policy] is CacheAware
        self._rng = rng

    def route(
        self,
        request: RouteRequest,
        *,
        now: Instant,
        boot: BootInstant,
        tried: frozenset[WorkerId] = frozenset(),
        lacking: frozenset[WorkerId] = frozenset(),
    ) -> Decision | None:
        """Choose a worker; None when no worker is usable. Changes nothing but the policy's own
        cursor. `lacking` do not have the adapter that is asked for.
        """
        states, excluded = self._fleet.usable(boot, tried | lacking)
        if lacking:
            was_tried = {w for w, why in excluded.items() if why is Exclusion.TRIED}
            excluded = {**excluded, **dict.fromkeys(was_tried - tried, Exclusion.ADAPTER)}
        by_slot = request.matched_tokens
        holders = states
        if by_slot is None:
            matched = [0] * len(states)
        else:
            matched = [by_slot[state.slot] for state in states]
            states, matched, excluded = _without_full(states, matched, excluded)
        if not states:
            return None
        sources = self._sources(request, holders, now) if self._may_pull else []
        columns = self._cost.columns(
            states,
            matched,
            request.prompt_tokens,
            now=now,
            churn_floor=self._fleet.churn.floor(now),
            sources=sources,
        )
        question = Question(
            states=states,
            matched_tokens=matched,
            columns=columns,
            home_key=request.home_key,
            home_slack_ms=self._cost.fixed_ms,
            is_prompt_known=by_slot is not None,
        )
        choice = self._policy.choose(question)
        return self._record(request, question, choice, excluded)

    def cold_ms(self, prompt_tokens: int) -> float:
        """Predicted prefill of a prompt of which nothing is there, by the profile."""
        return self._cost.prefill_ms(prompt_tokens, 0)

    def _sources(
        self, request: RouteRequest, states: list[WorkerState], now: Instant
    ) -> list[Source]:
        """Who holds most. Where all of those still owe a part of it, that is who will have it
        first, and beside it who has most of it now. Draws are weighed by 1 / (1 + queue).
        """
        by_slot, owed = request.source_tokens, request.owed
        if by_slot is None:
            return []
        most = max([by_slot[state.slot] for state in states])
        near = [state for state in states if by_slot[state.slot] == most]
        if most <= 0 or len(near) >= self._max_copies:
            return []
        if owed is None:
            return [self._drawn(request, near, most, 0.0, now)]
        ready_ms = [owed.ready_ms(state, most, now) for state in near]
        soonest_ms = min(ready_ms)
        soonest = [s for s, ms in zip(near, ready_ms, strict=True) if ms == soonest_ms]
        sources: list[Source] = []
        if soonest_ms < math.inf:
            sources.append(self._drawn(request, soonest, most, soonest_ms, now))
        if soonest_ms > 0.0:
            there, tokens = _have_most(states, by_slot, owed)
            if there:
                sources.append(self._drawn(request, there, tokens, 0.0, now))
        return sources

    def _drawn(
        self,
        request: RouteRequest,
        states: list[WorkerState],
        tokens: int,
        ready_ms: float,
        now: Instant,
    ) -> Source:
        weights = [1.0 / (1.0 + state.queue.queue_ms(now)) for state in states]
        source = states[0] if len(states) == 1 else self._rng.choices(states, weights)[0]
        assert request.source_tokens is not None
        return Source(
            worker=source.worker,
            tokens=tokens,
            ready_ms=ready_ms,
            by_slot=request.source_tokens,
            most_tokens=request.most_pulled_tokens,
        )

    def _record(
        self,
        request: RouteRequest,
        question: Question,
        choice: Choice,
        excluded: dict[WorkerId, Exclusion],
    ) -> Decision:
        columns = question.columns
        source = columns.sources[choice.index]
        return Decision(
            request_id=request.request_id,
            policy=self._policy_name,
            prompt_tokens=request.prompt_tokens,
            choice=choice.index,
            reason=choice.reason,
            source=source.worker if source else None,
            source_ready_ms=source.ready_ms if source else 0.0,
            gain=_gain(question.states, columns, choice.index, self._cost, request.prompt_tokens),
            candidates=Candidates(
                workers=[state.worker for state in question.states],
                matched_tokens=question.matched_tokens,
                pulled_tokens=columns.pulled_tokens,
                queue_ms=columns.queue_ms,
                transfer_ms=columns.transfer_ms,
                miss_ms=columns.miss_ms,
                imbalance_ms=columns.imbalance_ms,
                decode_pressure_ms=columns.decode_pressure_ms,
                cost_ms=columns.cost_ms,
                excluded=excluded,
            ),
        )


def _have_most(
    states: list[WorkerState], by_slot: list[int], owed: Owed
) -> tuple[list[WorkerState], int]:
    """Who has most now of what is expected there, and how much."""
    most, having = 0, list[WorkerState]()
    for state in sorted(states, key=lambda state: -by_slot[state.slot]):
        if by_slot[state.slot] < max(most, 1):
            break
        tokens = owed.there_tokens(state, by_slot[state.slot])
        if tokens > most:
            most, having = tokens, []
        if tokens == most > 0:
            having.append(state)
    return having, most


def _without_full(
    states: list[WorkerState], matched: list[int], excluded: dict[WorkerId, Exclusion]
) -> tuple[list[WorkerState], list[int], dict[WorkerId, Exclusion]]:
    """Workers above a watermark keep what they hold and get nothing new, unless all are."""
    if not any(state.is_full for state in states):
        return states, matched, excluded
    common = common_tokens(matched)
    kept = [i for i, state in enumerate(states) if not state.is_full or matched[i] > common]
    if not kept:
        return states, matched, excluded
    dropped = {s.worker: Exclusion.WATERMARK for i, s in enumerate(states) if i not in set(kept)}
    return [states[i] for i in kept], [matched[i] for i in kept], {**excluded, **dropped}


def _gain(
    states: list[WorkerState], columns: CostColumns, choice: int, cost: CostModel, tokens: int
) -> Gain:
    """What the choice wins over the best that cache-blind routing could do: the least queue, all
    computed. The sum is the difference of the two costs.
    """
    blind = min(range(len(states)), key=columns.queue_ms.__getitem__)
    queue = states[blind].queue
    blind_miss_ms = cost.prefill_ms(tokens, 0) * queue.scale
    inserting_ms = blind_miss_ms - cost.fixed_ms * queue.scale
    blind_imbalance_ms = columns.churn_price * queue.churn * inserting_ms
    return Gain(
        saved_prefill_ms=blind_miss_ms - columns.miss_ms[choice],
        queue_ms=columns.queue_ms[choice] - columns.queue_ms[blind],
        transfer_ms=columns.transfer_ms[choice],
        imbalance_ms=columns.imbalance_ms[choice]
        - blind_imbalance_ms
        + columns.decode_pressure_ms[choice]
        - columns.decode_pressure_ms[blind],
    )
