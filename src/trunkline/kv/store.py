"""The block store of one worker: what was computed or pulled here, until it is not worth its room.

    put ──────────────────────────────► READY ──► pinned by who reads it ──► evicted or condemned
    stage ─► filled, verified ─► publish ──┘            (a TTL ends every pin)

Safe for threads: an engine's loop and the threads of pulls use one store. Bytes are copied, hashed
and wiped outside the lock. Whatever becomes visible went through `digests.fault_of` or
`Staging.fault` first, and the host's judge is asked in the same step. Must never: show a block that
is not whole, verified and current. Read `catalogue.py` for what is behind the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trunkline.core.eviction import Evictor
from trunkline.core.records import Instant
from trunkline.core.transfer import KV_KEY_BYTES, Reason
from trunkline.kv.arena import Slot, wipe
from trunkline.kv.berths import Berth, Berths
from trunkline.kv.catalogue import Catalogue, Entry, Erasure
from trunkline.kv.digests import digests_of, fault_of
from trunkline.kv.figures import Counters, Figures, figures_of
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
)
from trunkline.kv.staging import Staging
from trunkline.ports.clock import Clock

MAX_PINS = 65_536
"""Runs that are pinned at a time; a further one finds nothing."""
MAX_LEASE_MS = 600_000.0
"""No pin or staging lives longer without being renewed."""


@dataclass(slots=True, eq=False)
class _Writing:
    """A `put` between its two steps."""

    owner: Owner
    erasure: Erasure | None = None


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
        on_conflict: Callable[[Manifest], None] | None = None,
    ) -> None:
        """`draw` gives that many bytes nobody can guess. `on_conflict` is told of each integrity
        alarm, outside the lock.
        """
        self.layout = layout
        self._clock = clock
        self._judge = judge
        self._draw = draw
        self._on_conflict = on_conflict
        self._lock = threading.Lock()
        self._catalogue = Catalogue(
            layout,
            make_order,
            host_slots=options.host_bytes // layout.block_bytes,
            staging_slots=options.staging_bytes // layout.block_bytes,
        )
        self._writings: dict[int, _Writing] = {}
        """By the index of the slot."""
        self._pins = PinTable(self._catalogue, draw, max_pins=options.max_pins)
        self._berths = Berths(self._catalogue)
        self._counters = Counters()

    def set_quota(self, domain: str, *, floor_bytes: int = 0, cap_bytes: int | None = None) -> bool:
        """The newest quota of a domain; False where too many have one already."""
        with self._lock:
            return self._catalogue.shelf.set_quota(
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
        if len(data) != self.layout.block_bytes:
            return Reason.LENGTH
        with self._lock:
            self._expire()
            slot = self._reserve(place, owner)
        if isinstance(slot, Reason):
            return slot
        if isinstance(slot, Manifest):
            return self._compare(slot, digests_of(memoryview(data), self.layout))
        if slot.is_dirty:
            self._wipe(slot)
        slot.view[:] = data
        manifest = self._manifest(place, owner, slot, digests_of(slot.view, self.layout))
        with self._lock:
            outcome = self._settle(manifest, slot, saved_ms, copies)
        if isinstance(outcome, Manifest):
            return self._compare(outcome, manifest.digests)
        return outcome

    def _reserve(self, place: Place, owner: Owner) -> Slot | Manifest | Reason:
        """A slot to write to, or what is here under that name already."""
        reason = self._refusal(place, owner)
        if reason is not None:
            return reason
        present = self._catalogue.find(place.key)
        if present is not None:
            return present.manifest
        if not self._catalogue.make_room(owner.domain, place.parent):
            return Reason.FULL
        self._catalogue.replace_condemned(place.key)
        self._catalogue.shelf.charge(owner.domain, self.layout.block_bytes)
        self._catalogue.census.writing += 1
        slot = self._catalogue.arena.take()
        self._writings[slot.index] = _Writing(owner)
        return slot

    def _settle(
        self, manifest: Manifest, slot: Slot, saved_ms: float, copies: int
    ) -> PutOutcome | Manifest:
        """Insert what was written, unless the world changed meanwhile."""
        catalogue = self._catalogue
        place, owner = manifest.place, manifest.owner
        catalogue.census.writing -= 1
        erasure = self._writings.pop(slot.index).erasure
        reason = Reason.EPOCH if erasure is not None else self._refusal(place, owner)
        present = catalogue.find(place.key)
        if reason is None and present is None:
            catalogue.insert(manifest, slot, saved_ms=saved_ms, copies=copies)
            catalogue.announce([manifest])
            return Kept(manifest=manifest, is_new=True)
        catalogue.shelf.discharge(owner.domain, self.layout.block_bytes)
        catalogue.vacate(slot, erasure, is_soiled=reason is Reason.EPOCH)
        return reason or _manifest_of(present)

    def _refusal(self, place: Place, owner: Owner) -> Reason | None:
        """Why no block of that place may come in now."""
        reason = self._judge.fault(owner)
        if reason is None and place.index and self._catalogue.find(place.parent) is None:
            return Reason.CHAIN
        return reason

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
    ) -> Pins:
        """Find and hold the longest leading run of these blocks, in one step.

        `holder` is for `unpin_holder`: a request, or a peer. The bytes are compared with their
        digests, unless `is_verified` is False: for who sends them on together with the digests, to
        somebody who compares.
        """
        token = b""
        with self._lock:
            self._expire()
            entries, reason = self._leading(ns, keys)
            if entries and self._pins.is_full:
                entries, reason = [], Reason.PINS_FULL
            if entries:
                token = self._pins.hold(entries, self._capped(until), holder)
                self._catalogue.shelf.touch([entry.manifest.place.key for entry in entries])
        if is_verified and entries:
            whole, damage = self._whole(entries)
            if damage is not None:
                token, reason = self._shorten(token, entries, whole), damage
                entries = entries[:whole] if token else []
        blocks = tuple(
            Block(manifest=entry.manifest, data=entry.slot.view.toreadonly()) for entry in entries
        )
        return Pins(token=token, blocks=blocks, reason=reason)

    def _leading(self, ns: bytes, keys: Sequence[bytes]) -> tuple[list[Entry], Reason | None]:
        entries: list[Entry] = []
        for key in keys:
            assert len(key) == KV_KEY_BYTES
            entry = self._catalogue.find(key)
            if entry is None:
                return entries, Reason.MISS
            if entry.manifest.owner.ns != ns:
                return entries, Reason.NS
            if entries and entry.manifest.place.parent != entries[-1].manifest.place.key:
                return entries, Reason.CHAIN
            reason = self._judge.fault(entry.manifest.owner)
            if reason is not None:
                return entries, reason
            entries.append(entry)
        return entries, None

    def _whole(self, entries: list[Entry]) -> tuple[int, Reason | None]:
        for count, entry in enumerate(entries):
            reason = fault_of(entry.slot.view, entry.manifest, self.layout)
            if reason is not None:
                return count, reason
        return len(entries), None

    def _shorten(self, token: bytes, entries: list[Entry], whole: int) -> bytes:
        """The block behind the whole ones is damaged: nobody shall meet it again."""
        with self._lock:
            self._counters.spoilt += 1
            if entries[whole].is_reachable:
                self._catalogue.detach(entries[whole])
            return token if self._pins.shorten(token, whole) else b""

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
        """Hold it longer; False where it ran out: what was read since may be another block's."""
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
            if slot.is_dirty:
                self._wipe(slot)
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
            published, conflict = self._admit(berth, manifests[:whole])
        if conflict is not None and self._on_conflict is not None:
            self._on_conflict(conflict)
        return Published(count=published.count, reason=published.reason or reason)

    def _admit(
        self, berth: Berth, manifests: Sequence[Manifest]
    ) -> tuple[Published, Manifest | None]:
        """The one place where what came from elsewhere becomes visible."""
        staging, catalogue = berth.staging, self._catalogue
        taken: set[int] = set()
        fresh: list[Manifest] = []
        reason: Reason | None = None
        conflict: Manifest | None = None
        count = 0
        for index, manifest in enumerate(manifests):
            reason = self._entry_refusal(berth, manifest)
            if reason is not None:
                break
            present = catalogue.find(manifest.place.key)
            if present is None:
                slot = staging.slots[index]
                kept = self._manifest(manifest.place, staging.owner, slot, manifest.digests)
                catalogue.shelf.charge(staging.owner.domain, self.layout.block_bytes)
                catalogue.census.staged -= 1
                catalogue.insert(kept, slot, saved_ms=staging.saved_ms, copies=staging.copies)
                taken.add(index)
                fresh.append(kept)
            elif present.manifest.digests != manifest.digests:
                self._counters.conflicts += 1
                conflict, reason = present.manifest, Reason.CONFLICT
                break
            count += 1
        catalogue.announce(fresh)
        self._berths.close(berth, taken)
        return Published(count=count, reason=reason), conflict

    def _entry_refusal(self, berth: Berth, manifest: Manifest) -> Reason | None:
        """Why this block of a staging may not come in, after room was made for it."""
        if berth.erasure is not None:
            return Reason.EPOCH
        place = manifest.place
        reason = self._refusal(place, berth.staging.owner)
        if reason is not None or self._catalogue.find(place.key) is not None:
            return reason
        if not self._catalogue.make_room(berth.staging.owner.domain, place.parent):
            return Reason.FULL
        self._catalogue.replace_condemned(place.key)
        return None

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
            self._catalogue.condemn(is_stale, erasure)
            self._berths.condemn(is_stale, erasure)
            for writing in self._writings.values():
                if writing.erasure is None and is_stale(writing.owner):
                    writing.erasure = erasure
                    erasure.condemned_blocks += 1
            erasure.condemned_bytes = erasure.condemned_blocks * self.layout.block_bytes
        return erasure

    def erase(self, limit: int) -> int:
        """Wipe up to that many condemned blocks; how many it were. 0: nothing is left to be done
        now.
        """
        count = 0
        while count < limit:
            with self._lock:
                self._expire()
                slot = self._catalogue.arena.take_dirty()
                while slot is None and self._catalogue.detach_condemned():
                    slot = self._catalogue.arena.take_dirty()
                if slot is None:
                    break
                self._catalogue.census.wiping += 1
            wipe(slot)
            with self._lock:
                self._catalogue.census.wiping -= 1
                self._catalogue.wiped(slot)
                self._catalogue.arena.give(slot)
            count += 1
        return count

    def _wipe(self, slot: Slot) -> None:
        wipe(slot)
        with self._lock:
            self._catalogue.wiped(slot)

    # -- what is going on ----------------------------------------------------------------------

    def take_events(self) -> list[StoreEvent]:
        """What became resident and what went, in order, since the last call."""
        with self._lock:
            self._expire()
            return self._catalogue.take_events()

    def resident(self) -> list[Manifest]:
        """All blocks that can be found, parents before children."""
        with self._lock:
            return self._catalogue.resident()

    def set_copies(self, key: bytes, copies: int) -> None:
        """So many live copies of a block are elsewhere."""
        with self._lock:
            self._catalogue.shelf.set_copies(key, copies)

    def figures(self) -> Figures:
        with self._lock:
            self._expire()
            return figures_of(self._catalogue, self._pins, self._counters)

    # -- under the lock ------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock.now()
        self._pins.expire(now)
        self._berths.expire(now)

    def _capped(self, until: Instant) -> Instant:
        return min(until, Instant(self._clock.now() + MAX_LEASE_MS))

    def _manifest(
        self, place: Place, owner: Owner, slot: Slot, digests: tuple[bytes, ...]
    ) -> Manifest:
        return Manifest(
            place=place,
            owner=owner,
            generation=slot.generation,
            layout_digest=self.layout.digest,
            chunk_bytes=self.layout.chunk_bytes,
            digests=digests,
            size_bytes=self.layout.block_bytes,
        )


def _manifest_of(entry: Entry | None) -> Manifest:
    assert entry is not None
    return entry.manifest
