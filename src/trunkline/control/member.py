"""One worker as the gateway knows it: found out, joined, followed, and gone.

    unreachable --(answers)--> joined --(health fails)--> unhealthy --(answers again)-->
    rediscovered

Owns the worker's place in fleet, directory and target table, one entry a data-parallel rank.
Read `engine.py` for what engines answer, `core/feed.py` for their events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum

from trunkline.config import BreakerConfig, HealthConfig, RoutingConfig
from trunkline.control.engine import (
    CacheFacts,
    LoadReport,
    parse_cache,
    parse_json_load,
    parse_metrics_load,
    parse_models,
)
from trunkline.core.actions import (
    Action,
    FeedBlind,
    FeedFailed,
    FeedTrusted,
    FeedUntrusted,
    RequestReplay,
    WorkerRestarted,
)
from trunkline.core.breaker import Breaker
from trunkline.core.directory import Directory
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.records import BlockKey, BootInstant, Instant, WorkerId
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock
from trunkline.ports.worker import (
    AttemptEnd,
    Endpoint,
    EventSource,
    FeedRunner,
    Fetch,
    Target,
    Targets,
)

DISCOVERY_PAUSE_SECS = 0.5
"""Between attempts to reach a worker that has not answered yet."""

LOAD_PATHS = ("/metrics", "/load", "/get_loads")


class Mode(Enum):
    """How we know what a worker holds."""

    CONNECTING = "connecting"
    EXACT = "exact"
    DIGEST = "digest"
    APPROXIMATE = "approximate"
    BLIND = "blind"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker as an operator names it."""

    name: str
    endpoint: Endpoint
    block_tokens: int | None = None
    """None takes what the worker says, or the configured default."""
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a digest-mode worker posts each second."""

    name: str
    boot_nonce: str
    counter: int
    checkpoints: frozenset[BlockKey]
    is_complete: bool
    memory_ratio: float
    load_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """One worker for operators; no secrets."""

    name: str
    url: str
    mode: Mode
    reason: str
    is_healthy: bool
    is_draining: bool
    breaker: int
    block_tokens: int | None
    capacity_blocks: int | None
    model_id: str
    degraded: tuple[str, ...]
    ranks: tuple[RankView, ...]
    labels: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank of a worker: what is in flight there and what its directory entries are worth."""

    worker: WorkerId
    incarnation: int
    in_flight: int
    queue_ms: float
    scale: float
    held_blocks: int
    predicted_blocks: int
    feed_state: str
    feed_stats: dict[str, int]


@dataclass(slots=True, kw_only=True)
class MemberParts:
    """What all members share."""

    fleet: Fleet
    directory: Directory
    targets: Targets
    clock: Clock
    fetch: Fetch
    make_feed: Callable[[WorkerId, EventSource], WorkerFeed]
    run_feed: FeedRunner
    find_sources: Callable[[bytes, str], list[EventSource]]
    health: HealthConfig
    breaker: BreakerConfig
    routing: RoutingConfig
    default_block_tokens: int
    log: EventLog
    joined: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True)
class _Facts:
    """What discovery found."""

    model_id: str
    cache: CacheFacts
    sources: list[EventSource]


