"""The distinct blocks of the pure index, by key, and who holds each in which view.

Must never: keep a block that nobody holds or expects. Read `_cells.py` for the records and
`_fallback.py`, the only user, for what workers announce.
"""

from __future__ import annotations

from trunkline.native._cells import (
    NOBODY,
    PREDICTED,
    VIEW_HOLDS,
    Entry,
    NamespaceState,
    SlotState,
    slots_in,
)
from trunkline.native._closure import VIEWS, Children, Orphans


class Blocks:
    """Blocks, the namespaces they are of, and the slots that hold them."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._children = Children()
        self.by_key: dict[bytes, Entry] = {}
        self.orphans = tuple(Orphans() for _ in range(VIEWS))
        self.slots: list[SlotState | None] = []
        self.namespaces: list[NamespaceState] = []
        self._buried_count = 0
        """Blocks of retired namespaces that engine hashes still name."""

    def count(self) -> int:
        return len(self.by_key) + self._buried_count

    def is_dead(self, entry: Entry) -> bool:
        namespace_id = entry.namespace_id
        return namespace_id == NOBODY or self.namespaces[namespace_id].is_retired

    def entry(self, key: bytes, namespace_id: int, parent: bytes | None) -> Entry | None:
        entry = self.by_key.get(key)
        if entry is not None and self.is_dead(entry):
            self.bury(entry)  # its namespace was retired and is back under another number
            entry = None
        if entry is None and self.count() < self._max_blocks:
            entry = self.by_key[key] = Entry(key, namespace_id, parent)
            self.namespaces[namespace_id].entries[key] = entry
            if parent is not None:
                self._children.add(parent, key)
        return entry

    def set_holds(self, slot: int, entry: Entry, holds: int) -> None:
        """Set how a slot holds a block. Forgets the block when nobody holds it any more."""
        before = entry.holds(slot)
        if holds == before:
            return
        for view, counted in enumerate(VIEW_HOLDS):
            is_in = bool(holds & counted)
            if is_in != bool(before & counted) and entry.namespace_id != NOBODY:
                self._count_orphans(view, slot, entry, is_in=is_in)
        entry.set_holds(slot, holds)
        self.drop_if_unheld(entry)

    def drop_if_unheld(self, entry: Entry) -> None:
        if entry.resident or entry.predicted:
            return
        if entry.namespace_id == NOBODY:
            self._buried_count -= 1
        else:
            self._unlist(entry)

    def bury(self, entry: Entry) -> None:
        """No key leads to the block from here on and nobody expects it; it goes when no engine hash
        names it.
        """
        for slot in slots_in(entry.predicted):
            self.forget_prediction(slot, self._live(slot), entry.key)
        for slot in slots_in(entry.resident):
            self._count_leaving(slot, entry)
        if entry.resident:
            self._unlist(entry)
            entry.namespace_id = NOBODY
            self._buried_count += 1

    def forget_prediction(self, slot: int, state: SlotState, key: bytes) -> None:
        if state.predicted.pop(key, None) is not None:
            entry = self.by_key[key]
            self.set_holds(slot, entry, entry.holds(slot) & ~PREDICTED)

    def _live(self, slot: int) -> SlotState:
        state = self.slots[slot]
        assert state is not None, f"slot {slot} holds blocks and is not in use"
        return state

    def _count_leaving(self, slot: int, entry: Entry) -> None:
        for view, counted in enumerate(VIEW_HOLDS):
            if entry.holds(slot) & counted:
                self._count_orphans(view, slot, entry, is_in=False)

    def _unlist(self, entry: Entry) -> None:
        del self.by_key[entry.key]
        del self.namespaces[entry.namespace_id].entries[entry.key]
        if entry.parent is not None:
            self._children.discard(entry.parent, entry.key)

    def _count_orphans(self, view: int, slot: int, entry: Entry, *, is_in: bool) -> None:
        """A block enters or leaves one view of a slot: is it an orphan, and are its children?"""
        orphans = self.orphans[view]
        key = entry.key
        delta = 0
        if entry.parent is not None and not self._is_in_view(view, slot, entry.parent):
            delta = 1 if is_in else -1
        if not is_in:
            delta += sum(self._is_in_view(view, slot, child) for child in self._children.of(key))
        elif orphans.slots_mask >> slot & 1:  # else it has no orphans that could find their parent
            delta -= sum(self._is_in_view(view, slot, child) for child in self._children.of(key))
        orphans.move(slot, delta)

    def _is_in_view(self, view: int, slot: int, key: bytes) -> bool:
        entry = self.by_key.get(key)
        return entry is not None and bool(entry.holds(slot) & VIEW_HOLDS[view])
