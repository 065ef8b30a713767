"""One worker as the gateway knows it: found out, joined, followed, and gone.

    unreachable --(answers)--> joined --(health fails)--> unhealthy
         ▲                       │                            │
         └──(another than it was)┴──────(answers again)───────┘

Owns the worker's place in fleet, directory and target table, one entry a data-parallel rank.
Read `engine.py` for what engines answer, `core/feed.py` for their events.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from trunkline.control.discovery import Facts, ask
from trunkline.control.engine import LoadReport, parse_models
from trunkline.control.load import LoadReader
from trunkline.control.parts import MemberParts, directory_bounds, new_breaker
from trunkline.control.silence import Silence
from trunkline.control.views import Heartbeat, MemberView, Mode, RankView, WorkerSpec, shown_url
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
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import WorkerState
from trunkline.core.load import PrefillQueue
from trunkline.core.records import BootInstant, Instant, WorkerId
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.ports.worker import AttemptEnd, Target

DISCOVERY_PAUSE_SECS = 0.5
"""Between attempts to reach a worker that has not answered yet."""

_FOLLOWS = "follows the worker's cache events"
_NO_EVENTS = "no events since start, though it announced them"
_NO_LOAD = LoadReport(running=0, waiting=None, memory_ratio=None)


class Member:
    """See the module's picture."""

    def __init__(self, spec: WorkerSpec, parts: MemberParts) -> None:
        self.spec = spec
        self.workers: list[WorkerId] = []
        self.mode = Mode.CONNECTING
        self.model_id = ""
        self._parts = parts
        self._reason = "not reached yet"
        self._trouble = ""
        """What went wrong last, until it goes well again."""
        self._feeds: dict[WorkerId, WorkerFeed] = {}
        self._ranks: dict[WorkerId, int] = {}
        self._silence = Silence()
        self._facts: Facts | None = None
        self._block_tokens: int | None = None
        self._told_block_tokens: int | None = None
        """What its heartbeats say."""
        self._again = asyncio.Event()
        """Everything is to be asked anew: it was away, or is another than it was."""
        self._was_refused = False
        """Nobody listened there a moment ago: whoever answers next has begun a new life."""
        self._is_draining = False
        self._failed_probes = 0
        self._good_probes = 0
        self._load = LoadReader(spec.name, self._get, parts.log)
        self._breaker = new_breaker(parts.breaker)

    @property
    def max_model_len(self) -> int | None:
        """What it announced; None where it does not say, or has not joined."""
        return self._facts.max_model_len if self._facts and self.workers else None

    @property
    def models(self) -> tuple[str, ...]:
        """The names it answers to; none while it is not in the fleet."""
        return self._facts.models if self._facts and self.workers else ()

    async def live(self) -> None:
        """Discover, join and follow, until cancelled. Whatever a worker answers, it troubles nobody
        but itself: it is out, shown with the reason, and asked again.
        """
        while True:
            try:
                facts = await self._discover()
                self._join(facts)
                await self._follow(facts)
            except Exception as error:  # noqa: BLE001  # logged with its trace; see above
                self._parts.log.error("worker.join_failed", cause=error, worker=self.spec.name)
                self._part(f"cannot be joined: {type(error).__name__}")
                await asyncio.sleep(DISCOVERY_PAUSE_SECS)

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
        self._ranks = {}
        self._silence = Silence()

    def _part(self, why: str) -> None:
        """Not in the fleet until it is another than it is now."""
        self.leave()
        self.mode, self._trouble = Mode.CONNECTING, why

    def is_misread(self, heartbeat: Heartbeat) -> bool:
        """Whether its blocks are of another size than we joined it with; then it is asked anew."""
        if self.spec.block_tokens is not None or heartbeat.block_tokens == self._block_tokens:
            return False
        self._told_block_tokens = heartbeat.block_tokens
        self._again.set()
        return True

    def take_heartbeat(
        self, heartbeat: Heartbeat, lease_ends_at: BootInstant, is_new_life: bool
    ) -> None:
        """A good heartbeat: believe the worker until then, and what it says it holds."""
        parts, worker = self._parts, self.workers[0]
        parts.fleet.renew_lease(worker, lease_ends_at)
        self._set_full(heartbeat.memory_ratio, heartbeat.load_ratio)
        if self._feeds:
            return  # its events say more than any digest
        if is_new_life:
            parts.directory.restart(worker)
            parts.log.info("worker.restarted", worker=worker)
        if self.mode is not Mode.DIGEST:
            self.mode, self._reason = Mode.DIGEST, "sends heartbeats with checkpoint keys"
            self._put_target(worker)
        # A prefix that was routed there lately may still be waiting for its prefill.
        grace_ms = parts.routing.predicted_ttl_ms
        parts.directory.report(
            worker,
            heartbeat.checkpoints,
            is_complete=heartbeat.is_complete,
            taken_at=Instant(parts.clock.now() - grace_ms),
        )

    def view(self) -> MemberView:
        parts = self._parts
        states = [state for w in self.workers if (state := parts.fleet.get(w)) is not None]
        cache = self._facts.cache if self._facts else None
        return MemberView(
            name=self.spec.name,
            url=shown_url(self.spec.endpoint),
            mode=self.mode,
            reason=self._trouble or self._reason,
            is_healthy=bool(states) and all(state.is_healthy for state in states),
            is_draining=self._is_draining,
            breaker=self._breaker.state(parts.clock.now()).value,
            block_tokens=self._block_tokens,
            capacity_blocks=cache.capacity_blocks if cache else None,
            model_id=self.model_id,
            max_model_len=self.max_model_len,
            degraded=self._degraded(),
            ranks=tuple(self._rank_view(state) for state in states),
            labels=dict(self.spec.labels),
        )

    # -- discovery -------------------------------------------------------------------------------

    async def _discover(self) -> Facts:
        parts, name = self._parts, self.spec.name
        while True:
            try:
                facts = await ask(self.spec, self._get, parts.find_sources)
            except (WorkerLost, WorkerTimeout) as error:
                self._trouble = str(error)
                parts.log.warning("worker.unreachable", worker=name, why=str(error))
                if self.workers and self._is_healthy():
                    self._set_unhealthy()  # it was to be asked anew, and nobody else looks after it
            else:
                refusal = parts.model.refusal(facts.models, self.spec.model_id)
                if refusal is None:
                    return facts
                self._part(refusal)
                parts.log.warning("worker.other_model", worker=name, why=refusal)
            await asyncio.sleep(DISCOVERY_PAUSE_SECS)

    async def _get(self, path: str) -> tuple[int, bytes]:
        timeout_ms = self._parts.health.health_check_timeout_secs * 1_000.0
        try:
            answer = await self._parts.fetch(self.spec.endpoint, "GET", path, timeout_ms=timeout_ms)
        except WorkerLost as error:
            self._was_refused |= isinstance(error.__cause__, ConnectionRefusedError)
            raise
        if self._was_refused and self._is_healthy():
            self._again.set()
        return answer

    def _join(self, facts: Facts) -> None:
        """A new incarnation of each rank, knowing nothing of what an earlier one held (C24)."""
        parts = self._parts
        # What we sent there and has not ended is still in flight, whatever the worker is now.
        queues = {w: state.queue for w in self.workers if (state := parts.fleet.get(w))}
        self.leave()
        # What its last life did wrong says nothing about this one.
        self._breaker = new_breaker(parts.breaker)
        self._facts, self._was_refused, self._trouble = facts, False, ""
        self._again.clear()
        self.model_id = parts.model.settle(facts.models, self.spec.model_id)
        block_tokens = (
            self.spec.block_tokens
            or self._told_block_tokens
            or facts.cache.block_tokens
            or parts.default_block_tokens
        )
        if self._block_tokens not in (None, block_tokens):
            parts.log.warning(
                "worker.block_size_changed",
                worker=self.spec.name,
                was=self._block_tokens,
                block_tokens=block_tokens,
            )
        self._block_tokens = block_tokens
        ranks = [source.rank or 0 for source in facts.sources] or [0]
        self.mode = Mode.EXACT if facts.sources else Mode.APPROXIMATE
        self._reason = _FOLLOWS if facts.sources else "the worker announces no events"
        for index, rank in enumerate(ranks):
            name = self.spec.name if len(ranks) == 1 else f"{self.spec.name}@{rank}"
            worker = WorkerId(name)
            slot = parts.directory.join(
                worker, block_tokens=block_tokens, **directory_bounds(facts.cache.capacity_blocks)
            )
            state = WorkerState(
                worker=worker,
                slot=slot,
                block_tokens=block_tokens,
                queue=queues.get(worker) or PrefillQueue(),
                is_draining=self._is_draining,
            )
            parts.fleet.add(state)
            self.workers.append(worker)
            self._ranks[worker] = rank
            self._put_target(worker)
            if facts.sources:
                self._feeds[worker] = parts.make_feed(worker, facts.sources[index])
        parts.log.info(
            "worker.joined", worker=self.spec.name, mode=self.mode.value, block_tokens=block_tokens
        )

    def _put_target(self, worker: WorkerId) -> None:
        routing, breaker = self._parts.routing, self._breaker
        is_exact = self.mode is Mode.EXACT
        self._parts.targets.add_target(
            Target(
                worker=worker,
                endpoint=self.spec.endpoint,
                headers=self._rank_headers(worker),
                predicted_ttl_ms=routing.predicted_ttl_ms
                if is_exact
                else routing.approximate_ttl_ms,
                wants_checkpoints=self.mode is Mode.DIGEST,
                on_sent=partial(self._on_sent, breaker),
                on_ended=partial(self._on_ended, breaker, worker),
            )
        )

    def _rank_headers(self, worker: WorkerId) -> tuple[tuple[str, str], ...]:
        if len(self._ranks) == 1 and worker == self.spec.name:
            return ()
        return (("x-data-parallel-rank", str(self._ranks[worker])),)

    # -- following -------------------------------------------------------------------------------

    async def _follow(self, facts: Facts) -> None:
        """Until the worker was away and is back, or is another than it was."""
        following = [self._follow_load(), self._follow_health()]
        for worker, source in zip(self.workers, facts.sources, strict=False):
            feed = self._feeds[worker]
            following.append(self._parts.run_feed(source, feed, self._on_feed_action))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep(work)) for work in following]
            await self._again.wait()
            for task in tasks:
                task.cancel()

    async def _keep(self, work: Coroutine[Any, Any, None]) -> None:  # Any: what it awaits
        """A mistake of ours with one worker must not end all others: it is written down, and this
        worker is asked anew.
        """
        try:
            await work
        except Exception as error:  # noqa: BLE001  # logged with its trace; see above
            self._parts.log.error("worker.follow_failed", cause=error, worker=self.spec.name)
            await asyncio.sleep(DISCOVERY_PAUSE_SECS)
            self._again.set()

    def _on_feed_action(self, action: Action) -> None:
        """What a feed says of the worker as a whole."""
        log = self._parts.log
        match action:
            case FeedFailed():
                # Nothing more will come: learn from our own routing instead (C103).
                # What was learnt can no longer be corrected.
                self.mode, self._reason = Mode.APPROXIMATE, action.reason
                self._parts.directory.clear(action.worker)
                self._put_target(action.worker)
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
        """Takes the worker out, and has it asked anew when it answers well again."""
        settings = self._parts.health
        self._failed_probes = self._good_probes = 0
        while True:
            await asyncio.sleep(settings.health_check_interval_secs)
            if await self._probe():
                self._failed_probes, self._trouble = 0, ""
                self._good_probes += 1
                is_enough = self._good_probes >= settings.health_success_threshold
                if is_enough and not self._is_healthy():
                    self._again.set()
                await self._refresh_models()
            else:
                self._good_probes = 0
                self._failed_probes += 1
                if self._failed_probes >= settings.health_failure_threshold and self._is_healthy():
                    self._set_unhealthy()
            self._sync_breaker()

    async def _probe(self) -> bool:
        path = self._parts.health.health_check_endpoint
        try:
            status, _ = await self._get(path)
        except (WorkerLost, WorkerTimeout) as error:
            self._trouble = str(error)
            return False
        if status != 200:
            self._trouble = f"{self.spec.name}{path} answered {status}"
        return status == 200

    async def _refresh_models(self) -> None:
        """Adapters come and go while an engine runs; its model does not."""
        assert self._facts is not None, "followed before it was asked"
        try:
            status, body = await self._get("/v1/models")
        except (WorkerLost, WorkerTimeout):
            return  # the next health probe says so
        models = tuple(model.model_id for model in parse_models(body)) if status == 200 else ()
        if models and models != self._facts.models:
            self._facts = replace(self._facts, models=models)
            if self._parts.model.refusal(models, self.spec.model_id) is not None:
                self._again.set()

    def _is_healthy(self) -> bool:
        states = [self._parts.fleet.get(worker) for worker in self.workers]
        return all(state is not None and state.is_healthy for state in states)

    def _set_unhealthy(self) -> None:
        self._parts.log.warning("worker.unhealthy", worker=self.spec.name, why=self._trouble)
        for worker in self.workers:
            self._parts.fleet.update(worker, is_healthy=False)

    async def _follow_load(self) -> None:
        assert self._facts is not None, "followed before it was asked"
        while True:
            try:
                reading = await self._load.read()
            except (WorkerLost, WorkerTimeout):
                self._take_load(_NO_LOAD)  # its health probe says so
            else:
                self._take_load(reading.report or _NO_LOAD)
                cache = reading.cache
                is_known = cache is not None and cache.block_tokens is not None
                if is_known and cache != self._facts.cache:
                    self._again.set()  # restarted with other settings (C24)
            await asyncio.sleep(self._parts.health.load_interval_secs)

    def _take_load(self, report: LoadReport) -> None:
        for worker in self.workers:
            state = self._parts.fleet.get(worker)
            if state is not None and len(self.workers) == 1:
                # What is not known is not held against it: no foreign queue.
                state.queue.correct(report.waiting or 0)
            if report.is_asleep:
                # A sleeping engine has dropped its cache and publishes nothing about it (C20).
                self._parts.directory.clear(worker)
        if not self._is_beating():
            self._set_full(report.memory_ratio or 0.0, 0.0)
        self._listen()

    def _is_beating(self) -> bool:
        """Whether heartbeats tell how full it is; they hold as long as its lease."""
        states = [self._parts.fleet.get(worker) for worker in self.workers]
        return any(state is not None and math.isfinite(state.lease_ends_at) for state in states)

    def _set_full(self, memory_ratio: float, load_ratio: float) -> None:
        routing = self._parts.routing
        is_full = memory_ratio > routing.memory_watermark or load_ratio > routing.load_watermark
        for worker in self.workers:
            state = self._parts.fleet.get(worker)
            if state is not None and state.is_full != is_full:
                self._parts.fleet.update(worker, is_full=is_full)

    # -- silence ---------------------------------------------------------------------------------

    def _note_answer(self, worker: WorkerId) -> None:
        """A request ended well there: with blocks that we expect there, an event should come."""
        feed = self._feeds.get(worker)
        expected_blocks = self._parts.directory.predicted_count(worker) if feed else 0
        if feed and self._silence.answered(feed, expected_blocks) and self.mode is Mode.EXACT:
            self._parts.log.warning("worker.no_events", worker=worker)
            self._set_mode(Mode.APPROXIMATE, _NO_EVENTS)

    def _listen(self) -> None:
        """Exact again when the first batch came after all."""
        if self._reason == _NO_EVENTS and self._silence.is_over(self._feeds):
            self._silence = Silence()
            self._parts.log.info("worker.events_came", worker=self.spec.name)
            self._set_mode(Mode.EXACT, _FOLLOWS)

    def _set_mode(self, mode: Mode, reason: str) -> None:
        self.mode, self._reason = mode, reason
        for worker in self.workers:
            self._put_target(worker)

    def _degraded(self) -> tuple[str, ...]:
        silent = ("events",) if self._reason == _NO_EVENTS else ()
        return (*silent, "load") if self._load.is_unknown else silent

    # -- breaker ---------------------------------------------------------------------------------

    def _on_sent(self, breaker: Breaker) -> None:
        """`breaker` is that of the life that the attempt was sent to."""
        breaker.begin(self._parts.clock.now())
        self._sync_breaker()

    def _on_ended(self, breaker: Breaker, worker: WorkerId, end: AttemptEnd) -> None:
        match end:
            case AttemptEnd.COMPLETE:
                breaker.succeeded()
                if breaker is self._breaker:
                    self._note_answer(worker)
            case AttemptEnd.WORKER_FAILED:
                breaker.failed(self._parts.clock.now())
            case AttemptEnd.CLIENT_GONE:
                breaker.abandoned()
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
