"""One worker as a holder of epochs: its lease, each second, and the orders it is given.

    POST /trunkline/lease    {"grant": the answer to its last ask, or null} -> a new ask
    POST /trunkline/revoke   an order -> its ack, with counts
    GET  /trunkline/erased   what it has physically erased since

A worker that does not know the first is a stock engine: no holder, fenced by its salt. Must never:
grant below the registry's table, or answer an ask of another life. Read `core/freshness.py` for the
rules, `revocation.py` for who gives orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from trunkline.control.receipts import Erase, Erasure, Fence, HolderAck
from trunkline.core.epochs import EpochTable
from trunkline.core.freshness import LEASE_BEAT_MS, Grant, LeaseGrants, Order
from trunkline.core.records import BootInstant
from trunkline.core.transfer import LAYOUT_BYTES, MAX_NAME_BYTES
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock
from trunkline.ports.worker import Endpoint, Fetch, Post, PullAddress

LEASE_PATH = "/trunkline/lease"
REVOKE_PATH = "/trunkline/revoke"
ERASED_PATH = "/trunkline/erased"

MAX_ENDED = 256
"""Ends of pulls in one answer to a lease."""
TIMEOUT_MS = 1_000.0
"""Of one request. A worker that is slower has a lease that runs out, which is as good as an ack."""

OnPulls = Callable[[str, Sequence[tuple[str, bytes]], int], None]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
_Answer = TypeVar("_Answer")
_Bytes = Annotated[dict[_Word, _Count], msgspec.Meta(max_length=16)]


class _PullAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: _Name
    incarnation: _Name
    host: _Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    local: Annotated[str, msgspec.Meta(max_length=107)] = ""
    """A unix socket's name is no longer."""
    layout: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^[0-9a-f]+\Z", min_length=2 * LAYOUT_BYTES, max_length=2 * LAYOUT_BYTES
        ),
    ]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    sources: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    lends_owed: bool = False


class _EndedPull(msgspec.Struct, frozen=True, kw_only=True):
    name: _Word
    told: Annotated[str, msgspec.Meta(max_length=1_024)]


class _LeaseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    ask: _Word
    boot_nonce: _Word
    rev: _Count
    fence: Fence
    erase: Erase
    salt_regions: bool = False
    pull: _PullAnswer | None = None
    pulled: Annotated[list[_EndedPull], msgspec.Meta(max_length=MAX_ENDED)] = msgspec.field(
        default_factory=list[_EndedPull]
    )
    lost_tokens: _Count = 0
    """Of this life."""


class _RevokeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    rev: _Count
    boot_nonce: str = ""
    """Which life acks; one that does not say is the one last heard of."""
    aborted: _Count = 0
    condemned_blocks: _Count = 0
    condemned_bytes: _Bytes = msgspec.field(default_factory=dict[str, int])


class _ErasedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    rev: _Count
    done: bool
    blocks: _Count = 0
    bytes: _Bytes = msgspec.field(default_factory=dict[str, int])


@dataclass(slots=True, kw_only=True)
class HolderParts:
    """What all workers' holders share."""

    table: Callable[[], EpochTable]
    """The registry's, as of now."""
    grants: LeaseGrants
    fetch: Fetch
    post: Post
    clock: Clock
    log: EventLog
    lease_left_ms: Callable[[], float] = lambda: math.inf
    """Of this gateway's own lease: a worker is granted no more. Infinite where it needs none."""
    on_ahead: Callable[[str, int], None] = lambda _worker, _rev: None
    """A worker knows a revision that the registry does not: this was restored from a backup."""
    on_pulls: OnPulls | None = None
    """How pulls of a worker ended, by our names of them, and how many further tokens it computed
    that its engine had counted as reused."""


