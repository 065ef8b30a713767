"""What is resident where: the index of a store, its memory, its quotas, and what became of blocks.

        make_room + take ─► (filled outside the lock) ─► insert ─► READY ─► detach ─► free or dirty
                                                              condemn ─► unreachable ─► erase

A block is here only while the block before it is: whatever takes a block away takes all behind it.
Revocation marks an owner, which hides all its blocks in one step; they are detached and wiped in
slices. Must never: be called without the store's lock. Read `store.py` next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trunkline.core.eviction import Evictor
from trunkline.core.records import Tier
from trunkline.kv.arena import Arena, Slot
from trunkline.kv.records import (
    Added,
    BlockState,
    Gone,
    Layout,
    Manifest,
    Overflowed,
    Owner,
    StoreEvent,
)
from trunkline.kv.shelf import Shelf

MAX_EVENTS = 65_536
"""Events that wait to be taken; beyond it all are dropped and one says so."""


@dataclass(slots=True, eq=False, kw_only=True)
class Erasure:
    """What one revocation condemned here, and how far the overwriting has come."""

    condemned_blocks: int = 0
    condemned_bytes: int = 0
    erased_blocks: int = 0
    erased_bytes: int = 0
    aborted: int = 0
    """Stagings that can not be published any more; their blocks are among the condemned."""

    @property
    def is_done(self) -> bool:
        return self.erased_blocks == self.condemned_blocks


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks of one owner."""

    owner: Owner
    entries: dict[bytes, Entry] = field(default_factory=dict[bytes, "Entry"], repr=False)
    erasure: Erasure | None = None
    """Condemned, and who is told when they are wiped."""


@dataclass(slots=True, eq=False)
class Entry:
    """One resident block."""

    manifest: Manifest
    slot: Slot
    holding: Holding
    state: BlockState = BlockState.READY
    pins: int = 0

    @property
    def is_reachable(self) -> bool:
        return self.state is BlockState.READY and self.holding.erasure is None


@dataclass(slots=True, kw_only=True)
class Census:
    """Slots by what they are used for. With what is free and dirty they add up to all there are."""

    ready: int = 0
    """In the index, condemned ones that were not detached yet included."""
    writing: int = 0
    """Promised to `put`, being filled."""
    leaving: int = 0
    """Out of the index, still pinned."""
    staged: int = 0
    quarantined: int = 0
    wiping: int = 0
    pinned: int = 0
    """Slots with a pin, in the index or out of it."""


