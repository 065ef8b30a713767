"""One seeded schedule of a revocation: the real revoker and leases, on a network that is not kind.

    PYTHONPATH=tests python tests/sim/revocation_world.py 4711  # one seed again, told

Virtual time. Each machine has a boot clock that is off by up to 1 %, and goes on while the machine
is suspended. Messages are late, lost, doubled and overtake one another; holders fall silent, are
suspended, restart (some with a clock that begins anew), or live on unseen beside their successor;
the registry restarts and resumes. `World.check` is called after whatever could matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trunkline.control.book import Check
from trunkline.control.changes import EpochRaised, Intent, SubjectEnabled
from trunkline.control.holders import HolderParts, WorkerHolder
from trunkline.control.receipts import Erasure, HolderAck, Receipt
from trunkline.control.revocation import Revoker, RevokerParts
from trunkline.core.epochs import EpochTable, Subject, SubjectKind
from trunkline.core.freshness import Freshness, Grant, LeaseGrants, Order, Verb
from trunkline.core.records import BootInstant, Instant, WallTime
from trunkline.errors import AuditDown, WorkerTimeout
from trunkline.observe import EventLog
from trunkline.ports.worker import Endpoint
from virtual_loop import VirtualLoop

VICTIM = Subject(kind=SubjectKind.TENANT, path="a" * 32)
OTHER = Subject(kind=SubjectKind.MODEL, path="m")
ME = Intent(actor="officer", reason="test")
MakeFreshness = Callable[[str], Freshness]
MakeGrants = Callable[[BootInstant, bool], LeaseGrants]


@dataclass(slots=True)
class MachineClock:
    """`ports.Clock` of one machine: its own rate, its own beginning."""

    loop: asyncio.AbstractEventLoop
    leap: list[float]
    """Seconds that passed while the registry's machine was suspended: real, but not in its loop."""
    rate: float
    began_s: float

    def boot(self) -> BootInstant:
        return BootInstant((self.loop.time() + self.leap[0] - self.began_s) * self.rate * 1_000.0)

    def now(self) -> Instant:
        return Instant(self.loop.time() * self.rate * 1_000.0)

    def wall(self) -> WallTime:
        return WallTime(0.0)