class WorkerHolder:
    """A `revocation.Holder`. Give it a task for `run`; it is asked anew by `look_again`."""

    def __init__(self, name: str, endpoint: Endpoint, parts: HolderParts) -> None:
        self.name = name
        self._endpoint = endpoint
        self._parts = parts
        self._last: _LeaseAnswer | None = None
        """Its newest answer; None while it has none."""
        self._is_asked_openly = False
        """The ask of its newest answer has no grant yet."""
        self._complete: tuple[str, int] | None = None
        """The life that has all our epochs by grants of ours, and their table's `changed_rev`."""
        self._is_stock = False
        self._asked_at = BootInstant(-math.inf)
        """Its newest ask is no older than this: the call was sent then that brought it."""
        self._armed_until = BootInstant(-math.inf)
        self._is_lost = False
        self._wake = asyncio.Event()

    @property
    def fence(self) -> Fence:
        """Of a worker that has said nothing yet, what holds for any."""
        return self._last.fence if self._last else Fence.GATEWAY

    @property
    def erase(self) -> Erase:
        return self._last.erase if self._last else Erase.RESTART

    @property
    def takes_tickets(self) -> bool:
        """It has an agent, which checks at the point of use what each request may reuse."""
        return self._last is not None

    @property
    def has_salt_regions(self) -> bool:
        """Whether public prefixes can be shared there."""
        return self._last.salt_regions if self._last else False

    @property
    def pull(self) -> PullAddress | None:
        """Where its blocks can be pulled from, as of its newest answer."""
        told = self._last.pull if self._last else None
        if told is None:
            return None
        return PullAddress(
            worker=told.worker,
            incarnation=told.incarnation,
            host=told.host,
            port=told.port,
            local=told.local,
            layout=bytes.fromhex(told.layout),
            block_bytes=told.block_bytes,
            sources=told.sources,
            lends_owed=told.lends_owed,
        )

    @property
    def is_told(self) -> bool:
        return not self._is_stock

    @property
    def is_stock(self) -> bool:
        """It said that it knows no leases."""
        return self._is_stock

    @property
    def rev_seen(self) -> int | None:
        """As of its newest answer; None while it has none."""
        return self._last.rev if self._last else None

    def is_granted(self) -> bool:
        """Whether it has a lease now, by what it answered to the grant: reuse is on there."""
        return self._parts.clock.boot() < self._armed_until

    def look_again(self) -> None:
        """It is another than it was (a new incarnation): ask it at once, a stock engine as well."""
        self._is_stock = False
        self._wake.set()

    def renew(self) -> None:
        """The epochs are others: bring them there before the next beat."""
        self._wake.set()

    async def run(self) -> None:
        """Keep its lease alive, until cancelled. Whatever it answers, it troubles only itself."""
        while True:
            self._wake.clear()
            if not self._is_stock:
                await self._beat()
            pause_s = None if self._is_stock else LEASE_BEAT_MS / 1_000.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def revoke(self, order: Order) -> HolderAck:
        body = {
            "rev": order.rev,
            "subject": str(order.subject),
            "epoch": order.epoch,
            "verb": order.verb.value,
        }
        answer = self._read(await self._send(REVOKE_PATH, body), _RevokeAnswer, REVOKE_PATH)
        if answer.rev != order.rev:
            raise WorkerLost(f"{self.name} acked revision {answer.rev}, asked was {order.rev}")
        self.renew()  # it may have missed changes before this one
        return HolderAck(
            life=self._life(answer.boot_nonce or (self._last.boot_nonce if self._last else "")),
            aborted=answer.aborted,
            condemned_blocks=answer.condemned_blocks,
            condemned_bytes=answer.condemned_bytes,
        )

    async def erased(self, rev: int) -> Erasure:
        path = f"{ERASED_PATH}?rev={rev}"
        reply = await self._parts.fetch(self._endpoint, "GET", path, timeout_ms=TIMEOUT_MS)
        answer = self._read(reply, _ErasedAnswer, ERASED_PATH)
        if answer.rev != rev:
            raise WorkerLost(f"{self.name} told of revision {answer.rev}, asked was {rev}")
        return Erasure(
            holder=self.name,
            rev=rev,
            is_done=answer.done,
            blocks=answer.blocks,
            bytes=answer.bytes,
        )

    async def _beat(self) -> None:
        try:
            was_granted = await self._ask()
            if self._is_asked_openly and not (was_granted and self._outlives_a_beat()):
                # A new life, or a beat was lost: not a whole beat without reuse. Or our own lease
                # with the registry was short: what is granted for this ask counts from now.
                await self._ask()
        except (WorkerLost, WorkerTimeout) as error:
            self._is_asked_openly = False
            if not self._is_lost:
                self._is_lost = True
                self._parts.log.warning("lease.unanswered", worker=self.name, why=str(error))
        else:
            self._is_lost = False

    def _outlives_a_beat(self) -> bool:
        """The lease that it has is good for the next beat, and for some lateness of that."""
        return self._armed_until - self._parts.clock.boot() >= 1.5 * LEASE_BEAT_MS

    async def _ask(self) -> bool:
        """One call: our grant for its last ask (whether there was one), and its next ask."""
        changed_rev = self._parts.table().changed_rev
        grant, asked_at = self._grant(), self._asked_at
        sent_at = self._parts.clock.boot()
        body = {"grant": msgspec.to_builtins(grant) if grant else None}
        status, answer = await self._send(LEASE_PATH, body)
        if status == 404:
            self._is_stock, self._last, self._is_asked_openly = True, None, False
            self._parts.log.info("lease.stock_engine", worker=self.name)
            return False
        told = self._read((status, answer), _LeaseAnswer, LEASE_PATH)
        if told.ask.rpartition(":")[0] != told.boot_nonce:
            raise WorkerLost(f"{self.name} asks in the name of another life")
        is_same_life = self._last is not None and self._last.boot_nonce == told.boot_nonce
        lost = told.lost_tokens - (self._last.lost_tokens if self._last and is_same_life else 0)
        if told.pulled or lost > 0:
            ended = [(one.name, one.told.encode()) for one in told.pulled]
            if self._parts.on_pulls is not None:
                self._parts.on_pulls(self.name, ended, max(0, lost))
        self._last, self._is_asked_openly, self._asked_at = told, True, sent_at
        is_ahead = told.rev > self._parts.table().rev
        if is_ahead:
            self._parts.on_ahead(self.name, told.rev)
        if grant is None or not is_same_life:
            return False
        if grant.rev <= told.rev and not is_ahead:
            self._armed_until = BootInstant(asked_at + grant.ttl_ms)
        if grant.epochs and told.rev == grant.rev:
            self._complete = (told.boot_nonce, changed_rev)
        return True

    def _grant(self) -> Grant | None:
        last, parts = self._last, self._parts
        left_ms = parts.lease_left_ms()
        if last is None or not self._is_asked_openly or left_ms <= 0.0:
            return None
        self._is_asked_openly = False  # one grant an ask
        table, now = parts.table(), parts.clock.boot()
        # Other changes move only the revision, which goes along without them: it is what a restored
        # backup is told by.
        is_complete = (last.boot_nonce, table.changed_rev) == self._complete
        has_all = is_complete and last.rev >= table.changed_rev
        return parts.grants.grant(
            self._life(last.boot_nonce),
            last.ask,
            rev=table.rev,
            epochs={} if has_all else {str(s): epoch for s, epoch in table.epochs.items()},
            now=now,
            most_ms=left_ms,
        )

    def _life(self, boot_nonce: str) -> str:
        return f"{self.name}#{boot_nonce}"

    async def _send(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:  # JSON
        return await self._parts.post(
            self._endpoint, path, msgspec.json.encode(body), timeout_ms=TIMEOUT_MS
        )

    def _read(self, reply: tuple[int, bytes], kind: type[_Answer], path: str) -> _Answer:
        status, body = reply
        if status != 200:
            raise WorkerLost(f"{self.name}{path} answered {status}")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WorkerLost(f"{self.name}{path} answered nonsense: {error}") from error
