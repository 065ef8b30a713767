"""What the simulated engine exports at `/metrics`, under the names that vLLM has.

Must never: carry prompt text or a client's words in a label. Read `api.py` next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trunkline.core.records import WallTime
from trunkline.worker.engine import Engine
from trunkline.worker.fence import Fence
from trunkline.worker.jobs import Job
from trunkline.worker.storage import Exchange, Storage

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800)
_TOKENS = (16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144)
_LABELS = ("model_name", "engine")
_ABSENT = (
    "vllm:num_preemptions",
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
)


class Metrics:
    """One registry for all ranks of a worker."""

    def __init__(
        self, model: str, ranks: int, told_block_tokens: int = 0, *, started: WallTime
    ) -> None:
        """`told_block_tokens`: the block size that is told, 0 for the real one."""
        self._told_block_tokens = told_block_tokens
        self.registry = CollectorRegistry()
        self._model = model
        begun = Gauge("process_start_time_seconds", "When this life began.", registry=self.registry)
        begun.set(started / 1_000.0)

        def histogram(name: str, sentence: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(name, sentence, _LABELS, buckets=buckets, registry=self.registry)
            for rank in range(ranks):
                made.labels(model, str(rank))
            return made

        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the start of prefill.", _SECONDS
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From start of prefill to the token.", _SECONDS
        )
        self._computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens not hit.", _TOKENS
        )

    def observe(self, rank: int, job: Job) -> None:
        """Called when a job gives its first token."""
        labels = (self._model, str(rank))
        self._ttft.labels(*labels).observe(max(0.0, job.first_token_at - job.arrived_at))
        self._queue.labels(*labels).observe(max(0.0, job.started_at - job.arrived_at))
        self._prefill.labels(*labels).observe(max(0.0, job.first_token_at - job.started_at))
        self._computed.labels(*labels).observe(len(job.prompt) - job.cached_tokens)

    def watch(self, engines: Sequence[Engine]) -> None:
        """Read these engines at each scrape."""
        self.registry.register(_EngineCollector(self._model, engines, self._told_block_tokens))

    def watch_fence(self, fence: Fence) -> None:
        """Read the fence of a worker with an agent at each scrape."""
        self.registry.register(_FenceCollector(fence))

    def watch_storage(self, storage: Storage) -> None:
        """Read what lies behind the device at each scrape."""
        self.registry.register(_StorageCollector(storage))

    def rendered(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, model: str, engines: Sequence[Engine], told_block_tokens: int) -> None:
        self._model = model
        self._engines = engines
        self._told_block_tokens = told_block_tokens

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", [e.running for e in self._engines])
        yield self._gauge("vllm:num_requests_waiting", [e.waiting for e in self._engines])
        shares = [e.cache.used_share for e in self._engines]
        yield self._gauge("vllm:kv_cache_usage_perc", shares)
        totals = [e.totals for e in self._engines]
        yield self._counter("vllm:prefix_cache_queries", [t.queried for t in totals])
        yield self._counter("vllm:prefix_cache_hits", [t.hit for t in totals])
        yield self._counter("vllm:prompt_tokens", [t.queried for t in totals])
        yield self._counter("vllm:generation_tokens", [t.generated for t in totals])
        rejected = [t.rejected_requests for t in totals]
        yield self._counter("vllm:admission_rejections", rejected, ("reason", "queue_full"))
        done = [t.finished_requests for t in totals]
        aborted = [t.aborted_requests for t in totals]
        success = self._counter("vllm:request_success", done, ("finished_reason", "length"))
        self._fill(success, aborted, "abort")
        yield success
        sources = self._counter(
            "vllm:prompt_tokens_by_source",
            [t.queried - t.hit for t in totals],
            ("source", "local_compute"),
        )
        self._fill(sources, [t.hit - t.loaded for t in totals], "local_cache_hit")
        self._fill(sources, [t.loaded for t in totals], "external_kv_transfer")
        yield sources
        cached = self._counter(
            "vllm:prompt_tokens_cached_by_source",
            [t.hit - t.loaded for t in totals],
            ("source", "device"),
        )
        self._fill(cached, [t.loaded - t.pulled - t.lifted for t in totals], "host")
        self._fill(cached, [t.lifted for t in totals], "disk")
        self._fill(cached, [t.pulled for t in totals], "pull")
        yield cached
        # There is neither preemption nor a second tier here; dashboards want the series.
        for absent in _ABSENT:
            yield self._counter(absent, [0 for _ in totals])
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Sizes of the cache.",
            labels=("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        for rank, engine in enumerate(self._engines):
            told = self._told_block_tokens or engine.cache.block_tokens
            sizes = (str(told), str(engine.cache.capacity))
            info.add_metric((str(rank), *sizes, "True"), 1)
        yield info

    def _gauge(self, name: str, values: Sequence[float]) -> Metric:
        family = GaugeMetricFamily(name, "As in the engine.", labels=_LABELS)
        for rank, value in enumerate(values):
            family.add_metric((self._model, str(rank)), value)
        return family

    def _counter(
        self, name: str, values: Sequence[float], extra: tuple[str, str] | None = None
    ) -> CounterMetricFamily:
        labels = _LABELS if extra is None else (*_LABELS, extra[0])
        family = CounterMetricFamily(name, "As in the engine.", labels=labels)
        self._fill(family, values, *(() if extra is None else (extra[1],)))
        return family

    def _fill(self, family: CounterMetricFamily, values: Sequence[float], *extra: str) -> None:
        for rank, value in enumerate(values):
            family.add_metric((self._model, str(rank), *extra), value)


class _FenceCollector(Collector):
    """What stock engines do not have."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "trunkline:reuse_refused",
            "Requests that were not served from here.",
            labels=("reason",),
        )
        for reason, count in self._fence.refused.items():
            refused.add_metric((reason.value,), count)
        yield refused
        grants = CounterMetricFamily(
            "trunkline:lease_grants",
            "Leases granted to us, by what became of them.",
            labels=("taken",),
        )
        for taken, count in self._fence.grants.items():
            grants.add_metric((taken.value,), count)
        yield grants
        yield GaugeMetricFamily(
            "trunkline:reuse_allowed",
            "1 while the freshness lease is valid.",
            value=self._fence.freshness.is_valid(self._fence.boot()),
        )