class Member:
    """See the module's picture."""

    def __init__(self, spec: WorkerSpec, parts: MemberParts) -> None:
        self.spec = spec
        self.workers: list[WorkerId] = []
        self.mode = Mode.CONNECTING
        self.model_id = ""
        self._parts = parts
        self._reason = "not reached yet"
        self._feeds: dict[WorkerId, WorkerFeed] = {}
        self._facts: _Facts | None = None
        self._block_tokens: int | None = None
        self._is_draining = False
        self._failed_probes = 0
        self._good_probes = 0
        self._degraded: dict[str, None] = {}
        self._load_path: str | None = None
        settings = parts.breaker
        self._breaker = Breaker(
            failure_threshold=settings.cb_failure_threshold,
            success_threshold=settings.cb_success_threshold,
            pause_ms=settings.cb_timeout_duration_secs * 1_000.0,
        )

    @property
    def is_joined(self) -> bool:
        return bool(self.workers)

    async def live(self) -> None:
        """Discover, join and follow, until cancelled."""
        while True:
            facts = await self._discover()
            self._join(facts)
            await self._follow(facts)

    def drain(self) -> None:
        self._is_draining = True
        for worker in self.workers:
            self._parts.fleet.update(worker, is_draining=True)

    def leave(self) -> None:
        """Out of fleet, directory and targets, at once."""
        parts = self._parts
        for worker in self.workers:
            parts.fleet.remove(worker)
            parts.directory.leave(worker)
            parts.targets.remove_target(worker)
        self.workers = []
        self._feeds = {}

    def take_heartbeat(
        self, heartbeat: Heartbeat, boot: BootInstant, ttl_ms: float, is_new_life: bool
    ) -> None:
        """A good heartbeat: believe the worker for `ttl_ms` more, and what it says it holds."""
        parts, worker = self._parts, self.workers[0]
        if is_new_life:
            parts.directory.restart(worker)
            parts.log.info("worker.restarted", worker=worker)
        if self.mode is not Mode.DIGEST:
            self.mode, self._reason = Mode.DIGEST, "sends heartbeats with checkpoint keys"
            self._put_target(worker, 0)
        # A prefix that was routed there lately may still be waiting for its prefill.
        grace_ms = parts.routing.predicted_ttl_ms
        parts.directory.report(
            worker,
            heartbeat.checkpoints,
            is_complete=heartbeat.is_complete,
            taken_at=Instant(parts.clock.now() - grace_ms),
        )
        parts.fleet.renew_lease(worker, BootInstant(boot + ttl_ms))
        self._set_full(heartbeat.memory_ratio, heartbeat.load_ratio)

    def view(self) -> MemberView:
        parts = self._parts
        states = [state for w in self.workers if (state := parts.fleet.get(w)) is not None]
        cache = self._facts.cache if self._facts else None
        return MemberView(
            name=self.spec.name,
            url=_url(self.spec.endpoint),
            mode=self.mode,
            reason=self._reason,
            is_healthy=bool(states) and all(state.is_healthy for state in states),
            is_draining=self._is_draining,
            breaker=self._breaker.state(parts.clock.now()).value,
            block_tokens=self._block_tokens,
            capacity_blocks=cache.capacity_blocks if cache else None,
            model_id=self.model_id,
            degraded=tuple(self._degraded),
            ranks=tuple(self._rank_view(state) for state in states),
            labels=dict(self.spec.labels),
        )

    # -- discovery -------------------------------------------------------------------------------

    async def _discover(self) -> _Facts:
        while True:
            try:
                return await self._ask()
            except (WorkerLost, WorkerTimeout) as error:
                self._reason = str(error)
                self._parts.log.warning("worker.unreachable", worker=self.spec.name, why=str(error))
            await asyncio.sleep(DISCOVERY_PAUSE_SECS)

    async def _ask(self) -> _Facts:
        status, body = await self._get("/v1/models")
        if status != 200:
            raise WorkerLost(f"{self.spec.name}/v1/models answered {status}")
        models = parse_models(body)
        if not models:
            raise WorkerLost(f"{self.spec.name}/v1/models lists no model")
        status, metrics = await self._get("/metrics")
        cache = (
            parse_cache(metrics)
            if status == 200
            else CacheFacts(block_tokens=None, capacity_blocks=None)
        )
        status, announced = await self._get("/kv_event_sources")
        host = self.spec.endpoint.host
        sources = self._parts.find_sources(announced, host) if status == 200 else []
        return _Facts(model_id=models[0].model_id, cache=cache, sources=sources)

    async def _get(self, path: str) -> tuple[int, bytes]:
        timeout_ms = self._parts.health.health_check_timeout_secs * 1_000.0
        return await self._parts.fetch(self.spec.endpoint, "GET", path, timeout_ms=timeout_ms)

    def _join(self, facts: _Facts) -> None:
        """A new incarnation of each rank, knowing nothing of what an earlier one held (C24)."""
        parts = self._parts
        self.leave()
        self._facts = facts
        self.model_id = facts.model_id
        block_tokens = (
            self.spec.block_tokens or facts.cache.block_tokens or parts.default_block_tokens
        )
        self._block_tokens = block_tokens
        ranks = [source.rank or 0 for source in facts.sources] or [0]
        self.mode = Mode.EXACT if facts.sources else Mode.APPROXIMATE
        self._reason = (
            "follows the worker's cache events"
            if facts.sources
            else "the worker announces no events"
        )
        for index, rank in enumerate(ranks):
            name = self.spec.name if len(ranks) == 1 else f"{self.spec.name}@{rank}"
            worker = WorkerId(name)
            capacity = facts.cache.capacity_blocks
            slot = parts.directory.join(
                worker, block_tokens=block_tokens, max_predicted=capacity or 1 << 20
            )
            state = WorkerState(
                worker=worker, slot=slot, block_tokens=block_tokens, is_draining=self._is_draining
            )
            parts.fleet.add(state)
            self.workers.append(worker)
            self._put_target(worker, rank)
            if facts.sources:
                self._feeds[worker] = parts.make_feed(worker, facts.sources[index])
        parts.log.info(
            "worker.joined", worker=self.spec.name, mode=self.mode.value, block_tokens=block_tokens
        )
        parts.joined.set()

    def _put_target(self, worker: WorkerId, rank: int) -> None:
        routing = self._parts.routing
        is_exact = self.mode is Mode.EXACT
        self._parts.targets.add_target(
            Target(
                worker=worker,
                endpoint=self.spec.endpoint,
                headers=(("x-data-parallel-rank", str(rank)),) if "@" in worker else (),
                predicted_ttl_ms=routing.predicted_ttl_ms
                if is_exact
                else routing.approximate_ttl_ms,
                wants_checkpoints=self.mode is Mode.DIGEST,
                on_sent=self._on_sent,
                on_ended=self._on_ended,
            )
        )

    # -- following -------------------------------------------------------------------------------

    async def _follow(self, facts: _Facts) -> None:
        """Until the worker was away and is back: then everything is asked anew."""
        tasks = [asyncio.create_task(self._follow_load())]
        for worker, source in zip(self.workers, facts.sources, strict=False):
            tasks.append(asyncio.create_task(self._follow_events(source, self._feeds[worker])))
        try:
            await self._follow_health()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_events(self, source: EventSource, feed: WorkerFeed) -> None:
        await self._parts.run_feed(source, feed, self._on_feed_action)

    def _on_feed_action(self, action: Action) -> None:
        """What a feed says of the worker as a whole."""
        log = self._parts.log
        match action:
            case FeedFailed():
                # Nothing more will come: learn from our own routing instead (C103).
                self.mode, self._reason = Mode.APPROXIMATE, action.reason
                self._put_target(action.worker, self.workers.index(action.worker))
                log.warning("feed.failed", worker=action.worker, why=action.reason)
            case FeedBlind():
                self.mode, self._reason = Mode.BLIND, action.reason
                log.warning("feed.blind", worker=action.worker, why=action.reason)
            case FeedUntrusted():
                log.warning("feed.untrusted", worker=action.worker, why=action.reason)
            case FeedTrusted():
                log.info("feed.trusted", worker=action.worker)
            case WorkerRestarted():
                log.info("worker.restarted", worker=action.worker)
            case RequestReplay():
                raise AssertionError("the runner carries out replays itself")

    async def _follow_health(self) -> None:
        """Returns when a worker that was unhealthy answers well again."""
        settings = self._parts.health
        while True:
            await asyncio.sleep(settings.health_check_interval_secs)
            if await self._probe():
                self._failed_probes = 0
                self._good_probes += 1
                was_away = not self._is_healthy()
                if was_away and self._good_probes >= settings.health_success_threshold:
                    return
            else:
                self._good_probes = 0
                self._failed_probes += 1
                if self._failed_probes >= settings.health_failure_threshold and self._is_healthy():
                    self._set_healthy(False)
            self._sync_breaker()

    async def _probe(self) -> bool:
        try:
            status, _ = await self._get(self._parts.health.health_check_endpoint)
        except (WorkerLost, WorkerTimeout) as error:
            self._reason = str(error)
            return False
        return status == 200

    def _is_healthy(self) -> bool:
        states = [self._parts.fleet.get(worker) for worker in self.workers]
        return all(state is not None and state.is_healthy for state in states)

    def _set_healthy(self, is_healthy: bool) -> None:
        self._parts.log.warning("worker.unhealthy", worker=self.spec.name, why=self._reason)
        for worker in self.workers:
            self._parts.fleet.update(worker, is_healthy=is_healthy)

    async def _follow_load(self) -> None:
        while True:
            report = await self._read_load()
            if report is not None:
                self._take_load(report)
            await asyncio.sleep(self._parts.health.load_interval_secs)

    async def _read_load(self) -> LoadReport | None:
        """Ask where it answered last; else try each way an engine may have (C11)."""
        for path in (self._load_path,) if self._load_path else LOAD_PATHS:
            try:
                status, body = await self._get(path)
            except (WorkerLost, WorkerTimeout):
                return None  # its health probe says so
            parse = parse_metrics_load if path == "/metrics" else parse_json_load
            report = parse(body) if status == 200 else None
            if report is not None:
                self._load_path = path
                self._degraded.pop("load", None)
                return report
        self._load_path = None
        if "load" not in self._degraded:
            self._degraded["load"] = None
            self._parts.log.warning(
                "worker.load_unknown", worker=self.spec.name, tried=" ".join(LOAD_PATHS)
            )
        return None

    def _take_load(self, report: LoadReport) -> None:
        for worker in self.workers:
            state = self._parts.fleet.get(worker)
            if state is not None and report.waiting is not None and len(self.workers) == 1:
                state.queue.correct(report.waiting)
            if report.is_asleep:
                # A sleeping engine has dropped its cache and publishes nothing about it (C20).
                self._parts.directory.clear(worker)
        if self.mode is not Mode.DIGEST and report.memory_ratio is not None:
            self._set_full(report.memory_ratio, 0.0)

    def _set_full(self, memory_ratio: float, load_ratio: float) -> None:
        routing = self._parts.routing
        is_full = memory_ratio > routing.memory_watermark or load_ratio > routing.load_watermark
        for worker in self.workers:
            state = self._parts.fleet.get(worker)
            if state is not None and state.is_full != is_full:
                self._parts.fleet.update(worker, is_full=is_full)

    # -- breaker ---------------------------------------------------------------------------------

    def _on_sent(self) -> None:
        self._breaker.begin(self._parts.clock.now())
        self._sync_breaker()

    def _on_ended(self, end: AttemptEnd) -> None:
        now = self._parts.clock.now()
        match end:
            case AttemptEnd.COMPLETE:
                self._breaker.succeeded()
            case AttemptEnd.WORKER_FAILED:
                self._breaker.failed(now)
            case AttemptEnd.CLIENT_GONE:
                self._breaker.abandoned()
        self._sync_breaker()

    def _sync_breaker(self) -> None:
        if self._parts.breaker.disable_circuit_breaker:
            return
        is_open = not self._breaker.is_usable(self._parts.clock.now())
        for worker in self.workers:
            state = self._parts.fleet.get(worker)
            if state is not None and state.is_breaker_open != is_open:
                self._parts.fleet.update(worker, is_breaker_open=is_open)

    def _rank_view(self, state: WorkerState) -> RankView:
        directory, worker = self._parts.directory, state.worker
        feed = self._feeds.get(worker)
        return RankView(
            worker=worker,
            incarnation=directory.incarnation(worker),
            in_flight=state.queue.in_flight_count,
            queue_ms=state.queue.queue_ms(self._parts.clock.now()),
            scale=state.queue.scale,
            held_blocks=directory.held_count(worker),
            predicted_blocks=directory.predicted_count(worker),
            feed_state=feed.state.value if feed else "none",
            feed_stats=asdict(feed.stats) if feed else {},
        )


def _url(endpoint: Endpoint) -> str:
    scheme = "https" if endpoint.is_tls else "http"
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{scheme}://{host}:{endpoint.port}{endpoint.base_path}"
