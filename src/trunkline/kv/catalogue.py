"""What is resident where: the index of a store, its memory, its quotas, and what became of blocks.

    make_room + take ─► (filled outside the lock) ─► keep ─► READY ─► evicted: to disk, or nowhere
                                                      condemn ─► hidden ─► detached ─► wiped

A block is here, in some tier, only while the block before it is: what takes a block away takes all
behind it. Revocation marks an owner, which hides all its blocks in one step; they are detached and
wiped in slices. Must never: be called without the store's lock. Read `store.py` next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from trunkline.core.eviction import Evictor
from trunkline.core.records import Tier
from trunkline.kv.arena import Arena, Slot
from trunkline.kv.entries import Census, Entry, Erasure, Holding, Lower
from trunkline.kv.news import News
from trunkline.kv.records import BlockState, Layout, Manifest, Owner
from trunkline.kv.shelf import Shelf


class Catalogue:
    """The index over both tiers, and the memory of the upper one."""

    def __init__(
        self,
        layout: Layout,
        make_order: Callable[[], Evictor],
        *,
        host_slots: int,
        staging_slots: int,
        disk_blocks: int = 0,
        moving_slots: int = 0,
    ) -> None:
        block_bytes = layout.block_bytes
        self.block_bytes = block_bytes
        self.host = Shelf(make_order, capacity_blocks=host_slots, block_bytes=block_bytes)
        self.disk = Shelf(make_order, capacity_blocks=disk_blocks, block_bytes=block_bytes)
        self.arena = Arena(
            slot_bytes=block_bytes, slot_count=max(1, host_slots + staging_slots + moving_slots)
        )
        self.census = Census()
        self.news = News()
        self.lower: Lower | None = None
        self.evicted_count = 0
        self.disk_count = 0
        """Files that are complete."""
        self._host_slots = host_slots
        self._staging_slots = staging_slots
        self._disk_blocks = disk_blocks
        self._moving_slots = moving_slots
        self._entries: dict[bytes, Entry] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        """Resident blocks by the key of the one before."""
        self._holdings: dict[Owner, Holding] = {}
        self._leaving: dict[int, Entry] = {}
        """Out of the index and pinned, by slot."""
        self._moving: dict[int, Entry] = {}
        """Being written to disk, by slot."""
        self._backlog: deque[Holding] = deque()
        """Condemned, not all detached yet."""
        self._soiled: dict[int, Erasure] = {}
        """Who is told when the slot of that index is wiped."""

    # -- the index -----------------------------------------------------------------------------

    def find(self, key: bytes) -> Entry | None:
        """The block that others may use; the judge is not asked here."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.is_reachable else None

    def resident(self) -> list[tuple[Tier, Manifest]]:
        """All that can be found, and where; parents before children."""
        found: list[tuple[Tier, Manifest]] = []
        for entry in self._entries.values():
            if entry.is_reachable:
                if entry.slot is not None:
                    found.append((Tier.HOST, entry.manifest))
                if entry.name is not None:
                    found.append((Tier.DISK, entry.manifest))
        return found

    def keep(self, manifest: Manifest, slot: Slot, *, saved_ms: float, copies: int) -> Entry:
        """A block whose slot was filled, and was charged for, is in host memory from now on."""
        place = manifest.place
        entry = self._entries.get(place.key)
        if entry is None:
            entry = self._enter(manifest, saved_ms, copies)
        assert entry.is_reachable
        assert entry.slot is None
        entry.manifest, entry.slot = manifest, slot
        self.host.add(
            place.key,
            place.parent,
            entry.domain,
            saved_ms=entry.saved_ms,
            copies=entry.copies,
        )
        self.census.ready += 1
        entry.holding.host_count += 1
        entry.holding.copy_count += 1
        return entry

    def _enter(self, manifest: Manifest, saved_ms: float, copies: int) -> Entry:
        place = manifest.place
        assert place.index == 0 or self.find(place.parent) is not None
        holding = self._holdings.get(manifest.owner)
        if holding is None:
            holding = self._holdings[manifest.owner] = Holding(manifest.owner)
        entry = Entry(manifest, holding, saved_ms, copies)
        self._entries[place.key] = entry
        holding.entries[place.key] = entry
        self._children.setdefault(place.parent, {})[place.key] = None
        return entry

    def detach(self, entry: Entry) -> None:
        """Out of the index, with all that stands on it; the last one first."""
        doomed = [entry]
        for one in doomed:
            doomed.extend(self._entries[key] for key in self._children.get(one.key, ()))
        for one in reversed(doomed):
            self._detach_leaf(one)

    def _detach_leaf(self, entry: Entry) -> None:
        assert entry.key not in self._children
        if entry.slot is not None:
            self._leave_host(entry, entry.slot)
        if entry.name is not None:
            self._leave_disk(entry, entry.name)
        entry.holding.copy_count -= entry.is_moving
        entry.state = BlockState.CONDEMNED
        place = entry.manifest.place
        del self._entries[place.key]
        siblings = self._children[place.parent]
        del siblings[place.key]
        if not siblings:
            del self._children[place.parent]
        holding = entry.holding
        del holding.entries[place.key]
        if not holding.entries:
            assert not holding.copy_count
            if holding.erasure is None:
                del self._holdings[holding.owner]

    def _leave_host(self, entry: Entry, slot: Slot) -> None:
        """The host tier's copy goes; a pinned one when the pins end."""
        self.host.remove(entry.key)
        self.census.ready -= 1
        self.census.hidden -= entry.holding.erasure is not None
        entry.holding.host_count -= 1
        entry.holding.copy_count -= 1
        self.news.gone(entry.key, Tier.HOST)
        if entry.pins:
            # The entry keeps the slot: it is out of the index.
            self.census.leaving += 1
            self._leaving[slot.index] = entry
        else:
            entry.slot = None
            self.vacate(slot, entry.manifest.owner, entry.fate)

    def _leave_disk(self, entry: Entry, name: str) -> None:
        """File and entry in one step: what is not in the index is not counted on by anybody."""
        self.disk.remove(entry.key)
        self.disk_count -= 1
        entry.name = None
        entry.holding.copy_count -= 1
        self.news.gone(entry.key, Tier.DISK)
        self._remove_file(name, entry.fate)

    def _remove_file(self, name: str, fate: Erasure | None) -> None:
        assert self.lower is not None
        self.lower.remove(name, fate)

    # -- pins ----------------------------------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        assert entry.is_reachable
        assert entry.slot is not None
        self.census.pinned += not entry.pins
        entry.pins += 1
        self.host.hold(entry.key)

    def unpin(self, entry: Entry) -> None:
        assert entry.pins > 0
        assert entry.slot is not None
        entry.pins -= 1
        self.census.pinned -= not entry.pins
        if entry.state is BlockState.READY:
            self.host.release(entry.key)
        elif not entry.pins:
            slot, entry.slot = entry.slot, None
            self.census.leaving -= 1
            del self._leaving[slot.index]
            self.vacate(slot, entry.manifest.owner, entry.fate)

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
        before = self.find(parent)
        held = before if before is not None and before.slot is not None else None
        if held is not None:
            self.host.hold(parent)
        has_room = self._evict_until_room(domain)
        if held is not None and held.state is BlockState.READY:
            self.host.release(parent)
        # What gave way on disk may have taken the parent along.
        return has_room and (before is None or before.state is BlockState.READY)

    def _evict_until_room(self, domain: str) -> bool:
        while self.host.has_to_give(domain):
            if not self._evict(self.host.own_victim(domain)):
                return False
        while self.host_used >= self._host_slots:
            if self.detach_condemned():
                continue
            if not self._evict(self.host.victim(domain)):
                return False
        return True

    def _evict(self, key: bytes | None) -> bool:
        if key is None:
            return False
        self.evicted_count += 1
        entry = self._entries[key]
        slot = entry.slot
        assert slot is not None
        assert not entry.pins
        is_below = entry.is_reachable and (entry.name is not None or entry.is_moving)
        if is_below:
            self._leave_host(entry, slot)
        elif not self._has_moved(entry, slot) and entry.state is BlockState.READY:
            self.detach(entry)
        return True

    def _has_moved(self, entry: Entry, slot: Slot) -> bool:
        """Hand the slot to the tier below, where that pays and has room."""
        lower = self.lower
        if lower is None or not entry.is_reachable or self.census.moving >= self._moving_slots:
            return False
        if not lower.may_take(entry.saved_ms) or not self._make_room_below(entry):
            return False
        if not lower.write(entry, slot):
            return False
        self.disk.charge(entry.domain)
        self.host.remove(entry.key)
        self.news.gone(entry.key, Tier.HOST)
        entry.slot, entry.is_moving = None, True
        entry.holding.host_count -= 1
        self.census.ready -= 1
        self.census.moving += 1
        self._moving[slot.index] = entry
        return True

    def _make_room_below(self, entry: Entry) -> bool:
        parent = self._entries.get(entry.manifest.place.parent)
        held = parent if parent is not None and parent.name is not None else None
        if held is not None:
            self.disk.hold(held.key)
        while self.disk_count + self.census.moving >= self._disk_blocks:
            key = self.disk.victim(entry.domain)
            if key is None:
                break
            self.drop_file(self._entries[key])
        if held is not None and held.name is not None:
            self.disk.release(held.key)
        has_room = self.disk_count + self.census.moving < self._disk_blocks
        return has_room and entry.state is BlockState.READY

    def drop_file(self, entry: Entry) -> None:
        """Its copy on disk goes; where that was the only one, the block does, and all behind it."""
        if entry.slot is None and not entry.is_moving:
            self.detach(entry)
        elif entry.name is not None:
            self._leave_disk(entry, entry.name)

    def moved(
        self, entry: Entry, slot: Slot, name: str, *, is_written: bool, is_current: bool
    ) -> None:
        """A write to disk has ended; `is_current` is what the judge says of the owner."""
        self.census.moving -= 1
        del self._moving[slot.index]
        entry.is_moving = False
        self.vacate(slot, entry.manifest.owner, entry.fate)
        is_wanted = is_written and is_current and entry.is_reachable
        if is_wanted:
            entry.name = name
            self.disk_count += 1
            self.disk.add(
                entry.key,
                entry.manifest.place.parent,
                entry.domain,
                saved_ms=entry.saved_ms,
                copies=entry.copies,
            )
            self.news.added([entry.manifest], Tier.DISK)
            return
        self.disk.discharge(entry.domain)
        if is_written:
            self._remove_file(name, None)
        if entry.state is BlockState.READY:
            entry.holding.copy_count -= 1
            if entry.slot is None:
                self.detach(entry)

    def vacate(
        self, slot: Slot, owner: Owner, fate: Erasure | None, *, is_soiled: bool = False
    ) -> None:
        """Nobody uses the slot any more. What is revoked on it is to be wiped."""
        if fate is not None:
            self._soiled[slot.index] = fate
            self.arena.soil(slot)
        elif is_soiled:
            self.arena.soil(slot)
        else:
            self.arena.give(slot, owner)

    def set_copies(self, key: bytes, copies: int) -> None:
        """So many live copies of a block are elsewhere."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.copies = copies
            self.host.set_copies(key, copies)
            self.disk.set_copies(key, copies)

    # -- revocation ----------------------------------------------------------------------------

    def condemn(self, is_stale: Callable[[Owner], bool], erasure: Erasure) -> list[Owner]:
        """Hide all blocks of stale owners: a step for each owner, not for each block. Memory that
        is free and was theirs is wiped as well.
        """
        stale = [owner for owner in self._holdings if is_stale(owner)]
        for owner in stale:
            holding = self._holdings.pop(owner)
            holding.erasure = erasure
            erasure.condemn(holding.copy_count, self.block_bytes)
            self.census.hidden += holding.host_count
            self._backlog.append(holding)
        # Those that had left are no copies of the holding any more. One that an earlier revocation
        # counted, before it left or after, stays with that. One may be here with two slots.
        left = [
            entry
            for entry in (*self._leaving.values(), *self._moving.values())
            if entry.state is BlockState.CONDEMNED and is_stale(entry.manifest.owner)
            if entry.fate is None or entry.fate is erasure
        ]
        for entry in left:
            entry.erasure = erasure
        erasure.condemn(len(left), self.block_bytes)
        for slot in self.arena.soil_freed(is_stale):
            self._soiled[slot.index] = erasure
            erasure.condemn(1, self.block_bytes)
        return stale

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

    def wiped(self, slot: Slot) -> None:
        """A dirty slot is clean; its revocation is told."""
        erasure = self._soiled.pop(slot.index, None)
        if erasure is not None:
            erasure.erased(self.block_bytes)
