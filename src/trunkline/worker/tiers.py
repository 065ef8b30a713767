"""What a worker keeps behind its device memory: one KV store, over all its ranks.

    block READY on the device ──keep──► store ──found──► copied to the device again
    pulled from another worker ─publish──┘

Write-through: what a ticket let a request publish is put here too, as the device keeps it, mask and
all. A block is in the store only while the one before it is, so a block whose ancestors went is put
after those that the device still has. Every rank is told of what comes and goes, and tells it.

Must never: take in what the device does not have READY, or hand out what the store did not verify.
Read `cache.py` for who asks, `kv/store.py` for how it is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from trunkline.core import simkv
from trunkline.core.records import Instant, Tier
from trunkline.core.transfer import Reason
from trunkline.kv.catalogue import Erasure
from trunkline.kv.digests import fault_of
from trunkline.kv.notices import Note, Notices
from trunkline.kv.records import Block as KvBlock
from trunkline.kv.records import Kept, Owner, Place
from trunkline.kv.shares import Shares
from trunkline.kv.store import BlockStore
from trunkline.kv.tickets import Ticket
from trunkline.ports.clock import Clock
from trunkline.ports.publisher import BlockEvent
from trunkline.worker import fence
from trunkline.worker.blocks import Behind, Block, BlockState, KvSequence, Stamp

ERASE_SLICE_BLOCKS = 256
"""Blocks wiped between two looks at the sockets."""
PUBLIC_SHARE = 0.25
"""Of the store: what registered public prefixes may hold on to, used or not."""
PUBLIC_LEASE_MS = 600_000.0
_READ_LEASE_MS = 10_000.0
"""A reader copies in the same step; the lease is for one that dies in it."""
_READY = BlockState.READY

_REFUSED = {
    Reason.DIGEST: fence.Reason.SUM,
    Reason.CHAIN: fence.Reason.CHAIN,
    Reason.EPOCH: fence.Reason.EPOCH,
    Reason.LEASE: fence.Reason.LEASE,
    Reason.NS: fence.Reason.NS,
}
"""Ordinary reasons, such as that nothing is there, are no refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A run of blocks of one prompt that the store has, held while it is copied."""

    blocks: tuple[KvBlock, ...]
    stamps: tuple[Stamp, ...]
    """Whose each is; one record for neighbours of one owner."""
    refused: fence.Reason | None
    """What is wrong with the block behind them, where one is there."""


@dataclass(slots=True, kw_only=True)
class _Public:
    """Blocks of a public prefix that stay."""

    token: bytes
    owners: tuple[Owner, ...]
    count: int
    until: Instant


class HostTier:
    """Belongs to the event loop; the store itself is used by the threads of pulls as well."""

    def __init__(
        self,
        store: BlockStore,
        *,
        clock: Clock,
        block_tokens: int,
        host_blocks: int,
        device_blocks: int,
        has_disk: bool,
        saved_ms: Callable[[int], float],
    ) -> None:
        """`device_blocks` of one rank. `saved_ms(index)`: what computing that block of a prompt
        takes.
        """
        self.store = store
        self.has_disk = has_disk
        self._clock = clock
        self._shares = Shares(store, host_blocks / device_blocks)
        self.saved_ms = saved_ms
        self._block_tokens = block_tokens
        self._notices = Notices(block_tokens, store.resident)
        self._listeners: list[Callable[[list[BlockEvent]], None]] = []
        self._publics: dict[bytes, _Public] = {}
        self._public_room = int(host_blocks * PUBLIC_SHARE)
        self._eraser: asyncio.Handle | None = None
        self._erasures: list[Erasure] = []
        """Not complete as of the last look: something was still held."""
        self.put_refused: dict[Reason, int] = {}
        """Blocks that the store did not take, by why."""

    @property
    def block_bytes(self) -> int:
        return self.store.layout.block_bytes

    def listen(self, publish: Callable[[list[BlockEvent]], None]) -> None:
        """One more rank that tells what comes and goes here."""
        self._listeners.append(publish)

    # -- in ----------------------------------------------------------------------------------------

    def keep(self, sequence: KvSequence, index: int) -> None:
        """A block of the sequence is READY on the device. After the first that cannot be kept no
        further one of this sequence is.
        """
        if not sequence.is_kept_behind:
            return
        reason = self._put(sequence, index)
        if reason is Reason.CHAIN:
            reason = self.keep_before(sequence, index) or self._put(sequence, index)
        if reason is not None:
            sequence.is_kept_behind = False
            self.put_refused[reason] = self.put_refused.get(reason, 0) + 1

    def keep_before(self, sequence: KvSequence, index: int) -> Reason | None:
        """Put what is missing of the blocks before `index`; why not all of it is there."""
        for between in range(self.count_from(sequence, 0, index), index):
            reason = self._put(sequence, between)
            if reason is not None:
                return reason
        return None

    def _put(self, sequence: KvSequence, index: int) -> Reason | None:
        if index >= len(sequence.blocks):
            return Reason.CHAIN
        block = sequence.blocks[index]
        if block.state is not _READY or not block.stamp.ns or block.domain is None:
            return Reason.NS  # a private copy, or of a request without a ticket
        if simkv.checksum(block.kv) != block.checksum:
            return Reason.DIGEST  # a digest that is made of it now would say that it is whole
        is_noted_now = self._notices.note(block.hash, self._noted(sequence, index))
        outcome = self.store.put(
            place_of(sequence, index), owner_of(block), block.kv, saved_ms=self.saved_ms(index)
        )
        if isinstance(outcome, Kept):
            return None
        if is_noted_now:
            self._notices.drop(block.hash)
        return outcome

    def set_quota(self, ticket: Ticket) -> None:
        """The tenant's share of the device is its share here."""
        self._shares.tell(ticket)

    # -- out ---------------------------------------------------------------------------------------

    @contextmanager
    def found(self, sequence: KvSequence, first: int, limit: int) -> Generator[Found]:
        """The verified blocks of a prompt from `first` on, at most to `limit`."""
        blocks: list[KvBlock] = []
        tokens: list[bytes] = []
        reason: Reason | None = None
        until = Instant(self._clock.now() + _READ_LEASE_MS)
        try:
            for ns, begin, end in _zones(sequence, first, limit):
                pins = self.store.pin(ns, sequence.hashes[begin:end], until=until, holder="engine")
                if pins.token:
                    tokens.append(pins.token)
                blocks.extend(pins.blocks)
                reason = _misplaced(sequence, first, blocks) or pins.reason
                if reason is not None:
                    break
            refused = _REFUSED.get(reason) if reason else None
            yield Found(blocks=tuple(blocks), stamps=tuple(_stamps(blocks)), refused=refused)
        finally:
            for token in tokens:
                self.store.unpin(token)

    def copied(self, block: KvBlock) -> bytearray | None:
        """A copy of what was found. None where it is not that any more: a process that stood still
        lost its lease, and another block may lie there.
        """
        data = bytearray(block.data)
        reason = fault_of(memoryview(data), block.manifest, self.store.layout)
        return data if reason is None else None

    def count_from(self, sequence: KvSequence, first: int, limit: int) -> int:
        """How many blocks from `first` on are in host memory. They count as used."""
        return self._reach(sequence, first, limit)[0]

    def goes_on_below(self, sequence: KvSequence, first: int, limit: int) -> bool:
        """Whether the first block that is missing in host memory lies on disk."""
        return self.has_disk and self._reach(sequence, first, limit)[1] is Reason.TIER

    def bring_up(self, sequence: KvSequence, first: int, limit: int, until: Instant) -> int:
        """Read what comes next from disk: how many blocks came. Waits, at most until then: not for
        the loop.
        """
        there = self.count_from(sequence, first, limit)
        return self._reach(sequence, first, limit, until)[0] - there

    def _reach(
        self, sequence: KvSequence, first: int, limit: int, load_until: Instant | None = None
    ) -> tuple[int, Reason | None]:
        """How many blocks, and why not more."""
        count = 0
        until = Instant(self._clock.now() + _READ_LEASE_MS)
        for ns, begin, end in _zones(sequence, first, limit):
            pins = self.store.pin(
                ns,
                sequence.hashes[begin:end],
                until=until,
                holder="engine",
                is_verified=False,
                load_until=load_until,
            )
            if pins.token:
                self.store.unpin(pins.token)
            count += len(pins.blocks)
            if pins.reason is not None:
                return count, pins.reason
        return count, None

    # -- public prefixes ---------------------------------------------------------------------------

    def hold_public(self, sequence: KvSequence) -> None:
        """The public beginning of a prompt stays here as far as there is room for such."""
        if sequence.ticket is None or not sequence.ticket.regions:
            return
        for ns, begin, end in _zones(sequence, 0, sequence.zones[-1].first):
            self._hold_public(ns, sequence.hashes[begin:end])

    def _hold_public(self, ns: bytes, keys: Sequence[bytes]) -> None:
        now = self._clock.now()
        held = self._publics.get(ns)
        is_fresh = held is not None and held.until - now > PUBLIC_LEASE_MS / 2
        if held is not None and is_fresh and held.count >= len(keys):
            return
        others = sum(public.count for public in self._publics.values() if public is not held)
        room = self._public_room - others
        wanted = keys[: max(0, room)]
        if not wanted or (held is not None and is_fresh and held.count >= len(wanted)):
            return
        until = Instant(now + PUBLIC_LEASE_MS)
        pins = self.store.pin(ns, wanted, until=until, holder="public", is_verified=False)
        if not pins.token:
            return
        if held is not None:
            self.store.unpin(held.token)
        self._publics[ns] = _Public(
            token=pins.token,
            owners=tuple({block.manifest.owner: None for block in pins.blocks}),
            count=len(pins.blocks),
            until=until,
        )

    def tend(self) -> None:
        """Renew what public prefixes hold, and wipe what is not held any more: called with each
        lease, every second or so.
        """
        self._erasures = [erasure for erasure in self._erasures if not erasure.is_done]
        if self._erasures:
            self.erase_soon()
        now = self._clock.now()
        for ns, public in list(self._publics.items()):
            if public.until - now > PUBLIC_LEASE_MS / 2:
                continue
            public.until = Instant(now + PUBLIC_LEASE_MS)
            if not self.store.renew(public.token, public.until):
                del self._publics[ns]

    @property
    def public_blocks(self) -> int:
        return sum(public.count for public in self._publics.values())

    # -- revocation --------------------------------------------------------------------------------

    def condemn(self, is_stale: Callable[[Owner], bool]) -> Behind:
        """Nothing of these owners can be found or published from now on. Then `erase_soon`."""
        disk_blocks = 0
        if self.has_disk:
            resident = self.store.resident()
            disk_blocks = sum(
                tier is Tier.DISK and is_stale(manifest.owner) for tier, manifest in resident
            )
        erasure = self.store.condemn(is_stale)
        disk_blocks = min(disk_blocks, erasure.condemned_blocks)
        for ns, public in list(self._publics.items()):
            if any(map(is_stale, public.owners)):
                self.store.unpin(public.token)
                del self._publics[ns]
        self._erasures.append(erasure)
        return Behind(erasure, disk_blocks * self.block_bytes)

    def reset(self) -> None:
        """Forget everything, at once and for good."""
        self.condemn(lambda _owner: True)
        while self.store.erase(ERASE_SLICE_BLOCKS):
            pass
        self.flush()

    def close(self) -> None:
        if self._eraser is not None:
            self._eraser.cancel()
        self.store.close()

    def erase_soon(self) -> None:
        """Wipe what is condemned, a slice at a time."""
        if self._eraser is None:
            self._eraser = asyncio.get_running_loop().call_soon(self._erase_slice)

    def _erase_slice(self) -> None:
        self._eraser = None
        if self.store.erase(ERASE_SLICE_BLOCKS):
            self.flush()
            self.erase_soon()

    # -- events ------------------------------------------------------------------------------------

    def await_pull(self, sequence: KvSequence, first: int, last: int) -> None:
        """These blocks may come by a pull."""
        for index in range(first, last):
            self._notices.expect(sequence.hashes[index], self._noted(sequence, index))

    def end_pull(self, keys: Sequence[bytes]) -> None:
        """It has ended: what came is told."""
        self.flush()
        self._notices.settle(keys)

    def _noted(self, sequence: KvSequence, index: int) -> Note:
        zone = sequence.zone_of(index)
        start = index * self._block_tokens
        return Note(
            tokens=sequence.tokens[start : start + self._block_tokens],
            salt=zone.salt,
            begins_region=index > 0 and zone.first == index,
        )

    def flush(self) -> None:
        """Let every rank tell what came and went."""
        events = self._notices.take(self.store.take_events())
        if events:
            for publish in self._listeners:
                publish(events)


