"""Records of a run -> the figures that reports print and bars compare.

TTFT is in engine ms: wall ms divided by the time scale of simulated workers, so that runs of any
scale compare; wall ms stand beside it. Lost requests count as requests and nowhere else. Read
`bars.py`, then `report.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trunkline.core.decision import Plan
from trunkline.replay.counters import FleetCounters, Quantiles, percentile
from trunkline.replay.records import RequestRecord, Verdict

MAX_REASONS = 20
"""Distinct reasons of loss that are told apart; the rest counts as `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution of times in ms."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> Spread | None:
        """None for no values."""
        if not values_ms:
            return None
        ordered = sorted(values_ms)
        return cls(
            mean=sum(ordered) / len(ordered),
            p50=percentile(ordered, 0.50),
            p95=percentile(ordered, 0.95),
            p99=percentile(ordered, 0.99),
        )

    def divided(self, factor: float) -> Spread:
        return Spread(
            mean=self.mean / factor,
            p50=self.p50 / factor,
            p95=self.p95 / factor,
            p99=self.p99 / factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All figures of one run under one policy. None: nobody reported it."""

    workload: str
    policy: str
    requests: int
    lost: int
    lost_reasons: Mapping[str, int]
    wall_s: float
    time_scale: float
    prompt_tokens: int
    cached_tokens: int
    hit_requests: int
    answers_checked: int
    false_hits: int
    over_claims: int | None
    ttft_wall_ms: Spread | None
    client_late_ms: Spread | None
    router_queue_ms: Spread | Quantiles | None
    worker_work: Mapping[str, float]
    directory_lookup_us: Quantiles | None
    transfer_bytes: int | None
    kv_memory_bytes: int | None
    gateway_memory_bytes: int | None
    plans: Mapping[str, int] = field(default_factory=dict[str, int])
    pulled_tokens: int | None = None
    net_saved_wall_ms: float | None = None
    """Predicted, summed over all choices."""
    baselines: Mapping[str, Summary] = field(default_factory=dict[str, "Summary"])

    @property
    def completed(self) -> int:
        return self.requests - self.lost

    @property
    def prefill_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_tokens_ratio(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def hit_requests_ratio(self) -> float | None:
        return self.hit_requests / self.completed if self.completed else None

    @property
    def ttft_ms(self) -> Spread | None:
        """Engine time."""
        return None if self.ttft_wall_ms is None else self.ttft_wall_ms.divided(self.time_scale)

    @property
    def net_saved_ms(self) -> float | None:
        """Engine time, the mean over requests."""
        saved_ms = self.net_saved_wall_ms
        return None if saved_ms is None else saved_ms / self.time_scale / max(1, self.requests)

    @property
    def busiest_over_mean_work(self) -> float | None:
        work = list(self.worker_work.values())
        mean = sum(work) / len(work) if work else 0.0
        return max(work) / mean if mean > 0.0 else None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; dotted paths into this are what bars name."""
        figures = self._figures()
        figures["baselines"] = {
            name: baseline.as_dict() for name, baseline in self.baselines.items()
        }
        return figures

    def _figures(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "policy": self.policy,
            "requests": self.requests,
            "lost": self.lost,
            "lost_reasons": dict(self.lost_reasons),
            "wall_s": _rounded(self.wall_s),
            "time_scale": self.time_scale,
            "hit_tokens_ratio": _rounded(self.hit_tokens_ratio),
            "hit_requests_ratio": _rounded(self.hit_requests_ratio),
            "prompt_tokens": self.prompt_tokens,
            "avoided_prefill_tokens": self.cached_tokens,
            "prefill_tokens": self.prefill_tokens,
            "ttft_ms": _spread(self.ttft_ms),
            "ttft_wall_ms": _spread(self.ttft_wall_ms),
            "client_late_ms": _spread(self.client_late_ms),
            "router_queue_ms": _spread(self.router_queue_ms),
            "directory_lookup_us": _spread(self.directory_lookup_us),
            "busiest_over_mean_work": _rounded(self.busiest_over_mean_work),
            "worker_work": {name: _rounded(work) for name, work in self.worker_work.items()},
            "transfer_bytes": self.transfer_bytes,
            "pulled_tokens": self.pulled_tokens,
            "plans": {plan.value: self.plans.get(plan.value, 0) for plan in Plan},
            "net_saved_ms": _rounded(self.net_saved_ms),
            "kv_memory_bytes": self.kv_memory_bytes,
            "gateway_memory_bytes": self.gateway_memory_bytes,
            "over_claims": self.over_claims,
            "answers_checked": self.answers_checked,
            "false_hits": self.false_hits,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the records themselves do not say."""

    workload: str
    policy: str
    wall_ms: float
    time_scale: float = 1.0
    block_tokens: int = 16
    """The engine's block size, for over-claims."""


def summarise(
    records: Sequence[RequestRecord], facts: RunFacts, counters: FleetCounters | None = None
) -> Summary:
    """Add up a run. `counters` of the fleet go before what the records alone can tell."""
    told = counters or FleetCounters()
    kept = [record for record in records if not record.is_lost]
    lost = [record for record in records if record.is_lost]
    over_claims = told.over_claims
    if over_claims is None:
        over_claims = _over_claims(kept, facts.block_tokens)
    queue_ms = [record.queue_ms for record in kept if record.queue_ms is not None]
    return Summary(
        workload=facts.workload,
        policy=facts.policy,
        requests=len(records),
        lost=len(lost),
        lost_reasons=_reasons(lost),
        wall_s=facts.wall_ms / 1_000.0,
        time_scale=facts.time_scale,
        prompt_tokens=sum(record.prompt_tokens for record in kept),
        cached_tokens=sum(record.cached_tokens or 0 for record in kept),
        hit_requests=sum(1 for record in kept if record.cached_tokens),
        answers_checked=sum(1 for record in records if record.verdict is not Verdict.UNCHECKED),
        false_hits=sum(1 for record in records if record.verdict is Verdict.WRONG),
        over_claims=over_claims,
        ttft_wall_ms=Spread.of([r.ttft_ms for r in kept if r.ttft_ms is not None]),
        client_late_ms=Spread.of([record.client_late_ms for record in records]),
        router_queue_ms=told.router_queue_ms or Spread.of(queue_ms),
        worker_work=told.worker_work or work_by_worker(kept),
        directory_lookup_us=told.directory_lookup_us,
        transfer_bytes=told.transfer_bytes,
        kv_memory_bytes=told.kv_memory_bytes,
        gateway_memory_bytes=told.gateway_memory_bytes,
        plans=told.plans,
        pulled_tokens=told.pulled_tokens,
        net_saved_wall_ms=told.net_saved_ms,
    )


def work_by_worker(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Prefill tokens computed by each worker, as far as the gateway named workers."""
    work: Counter[str] = Counter()
    for record in records:
        if record.worker is not None:
            work[record.worker] += record.prompt_tokens - (record.cached_tokens or 0)
    return {worker: float(tokens) for worker, tokens in sorted(work.items())}


def _over_claims(records: Sequence[RequestRecord], block_tokens: int) -> int | None:
    """Requests that found less than the gateway believed; None when it did not say what it
    believed.

    An engine computes at least the prompt's last token, so a whole prompt is never cached.
    """
    told = [r for r in records if r.matched_tokens is not None and r.cached_tokens is not None]
    if not told:
        return None
    usable = [
        min(r.matched_tokens or 0, (r.prompt_tokens - 1) // block_tokens * block_tokens)
        for r in told
    ]
    return sum((r.cached_tokens or 0) < most for r, most in zip(told, usable, strict=True))


def _reasons(lost: Sequence[RequestRecord]) -> dict[str, int]:
    counted = Counter(record.lost_reason for record in lost).most_common()
    shown = dict(counted[:MAX_REASONS])
    if len(counted) > MAX_REASONS:
        shown["other"] = sum(count for _, count in counted[MAX_REASONS:])
    return shown


def _spread(spread: Spread | Quantiles | None) -> dict[str, float | None] | None:
    if spread is None:
        return None
    names = ("mean", "p50", "p95", "p99") if isinstance(spread, Spread) else ("p50", "p99")
    return {name: _rounded(getattr(spread, name)) for name in names}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