@dataclass(slots=True)
class Life:
    """One life of a holder: what a worker keeps."""

    clock: MachineClock
    freshness: Freshness

    def lease(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["grant"] is not None:
            self.freshness.take(Grant(**body["grant"]))
        return {
            "ask": self.freshness.ask(self.clock.boot()),
            "boot_nonce": self.freshness.boot_nonce,
            "rev": self.freshness.rev,
            "fence": "worker",
            "erase": "namespace",
            "salt_regions": True,
        }

    def revoke(self, body: dict[str, Any]) -> dict[str, Any]:
        self.freshness.obey(body["rev"], body["subject"], body["epoch"])
        nonce = self.freshness.boot_nonce
        return {"rev": body["rev"], "boot_nonce": nonce, "condemned_blocks": 1}

    def may_use_old(self, epoch: int) -> bool:
        """Whether a block from before the revocation would be served now."""
        is_old = self.freshness.epoch(str(VICTIM)) < epoch
        return is_old and self.freshness.is_valid(self.clock.boot())


@dataclass(slots=True)
class Machine:
    """A holder's place in the network."""

    life: Life
    silent_from_s: float
    suspended_s: tuple[float, float]
    earlier: list[Life] = field(default_factory=list[Life])
    """Lives that may still be about, though nobody reaches them."""


class Registry:
    """Durable: it outlives the registry's process."""

    def __init__(self, draw: random.Random) -> None:
        self.table = EpochTable()
        self._draw = draw

    async def commit(
        self, change: EpochRaised | SubjectEnabled, intent: Intent, check: Check | None = None
    ) -> int:
        await asyncio.sleep(self._draw.uniform(0.0, 0.01))
        assert isinstance(change, EpochRaised)
        subject = VICTIM if change.subject == str(VICTIM) else OTHER
        rev = self.table.rev + 1
        self.table = self.table.raised(subject, change.epoch, rev=rev, bars=change.bars)
        return rev


class Audit:
    """Down now and then."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    async def intent(self, action: str, subject: Subject, intent: Intent) -> None:
        await self._write()

    async def outcome(self, receipt: Receipt, intent: Intent) -> None:
        await self._write()

    async def erased(self, erasure: Erasure, intent: Intent) -> None:
        await self._write()

    async def _write(self) -> None:
        await asyncio.sleep(self._draw.choice((0.001, 0.001, 0.2)))
        if self._draw.random() < 0.2:
            raise AuditDown("no sink")


class World:
    """One schedule; `run` it, then look at the figures."""

    def __init__(
        self,
        seed: int,
        loop: asyncio.AbstractEventLoop,
        *,
        make_freshness: MakeFreshness = Freshness,
        make_grants: MakeGrants = lambda began_at, earlier: LeaseGrants(
            began_at, has_earlier_life=earlier
        ),
    ) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.violations: list[str] = []
        self.story: list[str] = []
        self.receipt: Receipt | None = None
        self.ack_ms = 0.0
        self.was_cut_off = False
        self.silent_count = 0
        self.could_use_at_commit = 0
        self._make_freshness = make_freshness
        self._make_grants = make_grants
        self._loop = loop
        self._began_s = loop.time()
        self._leap = [0.0]
        self._lives = 0
        self._registry = Registry(self.draw)
        # Time goes by the registry's clock. Off by 1 %, as the others are: see `_machine_clock`.
        self._clock = MachineClock(loop=loop, leap=self._leap, rate=1.0, began_s=loop.time())
        self._loss = self.draw.choice((0.0, 0.0, 0.05, 0.3))
        self._doubling = self.draw.choice((0.0, 0.1, 0.5))
        self._slowness = self.draw.choice((0.0, 0.1, 0.5))
        self._machines = {f"w{n}": self._machine() for n in range(self.draw.randint(1, 4))}
        self._group: asyncio.TaskGroup | None = None

    @property
    def was_suspended(self) -> bool:
        """The registry's machine was, so that its figures hold that time."""
        return self._leap[0] > 0.0

    async def run(self) -> None:
        revoke_at_s = self.draw.uniform(0.5, 3.5)
        restart_after_s = self.draw.choice((None, None, self.draw.uniform(0.0, 3.0)))
        self._plan_troubles(revoke_at_s)
        order: Order | None = None
        is_first = True
        while self.receipt is None:
            grants = self._make_grants(self._clock.boot(), not is_first)
            async with contextlib.AsyncExitStack() as stack:
                revoker = await self._start(stack, grants)
                if is_first:
                    await asyncio.sleep(self.draw.uniform(0.3, 1.0))
                    await revoker.invalidate(OTHER, ME) if self.draw.random() < 0.1 else None
                    await self._until(revoke_at_s)
                    self._note("revoke")
                began = self._clock.boot()
                work = revoker.resume(order, ME) if order else revoker.revoke(VICTIM, ME)
                limit_s = restart_after_s if is_first else None
                try:
                    async with asyncio.timeout(limit_s):
                        self.receipt = await work
                except TimeoutError:
                    self.was_cut_off = True
                    self._note("the registry restarts")
                    epoch = self._registry.table.epochs.get(VICTIM, 0)
                    if epoch:
                        rev = self._registry.table.rev
                        order = Order(rev=rev, subject=VICTIM, epoch=epoch, verb=Verb.REVOKE)
                    is_first = False
                    continue
                self.ack_ms = self._clock.boot() - began
                self._note(f"acknowledged: {self.receipt.acked} fenced {self.receipt.fenced}")
                self.check("at the ack")
                await asyncio.sleep(1.5)  # whatever is still told and granted
            await asyncio.sleep(6.0)  # the latest message there is

    def check(self, when: str) -> None:
        """No use after the ack."""
        if self.receipt is None:
            return
        for name, machine in self._machines.items():
            for life in (machine.life, *machine.earlier):
                if life.may_use_old(self.receipt.epoch):
                    self.violations.append(f"{name} would use what was revoked, {when}")
                    self._note(self.violations[-1])

    async def post(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        *,
        timeout_ms: float,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> tuple[int, bytes]:
        """`ports.Post` through this network."""
        answer: asyncio.Future[bytes] = self._loop.create_future()
        words = json.loads(body)
        for _ in range(2 if self.draw.random() < self._doubling else 1):
            self._send(lambda: self._deliver(endpoint.host, path, words, answer), endpoint.host)
        try:
            async with asyncio.timeout(timeout_ms / 1_000.0):
                return 200, await answer
        except TimeoutError as error:
            raise WorkerTimeout(f"{endpoint.host}{path}") from error

    async def fetch(
        self, endpoint: Endpoint, method: str, path: str, *, timeout_ms: float
    ) -> tuple[int, bytes]:
        """`ports.Fetch`: everything is erased at once."""
        rev = int(path.rpartition("=")[2])
        return 200, json.dumps({"rev": rev, "done": True, "blocks": 1}).encode()

    async def _start(self, stack: contextlib.AsyncExitStack, grants: LeaseGrants) -> Revoker:
        """One life of the registry's process."""
        log = EventLog("revocation-world")
        parts = HolderParts(
            table=lambda: self._registry.table,
            grants=grants,
            fetch=self.fetch,
            post=self.post,
            clock=self._clock,
            log=log,
        )
        holders = [
            WorkerHolder(name, Endpoint(host=name, port=1, host_header=name), parts)
            for name in self._machines
        ]
        loops = [asyncio.create_task(holder.run()) for holder in holders]

        async def stop() -> None:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

        stack.push_async_callback(stop)

        def here(order: Order) -> HolderAck:
            lives = [machine.life for machine in self._machines.values()]
            self.could_use_at_commit = sum(life.may_use_old(order.epoch) for life in lives)
            return HolderAck(life="")

        revoker = Revoker(
            RevokerParts(
                registry=self._registry,
                grants=grants,
                holders=lambda: holders,
                here=here,
                audit=Audit(self.draw),
                clock=self._clock,
                log=log,
            )
        )
        return await stack.enter_async_context(revoker)

    def _deliver(
        self, name: str, path: str, words: dict[str, Any], answer: asyncio.Future[bytes]
    ) -> None:
        machine = self._machines[name]
        begin_s, end_s = machine.suspended_s
        if begin_s <= self._elapsed_s() < end_s:
            wait_s = end_s - self._elapsed_s() + 0.001
            self._loop.call_later(wait_s, self._deliver, name, path, words, answer)
            return
        handle = machine.life.lease if path.endswith("lease") else machine.life.revoke
        said = json.dumps(handle(words)).encode()
        self.check(f"after {path} {words}")
        self._send(lambda: answer.done() or answer.set_result(said), name)

    def _send(self, arrive: Callable[[], object], name: str) -> None:
        """One leg of the way."""
        is_lost = self.draw.random() < self._loss
        if is_lost or self._elapsed_s() >= self._machines[name].silent_from_s:
            return
        is_slow = self.draw.random() < self._slowness
        self._loop.call_later(self.draw.uniform(0.0, 5.0 if is_slow else 0.02), arrive)

    def _plan_troubles(self, revoke_at_s: float) -> None:
        for name, machine in self._machines.items():
            at_s = max(0.0, revoke_at_s + self.draw.uniform(-1.5, 1.5))
            match self.draw.choice(("none", "silent", "suspended", "restarts", "replaced")):
                case "silent":
                    machine.silent_from_s = at_s
                    self.silent_count += 1
                case "suspended":
                    machine.suspended_s = (at_s, at_s + self.draw.uniform(0.1, 5.0))
                case "restarts":
                    self._loop.call_later(at_s, self._restart, name, False)
                case "replaced":
                    self._loop.call_later(at_s, self._restart, name, True)
                case _:
                    pass
        if self.draw.random() < 0.15:
            at_s = max(0.0, revoke_at_s + self.draw.uniform(-1.0, 2.0))
            self._loop.call_later(at_s, self._suspend_registry, self.draw.uniform(0.1, 4.0))

    def _restart(self, name: str, lives_on: bool) -> None:
        machine = self._machines[name]
        if lives_on:
            machine.earlier.append(machine.life)
        machine.life = self._life()
        self._note(f"{name} {'is replaced' if lives_on else 'restarts'}")

    def _suspend_registry(self, secs: float) -> None:
        """Its loop stands still: for it, nothing but the boot clock has moved afterwards."""
        self._leap[0] += secs
        self._note(f"the registry's machine was suspended for {secs:.1f} s")

    def _machine(self) -> Machine:
        return Machine(life=self._life(), silent_from_s=1e9, suspended_s=(1e9, 1e9))

    def _life(self) -> Life:
        """Half of them on a machine that starts with it, so that its boot clock begins at 0."""
        self._lives += 1
        clock = self._machine_clock()
        return Life(clock=clock, freshness=self._make_freshness(f"n{self._lives}"))

    def _machine_clock(self) -> MachineClock:
        slowest, fastest = 0.99 / 1.01, 1.01 / 0.99  # against one that is off the other way
        rate = self.draw.choice((slowest, 1.0, fastest, self.draw.uniform(slowest, fastest)))
        age_s = self.draw.choice((0.0, self.draw.uniform(0.0, 1e6)))
        began_s = self._loop.time() + self._leap[0] - age_s
        return MachineClock(loop=self._loop, leap=self._leap, rate=rate, began_s=began_s)

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._elapsed_s()))

    def _elapsed_s(self) -> float:
        return self._loop.time() - self._began_s

    def _note(self, what: str) -> None:
        self.story.append(f"{self._elapsed_s():7.3f} s  {what}")


def played(seed: int, loop: asyncio.AbstractEventLoop, **broken: Any) -> World:
    """The world of one seed after its end; `broken` as of `World`."""
    world = World(seed, loop, **broken)
    loop.run_until_complete(world.run())
    return world


def again(world: World) -> str:
    """What a failing test prints."""
    story = "\n".join(world.story)
    return f"{story}\nagain: PYTHONPATH=tests python tests/sim/revocation_world.py {world.seed}"


if __name__ == "__main__":
    shown = played(int(sys.argv[1]), VirtualLoop())
    sys.stdout.write("\n".join([*shown.story, repr(shown.receipt), *shown.violations]) + "\n")
