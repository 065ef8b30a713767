"""What a fleet and its gateway say of a run: work per worker, directory, transfers, memory.

Owns the reading of Prometheus text; `MetricNames` names the families. A figure that nobody reports
is None and shows as such, never as 0. Read `results.py` next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite

MAX_SAMPLES = 200_000

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Two points of a distribution, in the unit that the field's name says."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCounters:
    """Counters of one run: the difference between after and before. None or empty: not reported."""

    worker_work: Mapping[str, float] = field(default_factory=dict[str, float])
    """Work by worker, in any one unit: prefill tokens computed, or busy ms."""
    directory_lookup_us: Quantiles | None = None
    transfer_bytes: int | None = None
    router_queue_ms: Quantiles | None = None
    kv_memory_bytes: int | None = None
    gateway_memory_bytes: int | None = None
    over_claims: int | None = None
    plans: Mapping[str, int] = field(default_factory=dict[str, int])
    """How often a prompt's beginning was to be found, pulled or computed."""
    pulled_tokens: int | None = None
    net_saved_ms: float | None = None
    """Sum over all choices, against the best that is blind to caches; predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """Families of the gateway's `/metrics` that figures are taken from."""

    lookup_seconds: str = "trunkline_directory_lookup_seconds"
    queue_seconds: str = "trunkline_queue_wait_seconds"
    transfer_bytes: str = "trunkline_pulled_bytes_total"
    pulled_tokens: str = "trunkline_pulled_tokens_total"
    plans: str = "trunkline_plans_total"
    net_gain_seconds: str = "trunkline_decision_net_gain_seconds"
    over_claims: str = "trunkline_over_claims_total"
    worker_work: str = "trunkline_worker_prefill_tokens_total"
    worker_label: str = "worker"
    kv_memory_bytes: str = "trunkline_worker_kv_bytes"
    gateway_memory_bytes: str = "process_resident_memory_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of Prometheus text."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def label(self, name: str) -> str:
        return dict(self.labels).get(name, "")


def parse_metrics(text: str) -> list[Sample]:
    """The samples of Prometheus text; lines that are none are passed over."""
    samples: list[Sample] = []
    for line in text.splitlines()[:MAX_SAMPLES]:
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = tuple((item[1], item[2]) for item in _LABEL.finditer(match[2] or ""))
        samples.append(Sample(name=match[1], labels=labels, value=value))
    return samples


def counters_from_metrics(
    after: str, before: str = "", names: MetricNames | None = None
) -> FleetCounters:
    """Figures of a run from the gateway's metrics at its end, less those at its beginning."""
    chosen = names or MetricNames()
    late, early = parse_metrics(after), parse_metrics(before)
    saved_s = _grown(late, early, chosen.net_gain_seconds)
    return FleetCounters(
        worker_work=_by_label(late, early, chosen.worker_work, chosen.worker_label),
        directory_lookup_us=_quantiles(late, early, chosen.lookup_seconds, 1e6),
        transfer_bytes=_whole(_grown(late, early, chosen.transfer_bytes)),
        router_queue_ms=_quantiles(late, early, chosen.queue_seconds, 1e3),
        kv_memory_bytes=_whole(_total(late, chosen.kv_memory_bytes)),
        gateway_memory_bytes=_whole(_total(late, chosen.gateway_memory_bytes)),
        over_claims=_whole(_grown(late, early, chosen.over_claims)),
        plans={
            plan: round(count)
            for plan, count in _by_label(late, early, chosen.plans, "plan").items()
        },
        pulled_tokens=_whole(_grown(late, early, chosen.pulled_tokens)),
        net_saved_ms=None if saved_s is None else saved_s * 1e3,
    )


def percentile(ordered: list[float], share: float) -> float:
    """Linear between the two nearest values of a sorted list that is not empty."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _total(samples: list[Sample], name: str) -> float | None:
    values = [sample.value for sample in samples if sample.name == name]
    return sum(values) if values else None


def _grown(late: list[Sample], early: list[Sample], name: str) -> float | None:
    total = _total(late, name)
    return None if total is None else total - (_total(early, name) or 0.0)


def _whole(value: float | None) -> int | None:
    return round(value) if value is not None and isfinite(value) else None


def _by_label(late: list[Sample], early: list[Sample], name: str, label: str) -> dict[str, float]:
    work: dict[str, float] = {}
    for sign, samples in ((1.0, late), (-1.0, early)):
        for sample in samples:
            if sample.name == name:
                worker = sample.label(label)
                work[worker] = work.get(worker, 0.0) + sign * sample.value
    return dict(sorted(work.items()))


def _quantiles(
    late: list[Sample], early: list[Sample], name: str, to_unit: float
) -> Quantiles | None:
    """From a histogram's buckets, linear inside a bucket; the open last bucket counts as its lower
    edge.
    """
    counts: dict[float, float] = {}
    for sign, samples in ((1.0, late), (-1.0, early)):
        for sample in samples:
            if sample.name == f"{name}_bucket":
                edge = float(sample.label("le") or "inf")
                counts[edge] = counts.get(edge, 0.0) + sign * sample.value
    buckets = sorted(counts.items())
    if not buckets or buckets[-1][1] <= 0.0:
        return None
    return Quantiles(
        p50=_bucket_quantile(buckets, 0.50) * to_unit, p99=_bucket_quantile(buckets, 0.99) * to_unit
    )


def _bucket_quantile(buckets: list[tuple[float, float]], share: float) -> float:
    wanted = share * buckets[-1][1]
    for (low_edge, low_count), (high_edge, high_count) in pairwise([(0.0, 0.0), *buckets]):
        if high_count >= wanted:
            if high_edge == inf or high_count == low_count:
                return low_edge
            return low_edge + (high_edge - low_edge) * (wanted - low_count) / (
                high_count - low_count
            )
    return buckets[-1][0]
