"""This gateway among those that share its registry: its lease, and what the others have in force.

Each posts a notice a second into the stream that holds the log. The stream's order is the grant:

    a gateway   posts at t0, its notice is at place s; takes in the log up to s; may then reuse
                for 3 s from t0
    a change    is in the log at place k, put by any of them. Who posted behind k has it. Who posted
                before k did so before the change was acknowledged: that lease has run out 3.13 s
                later, whether or not anybody hears of it again

So nobody grants, nothing has to be elected, and a gateway that is cut off stops to reuse by itself.
It ends its workers' leases with its own. A notice also names the changes that are in force at the
gateway and its workers, which makes the wait short. Must never: count a lease from anything but the
moment before its notice was sent, or arm one while lost data is not mended. Read
`core/freshness.py` for the times, `revocation.py` for who waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from trunkline.control.changes import EpochRaised
from trunkline.control.load_sync import LoadSync
from trunkline.control.mirrored_store import MirroredStore
from trunkline.control.registry import Committed, Registry
from trunkline.control.relays import GatewayRelays, RelayParts
from trunkline.control.restored import BackupWatch
from trunkline.control.revocation import Revoker, order_of
from trunkline.control.siblings import SiblingParts, Siblings, Side
from trunkline.control.supervised import Supervised
from trunkline.core.fleet import Fleet
from trunkline.core.freshness import LEASE_BEAT_MS, LEASE_TTL_MS, Fencing, Order, grant_ms
from trunkline.core.hearsay import Hearsay
from trunkline.core.records import BootInstant
from trunkline.errors import ConfigError, GatewayError, RegistryBroken
from trunkline.observe import EventLog
from trunkline.ports.board import Board, Notice
from trunkline.ports.clock import Clock
from trunkline.ports.store import StoreBroken, StoreDown

MAX_DONE = 256
"""Newest changes that a notice names as in force. Of one that is older, its lease answers."""

MAX_PEERS = 1_024
"""Lives of other gateways that are told apart; those beyond are waited for together."""

MAX_OFFS = 8
"""Newest notices of a gateway that its clock is told by."""

UNSEEN = "gateways out of reach"
CROWD = "further gateways"

_Rev = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Life = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    life: _Life
    born_rev: _Rev
    """It never went by less."""
    done: Annotated[tuple[_Rev, ...], msgspec.Meta(max_length=MAX_DONE)] = ()
    version: Annotated[str, msgspec.Meta(max_length=64)] = ""
    wall_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)] = 0.0
    """Its wall clock as it wrote this; 0.0 of one that does not say. People alone go by it."""


@dataclass(slots=True, kw_only=True)
class _Peer:
    until: BootInstant
    """When its newest lease has run out, by our clock."""
    born_rev: int
    done: frozenset[int]
    version: str = ""
    offs_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_OFFS))
    """How far its clock was before ours, by its last notices, less the way of each."""

    def has(self, rev: int) -> bool:
        return rev <= self.born_rev or rev in self.done


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """Another gateway, for operators."""

    life: str
    version: str
    """Empty where it does not say."""
    clock_off_s: float | None
    """How far its wall clock is before ours."""


@dataclass(slots=True, kw_only=True)
class GatewayParts:
    """What a gateway among others works with."""

    life: str
    """A name for people, and a nonce."""
    nonce: str
    registry: Registry
    store: MirroredStore
    board: Board
    clock: Clock
    log: EventLog
    load: LoadSync | None = None
    """Tells the others what waits at the workers."""
    siblings: Callable[[Gateways], SiblingParts] | None = None
    """What it takes to tell the others what is known of workers."""
    relays: Callable[[Gateways], RelayParts] | None = None
    """What it takes to tell them of workers' events that they cannot hear."""
    version: str = ""
    """Of this gateway, for the others to see."""
    on_back: Callable[[], None] = lambda: None
    """Its lease is valid again."""
    peers: dict[str, _Peer] = field(default_factory=dict[str, _Peer])


