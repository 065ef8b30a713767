"""One worker as the gateway knows it: found out, joined, followed, and gone.

    unreachable --(answers)--> joined --(health fails)--> unhealthy
         ▲                       │                            │
         └──(another than it was)┴──────(answers again)───────┘

Owns the worker's place in fleet, directory and target table, one entry a data-parallel rank.
Read `engine.py` for what engines answer, `core/feed.py` for their events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

from trunkline.control.discovery import NOTHING, Facts, ask, probed, refusal, relisted
from trunkline.control.engine import parse_models, release_of
from trunkline.control.entries import Entries, rank_headers
from trunkline.control.guard import Guard
from trunkline.control.health import Health
from trunkline.control.hearing import Hearing
from trunkline.control.load import LoadReader, LoadWatch
from trunkline.control.parts import MemberParts, directory_bounds
from trunkline.control.probe import is_refusal
from trunkline.control.selftest import SelfTest
from trunkline.control.trouble import DRAINS, OTHER_MODEL, SHOWN, Trouble
from trunkline.control.unheard import unheard
from trunkline.control.views import (
    CheckView,
    Heartbeat,
    MemberView,
    Mode,
    WorkerSpec,
    alarm_views,
    rank_view,
    shown_url,
)
from trunkline.core.decision import Exclusion
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import WorkerState
from trunkline.core.load import PrefillQueue
from trunkline.core.records import BootInstant, Instant, WorkerId
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.ports.worker import AttemptEnd, Stay, Target

DISCOVERY_PAUSE_SECS = 0.5
"""Between attempts to reach a worker that has not answered yet."""


class Member:
    """See the module's picture."""

    def __init__(self, spec: WorkerSpec, parts: MemberParts) -> None:
        self.spec = spec
        self.model_id = ""
        self._parts = parts
        self._entries = Entries(parts.fleet)
        self._trouble = Trouble()
        """What went wrong last, until it goes well again."""
        self._ranks: dict[WorkerId, int] = {}
        self._facts = NOTHING
        self._block_tokens: int | None = None
        self._told_block_tokens: int | None = None
        """What its heartbeats say."""
        self._again = asyncio.Event()
        """Everything is to be asked anew: it was away, or is another than it was."""
        self._is_draining = False
        self.stay = Stay(is_gone=self._is_gone)
        self._health = Health(lambda: parts.health)
        self._load = LoadReader(spec.name, self._get, parts.log)
        self._guard = self._new_guard()
        self._self_test = SelfTest(spec.name, self._entries, parts)
        self._hearing = Hearing(
            spec.name, parts, on_mode=self._put_targets, on_restart=self._self_test.renew
        )

    @property
    def workers(self) -> list[WorkerId]:
        """Its entries in the fleet, one a rank; none while it is not in it."""
        return self._entries.workers

    @property
    def max_model_len(self) -> int | None:
        """What it announced; None where it does not say, or has not joined."""
        return self._facts.max_model_len if self.workers else None

    @property
    def models(self) -> tuple[str, ...]:
        """The names it answers to; none while it is not in the fleet."""
        return self._facts.models if self.workers else ()

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
                self._part(f"cannot be joined: {type(error).__name__}")
                if self._trouble.is_worth_saying("worker.join_failed", self._parts.clock.now()):
                    self._parts.log.error("worker.join_failed", cause=error, worker=self.spec.name)
                await asyncio.sleep(DISCOVERY_PAUSE_SECS)

    def drain(self, *, is_draining: bool) -> None:
        """No new requests, or again."""
        self._is_draining = is_draining
        self._entries.set_draining(is_draining=is_draining)

    @property
    def in_flight_count(self) -> int:
        return self._entries.in_flight_count

    def leave(self) -> None:
        """Out of fleet, directory and targets, at once."""
        parts = self._parts
        for worker in self.workers:
            parts.fleet.remove(worker)
            parts.directory.leave(worker)
            parts.targets.remove_target(worker)
        self.workers.clear()
        self._hearing.end()
        self._ranks = {}
        self._guard.retire()

    def _part(self, why: str) -> None:
        """Not in the fleet until it is another than it is now."""
        self.leave()
        self._hearing.mode, self._trouble.text = Mode.CONNECTING, why

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
        self._entries.set_full(is_full=parts.is_full(heartbeat.memory_ratio, heartbeat.load_ratio))
        if self._hearing.feeds or not (self._facts or NOTHING).is_exact:
            return  # its events say more than any digest; of other blocks than ours it is none
        if is_new_life:
            parts.directory.restart(worker)
            parts.log.info("worker.restarted", worker=worker)
        if self._hearing.take_digests():
            self._put_target(worker)
            self._self_test.renew()
        # A prefix that was routed there lately may still be waiting for its prefill.
        grace_ms = parts.routing.predicted_ttl_ms
        parts.directory.report(
            worker,
            heartbeat.checkpoints,
            is_complete=heartbeat.is_complete,
            taken_at=Instant(parts.clock.now() - grace_ms),
        )

    def view(self) -> MemberView:
        parts, now = self._parts, self._parts.clock.now()
        facts, hearing = self._facts, self._hearing
        exclusion = self._entries.exclusion(parts.clock.boot())
        return MemberView(
            name=self.spec.name,
            url=shown_url(self.spec.endpoint),
            mode=self._self_test.mode(hearing.mode),
            reason=self._shown_reason(exclusion),
            exclusion=exclusion,
            is_draining=self._is_draining,
            breaker=self._guard.state(now).value,
            block_tokens=self._block_tokens,
            capacity_blocks=facts.cache.capacity_blocks,
            model_id=self.model_id,
            engine=facts.engine,
            engine_version=facts.version,
            max_model_len=self.max_model_len,
            degraded=self._degraded(),
            ranks=tuple(
                rank_view(state, parts.directory, hearing.feeds.get(state.worker), now)
                for state in self._entries.states()
            ),
            labels=dict(self.spec.labels),
            check=self._self_test.view(),
            endpoint=self.spec.endpoint,
            is_other_model=self._trouble.kind == OTHER_MODEL,
            load=self._load.last,
            alarms=alarm_views(parts.fleet.alarms.of(self.workers), now),
            is_replayable=all(source.replay_endpoint for source in facts.sources),
        )

    def unheard(self) -> Iterator[tuple[WorkerId, str]]:
        """Of which of its ranks nothing is heard now, and why."""
        return unheard(self._entries.states(), self._hearing, self._parts.clock.boot())

    async def check(self) -> CheckView | None:
        """Test it now; None while it is not in the fleet."""
        return await self._self_test.ask() if self.workers else None

    def _shown_reason(self, exclusion: Exclusion | None) -> str:
        match exclusion:
            case None if self.workers:
                return self._self_test.reason(self._hearing.mode) or self._hearing.reason
            case None:
                return self._trouble.text or self._hearing.reason
            case Exclusion.DRAINING:
                return "; ".join(filter(None, (DRAINS, self._trouble.text)))
            case Exclusion.BREAKER:
                return self._guard.reason
            case Exclusion.ISOLATION:
                return self._self_test.verdict
            case _:
                return SHOWN.get(exclusion, self._trouble.text)

    # -- discovery -------------------------------------------------------------------------------

    async def _discover(self) -> Facts:
        parts, wanted = self._parts, self.spec.model_id
        while True:
            try:
                size = parts.default_block_tokens
                facts = await ask(self.spec, self._get, parts.find_sources, size)
            except (WorkerLost, WorkerTimeout) as error:
                self._trouble.text = str(error)
                if self.workers and self._entries.is_healthy():
                    self._set_unhealthy()  # it was to be asked anew, and nobody else looks after it
                self._complain("worker.unreachable")
            else:
                why_not = refusal(facts, parts.model, wanted, has_tenants=parts.keeps_apart)
                if why_not is None:
                    return parts.as_read(facts)
                self._part(why_not)
                self._complain(OTHER_MODEL)
                if parts.model.refusal(facts.models, wanted):
                    parts.on_other(self.spec.name)
            await asyncio.sleep(DISCOVERY_PAUSE_SECS)

    async def _get(self, path: str) -> tuple[int, bytes]:
        timeout_ms = self._parts.health.health_check_timeout_secs * 1_000.0
        try:
            told = await self._parts.fetch(self.spec.endpoint, "GET", path, timeout_ms=timeout_ms)
        except WorkerLost as error:
            if is_refusal(error.__cause__):
                self._on_refused(str(error))
            raise
        self._health.heard()
        return told

    def _on_refused(self, why: str) -> None:
        """Nobody listens there: that is no slow answer, and once is enough."""
        self._health.refused()
        if self.workers and self._entries.is_healthy():
            self._trouble.text = why
            self._set_unhealthy()

    def _complain(self, event: str) -> None:
        """A line about its trouble, now and then."""
        if self._trouble.is_worth_saying(event, self._parts.clock.now()):
            self._parts.log.warning(event, worker=self.spec.name, why=self._trouble.text)

    def _join(self, facts: Facts) -> None:
        """A new incarnation of each rank, knowing nothing of what an earlier one held (C24)."""
        parts = self._parts
        # What we sent there and has not ended is still in flight, whatever the worker is now.
        queues = {state.worker: state.queue for state in self._entries.states()}
        self.leave()
        self._guard = self._new_guard()
        self._health.begin()
        self._self_test.begin()
        self._facts = facts
        self._again.clear()
        self.model_id = parts.model.settle(facts.models, self.spec.model_id)
        block_tokens = self._settled_block_tokens(facts)
        ranks = [source.rank or 0 for source in facts.sources] or [0]
        self._hearing.begin(facts)
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
                is_unchecked=self._self_test.holds,
            )
            parts.fleet.start_slowly(state, parts.routing.slow_start_ms)
            self._entries.add(state)
            self._ranks[worker] = rank
            self._put_target(worker)
            if facts.sources:
                self._hearing.follow(worker, facts.sources[index])
        hearing = self._hearing
        told = {"mode": hearing.mode.value, "block_tokens": block_tokens, "why": hearing.reason}
        parts.log.info("worker.joined", worker=self.spec.name, **told)
        away_ms = self._trouble.end(parts.clock.now())
        if away_ms is not None:
            parts.log.info("worker.reached", worker=self.spec.name, away_ms=away_ms)

    def _settled_block_tokens(self, facts: Facts) -> int:
        """The size of its blocks in this life, by whoever knows best."""
        block_tokens = (
            self.spec.block_tokens
            or self._told_block_tokens
            or facts.cache.block_tokens
            or self._parts.default_block_tokens
        )
        if self._block_tokens not in (None, block_tokens):
            self._parts.log.warning(
                "worker.block_size_changed",
                worker=self.spec.name,
                was=self._block_tokens,
                block_tokens=block_tokens,
            )
        self._block_tokens = block_tokens
        return block_tokens

    def _put_target(self, worker: WorkerId) -> None:
        routing, guard, facts = self._parts.routing, self._guard, self._facts
        is_exact = self._self_test.mode(self._hearing.mode) is Mode.EXACT
        ttl_ms = routing.predicted_ttl_ms if is_exact else routing.approximate_ttl_ms
        self._parts.targets.add_target(
            Target(
                worker=worker,
                endpoint=self.spec.endpoint,
                headers=rank_headers(self._ranks, worker, self.spec.name),
                predicted_ttl_ms=ttl_ms,
                is_exact=is_exact,
                max_model_len=facts.max_model_len,
                engine=facts.engine,
                release=release_of(facts.version),
                models=frozenset(self.models),
                agent=self._parts.agent(self.spec.name),
                wants_checkpoints=self._hearing.mode is Mode.DIGEST,
                is_told_in_body=self.spec.agent is not None,
                p2p=self.spec.p2p,
                stay=self.stay,
                pace=None if self._parts.health.disable_gray_detection else guard.pace,
                on_sent=partial(self._on_sent, guard),
                on_ended=partial(self._on_ended, guard, worker),
            )
        )

    # -- following -------------------------------------------------------------------------------

    async def _follow(self, facts: Facts) -> None:
        """Until the worker was away and is back, or is another than it was."""
        watch = LoadWatch(
            reader=self._load,
            entries=self._entries,
            parts=self._parts,
            cache=facts.cache,
            pace=self._guard.pace,
            on_other=self._again.set,
            on_read=self._look_again,
            on_late=self._health.doubt,
        )
        following = [watch.run(), self._follow_health(), self._self_test.hold()]
        following.append(self._self_test.run(self._ranked, self._adapters, self._put_targets))
        for worker, source in zip(self.workers, facts.sources, strict=False):
            feed = self._hearing.feeds[worker]
            following.append(self._parts.run_feed(source, feed, self._hearing.on_action))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep(work)) for work in following]
            await self._again.wait()
            for task in tasks:
                task.cancel()

    def _ranked(self) -> list[tuple[WorkerId, WorkerFeed | None]]:
        return [(worker, self._hearing.feeds.get(worker)) for worker in self.workers]

    def _adapters(self) -> tuple[str, ...]:
        return self._facts.adapters

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

    async def _follow_health(self) -> None:
        """Takes the worker out, and has it asked anew when it answers well again."""
        while True:
            await self._health.until_due()
            probe = probed(self.spec.name, self._parts.health, self._get)
            wrong = await self._health.follow(probe, lambda: self._guard.pace.tokens)
            self._trouble.text = wrong or self._trouble.text
            if not wrong:
                is_enough = self._health.passed()
                if self._entries.is_healthy():
                    self._trouble.text = ""
                elif is_enough:
                    self._again.set()
                else:
                    self._trouble.text = "it answers again, not often enough yet"
                await self._refresh_models()
            else:
                is_enough = self._health.failed()
                if not self._entries.is_healthy():
                    self._complain("worker.unhealthy")
                elif is_enough:
                    self._set_unhealthy()
            self._sync_guard()

    async def _refresh_models(self) -> None:
        """Adapters come and go while an engine runs; its model does not."""
        try:
            status, body = await self._get("/v1/models")
        except (WorkerLost, WorkerTimeout):
            return  # the next health probe says so
        facts = relisted(self._facts, parse_models(body) if status == 200 else ())
        if facts != self._facts:
            self._facts = facts
            self._put_targets()
            if self._parts.model.refusal(facts.models, self.spec.model_id) is not None:
                self._again.set()

    def _is_gone(self) -> bool:
        """It does not answer, and none of its streams gives a token: not to the last probe, and not
        for so long that it is silent, or not to so many that it is out.
        """
        is_missed = self._entries.is_silent() or not self._entries.is_healthy()
        return is_missed and self._health.is_unheard

    def _set_unhealthy(self) -> None:
        self._complain("worker.unhealthy")
        self._entries.set_unhealthy()

    def _put_targets(self) -> None:
        told = self._self_test.told_block_tokens
        if told not in (None, self._block_tokens) and self.spec.block_tokens is None:
            self._told_block_tokens = told  # its events win (C54)
            self._again.set()
        for worker in self.workers:
            self._put_target(worker)

    def _degraded(self) -> tuple[str, ...]:
        silent = ("events",) if self._hearing.is_silent else ()
        return (*silent, "load") if self._load.is_unknown else silent

    # -- breaker and pace ------------------------------------------------------------------------

    def _new_guard(self) -> Guard:
        """What its last life did wrong says nothing about this one."""
        parts = self._parts
        return Guard(self.spec.name, parts.breaker, parts.health, parts.log, parts.pool_pace)

    def _look_again(self) -> None:
        """What time alone changes."""
        self._hearing.listen()
        self._sync_guard()

    def _on_sent(self, guard: Guard) -> None:
        """`guard` is that of the life that the attempt was sent to."""
        guard.sent(self._parts.clock.now())
        self._sync_guard()

    def _on_ended(self, guard: Guard, worker: WorkerId, end: AttemptEnd) -> None:
        guard.ended(end, self._parts.clock.now())
        if guard is self._guard:
            match end:
                case AttemptEnd.COMPLETE | AttemptEnd.UNHEARD:
                    self._hearing.answered(worker)
                case AttemptEnd.WORKER_FAILED | AttemptEnd.WORKER_LATE:
                    self._health.doubt()
                case AttemptEnd.CLIENT_GONE:
                    pass  # says nothing about the worker
        self._sync_guard()

    def _sync_guard(self) -> None:
        now = self._parts.clock.now()
        self._entries.set_breaker(is_open=self._guard.is_open(now))
        self._entries.set_standing(self._guard.standing(now))