class Catalogue:
    """The host tier of one store."""

    def __init__(
        self,
        layout: Layout,
        make_order: Callable[[], Evictor],
        *,
        host_slots: int,
        staging_slots: int,
    ) -> None:
        self._layout = layout
        self._host_slots = host_slots
        self._staging_slots = staging_slots
        self.arena = Arena(
            slot_bytes=layout.block_bytes, slot_count=max(1, host_slots + staging_slots)
        )
        self.shelf = Shelf(make_order, capacity_bytes=host_slots * layout.block_bytes)
        self.census = Census()
        self.evicted_count = 0
        self._entries: dict[bytes, Entry] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        """Resident blocks by the key of the one before."""
        self._holdings: dict[Owner, Holding] = {}
        self._backlog: deque[Holding] = deque()
        """Condemned, not all detached yet."""
        self._soiled: dict[int, Erasure] = {}
        """Who is told when the slot of that index is wiped."""
        self._events: list[StoreEvent] = []

    # -- the index -----------------------------------------------------------------------------

    def find(self, key: bytes) -> Entry | None:
        """The block that others may use; the judge is not asked here."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.is_reachable else None

    def resident(self) -> list[Manifest]:
        """All that can be found, parents before children."""
        return [entry.manifest for entry in self._entries.values() if entry.is_reachable]

    def insert(self, manifest: Manifest, slot: Slot, *, saved_ms: float, copies: int) -> Entry:
        """A block whose slot and charge are there can be found from now on."""
        place = manifest.place
        assert place.key not in self._entries
        assert place.index == 0 or self.find(place.parent) is not None
        holding = self._holdings.get(manifest.owner)
        if holding is None:
            holding = self._holdings[manifest.owner] = Holding(manifest.owner)
        entry = Entry(manifest, slot, holding)
        self._entries[place.key] = entry
        holding.entries[place.key] = entry
        self._children.setdefault(place.parent, {})[place.key] = None
        self.shelf.add(
            place.key,
            place.parent,
            manifest.owner.domain,
            size_bytes=manifest.size_bytes,
            saved_ms=saved_ms,
            copies=copies,
        )
        self.census.ready += 1
        return entry

    def detach(self, entry: Entry) -> None:
        """Out of the index, with all that stands on it; the last one first."""
        doomed = [entry]
        for one in doomed:
            children = self._children.get(one.manifest.place.key, ())
            doomed.extend(self._entries[key] for key in children)
        for one in reversed(doomed):
            self._detach_leaf(one)

    def _detach_leaf(self, entry: Entry) -> None:
        place = entry.manifest.place
        assert place.key not in self._children
        self.shelf.remove(place.key)
        del self._entries[place.key]
        siblings = self._children[place.parent]
        del siblings[place.key]
        if not siblings:
            del self._children[place.parent]
        holding = entry.holding
        del holding.entries[place.key]
        if not holding.entries and holding.erasure is None:
            del self._holdings[holding.owner]
        self.tell(Gone(key=place.key, tier=Tier.HOST))
        entry.state = BlockState.CONDEMNED
        self.census.ready -= 1
        if entry.pins:
            self.census.leaving += 1
        else:
            self.vacate(entry.slot, holding.erasure)

    # -- pins ----------------------------------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        assert entry.is_reachable
        self.census.pinned += not entry.pins
        entry.pins += 1
        self.shelf.hold(entry.manifest.place.key)

    def unpin(self, entry: Entry) -> None:
        assert entry.pins > 0
        entry.pins -= 1
        self.census.pinned -= not entry.pins
        if entry.state is BlockState.READY:
            self.shelf.release(entry.manifest.place.key)
        elif not entry.pins:
            self.census.leaving -= 1
            self.vacate(entry.slot, entry.holding.erasure)

    # -- room ----------------------------------------------------------------------------------

    @property
    def host_used(self) -> int:
        census = self.census
        return census.ready + census.writing + census.leaving

    @property
    def staging_room(self) -> int:
        """Slots that may still be staged."""
        return self._staging_slots - self.census.staged - self.census.quarantined

    def make_room(self, domain: str, parent: bytes) -> bool:
        """Let others give way until one more block of this domain fits, but not its own parent."""
        held = parent if self.find(parent) is not None else None
        if held is not None:
            self.shelf.hold(held)
        try:
            return self._evict_until_room(domain)
        finally:
            if held is not None:
                self.shelf.release(held)

    def _evict_until_room(self, domain: str) -> bool:
        size_bytes = self._layout.block_bytes
        while self.shelf.has_to_give(domain, size_bytes):
            if not self._evict(self.shelf.own_victim(domain)):
                return False
        while self.host_used >= self._host_slots:
            if self.detach_condemned():
                continue
            if not self._evict(self.shelf.victim(domain)):
                return False
        return True

    def _evict(self, key: bytes | None) -> bool:
        if key is None:
            return False
        self.evicted_count += 1
        self.detach(self._entries[key])
        return True

    def vacate(self, slot: Slot, erasure: Erasure | None, *, is_soiled: bool = False) -> None:
        """Nobody uses the slot any more. What is revoked on it is to be wiped."""
        if erasure is not None:
            self._soiled[slot.index] = erasure
            self.arena.soil(slot)
        elif is_soiled:
            self.arena.soil(slot)
        else:
            self.arena.give(slot)

    # -- revocation ----------------------------------------------------------------------------

    def condemn(self, is_stale: Callable[[Owner], bool], erasure: Erasure) -> None:
        """Hide all blocks of stale owners: a step for each owner, not for each block."""
        for owner in [owner for owner in self._holdings if is_stale(owner)]:
            holding = self._holdings.pop(owner)
            holding.erasure = erasure
            erasure.condemned_blocks += len(holding.entries)
            self._backlog.append(holding)

    def detach_condemned(self) -> bool:
        """One condemned block out of the index; False where there is none."""
        while self._backlog:
            holding = self._backlog[0]
            if not holding.entries:
                self._backlog.popleft()
                continue
            self.detach(next(reversed(holding.entries.values())))
            return True
        return False

    def replace_condemned(self, key: bytes) -> None:
        """A block of that name that nobody can find makes place for a new one."""
        entry = self._entries.get(key)
        if entry is not None and not entry.is_reachable:
            self.detach(entry)

    @property
    def backlog_count(self) -> int:
        return sum(len(holding.entries) for holding in self._backlog)

    def wiped(self, slot: Slot) -> None:
        """A dirty slot is clean; its revocation is told."""
        erasure = self._soiled.pop(slot.index, None)
        if erasure is not None:
            erasure.erased_blocks += 1
            erasure.erased_bytes += self._layout.block_bytes

    # -- events --------------------------------------------------------------------------------

    def tell(self, event: StoreEvent) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._events = [Overflowed()]
        self._events.append(event)

    def announce(self, manifests: Sequence[Manifest]) -> None:
        """They can be found; each unbroken run of one chain is one event."""
        run: list[Manifest] = []
        for manifest in manifests:
            if run and manifest.place.parent != run[-1].place.key:
                self.tell(_added(run))
                run = []
            run.append(manifest)
        if run:
            self.tell(_added(run))

    def take_events(self) -> list[StoreEvent]:
        events, self._events = self._events, []
        return events


def _added(run: Sequence[Manifest]) -> Added:
    first = run[0]
    return Added(
        keys=tuple(manifest.place.key for manifest in run),
        parent=first.place.parent,
        first_index=first.place.index,
        tier=Tier.HOST,
        owner=first.owner,
    )
