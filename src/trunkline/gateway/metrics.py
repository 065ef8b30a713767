"""Prometheus metrics, put together when they are scraped.

The hot path counts in plain ints; a scrape copies them (`snapshot`, on the loop) and writes the
text (`render`, on a thread). `FAMILIES` declares every metric once: name, kind, labels, bound. Must
never keep a series of its own: what a source no longer tells, the next scrape no longer shows. Read
`admin.py` next, which serves it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
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

PREFIX = "trunkline_"
OTHER = "other"
"""Label of everything beyond a bound."""

# Up to an hour: long answers stream that long, and a bucket that ends earlier hides them.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_200, 3_600)
# A look-up of a 128k-token prompt takes about a millisecond.
LOOKUP_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Declaration of one metric. Further series than `max_series` are added up under `other`."""

    name: str
    kind: Kind
    sentence: str
    labels: tuple[str, ...] = ()
    max_series: int = 1_000


def _counter(name: str, sentence: str, *labels: str) -> Family:
    return Family(name=name, kind=Kind.COUNTER, sentence=sentence, labels=labels)


def _gauge(name: str, sentence: str, *labels: str) -> Family:
    return Family(name=name, kind=Kind.GAUGE, sentence=sentence, labels=labels)


def _histogram(name: str, sentence: str, *labels: str) -> Family:
    return Family(name=name, kind=Kind.HISTOGRAM, sentence=sentence, labels=labels)


# Workers are ours, not the client's: a fleet of 1,000 with ranks must show each of them.
_MOST_WORKERS = 16_384


