"""The block store of one worker: what was computed or pulled here, until it is not worth its room.

    put ──────────────────────────────► READY ──► pinned by who reads it ──► evicted or condemned
    stage ─► filled, verified ─► publish ──┘  ▲         (a TTL ends every pin)
                                              └── loaded from disk, verified

Safe for threads: an engine's loop and the threads of pulls use one store. Bytes are copied, hashed,
read from disk and wiped outside the lock. Must never: show a block that is not whole, verified and
current. Read `admission.py` for how a block comes in, `catalogue.py` for what is behind the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from trunkline.core.eviction import Evictor
from trunkline.core.records import Instant, Tier
from trunkline.core.transfer import KV_KEY_BYTES, Reason
from trunkline.kv.admission import Admission, Present, manifest_of
from trunkline.kv.arena import Slot, wipe
from trunkline.kv.berths import Berths
from trunkline.kv.catalogue import Catalogue
from trunkline.kv.digests import digests_of, fault_of
from trunkline.kv.disk import DiskTier
from trunkline.kv.entries import Entry, Erasure
from trunkline.kv.figures import Counters, Figures, figures_of
from trunkline.kv.ladder import NAME_KEY_BYTES, Ladder
from trunkline.kv.loading import Loader
from trunkline.kv.pins import TOKEN_BYTES, PinTable
from trunkline.kv.records import (
    Block,
    Judge,
    Kept,
    Layout,
    Manifest,
    Owner,
    Pins,
    Place,
    Published,
    PutOutcome,
    StoreEvent,
    always,
)
from trunkline.kv.staging import Staging
from trunkline.ports.clock import Clock

MAX_PINS = 65_536
"""Runs that are pinned at a time; a further one finds nothing."""
MAX_LEASE_MS = 600_000.0
"""No pin or staging lives longer without being renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How much there may be. Bytes are rounded down to whole blocks."""

    host_bytes: int
    staging_bytes: int
    """For what is on its way, beside the blocks."""
    max_pins: int = MAX_PINS


class BlockStore:
    """The blocks of one layout."""

    def __init__(
        self,
        layout: Layout,
        options: StoreOptions,
        *,
        clock: Clock,
        judge: Judge,
        make_order: Callable[[], Evictor],
        draw: Callable[[int], bytes],
        disk: DiskTier | None = None,
        on_conflict: Callable[[Manifest], None] | None = None,
    ) -> None:
        """`draw` gives that many bytes nobody can guess. `on_conflict` is told of each integrity
        alarm, outside the lock, and of the block that stays. The store closes `disk`.
        """
        self.layout = layout
        self._clock = clock
        self._draw = draw
        self._judge = judge
        self._on_conflict = on_conflict
        self._lock = threading.Lock()
        block_bytes = layout.block_bytes
        self._catalogue = Catalogue(
            layout,
            make_order,
            host_slots=options.host_bytes // block_bytes,
            staging_slots=options.staging_bytes // block_bytes,
            disk_blocks=disk.capacity_blocks(block_bytes) if disk is not None else 0,
            moving_slots=disk.options.moving_blocks if disk is not None else 0,
        )
        self._pins = PinTable(self._catalogue, draw, max_pins=options.max_pins)
        self._berths = Berths(self._catalogue)
        self._admission = Admission(layout, self._catalogue, self._berths, judge)
        self._counters = Counters()
        self._disk = disk
        self._loader: Loader | None = None
        if disk is not None:
            self._catalogue.lower = Ladder(
                disk, name_key=draw(NAME_KEY_BYTES), moved=self._moved, erased=self._erased
            )
            self._loader = Loader(
                layout,
                self._catalogue,
                self._admission,
                disk,
                self._counters,
                lock=self._lock,
                clean=self._clean,
            )

    def set_quota(self, domain: str, *, floor_bytes: int = 0, cap_bytes: int | None = None) -> bool:
        """The newest quota of a domain; False where too many have one already."""
        with self._lock:
            return self._catalogue.host.set_quota(
                domain, floor_bytes=floor_bytes, cap_bytes=cap_bytes
            )

    # -- the engine's own blocks ---------------------------------------------------------------

    def put(
        self,
        place: Place,
        owner: Owner,
        data: bytes | bytearray | memoryview,
        *,
        saved_ms: float = 0.0,
        copies: int = 0,
    ) -> PutOutcome:
        """Keep a copy of a finished block: call it after the engine's own completion of the block.
        The digests are made here, from the bytes that are kept.
        """
        source = memoryview(data).cast("B")
        if len(source) != self.layout.block_bytes:
            return Reason.LENGTH
        self._tend()
        with self._lock:
            self._expire()
            slot = self._admission.reserve(place, owner)
        if isinstance(slot, Reason):
            return slot
        if isinstance(slot, Present):
            return self._compare(slot.manifest, digests_of(source, self.layout))
        self._clean(slot)
        slot.view[:] = source
        manifest = manifest_of(self.layout, place, owner, slot, digests_of(slot.view, self.layout))
        with self._lock:
            outcome = self._admission.settle(manifest, slot, saved_ms=saved_ms, copies=copies)
        if isinstance(outcome, Present):
            return self._compare(outcome.manifest, manifest.digests)
        return outcome

    def _compare(self, present: Manifest, digests: tuple[bytes, ...]) -> PutOutcome:
        if present.digests == digests:
            return Kept(manifest=present, is_new=False)
        with self._lock:
            self._counters.conflicts += 1
        if self._on_conflict is not None:
            self._on_conflict(present)
        return Reason.CONFLICT

    # -- readers -------------------------------------------------------------------------------

    def pin(
        self,
        ns: bytes,
        keys: Sequence[bytes],
        *,
        until: Instant,
        holder: str = "",
        is_verified: bool = True,
        load_until: Instant | None = None,
        is_wanted: Callable[[], bool] = always,
    ) -> Pins:
        """Find and hold the longest leading run of these blocks, in one step.

        `holder` is for `unpin_holder`: a request, or a peer. The bytes are compared with their
        digests, unless `is_verified` is False: for who sends them on together with the digests, to
        somebody who compares. What lies on disk ends the run, unless `load_until` says how long
        this thread may wait for it: not for an event loop. Nothing more is read for somebody who
        does not want it any more.
        """
        self._tend()
        pins = self._pin(ns, keys, (until, holder, is_verified))
        loader = self._loader
        if loader is None or load_until is None:
            return pins
        for _ in keys:
            if pins.reason is not Reason.TIER or not is_wanted():
                break
            found = len(pins.blocks)
            reason = loader.load(keys[found], load_until)
            if reason is not None:
                return replace(pins, reason=reason)
            more = self._pin(ns, keys[found:], (until, holder, is_verified))
            pins = self._joined(pins, more)
        return pins

    def _pin(self, ns: bytes, keys: Sequence[bytes], terms: tuple[Instant, str, bool]) -> Pins:
        until, holder, is_verified = terms
        token = b""
        with self._lock:
            self._expire()
            entries, reason = self._leading(ns, keys)
            if entries and self._pins.is_full:
                entries, reason = [], Reason.PINS_FULL
            if entries:
                token = self._pins.hold(
                    [entry for entry, _ in entries], self._capped(until), holder
                )
                self._catalogue.host.touch([entry.key for entry, _ in entries])
        if is_verified and entries:
            whole, damage = self._whole(entries)
            if damage is not None:
                token, reason = self._shorten(token, entries[whole][0], whole, damage)
                entries = entries[:whole] if token else []
        blocks = tuple(
            Block(manifest=entry.manifest, data=slot.view.toreadonly()) for entry, slot in entries
        )
        return Pins(token=token, blocks=blocks, reason=reason)

    def _joined(self, pins: Pins, more: Pins) -> Pins:
        """Two runs, the second right behind the first, under one token."""
        if not pins.blocks or not more.blocks:
            return more if more.blocks else replace(pins, reason=more.reason)
        last, first = pins.blocks[-1].manifest.place, more.blocks[0].manifest.place
        with self._lock:
            if first.parent != last.key:
                self._pins.release(more.token)
                return replace(pins, reason=Reason.CHAIN)
            if not self._pins.merge(pins.token, more.token):
                self._pins.release(pins.token)
                return Pins(token=b"", blocks=(), reason=Reason.TOKEN)
        return Pins(token=pins.token, blocks=pins.blocks + more.blocks, reason=more.reason)

    def _leading(
        self, ns: bytes, keys: Sequence[bytes]
    ) -> tuple[list[tuple[Entry, Slot]], Reason | None]:
        entries: list[tuple[Entry, Slot]] = []
        parent: bytes | None = None
        for key in keys:
            assert len(key) == KV_KEY_BYTES
            entry = self._catalogue.find(key)
            if entry is None:
                return entries, Reason.MISS
            manifest = entry.manifest
            if manifest.owner.ns != ns:
                return entries, Reason.NS
            if parent is not None and manifest.place.parent != parent:
                return entries, Reason.CHAIN
            reason = self._judge.fault(manifest.owner)
            if reason is not None:
                return entries, reason
            if entry.slot is None:
                return entries, Reason.TIER
            entries.append((entry, entry.slot))
            parent = key
        return entries, None

    def _whole(self, entries: list[tuple[Entry, Slot]]) -> tuple[int, Reason | None]:
        for count, (entry, slot) in enumerate(entries):
            reason = fault_of(slot.view, entry.manifest, self.layout)
            if reason is not None:
                return count, reason
        return len(entries), None

    def _shorten(
        self, token: bytes, damaged: Entry, whole: int, damage: Reason
    ) -> tuple[bytes, Reason]:
        """The block behind the whole ones is damaged: nobody shall meet it again. Unless the lease
        ran out meanwhile: then the memory may have been another block's.
        """
        with self._lock:
            if not self._pins.is_live(token):
                return b"", Reason.TOKEN
            self._counters.spoilt += 1
            if damaged.is_reachable:
                self._catalogue.detach(damaged)
            return (token if self._pins.shorten(token, whole) else b""), damage

    def unpin(self, token: bytes) -> bool:
        """Give a run back; False, and counted, where it was given back or ran out before."""
        with self._lock:
            self._expire()
            return self._was_good(self._pins.release(token))

    def unpin_holder(self, holder: str) -> int:
        """Its request is over, or the peer is gone: how many runs it still held."""
        with self._lock:
            self._expire()
            return self._pins.release_holder(holder)

    def renew(self, token: bytes, until: Instant) -> bool:
        """Hold it longer; False where it ran out: what was read since may be another block's. And
        where nobody can find all of it any more: what is revoked or damaged is not to be read on.
        """
        with self._lock:
            self._expire()
            return self._was_good(self._pins.renew(token, self._capped(until)))

    def _was_good(self, is_good: bool) -> bool:
        self._counters.void_tokens += not is_good
        return is_good

    # -- what comes from elsewhere -------------------------------------------------------------

    def stage(
        self,
        owner: Owner,
        places: Sequence[Place],
        *,
        until: Instant,
        saved_ms: float = 0.0,
        copies: int = 0,
    ) -> Staging | Reason:
        """Room for a run of blocks that are on their way. No queue: full is full."""
        assert places
        assert all(b.parent == a.key and b.index == a.index + 1 for a, b in pairwise(places))
        with self._lock:
            self._expire()
            reason = self._judge.fault(owner)
            if reason is not None:
                return reason
            if len(places) > self._catalogue.staging_room:
                return Reason.STAGING_FULL
            slots = [self._catalogue.arena.take() for _ in places]
            staging = Staging(
                token=self._draw(TOKEN_BYTES),
                owner=owner,
                places=places,
                slots=slots,
                layout=self.layout,
                until=self._capped(until),
                saved_ms=saved_ms,
                copies=copies,
            )
            self._berths.open(staging)
        for slot in slots:
            self._clean(slot)
        return staging

    def publish(self, token: bytes, manifests: Sequence[Manifest]) -> Published:
        """Make the leading blocks findable that are what the manifests say, as far as those go;
        the rest is given back. The token is used, whatever comes out.
        """
        with self._lock:
            self._expire()
            berth = self._berths.begin(token)
            if not self._was_good(berth is not None) or berth is None:
                return Published(count=0, reason=Reason.TOKEN)
        staging = berth.staging
        assert len(manifests) <= len(staging.places)
        reason: Reason | None = None
        whole = 0
        for index, manifest in enumerate(manifests):
            reason = staging.fault(index, manifest)
            if reason is not None:
                break
            whole += 1
        with self._lock:
            self._expire()
            published, alarm = self._admission.admit(berth, manifests[:whole])
            self._counters.conflicts += alarm is not None
        if alarm is not None and self._on_conflict is not None:
            self._on_conflict(alarm)
        return Published(count=published.count, reason=published.reason or reason)

    def abandon(self, token: bytes, *, quarantine: bool = False) -> bool:
        """Give a staging back unpublished; False, and counted, where it was used before.

        With `quarantine` its memory stays set aside until `unquarantine`, for a writer that cannot
        be stopped. One whose time ended is set aside by itself until it is abandoned.
        """
        with self._lock:
            self._expire()
            return self._was_good(self._berths.abandon(token, is_written_to=quarantine))

    def unquarantine(self, token: bytes) -> bool:
        """Nobody writes to that staging any more."""
        with self._lock:
            return self._was_good(self._berths.unquarantine(token))

    # -- revocation ----------------------------------------------------------------------------

    def condemn(self, is_stale: Callable[[Owner], bool]) -> Erasure:
        """Nothing of a stale owner can be found, published or kept from now on. Bytes are wiped by
        `erase`, those that are pinned or being written to when that has ended.
        """
        erasure = Erasure()
        with self._lock:
            stale = self._catalogue.condemn(is_stale, erasure)
            self._berths.condemn(is_stale, erasure)
            self._admission.condemn(is_stale, erasure)
        if self._disk is not None:
            for owner in stale:
                self._disk.destroy(owner.ns)
        return erasure

    def erase(self, limit: int) -> int:
        """Take up to that many steps of taking condemned blocks out of the index and wiping them;
        how many it were. 0: nothing is left to be done now.
        """
        self._tend()
        for count in range(limit):
            with self._lock:
                self._expire()
                slot = self._catalogue.arena.take_dirty()
                if slot is None:
                    if self._catalogue.detach_condemned():
                        continue
                    return count
                self._catalogue.census.wiping += 1
            wipe(slot)
            with self._lock:
                self._catalogue.census.wiping -= 1
                self._catalogue.wiped(slot)
                self._catalogue.arena.give_wiped(slot)
        return limit

    def _clean(self, slot: Slot) -> None:
        """Make what was just taken fit for use."""
        if slot.is_dirty:
            wipe(slot)
            with self._lock:
                self._catalogue.wiped(slot)

    # -- what is going on ----------------------------------------------------------------------

    def take_events(self) -> list[StoreEvent]:
        """What became resident and what went, in order, since the last call."""
        with self._lock:
            self._expire()
            return self._catalogue.news.take()

    def resident(self) -> list[tuple[Tier, Manifest]]:
        """All blocks that can be found, and where; parents before children."""
        with self._lock:
            return self._catalogue.resident()

    def set_copies(self, key: bytes, copies: int) -> None:
        """So many live copies of a block are elsewhere."""
        with self._lock:
            self._catalogue.set_copies(key, copies)

    def figures(self) -> Figures:
        with self._lock:
            self._expire()
            return figures_of(self._catalogue, self._pins, self._counters)

    def close(self) -> None:
        """End the disk tier. What is pinned stays readable."""
        if self._disk is not None:
            self._disk.close()

    # -- under the lock ------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock.now()
        self._pins.expire(now)
        self._berths.expire(now)

    def _capped(self, until: Instant) -> Instant:
        return min(until, Instant(self._clock.now() + MAX_LEASE_MS))

    def _tend(self) -> None:
        if self._disk is not None:
            self._disk.tend()

    def _moved(self, entry: Entry, slot: Slot, name: str, is_written: bool) -> None:
        with self._lock:
            is_current = self._judge.fault(entry.manifest.owner) is None
            self._catalogue.moved(entry, slot, name, is_written=is_written, is_current=is_current)

    def _erased(self, fate: Erasure) -> None:
        with self._lock:
            fate.erased(self.layout.block_bytes)