def place_of(sequence: KvSequence, index: int) -> Place:
    """Which block of which chain one of a prompt is."""
    parent = sequence.hashes[index - 1] if index else b""
    return Place(key=sequence.hashes[index], parent=parent, index=index)


def owner_of(block: Block) -> Owner:
    """Whose a block of the device is."""
    assert block.domain is not None
    stamp = block.stamp
    return Owner(
        ns=stamp.ns, subjects=stamp.subjects, epochs=stamp.epochs, domain=block.domain.name
    )


def _zones(sequence: KvSequence, first: int, limit: int) -> Iterator[tuple[bytes, int, int]]:
    """Namespace, begin and end of the zones between two blocks of a prompt."""
    limit = min(limit, len(sequence.hashes))
    for begin in range(first, limit):
        zone = sequence.zone_of(begin)
        if begin not in (first, zone.first):
            continue
        later = (one.first for one in sequence.zones if one.first > begin)
        yield zone.stamp.ns, begin, min(next(later, limit), limit)


def _misplaced(sequence: KvSequence, first: int, blocks: list[KvBlock]) -> Reason | None:
    """Drop what is not the block of the prompt that it would be used as."""
    for number, block in enumerate(blocks):
        if block.manifest.place != place_of(sequence, first + number):
            del blocks[number:]
            return Reason.CHAIN
    return None


def _stamps(blocks: Sequence[KvBlock]) -> Iterator[Stamp]:
    for owner, run in groupby(blocks, key=lambda block: block.manifest.owner):
        stamp = Stamp(ns=owner.ns, subjects=owner.subjects, epochs=owner.epochs)
        yield from (stamp for _ in run)