def _worker(kind: Kind, name: str, sentence: str) -> Family:
    labels = ("worker",)
    return Family(name=name, kind=kind, sentence=sentence, labels=labels, max_series=_MOST_WORKERS)


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _counter(
            "requests_total",
            "Finished requests; `code` is a class, or client_gone.",
            "route",
            "code",
        ),
        _gauge("requests_active", "Requests in flight."),
        _gauge("connections_active", "Open client connections."),
        _histogram(
            "request_duration_seconds",
            "From the end of the request to the end of the answer.",
            "route",
        ),
        _histogram("ttft_seconds", "From the end of the request to its first token."),
        _counter("refusals_total", "Requests refused by the gateway itself.", "reason"),
        _counter(
            "dropped_fields_total", "Body fields not forwarded; `unknown` are all others.", "field"
        ),
        _gauge("upstream_connections_active", "Open connections to workers."),
        _gauge("late_picks_active", "Choices still being made for clients that left."),
        _counter("upstream_connects_total", "Connections opened to workers."),
        _counter("attempts_total", "Requests sent to workers, retries included."),
        _counter("retries_total", "Further attempts after a failed one."),
        _counter("retries_denied_total", "Retries that the budget forbade."),
        _counter("stale_retries_total", "Second sends after a kept connection had died."),
        _counter("worker_failures_total", "Attempts that failed at their worker."),
        _counter("broken_streams_total", "Answers that broke after they had begun."),
        _counter("resumed_streams_total", "Times a broken answer went on from another worker."),
        _counter("write_stalls_total", "Clients dropped because they fetched nothing."),
        _counter("bugs_total", "Errors nobody foresaw; each is in the log."),
        _counter("request_bytes_total", "Bytes of request bodies."),
        _counter("answer_bytes_total", "Bytes of answer bodies, framing included."),
        _counter("decisions_total", "Routing choices.", "reason"),
        _counter("plans_total", "Where prompts' beginnings were to come from.", "plan"),
        _counter(
            "pulls_total",
            "Pulls that workers were told to make, by how they ended.",
            "end",
            "reason",
        ),
        _counter("pulled_tokens_total", "Tokens whose KV workers took from one another."),
        _counter("pulled_bytes_total", "KV bytes of those tokens, by the profile."),
        _counter("pull_seconds_total", "Time of pulls, sum."),
        _counter("phantom_entries_total", "Blocks that were to be pulled and were not there."),
        _gauge("pull_sources_suspect", "Workers whose bytes were wrong too often to pull from."),
        _counter("pull_canaries_total", "Tests of pulls with a prefix of our own.", "end"),
        _gauge("pulls_degraded", "Workers to which no canary came through: an alarm."),
        _counter("pulled_wrong_bytes_total", "Pulls that ended at bytes which failed their check."),
        _counter("unheeded_pulls_total", "Pulls that a worker took no notice of."),
        _gauge("workers_ignoring_pulls", "Workers that took no notice of several in a row."),
        Family(
            name="worker_info",
            kind=Kind.GAUGE,
            sentence="Always 1: what a worker serves, and on what.",
            labels=("worker", "model", "engine"),
            max_series=_MOST_WORKERS,
        ),
        _worker(Kind.GAUGE, "worker_health", "1 if the worker may be chosen."),
        _worker(Kind.GAUGE, "worker_degraded", "1 if it tells no load, or sends no events."),
        _worker(Kind.GAUGE, "worker_misaligned", "1 if its self-test found something wrong."),
        _worker(Kind.GAUGE, "worker_leaking", "1 if it reused KV across salts: an alarm."),
        _worker(Kind.GAUGE, "worker_cb_state", "Breaker: 0 closed, 1 open, 2 half-open."),
        _worker(Kind.GAUGE, "worker_requests_active", "Requests in flight at the worker."),
        _worker(Kind.GAUGE, "worker_queue_seconds", "Predicted prefill in front of a new request."),
        _worker(Kind.COUNTER, "worker_selection_total", "Times the worker was chosen."),
        _worker(Kind.COUNTER, "kv_event_sequence_gaps_total", "Gaps in the worker's events."),
        _worker(Kind.GAUGE, "kv_event_stream_recovering", "1 while what was missed is replayed."),
        _worker(Kind.GAUGE, "kv_event_stream_silent", "1 while its connection is down."),
        _worker(Kind.GAUGE, "kv_event_stream_untrusted", "1 while its entries are not believed."),
        _gauge("panic_routing", "Models with over half of their workers in doubt: an alarm."),
        _counter("panics_total", "Times that this came about."),
        _gauge(
            "n_minus_1_headroom",
            "Share of the workers' prefill time left after the loss of one and its cache; below 0 "
            "that would shed requests.",
            "model",
        ),
        _gauge("prefix_indexer_size", "Distinct blocks in the directory."),
        _gauge("prefix_indexer_hit_ratio", "Prompt tokens found at the chosen worker, share."),
        _histogram("directory_lookup_seconds", "One look-up of a prompt's prefix."),
        _counter("prompt_tokens_total", "Prompt tokens of answers that tell their reuse."),
        _counter("predicted_tokens_total", "Of these, promised by the directory at the worker."),
        _counter("reused_tokens_total", "Of these, reused as the workers say."),
        _counter("reported_prompts_total", "Answers whose usage tells how much was reused."),
        _counter("reused_prompts_total", "Of these, those that reused anything."),
        _counter("unread_prompts_total", "Requests routed by load alone: their prompt is unknown."),
        _counter("over_claims_total", "Requests whose worker reused less than was promised."),
        _counter("over_claimed_tokens_total", "Tokens promised to such requests in vain."),
        _counter("recomputed_tokens_total", "Of the reused ones, computed after all."),
        _counter("decision_queue_seconds_total", "Predicted queue at the chosen workers, sum."),
        _gauge("decision_net_gain_seconds", "Predicted time saved by choices, sum; may fall."),
        _counter("auth_refusals_total", "Credentials that were not taken.", "reason"),
        _counter("rate_limited_total", "Requests over their tenant's own rate.", "rate"),
        _gauge("line_waiting", "Requests that wait for their tenant's turn."),
        _counter("line_ended_total", "Requests that waited for a turn, by what came of it.", "end"),
        _counter("line_shed_total", "Requests refused for overload.", "priority"),
        _gauge("line_overloaded", "Lines whose wait has been too long for a while."),
        _counter("line_waited_seconds_total", "Time waited by those that were sent, sum."),
        _gauge("registry_revision", "Newest revision of the registry."),
        _gauge("registry_lost_revisions", "Changes that a restored backup had forgotten."),
        _gauge("gateway_lease_seconds", "Time this gateway may still reuse without the registry."),
        _gauge("gateways_other", "Further gateways at the registry that may be reusing."),
        _counter(
            "foretold_blocks_total",
            "Blocks that gateways tell one another they expect, by what became of them.",
            "end",
        ),
        _counter("gateway_words_refused_total", "Words of gateways that made no sense."),
        _counter("handovers_total", "What is known of a worker, handed over whole.", "outcome"),
        _counter("handed_over_blocks_total", "Blocks of such handovers.", "outcome"),
        _gauge("audit_sinks_up", "Places that take audit records now; 0 stops all granting."),
        _gauge("audit_records_pending", "Audit records that wait for a sink."),
        _counter("audit_records_dropped_total", "Audit records that found no place to wait."),
        _gauge("worker_leases_active", "Workers that may reuse: their lease is valid."),
        _gauge("namespaces_active", "Namespaces in use."),
        _gauge("public_prefixes_active", "Registered public prefixes."),
        _counter("public_fills_total", "Public prefixes written to a worker."),
        _gauge("processes_serving", "Gateway processes that take connections."),
        _counter("process_restarts_total", "Gateway processes that ended and were started again."),
        _gauge("build_info", "Always 1.", "version", "native"),
        _counter("metrics_dropped_total", "Samples that no declaration fits; a bug."),
    )
}


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

    def samples(self) -> Iterator[Sample]:
        labels = (self.worker,)
        yield Sample("worker_info", 1, (self.worker, self.model, self.engine))
        yield Sample("worker_health", int(self.is_healthy), labels)
        yield Sample("worker_degraded", int(self.is_degraded), labels)
        yield Sample("worker_misaligned", int(self.is_misaligned), labels)
        yield Sample("worker_leaking", int(self.is_leaking), labels)
        yield Sample("worker_cb_state", self.breaker, labels)
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