class _StorageCollector(Collector):
    """The tiers behind the device, and pulls."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def collect(self) -> Iterator[Metric]:
        figures = self._storage.tier.store.figures()
        held = GaugeMetricFamily(
            "trunkline:tier_bytes", "Blocks that can be found, real bytes.", labels=("tier",)
        )
        held.add_metric(("host",), figures.host_bytes)
        if self._storage.lifts is not None:
            held.add_metric(("disk",), figures.disk_bytes)
        yield held
        for name, sentence, value in (
            ("staged", "On their way here, not verified yet.", figures.staged_bytes),
            ("pinned", "Held by who reads them, or for good.", figures.pinned_bytes),
            (
                "quarantined",
                "Set aside: somebody may still write there.",
                figures.quarantined_bytes,
            ),
        ):
            yield GaugeMetricFamily(f"trunkline:{name}_bytes", sentence, value=value)
        evicted = CounterMetricFamily(
            "trunkline:tier_evictions", "Blocks that made room for others.", labels=("tier",)
        )
        evicted.add_metric(("host",), figures.evicted)
        yield evicted
        yield self._refused()
        alarms = CounterMetricFamily(
            "trunkline:integrity_alarms",
            "Blocks whose bytes were not what they are.",
            labels=("kind",),
        )
        alarms.add_metric(("conflict",), figures.conflicts)
        alarms.add_metric(("damaged",), figures.spoilt)
        yield alarms
        if self._storage.exchange is not None:
            yield from _pull_metrics(self._storage.exchange)

    def _refused(self) -> Metric:
        refused = CounterMetricFamily(
            "trunkline:tier_refused", "Blocks not kept behind the device.", labels=("reason",)
        )
        for reason, count in self._storage.tier.put_refused.items():
            refused.add_metric((reason.value,), count)
        return refused


def _pull_metrics(exchange: Exchange) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "trunkline:pulls", "Pulls into this worker, by how they ended.", labels=("end", "reason")
    )
    for (end, reason), count in exchange.pulls.ended.items():
        ended.add_metric((end.value, reason.value if reason else ""), count)
    yield ended
    yield GaugeMetricFamily(
        "trunkline:pulls_running", "Requests that wait for theirs.", value=exchange.pulls.open_count
    )
    yield GaugeMetricFamily(
        "trunkline:pulls_overdue",
        "Open past their deadline: must be 0.",
        value=exchange.pulls.overdue_count,
    )
    yield GaugeMetricFamily(
        "trunkline:pulls_waiting",
        "Pulls from here that wait for what is being computed.",
        value=exchange.lent.coming.wait_count,
    )
    moved = CounterMetricFamily(
        "trunkline:pull_bytes", "KV moved, in the profile's bytes.", labels=("direction",)
    )
    moved.add_metric(("in",), exchange.pulls.bytes_in)
    moved.add_metric(("out",), exchange.bytes_out)
    yield moved
