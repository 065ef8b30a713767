"""One run: a fleet and its clients through warm, faults, heal and rest, watched all the time.

    setting.py ──► world.py ──► gate.py, crew.py   the product's parts, each machine by itself
                      │  ├────► callers.py         clients, and what they got
                      │  └────► troubles.py        what goes wrong when
                      ├───────► ground_truth.py, checks.py   what must hold
                      └───────► rare.py            what was seen at least once

A run is a function of its setting: `digest` is the same again to the byte. Read `runs.py` for who
runs many, and how a failing one is made smaller.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import zlib
from collections import Counter, deque
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

from faults.callers import Caller, Prompts, outcome_of
from faults.checks import Checks
from faults.crew import Life
from faults.gate import Durable, Gate, gateway_names, subject_of_tenant, worker_name
from faults.ground_truth import Truth
from faults.kv_plane import Plane
from faults.network import FaultyNet, FaultyPipe
from faults.rare import Sightings
from faults.setting import FAULTS_S, HEAL_S, REST_S, WARM_S, Call, Setting
from faults.shared import SERVERS, Common
from faults.streams import Air
from faults.troubles import Troubles
from prometheus_client import disable_created_metrics, enable_created_metrics

from trunkline.core.pace import STRIKE_LASTS_MS

TICK_S = 0.05
SEEN_EACH = 5
"""Ticks, when the faults are over."""
STEP_S = 3.0
"""So long before all must be as before, workers show whether their last events were lost."""
ROUND_S = 0.6
"""Events and what they lead to are everywhere."""
PREDICTED_S = 5.1
"""`predicted_ttl_ms`, and a moment."""
TURNS = 20
"""Of the loop: what one step leads to at the same instant is over after fewer."""
SETTLED_S = 0.7
"""By then all workers have joined, and nobody has asked yet."""


class World:
    """Make it on its own loop, and `run` it once."""

    def __init__(
        self, net: FaultyNet, setting: Setting, plane: Plane | None, *, lines: int = 200
    ) -> None:
        """`lines`: how much of its end is told. `plane`: where workers pull from one another."""
        self.net = net
        self.plane = plane
        self.setting = setting
        self.violations: list[tuple[str, str]] = []
        """(invariant, what was wrong), in the order in which they were seen."""
        self.story: deque[str] = deque(maxlen=lines)
        self.events = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.air = Air(net, setting.seed)
        self.common = Common(net, setting.seed) if setting.gateway_count > 1 else None
        """The registry that gateways share."""
        self.prompts = Prompts(setting.seed)
        self.truth = Truth(setting, self.prompts, self.violate, self.epoch_of)
        if plane is not None and self.truth.kv is not None:
            plane.sockets.on_send = self.truth.kv.sends
        self.seen = Sightings(self)
        self.checks = Checks(self)
        self.troubles = Troubles(self)
        self.durables = [Durable(name) for name in gateway_names(setting.gateway_count)]
        self.gates = {durable.name: self._new_gate(durable) for durable in self.durables}
        """The newest life of each."""
        self._down: dict[str, list[tuple[float, float]]] = {name: [] for name in self.gates}
        """From when to when each took no calls."""
        self._epochs: Counter[int] = Counter()
        self.lives: dict[str, Life] = {}
        self.earlier: list[Life] = []
        self.life_counts: Counter[str] = Counter()
        self.callers: dict[int, Caller] = {}
        self.base_tasks: dict[str, int] = {}
        """By gateway, when all is well."""
        self.is_over = False
        self.transcript: list[str] | None = None
        """All that is in the digest, where somebody wants to compare."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def run(self) -> None:
        self.net.run_until_complete(self._play())

    def violate(self, invariant: str, what: str) -> None:
        """But for what is only cleared away: the run is over by then."""
        if not self.is_over and len(self.violations) < 50:
            self.violations.append((invariant, f"{self.net.time():.3f} s  {what}"))
            self.note("VIOLATION", f"{invariant}: {what}")

    def note(self, kind: str, what: object = "") -> None:
        """One line of the story, which is a part of what must be the same again."""
        line = f"{self.net.time():9.4f}  {kind}  {what}"
        self.story.append(line)
        self._seal(line)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Work of the world's own."""
        self._tasks.append(self.net.create_task(work))

    def epoch_of(self, tenant: int) -> int:
        """As committed, as soon as any gateway knows of it, for ever."""
        subject = subject_of_tenant(tenant)
        for gate in self.gates.values():
            if hasattr(gate, "registry"):
                known = gate.registry.table.epochs.get(subject, 0)
                self._epochs[tenant] = max(self._epochs[tenant], known)
        return self._epochs[tenant]

    # -- machines ----------------------------------------------------------------------------------

    def start_worker(self, number: int) -> None:
        """A new life of it."""
        name = worker_name(number)
        earlier = self.lives.get(name)
        if earlier is not None:
            self.earlier.append(earlier)
        self.net.ground.vanished.discard(name)
        self.life_counts[name] += 1
        life = Life(
            self.setting,
            self.net,
            self.air,
            name,
            self.life_counts[name],
            lambda call: self.truth.comes(name, call),
        )
        self.lives[name] = life
        self.truth.watch(life)
        self.note("starts", f"{name}#{life.number}")

    def kill_worker(self, number: int, *, is_silent: bool) -> None:
        name = worker_name(number)
        self.note("dies", f"{name} {'silently' if is_silent else ''}")
        self.net.die(self.lives[name].machine, is_silent=is_silent)

    def start_gate(self, gate: Gate) -> None:
        began_s = self.net.time()
        gate.on_serving = lambda: self._down[gate.name].append((began_s, self.net.time()))
        self.checks.watch(gate)
        gate.machine.run(self.net.create_task, gate.run())

    def kill_gate(self, gate: Gate) -> None:
        self.note("dies", gate.name)
        for tenant in range(self.setting.tenant_count):
            self.epoch_of(tenant)  # nobody else may know it yet
        self.checks.gate_dies(gate)
        self._down[gate.name].append((self.net.time(), self.net.time() + 1e9))
        self.net.die(gate.machine)

    def restart_gate(self, name: str) -> None:
        durable = next(each for each in self.durables if each.name == name)
        died_s, _ = self._down[name].pop()
        self._down[name].append((died_s, self.net.time()))
        self.gates[name] = self._new_gate(durable)
        self.start_gate(self.gates[name])

    def were_all_down(self, since_s: float, until_s: float) -> bool:
        """Whether each gateway took no calls at some time in between."""
        return all(
            any(since_s <= to_s and from_s <= until_s for from_s, to_s in self._down[name])
            for name in self.gates
        )

    def _new_gate(self, durable: Durable) -> Gate:
        return Gate(self.setting, self.net, self.air, durable, self.common)

    # -- the run -----------------------------------------------------------------------------------

    async def _play(self) -> None:
        setting, net = self.setting, self.net
        net.on_arrival = self._note_arrival
        for number in range(setting.worker_count):
            self.start_worker(number)
        if self.common is None:
            self._set_ways()
        for gate in self.gates.values():
            self.start_gate(gate)
        self.begin(self._tick())
        for trouble in setting.troubles:
            self.begin(self.troubles.meet(trouble))
        for call in setting.calls:
            self.begin(self._call(call))
        await self._until(SETTLED_S)
        for gate in self.gates.values():
            self.base_tasks[gate.name] = gate.machine.open_tasks(lambda _name: True)
        if self.common is not None:  # they have become a fleet on a quick network
            self._set_ways()
        await self._until(WARM_S + FAULTS_S)
        self.troubles.heal()
        await self._until(WARM_S + FAULTS_S + HEAL_S - STEP_S)
        self._step()
        await self._until(WARM_S + FAULTS_S + HEAL_S)
        await self._between_steps()
        self.checks.has_healed()
        await self._come_to_rest()
        for call in setting.calls:
            caller = self.callers[call.number]
            caller.outcome = outcome_of(caller)
            self.checks.ended(caller)
        await self._between_steps()
        self.checks.is_at_rest()
        self.seen.look_back()
        if self.checks.doubted:
            await asyncio.sleep(STRIKE_LASTS_MS / 1e3)
            self.checks.is_believed_again()
        for error in net.stray_errors:
            self.violate("I5", f"an error that nobody caught: {error}")
        self.is_over = True

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(at_s - self.net.time())

    def _step(self) -> None:
        for life in self.lives.values():
            life.step()

    async def _come_to_rest(self) -> None:
        """Nobody asks any more: the last is over, and so is what was predicted of where it went."""
        last_s = self.net.time() + REST_S - ROUND_S
        while self.net.time() < last_s and not self._is_quiet():  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)
        self._step()
        await asyncio.sleep(ROUND_S)

    async def _between_steps(self) -> None:
        """A connection that is closed in this instant, by a timer that is due just when the world
        looks, is gone a turn later, and is not left.
        """
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def _is_quiet(self) -> bool:
        are_over = all(caller.over.is_set() for caller in self.callers.values())
        return are_over and self.net.time() > self.checks.last_pick_s + PREDICTED_S

    async def _tick(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            ticks += 1
            self.checks.look()
            if not self.troubles.is_over or ticks % SEEN_EACH == 0:
                self.seen.look()

    async def _call(self, call: Call) -> None:
        await asyncio.sleep(call.at_s)
        names = list(self.gates)
        first = call.number % len(names)
        caller = Caller(self.net, call, (*names[first:], *names[:first]))
        self.callers[call.number] = caller
        self.checks.begins(caller)
        await caller.ask(self.prompts.body(call))
        self.note("over", f"call {call.number} {len(caller.raw)} {zlib.crc32(caller.raw):08x}")

    def _set_ways(self) -> None:
        """As on an ordinary day; `Troubles.heal` brings them back to it."""
        setting = self.setting
        hosts = [worker_name(number) for number in range(setting.worker_count)]
        hosts += [SERVERS] if self.common is not None else []
        pairs = list(itertools.product(hosts, self.gates))
        if setting.pulls is not None:
            pairs += itertools.combinations(hosts[: setting.worker_count], 2)
        for host, other in pairs:
            for source, target in ((host, other), (other, host)):
                way = self.net.ground.way(source, target)
                way.latency_s, way.jitter_s = setting.latency_s, setting.jitter_s

    def _note_arrival(self, pipe: FaultyPipe, data: bytes | None) -> None:
        """Every byte is in the digest, with its time and where it came to."""
        size, seal = (len(data), zlib.crc32(data)) if data else (-1, 0)
        line = f"{self.net.time():.6f} {pipe.host} {pipe.number} {size} {seal:08x}"
        self._seal(line)

    def _seal(self, line: str) -> None:
        self.events += 1
        self._digest.update(line.encode())
        if self.transcript is not None:
            self.transcript.append(line)


@contextmanager
def heard(world: World) -> Generator[None]:
    """What the product and its servers log is a part of the story, and goes nowhere else."""
    handler = _Heard(world)
    loggers = [logging.getLogger(name) for name in ("trunkline", "uvicorn.error", "asyncio")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    disable_created_metrics()  # they tell when a process really began
    try:
        yield
    finally:
        enable_created_metrics()
        for logger, (level, propagates) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagates


class _Heard(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if self._world.is_over:
            return
        fields: dict[str, Any] = getattr(record, "fields", {})
        cause = record.exc_info[1] if record.exc_info else None
        words = " ".join(f"{name}={value}" for name, value in sorted(fields.items()))
        event = record.getMessage()
        self._world.note("log", f"{event} {words} {cause!r}" if cause else f"{event} {words}")
        self._world.seen.heard(event, fields)
        self._world.checks.heard(event, cause)