class Gateways(Supervised):
    """A `revocation.Peers`. An async context manager; its owner gives it a task for `run`."""

    def __init__(self, parts: GatewayParts) -> None:
        super().__init__()
        self._parts = parts
        self._born_rev = parts.registry.rev
        self._done: deque[int] = deque(maxlen=MAX_DONE)
        self._ends_at = BootInstant(-math.inf)
        self._own_read = 0
        """Place of our own notice, as it was read."""
        self._cursor = 0
        self._reading = asyncio.Lock()
        self._crowd_until = BootInstant(-math.inf)
        self._has_record, self._has_notice = asyncio.Event(), asyncio.Event()
        self._is_due = asyncio.Event()
        self._revoker: Revoker | None = None
        self.siblings: Siblings | None = None
        self.relays = None if parts.relays is None else GatewayRelays(parts.relays(self))
        self.trouble = "not joined yet"
        """Why there is no new lease; empty while there is."""
        parts.board.listen(self._has_record.set, self._has_notice.set)

    def is_valid(self) -> bool:
        """Whether this gateway may reuse now. Ask in the same step as the use."""
        return self._parts.clock.boot() < self._ends_at

    def left_ms(self) -> float:
        """What is left of the lease."""
        return self._ends_at - self._parts.clock.boot()

    def others(self) -> int:
        """Lives of other gateways that may be reusing now."""
        now = self._parts.clock.boot()
        return sum(peer.until > now for peer in self._parts.peers.values())

    def peers(self) -> list[PeerView]:
        """Those others. A notice that was long on its way makes a clock look slow: the best of the
        last few counts.
        """
        now = self._parts.clock.boot()
        return [
            PeerView(life=life, version=peer.version, clock_off_s=max(peer.offs_s, default=None))
            for life, peer in self._parts.peers.items()
            if peer.until > now
        ]

    @property
    def load(self) -> LoadSync | None:
        """What the gateways tell one another of the work at the workers."""
        return self._parts.load

    def share_knowledge(self, sides: Sequence[Side]) -> None:
        """From here on gateways tell one another what they know of workers."""
        if self._parts.siblings is not None:
            self.siblings = Siblings(self._parts.siblings(self), sides)
            self.begin(self.siblings.run(), "knowledge of gateways")
        if self.relays is not None:
            self.begin(self.relays.run(), "events over gateways")

    def share_load(self, fleets: Sequence[Fleet], hearsay: Sequence[Hearsay]) -> None:
        """From here on gateways tell one another what they have sent to these workers, and what of
        their caches they expect by it.
        """
        if self._parts.load is not None:
            self.begin(self._parts.load.run(fleets, hearsay), "load of gateways")

    async def run(self, revoker: Revoker, watch: BackupWatch) -> None:
        """Until cancelled: keep the lease, and take in what the others do."""
        self._revoker = revoker
        self._parts.registry.subscribe(self._hear)
        self.begin(self._follow_log(), "the shared log")
        self.begin(self._follow_board(), "notices of gateways")
        while True:
            self._is_due.clear()
            await self._try_beat(watch)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_BEAT_MS / 1_000.0):
                    await self._is_due.wait()

    async def settle(self, rev: int, fencing: Fencing) -> None:
        now = self._parts.clock.boot()
        try:
            async with asyncio.timeout(grant_ms() / 1_000.0):
                await self._read_board()
        except (StoreDown, TimeoutError):
            # Whoever posted before the change was acknowledged is through by then.
            fencing.expect(UNSEEN, BootInstant(now + grant_ms()))
        for life, peer in self._parts.peers.items():
            if peer.until > now:
                fencing.expect(life, peer.until)
                if peer.has(rev):
                    fencing.ack(life)
        if self._crowd_until > now:
            fencing.expect(CROWD, self._crowd_until)

    # -- the lease -------------------------------------------------------------------------------

    async def _try_beat(self, watch: BackupWatch) -> None:
        try:
            await self._beat(watch)
        except (StoreDown, StoreBroken, GatewayError) as error:
            is_bad = isinstance(error, StoreBroken | RegistryBroken | ConfigError)
            if not self.trouble or (is_bad and self.trouble != str(error)):
                say = self._parts.log.error if is_bad else self._parts.log.warning
                say(
                    "control.out",
                    why=str(error),
                    meaning="requests are served; reuse ends with the lease, nothing is changed",
                )
            self.trouble = str(error)
            return
        if self.trouble:
            self._parts.log.info("control.joined", life=self._parts.life, others=self.others())
            self._parts.on_back()
        self.trouble = ""

    async def _beat(self, watch: BackupWatch) -> None:
        parts = self._parts
        if not parts.store.is_joined:
            await parts.board.join()
        asked_at, read_to = parts.clock.boot(), self._cursor
        body = _Body(
            life=parts.life,
            born_rev=self._born_rev,
            done=tuple(self._done),
            version=parts.version,
            wall_s=max(0.0, parts.clock.wall()),
        )
        seq = await parts.board.post(parts.nonce, msgspec.json.encode(body))
        if seq <= read_to:  # the order begins anew: an older copy was put in its place
            parts.store.owes_mend = True
            self._cursor = self._own_read = 0
        if await self._read_board() < seq:
            raise StoreDown("a notice that was acknowledged is not there")
        await parts.store.sync()
        await parts.registry.catch_up()
        if parts.store.owes_mend:
            await self._mend(watch)
            self._is_due.set()
            return
        self._ends_at = max(self._ends_at, BootInstant(asked_at + LEASE_TTL_MS))

    async def _mend(self, watch: BackupWatch) -> None:
        parts, revoker = self._parts, self._revoker
        assert revoker is not None, "run has it"
        parts.log.error(
            "control.restored",
            rev=parts.registry.rev,
            meaning="NATS had lost data: it was put in again, as far as gateways have copies",
            remedy="revoke again what was revoked last; all caches are made unreachable",
        )
        self._ends_at = BootInstant(-math.inf)
        await watch.mend(parts.registry.rev + 1, parts.registry, revoker)
        parts.store.owes_mend = False

    # -- the others ------------------------------------------------------------------------------

    def _hear(self, committed: Committed) -> None:
        change = committed.change
        if committed.is_foreign and isinstance(change, EpochRaised):
            order = order_of(committed.rev, change)
            self.begin(self._carry_out(order, committed), f"revision {order.rev} of another")

    async def _carry_out(self, order: Order, committed: Committed) -> None:
        assert self._revoker is not None, "run has it"
        try:
            await self._revoker.follow(order, committed.intent)
        except GatewayError as error:
            self._parts.log.error("control.not_carried_out", rev=order.rev, why=str(error))
            return  # who waits for it waits for the end of our lease
        self._done.append(order.rev)
        self._is_due.set()

    async def _follow_log(self) -> None:
        while True:
            await self._has_record.wait()
            self._has_record.clear()
            with contextlib.suppress(GatewayError):  # the next beat says it
                if self._parts.store.is_joined:
                    await self._parts.registry.catch_up()

    async def _follow_board(self) -> None:
        while True:
            await self._has_notice.wait()
            self._has_notice.clear()
            with contextlib.suppress(StoreDown):  # the next beat says it
                await self._read_board()

    async def _read_board(self) -> int:
        """Take in all notices that are there; the place of our own, 0 without. Raises StoreDown."""
        async with self._reading:
            while (notice := await self._parts.board.after(self._cursor)) is not None:
                self._cursor = notice.seq
                if notice.name == self._parts.nonce:
                    self._own_read = notice.seq
                else:
                    self._heed(notice)
            return self._own_read

    def _heed(self, notice: Notice) -> None:
        parts = self._parts
        now = parts.clock.boot()
        until = BootInstant(now + grant_ms())
        try:
            body = msgspec.json.decode(notice.body, type=_Body)
        except (msgspec.DecodeError, RecursionError):
            self._crowd_until = max(self._crowd_until, until)  # of another version: it may believe
            return
        if body.life not in parts.peers and len(parts.peers) >= MAX_PEERS:
            ended = [life for life, peer in parts.peers.items() if peer.until <= now]
            for life in ended:
                del parts.peers[life]
            if not ended:
                self._crowd_until = max(self._crowd_until, until)
                return
        done = frozenset(body.done)
        before = parts.peers.get(body.life)
        peer = _Peer(until=until, born_rev=body.born_rev, done=done, version=body.version)
        peer.offs_s = peer.offs_s if before is None else before.offs_s
        if body.wall_s:
            peer.offs_s.append(body.wall_s - parts.clock.wall())
        parts.peers[body.life] = peer
        if self._revoker is not None:
            self._revoker.acknowledged(body.life, done)
