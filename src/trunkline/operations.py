"""What operators see and do: the admin port's backend over membership, picker and data plane.

Translates between the records of `gateway/backend.py` and those of `control/`, which do not know
each other. Must never: decide anything, or let a worker's key out. Read `wiring.py` for who puts it
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from trunkline.assembly import Core
from trunkline.control.engine import LoadReport
from trunkline.control.fleets import Members
from trunkline.control.flush import Flushed
from trunkline.control.holders import WorkerHolder
from trunkline.control.holdings import Holdings
from trunkline.control.views import AlarmView, CheckView, MemberView, Mode, WorkerSpec
from trunkline.control.views import Heartbeat as MemberHeartbeat
from trunkline.core.credentials import CredentialProblem
from trunkline.core.decision import Exclusion
from trunkline.core.fleet import Fleet
from trunkline.core.records import BlockKey, BootInstant, WorkerId
from trunkline.errors import ConfigError
from trunkline.gateway.backend import (
    Heartbeat,
    Refused,
    WorkerCondition,
    WorkerJob,
    WorkerOrder,
    WorkerView,
)
from trunkline.gateway.contracts import ClientError
from trunkline.gateway.counters import Counters
from trunkline.gateway.front import Readiness
from trunkline.gateway.metrics import Sample, WorkerRow, summed
from trunkline.gateway.preview import Preview, PreviewOrder
from trunkline.gateway.pulls import PullDesk
from trunkline.gateway.receipts import Receipt
from trunkline.worker_url import worker_name, worker_url_problem

BREAKER: dict[int, Literal["closed", "open", "half-open"]] = {
    0: "closed",
    1: "open",
    2: "half-open",
}
MODE: dict[Mode, Literal["exact", "approximate", "digest", "blind"]] = {
    Mode.CONNECTING: "blind",
    Mode.EXACT: "exact",
    Mode.DIGEST: "digest",
    Mode.APPROXIMATE: "approximate",
    Mode.BLIND: "blind",
}
_EXCLUDED: dict[Exclusion, WorkerCondition] = {
    Exclusion.UNHEALTHY: "unhealthy",
    Exclusion.DRAINING: "draining",
    Exclusion.BREAKER: "breaker-open",
    Exclusion.LEASE: "lease-expired",
    Exclusion.WARMING: "warming",
    Exclusion.SILENT: "silent",
    Exclusion.SUSPECT: "suspect",
    Exclusion.EJECTED: "ejected",
    Exclusion.ASLEEP: "asleep",
    Exclusion.CHECKING: "checking",
    Exclusion.ISOLATION: "isolation-failed",
}
"""Why a worker may not be chosen, in the words of decisions."""


_KEPT = {
    Flushed.BUSY: "has requests in flight, and dropped nothing; drain it first",
    Flushed.UNKNOWN: "offers no reset; vLLM does in development mode (VLLM_SERVER_DEV_MODE=1)",
    Flushed.FAILED: "did not answer well, and may or may not have dropped its cache",
}
"""Why nothing was forgotten."""


class Operations:
    """The `AdminBackend` of a gateway, and the source of its metrics."""

    def __init__(
        self,
        *,
        membership: Members,
        cores: Sequence[Core],
        counters: Counters,
        spec_of: Callable[[str, str, Mapping[str, str]], WorkerSpec],
        hide: Callable[[str], None],
        refused_credentials: Mapping[CredentialProblem, int],
        holdings: Holdings | None,
        preview: Preview,
    ) -> None:
        """`spec_of(url, api_key, labels)` checks a worker's address; it raises ConfigError.
        `hide` keeps a key out of the logs from then on. `refused_credentials` counts by reason,
        live. `holdings` is None where workers have no leases.
        """
        self._membership = membership
        self._cores = cores
        self._picker = cores[0].picker  # where all share one book
        self._counters = counters
        self._spec_of = spec_of
        self._hide = hide
        self._holdings = holdings
        self._preview = preview
        self._refused_credentials = refused_credentials

    # -- workers ---------------------------------------------------------------------------------

    async def workers(self) -> Sequence[WorkerView]:
        return [self._seen(view) for view in self._membership.views()]

    async def worker(self, worker: WorkerId) -> WorkerView | None:
        view = self._membership.view(self._name(worker))
        return None if view is None else self._seen(view)

    def _seen(self, view: MemberView) -> WorkerView:
        shown = _worker_view(view)
        detail = {**shown.detail, "reuse": self._reuse_of(view)}
        if self._holdings is not None:
            detail["isolation"] = _agent_view(self._holdings.find(view.name))
        return replace(shown, detail=detail)

    def _reuse_of(self, view: MemberView) -> dict[str, int]:
        """Of the prompts that it was sent in this life and told the reuse of."""
        known = self._picker.accounts.hits
        pairs = [known.get(rank.worker, (0, 0)) for rank in view.ranks]
        return {
            "prompt_tokens": sum(pair[0] for pair in pairs),
            "reused_tokens": sum(pair[1] for pair in pairs),
        }

    async def add_worker(self, order: WorkerOrder) -> WorkerJob | Refused:
        try:
            spec = self._spec_of(order.url, order.api_key, order.labels)
            spec = replace(spec, model_id=order.model_id)
            known = self._membership.spec(spec.name)
            if known is not None and known != spec:
                text = f"{spec.name} is here with another key, URL, model or labels: remove it"
                return Refused(status=409, code="worker_exists", message=text)
            self.add(spec)
        except ConfigError as error:
            return Refused(status=400, code="bad_worker", message=str(error))
        view = self._membership.view(spec.name)
        assert view is not None, f"{spec.name} was added just now"
        return WorkerJob(worker=WorkerId(spec.name), state=state_of(view))

    def add(self, spec: WorkerSpec) -> None:
        """Join a worker. Raises ConfigError at the bound."""
        self._hide(spec.endpoint.api_key)
        self._membership.add(spec)

    async def remove_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        name = self._name(worker)
        if not self._membership.remove(name):
            return None
        return WorkerJob(worker=WorkerId(name), state="removed")

    async def drain_worker(
        self, worker: WorkerId, grace_secs: int | None
    ) -> WorkerJob | Refused | None:
        name = self._name(worker)
        if not self._membership.drain(name, grace_secs):
            return None
        return WorkerJob(worker=WorkerId(name), state="draining")

    async def undrain_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        name = self._name(worker)
        if not self._membership.undrain(name):
            return None
        view = self._membership.view(name)
        assert view is not None, f"{name} was here just now"
        return WorkerJob(worker=WorkerId(name), state=state_of(view))

    async def check_worker(self, worker: WorkerId) -> WorkerView | Refused | None:
        name = self._name(worker)
        if self._membership.view(name) is None:
            return None
        found = await self._membership.check(name)
        view = self._membership.view(name)
        if view is None:
            return None
        if found is None:
            text = f"{name} cannot be tested, it is not in the fleet: {view.reason}"
            return Refused(status=409, code="worker_not_here", message=text)
        return self._seen(replace(view, check=found))

    async def reset_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        name = self._name(worker)
        outcome = await self._membership.reset(name)
        if outcome is None or outcome is Flushed.DONE:
            return outcome and WorkerJob(worker=WorkerId(name), state="reset")
        return Refused(
            status=409, code=f"reset_{outcome.value}", message=f"{name} {_KEPT[outcome]}"
        )

    # -- decisions -------------------------------------------------------------------------------

    async def decisions(
        self, *, limit: int, worker: WorkerId | None
    ) -> Sequence[Mapping[str, Any]]:
        name = None if worker is None else self._name(worker)
        found: list[Mapping[str, Any]] = []
        for receipt in self._picker.receipts.newest_first():
            if len(found) >= limit:
                break
            chosen = receipt.decision.worker
            if name is None or chosen == name or chosen.startswith(f"{name}@"):
                found.append(receipt.as_dict())
        return found

    async def decision(self, request_id: str) -> Mapping[str, Any] | None:
        found = [_told(attempts) for attempts in self._picker.receipts.requests(request_id)]
        if not found:
            return None
        latest, *others = found
        return {**latest, "same_id": others} if others else latest

    async def preview(self, order: PreviewOrder) -> Mapping[str, Any] | Refused:
        try:
            decision = await self._preview.decision(order)
        except ClientError as error:
            refusal = error.refusal
            return Refused(
                status=403 if refusal.status == 403 else 400,
                code=refusal.code,
                message=refusal.message,
            )
        return decision.as_dict()

    # -- heartbeats ------------------------------------------------------------------------------

    async def heartbeat_key(self, worker: WorkerId) -> str | None:
        spec = self._membership.spec(self._name(worker))
        return spec.endpoint.api_key if spec else None

    async def heartbeat(self, beat: Heartbeat) -> str | None:
        return self._membership.heartbeat(
            MemberHeartbeat(
                name=self._name(beat.worker),
                boot_nonce=beat.boot_nonce,
                counter=beat.counter,
                checkpoints=frozenset[BlockKey](beat.checkpoints),
                is_complete=beat.is_complete,
                memory_ratio=beat.memory,
                load_ratio=beat.load,
                block_tokens=beat.block_tokens,
            )
        )

    # -- metrics ---------------------------------------------------------------------------------

    def samples(self) -> Iterable[Sample]:
        """Everything the admin port exports, as it stands now."""
        yield from self._data_plane()
        yield from self._reuse()
        yield from summed(
            sample
            for core in self._cores
            if core.picker.desk
            for sample in _pulls(core.picker.desk)
        )
        for view in self._membership.views():
            yield from self._worker_row(view).samples()

    def _data_plane(self) -> Iterable[Sample]:
        counters = self._counters
        for (route, code), count in counters.requests.items():
            yield Sample("requests_total", count, (route, code))
        for reason, count in counters.refusals.items():
            yield Sample("refusals_total", count, (reason,))
        for problem, count in self._refused_credentials.items():
            yield Sample("auth_refusals_total", count, (problem.value,))
        yield Sample("requests_active", counters.active_requests)
        yield Sample("connections_active", counters.open_clients)
        for name, count in counters.dropped_fields.items():
            yield Sample("dropped_fields_total", count, (name,))
        yield Sample("upstream_connections_active", counters.open_upstreams)
        yield Sample("late_picks_active", counters.late_picks)
        yield Sample("upstream_connects_total", counters.connects)
        yield Sample("attempts_total", counters.attempts)
        yield Sample("retries_total", counters.retries)
        yield Sample("retries_denied_total", counters.retries_denied)
        yield Sample("stale_retries_total", counters.stale_retries)
        yield Sample("worker_failures_total", counters.worker_failures)
        yield Sample("broken_streams_total", counters.broken_streams)
        yield Sample("resumed_streams_total", counters.resumed_streams)
        yield Sample("write_stalls_total", counters.write_stalls)
        yield Sample("bugs_total", counters.bugs)
        yield Sample("request_bytes_total", counters.request_bytes)
        yield Sample("answer_bytes_total", counters.answer_bytes)
        yield Sample("ttft_seconds", counters.ttft.view())
        yield Sample("tpot_seconds", counters.tpot.view())
        for route, duration in counters.durations.items():
            yield Sample("request_duration_seconds", duration.view(), (route.value,))

    def _reuse(self) -> Iterable[Sample]:
        accounts = self._picker.accounts
        for reason, count in accounts.reasons.items():
            yield Sample("decisions_total", count, (reason,))
        for plan, count in accounts.plans.items():
            yield Sample("plans_total", count, (plan.value,))
        yield Sample("prompt_tokens_total", accounts.prompt_tokens)
        yield Sample("predicted_tokens_total", accounts.predicted_tokens)
        yield Sample("reused_tokens_total", accounts.reused_tokens)
        yield Sample("reported_prompts_total", accounts.reported_prompts)
        yield Sample("reused_prompts_total", accounts.hit_prompts)
        yield Sample("unread_prompts_total", accounts.unread_prompts)
        for reason, count in accounts.approximate_prompts.items():
            yield Sample("approximate_prompts_total", count, (reason,))
        yield Sample("false_hits_total", accounts.false_hits)
        yield Sample("over_claims_total", accounts.over_claims)
        yield Sample("over_claimed_tokens_total", accounts.over_claimed_tokens)
        yield Sample("recomputed_tokens_total", accounts.recomputed_tokens)
        yield Sample("decision_queue_seconds_total", accounts.queued_ms / 1_000.0)
        yield Sample("decision_net_gain_seconds", accounts.net_saved_ms / 1_000.0)
        known_blocks = sum(core.directory.block_count() for core in self._cores)
        yield Sample("prefix_indexer_size", known_blocks)
        if accounts.prompt_tokens:
            reused = accounts.reused_tokens - accounts.recomputed_tokens
            ratio = max(0, reused) / accounts.prompt_tokens
            yield Sample("prefix_indexer_hit_ratio", ratio)
        yield Sample("directory_lookup_seconds", accounts.lookup.view())

    def _worker_row(self, view: MemberView) -> WorkerRow:
        selections = self._picker.accounts.selections
        return WorkerRow(
            worker=view.name,
            is_healthy=bool(view.ranks) and view.exclusion is None,
            model=view.model_id,
            engine=view.engine.value,
            is_degraded=bool(view.degraded),
            is_misaligned=bool(view.check.examination and view.check.examination.is_wrong),
            is_leaking=bool(view.check.examination and view.check.examination.leaks),
            alarms=frozenset(alarm.kind for alarm in view.alarms),
            breaker=view.breaker,
            requests_active=sum(rank.in_flight for rank in view.ranks),
            queue_ms=max((rank.queue_ms for rank in view.ranks), default=0.0),
            selections_count=sum(selections.get(rank.worker, 0) for rank in view.ranks),
            event_gaps_count=sum(rank.feed_stats.get("gaps", 0) for rank in view.ranks),
            is_stream_recovering=any(rank.feed_state == "replaying" for rank in view.ranks),
            is_stream_silent=any(rank.feed_state == "silent" for rank in view.ranks),
            is_stream_untrusted=any(
                rank.feed_state in ("relearning", "blind") for rank in view.ranks
            ),
        )

    def _name(self, worker: WorkerId) -> str:
        """A worker by its name or by its URL; what is neither is looked for as it is."""
        url = worker if "://" in worker else f"http://{worker}"
        return worker if worker_url_problem(url) else worker_name(url)


def _pulls(desk: PullDesk) -> Iterable[Sample]:
    for how, count in desk.accounts.ended.items():
        yield Sample("pulls_total", count, how)
    yield Sample("pulled_tokens_total", desk.accounts.tokens)
    yield Sample("pulled_bytes_total", desk.accounts.bytes)
    yield Sample("pull_seconds_total", desk.accounts.ms / 1_000.0)
    yield Sample("phantom_entries_total", desk.sources.phantoms)
    yield Sample("pull_sources_suspect", desk.sources.suspect_count)
    yield Sample("pulled_wrong_bytes_total", desk.sources.wrong_bytes)
    yield Sample("unheeded_pulls_total", desk.heed.unheeded)
    yield Sample("workers_ignoring_pulls", len(desk.heed.alarmed))


def readiness_of(
    fleets: Mapping[str, Fleet], membership: Members, boot: BootInstant, *, may_reuse: bool
) -> Readiness:
    """Whether anything can be served now, and what it is called where nothing can. `fleets` by
    model.
    """
    seen = {model: fleet.usable(boot) for model, fleet in fleets.items()}
    usable = {model: len(found) for model, (found, _) in seen.items()}
    is_checking = any(Exclusion.CHECKING in excluded.values() for _, excluded in seen.values())
    missing = [model for model, count in usable.items() if not count and len(fleets) > 1]
    detail = f"{sum(usable.values())} usable"
    return Readiness(
        is_ready=any(usable.values()),
        is_reuse_on=may_reuse and any(usable.values()),
        detail=f"{detail}; none for {', '.join(missing)}" if missing else detail,
        unready_status="starting" if is_checking or membership.is_starting() else "no_workers",
    )


def _worker_view(view: MemberView) -> WorkerView:
    return WorkerView(
        worker=WorkerId(view.name),
        url=view.url,
        state=state_of(view),
        mode=MODE[view.mode],
        reason=view.reason,
        model_id=view.model_id,
        labels=view.labels,
        breaker=BREAKER[view.breaker],
        requests_active=sum(rank.in_flight for rank in view.ranks),
        queue_ms=round(max((rank.queue_ms for rank in view.ranks), default=0.0), 3),
        detail={
            "block_tokens": view.block_tokens,
            "capacity_blocks": view.capacity_blocks,
            "max_model_len": view.max_model_len,
            "engine": view.engine.value,
            "engine_version": view.engine_version,
            "degraded": list(view.degraded),
            "load": None if view.load is None else _load_view(view.load),
            "alarms": [_alarm_view(alarm) for alarm in view.alarms],
            "check": _check_view(view.check),
            "ranks": [asdict(rank) for rank in view.ranks],
        },
    )


def _told(attempts: Sequence[Receipt]) -> dict[str, Any]:
    """Of one request."""
    *earlier, last = attempts
    return {**last.as_dict(), "earlier": [one.as_dict() for one in earlier]}


def _load_view(load: LoadReport) -> dict[str, Any]:
    return {
        "running": load.running,
        "waiting": load.waiting,
        "memory": None if load.memory_ratio is None else round(load.memory_ratio, 4),
    }


def _alarm_view(alarm: AlarmView) -> dict[str, Any]:
    return {
        "kind": alarm.kind.value,
        "rank": alarm.rank,
        "why": alarm.why,
        "lasts_s": round(alarm.lasts_ms / 1_000.0),
    }


def _check_view(check: CheckView) -> dict[str, Any]:
    """What its self-test found; `status` is `unknown` before the first one ended."""
    found = check.examination
    status = "unknown" if found is None else "wrong" if found.is_wrong else "ok"
    return {
        "status": status,
        "result": None if found is None else found.belief.value,
        "unfinished": check.unfinished,
        "findings": [
            {
                "what": finding.topic.value,
                "state": finding.state.value,
                "expected": finding.expected,
                "found": finding.found,
                "remedy": finding.remedy,
            }
            for finding in (found.findings if found else ())
        ],
    }


def _agent_view(holder: WorkerHolder | None) -> dict[str, str | bool]:
    """How tenants are kept apart at a worker, and what that means for them."""
    if holder is None or not holder.takes_tickets:
        return {
            "fence": "gateway",
            "erase": "restart",
            "lease": False,
            "public_prefixes": "tenant-private: this engine cannot split its salt",
        }
    regions = holder.has_salt_regions
    return {
        "fence": holder.fence.value,
        "erase": holder.erase.value,
        "lease": holder.is_granted(),
        "public_prefixes": "shared" if regions else "tenant-private: it cannot split its salt",
    }


def state_of(view: MemberView) -> WorkerCondition:
    if not view.ranks:
        return "joining"
    return "ready" if view.exclusion is None else _EXCLUDED[view.exclusion]
