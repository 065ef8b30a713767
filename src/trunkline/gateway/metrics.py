"""Prometheus metrics, put together when they are scraped.

The hot path counts in plain ints; a scrape copies them (`snapshot`, on the loop) and writes the
text (`render`, on a thread). `families.py` declares every metric once. Must never keep a series of
its own: what a source no longer tells, the next scrape no longer shows. Read `admin.py` next, which
serves it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from trunkline.core.alarms import AlarmKind
from trunkline.gateway.families import FAMILIES, PREFIX, SECONDS, Family, Kind

OTHER = "other"
"""Label of everything beyond a bound."""


@dataclass(frozen=True, slots=True)
class HistogramView:
    """A copy of a histogram: `counts` has one more entry than `bounds`, not cumulated."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One number for one series. `name` is a key of FAMILIES; `labels` are values, in order."""

    name: str
    value: float | HistogramView
    labels: tuple[str, ...] = ()


class MetricsSource(Protocol):
    """Anything that counts. Called on the loop at each scrape: copies, computes nothing."""

    def samples(self) -> Iterable[Sample]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """What the metrics say of one worker."""

    worker: str
    is_healthy: bool
    model: str = ""
    engine: str = ""
    """Empty where it has not said."""
    breaker: int = 0
    requests_active: int = 0
    queue_ms: float = 0.0
    selections_count: int = 0
    event_gaps_count: int = 0
    is_stream_recovering: bool = False
    is_stream_silent: bool = False
    is_stream_untrusted: bool = False
    is_degraded: bool = False
    """It does not tell its load, or announced events and sends none."""
    is_misaligned: bool = False
    is_leaking: bool = False
    """What its last self-test said."""
    alarms: frozenset[AlarmKind] = frozenset()

    def samples(self) -> Iterator[Sample]:
        labels = (self.worker,)
        yield Sample("worker_info", 1, (self.worker, self.model, self.engine))
        yield Sample("worker_health", int(self.is_healthy), labels)
        yield Sample("worker_degraded", int(self.is_degraded), labels)
        yield Sample("worker_misaligned", int(self.is_misaligned), labels)
        yield Sample("worker_leaking", int(self.is_leaking), labels)
        yield Sample("worker_cb_state", self.breaker, labels)
        for kind in AlarmKind:
            yield Sample("alarm", int(kind in self.alarms), (kind.value, self.worker))
        yield Sample("worker_requests_active", self.requests_active, labels)
        yield Sample("worker_queue_seconds", self.queue_ms / 1_000.0, labels)
        yield Sample("worker_selection_total", self.selections_count, labels)
        yield Sample("kv_event_sequence_gaps_total", self.event_gaps_count, labels)
        yield Sample("kv_event_stream_recovering", int(self.is_stream_recovering), labels)
        yield Sample("kv_event_stream_silent", int(self.is_stream_silent), labels)
        yield Sample("kv_event_stream_untrusted", int(self.is_stream_untrusted), labels)


def summed(samples: Iterable[Sample]) -> list[Sample]:
    """One sample for each series: those that several parts have of their own, added up."""
    totals: dict[tuple[str, tuple[str, ...]], Sample] = {}
    for sample in samples:
        series = (sample.name, sample.labels)
        before = totals.get(series)
        if before is None:
            totals[series] = sample
            continue
        assert not isinstance(before.value, HistogramView), f"{sample.name} comes twice"
        assert not isinstance(sample.value, HistogramView), f"{sample.name} comes twice"
        totals[series] = Sample(sample.name, before.value + sample.value, sample.labels)
    return list(totals.values())


class Summed:
    """A `MetricsSource` of several that count the same, each for a part."""

    def __init__(self, sources: Sequence[MetricsSource]) -> None:
        self._sources = sources

    def samples(self) -> Iterable[Sample]:
        return summed(sample for source in self._sources for sample in source.samples())


class Histogram:
    """Counts of values under fixed bounds, as plain ints. `observe` is for the hot path."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds rise"
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def view(self) -> HistogramView:
        return HistogramView(self._bounds, tuple(self._counts), self._total)


Snapshot = Mapping[str, Mapping[tuple[str, ...], float | HistogramView]]
"""Family -> label values -> number: a copy that no longer changes."""


class Exposition:
    """All sources of one process, as one page."""

    def __init__(self, sources: Sequence[MetricsSource], *, version: str, native: str) -> None:
        self._sources = tuple(sources)
        self._build = Sample("build_info", 1, (version, native))
        self._dropped_count = 0

    def snapshot(self) -> Snapshot:
        """Copy every number. Cheap: some microseconds a series."""
        series: dict[str, dict[tuple[str, ...], float | HistogramView]] = {}
        for sample in self._all():
            family = FAMILIES.get(sample.name)
            if family is None or not _fits(family, sample):
                self._dropped_count += 1
                continue
            known = series.setdefault(sample.name, {})
            labels = sample.labels
            if labels not in known and len(known) >= family.max_series:
                labels = (OTHER,) * len(labels)
            known[labels] = _joined(family, known.get(labels), sample.value)
        series["metrics_dropped_total"] = {(): self._dropped_count}
        return series

    def _all(self) -> Iterator[Sample]:
        yield self._build
        for source in self._sources:
            yield from source.samples()


def render(snapshot: Snapshot) -> bytes:
    """The text format, families in order of declaration. Touches nothing that is shared."""
    return generate_latest(_Page(snapshot))


class _Page(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES.values():
            series = self._snapshot.get(family.name)
            if series:
                yield _metric(family, series)


def _fits(family: Family, sample: Sample) -> bool:
    is_histogram = isinstance(sample.value, HistogramView)
    has_kind = is_histogram == (family.kind is Kind.HISTOGRAM)
    return has_kind and len(sample.labels) == len(family.labels)


def _joined(
    family: Family, known: float | HistogramView | None, value: float | HistogramView
) -> float | HistogramView:
    """Two samples of one series: counts add up, of a gauge the last one holds."""
    if known is None or family.kind is Kind.GAUGE:
        return value
    if isinstance(known, HistogramView):
        assert isinstance(value, HistogramView)
        assert known.bounds == value.bounds, family.name
        counts = tuple(a + b for a, b in zip(known.counts, value.counts, strict=True))
        return HistogramView(known.bounds, counts, known.total + value.total)
    assert not isinstance(value, HistogramView)
    return known + value


def _metric(
    family: Family, series: Mapping[tuple[str, ...], float | HistogramView]
) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    name = PREFIX + family.name
    if family.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, family.sentence, labels=family.labels)
        for labels, view in series.items():
            assert isinstance(view, HistogramView)
            bounds = [*(f"{bound:g}" for bound in view.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(view.counts), strict=True))
            histogram.add_metric(list(labels), buckets, view.total)
        return histogram
    make = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = make(name, family.sentence, labels=family.labels)
    for labels, value in series.items():
        assert not isinstance(value, HistogramView)
        metric.add_metric(list(labels), value)
    return metric
