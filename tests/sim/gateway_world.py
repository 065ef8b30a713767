"""Gateways that share a registry, in one world with virtual time and a network that is unkind.

The gateways' own code runs on a bucket that is a list. Whoever asks it may wait, lose the question
or lose the answer; gateways are cut off and come back; their clocks run up to 1 % off; the bucket
may lose its newest entries. Each gateway lends its lease on to a worker that never acks anything.
At any time `check` looks for somebody who may use what was revoked before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from memory_bucket import Bucket, BucketLink, ChainedMemory

from trunkline.adapters.nats_board import NatsBoard
from trunkline.adapters.nats_store import NatsStore
from trunkline.control.changes import Intent, OrgAdded, TenantAdded
from trunkline.control.gateways import GatewayParts, Gateways
from trunkline.control.mirrored_store import MirroredStore
from trunkline.control.receipts import Erasure, HolderAck, Receipt
from trunkline.control.registry import Registry
from trunkline.control.restored import BackupWatch
from trunkline.control.revocation import HERE, Revoker, RevokerParts
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.freshness import LeaseGrants
from trunkline.core.records import BootInstant, Instant, WallTime
from trunkline.errors import GatewayError
from trunkline.observe import EventLog
from trunkline.ports.store import StoreDown

TENANT = Subject(kind=SubjectKind.TENANT, path=f"{2:032x}")
FLEET = Subject(kind=SubjectKind.FLEET)
ME = Intent(actor="officer", reason="test")
LOG = EventLog("test-gateways")


@dataclass(frozen=True)
class RatedClock:
    """A clock with a rate and an offset of its own."""

    loop: asyncio.AbstractEventLoop
    rate: float
    offset_ms: float

    def now(self) -> Instant:
        return Instant(self.loop.time() * 1e3 * self.rate)

    def boot(self) -> BootInstant:
        return BootInstant(self.loop.time() * 1e3 * self.rate + self.offset_ms)

    def wall(self) -> WallTime:
        return WallTime(1.7e9 + self.loop.time())


class Link(BucketLink):
    """Of one gateway."""

    def __init__(self, world: World) -> None:
        super().__init__(world.bucket)
        self._world = world
        self.is_cut = False

    def spread(self, key: str) -> None:
        self._world.tell(key)

    async def way(self, *, is_back: bool) -> None:
        world = self._world
        await asyncio.sleep(world.dice.choice(world.delays_ms) / 1e3)
        if self.is_cut or world.dice.random() < world.loss:
            await asyncio.sleep(0.2)
            raise StoreDown("lost on the way")


class NoAudit:
    async def intent(self, action: str, subject: Subject, intent: object) -> None: ...
    async def outcome(self, receipt: Receipt, intent: object) -> None: ...
    async def erased(self, erasure: Erasure, intent: object) -> None: ...


@dataclass
class Member:
    """One gateway, and its silent worker."""

    clock: RatedClock
    link: Link
    registry: Registry
    grants: LeaseGrants
    gateways: Gateways
    revoker: Revoker
    store: MirroredStore
    worker_until_s: float = 0.0
    worker_epochs: dict[Subject, int] = field(default_factory=dict[Subject, int])

    def lend(self, now_s: float, worker_rate: float) -> None:
        """A worker is granted what is left, and counts it by a clock of its own."""
        left_ms = self.gateways.left_ms()
        if left_ms <= 0.0:
            return
        table = self.registry.table
        grant = self.grants.grant(
            "w#1", "w:1", rev=table.rev, epochs={}, now=self.clock.boot(), most_ms=left_ms
        )
        if grant is not None:
            self.worker_until_s = now_s + grant.ttl_ms / worker_rate / 1e3
            self.worker_epochs = dict(table.epochs)


@dataclass
class World:
    loop: asyncio.AbstractEventLoop
    dice: random.Random
    bucket: Bucket = field(default_factory=Bucket)
    members: list[Member] = field(default_factory=list[Member])
    acked: dict[Subject, int] = field(default_factory=dict[Subject, int])
    violations: list[str] = field(default_factory=list[str])
    receipts: list[Receipt] = field(default_factory=list[Receipt])
    delays_ms: list[float] = field(default_factory=lambda: [0.2])
    loss: float = 0.0
    uses: int = 0
    has_workers: bool = False

    def tell(self, key: str) -> None:
        for member in self.members:
            if self.dice.random() < 0.8 and not member.link.is_cut:
                self.loop.call_later(self.dice.choice(self.delays_ms) / 1e3, member.link.tell, key)

    def check(self) -> None:
        """Nobody may use now what was revoked before."""
        now_s = self.loop.time()
        for number, member in enumerate(self.members):
            held: list[tuple[str, dict[Subject, int]]] = []
            if member.gateways.is_valid():
                held.append(("gateway", dict(member.registry.table.epochs)))
            if now_s < member.worker_until_s:
                held.append(("worker", member.worker_epochs))
            for who, epochs in held:
                self.uses += 1
                self.violations += [
                    f"{who} {number} at {now_s:.3f} s: {subject} at {epochs.get(subject, 0)}, "
                    f"acked is {epoch}"
                    for subject, epoch in self.acked.items()
                    if epochs.get(subject, 0) < epoch
                ]

    async def join(self, stack: contextlib.AsyncExitStack) -> Member:
        rate = self.dice.choice([0.99, 1.0, 1.01])
        clock = RatedClock(self.loop, rate, self.dice.uniform(0.0, 1e6))
        link = Link(self)
        store = MirroredStore(NatsStore(link), ChainedMemory())  # type: ignore[arg-type]
        await store.sync()
        registry = await Registry.load(store, clock)
        grants = LeaseGrants(clock.boot(), has_earlier_life=False)
        name = f"g{len(self.members)}"
        gateways = Gateways(
            GatewayParts(
                life=name,
                nonce=name,
                registry=registry,
                store=store,
                board=NatsBoard(link, []),  # type: ignore[arg-type]
                clock=clock,
                log=LOG,
            )
        )
        revoker = await stack.enter_async_context(
            Revoker(
                RevokerParts(
                    registry=registry,
                    grants=grants,
                    holders=list,
                    here=lambda order: HolderAck(life=HERE),
                    audit=NoAudit(),
                    clock=clock,
                    log=LOG,
                    peers=gateways,
                )
            )
        )
        await stack.enter_async_context(gateways)
        registry.subscribe(lambda committed: grants.raise_floor(committed.book.table.changed_rev))
        running = asyncio.ensure_future(gateways.run(revoker, BackupWatch(clock, LOG)))
        stack.callback(running.cancel)
        member = Member(
            clock=clock,
            link=link,
            registry=registry,
            grants=grants,
            gateways=gateways,
            revoker=revoker,
            store=store,
        )
        self.members.append(member)
        return member

    async def revoke(self, member: Member) -> None:
        with contextlib.suppress(GatewayError):
            receipt = await member.revoker.invalidate(TENANT, ME)
            self.receipts.append(receipt)
            self.acked[TENANT] = max(self.acked.get(TENANT, 0), receipt.epoch)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self.dice.choice([0.003, 0.011, 0.037]))
            if self.has_workers and self.dice.random() < 0.3:
                member = self.dice.choice(self.members)
                member.lend(self.loop.time(), self.dice.choice([0.99, 1.0, 1.01]))
            self.check()


async def begun(world: World, stack: contextlib.AsyncExitStack, count: int) -> None:
    """So many gateways, all with a lease."""
    for _ in range(count):
        await world.join(stack)
    first = world.members[0].registry
    await first.commit(OrgAdded(org=f"{1:032x}", name="acme"), ME)
    await first.commit(TenantAdded(tenant=TENANT.path, org=f"{1:032x}", name="acme"), ME)
    watching = asyncio.ensure_future(world.watch())
    stack.callback(watching.cancel)
    await leased(world)


async def leased(world: World) -> None:
    async with asyncio.timeout(120):
        while not all(member.gateways.is_valid() for member in world.members):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def played(world: World) -> World:
    """Revocations at several gateways, with cuts between."""
    dice = world.dice
    async with contextlib.AsyncExitStack() as stack:
        await begun(world, stack, dice.choice([2, 3]))
        world.has_workers = dice.random() < 0.5
        world.delays_ms = dice.choice([[0.2], [0.2, 5.0], [1.0, 30.0, 200.0]])
        world.loss = dice.choice([0.0, 0.0, 0.05])
        running: list[asyncio.Task[None]] = []
        for _ in range(dice.randint(1, 4)):
            victim = dice.choice(world.members)
            victim.link.is_cut = dice.random() < 0.5
            await asyncio.sleep(dice.uniform(0.0, 4.0))
            running.append(asyncio.ensure_future(world.revoke(dice.choice(world.members))))
            await asyncio.sleep(dice.uniform(0.0, 3.5))
            victim.link.is_cut = False
        await asyncio.gather(*running)
        world.delays_ms, world.loss = [0.2], 0.0
        await leased(world)
        await asyncio.sleep(3.0)
        heads = {member.registry.rev for member in world.members}
        if len(heads) != 1:
            world.violations.append(f"at rest the gateways are at {heads}")
    return world
