"""The memory of a store: equal slots in one piece, each given to one block at a time.

    free ──take──► somebody's ──give──► free
                        └──soil──► dirty ──(wiped by whoever takes it, or by `erase`)──► free

Must never: give a slot to two, or one with another's bytes to anybody. Not safe for threads by
itself: the store's lock is around every call but `wipe`. Read `store.py` next.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trunkline.core.identity import TAG_BYTES
from trunkline.kv.records import Owner

_WIPE_BYTES = 1 << 16
NOBODY = Owner(ns=bytes(TAG_BYTES))
"""Whose bytes are on a wiped slot."""


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one block."""

    index: int
    view: memoryview
    generation: int = 0
    """Raised each time that it is given to somebody."""
    is_dirty: bool = False
    """Bytes of what was revoked are on it."""


class Arena:
    """`slot_count` slots of `slot_bytes`. The system gives memory as it is written to."""

    def __init__(self, *, slot_bytes: int, slot_count: int) -> None:
        assert slot_bytes > 0
        assert slot_count > 0
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self._memory = memoryview(mmap.mmap(-1, slot_bytes * slot_count))
        self._fresh = 0
        """Slots from here on were never used: made when they are needed."""
        self._free: dict[Owner, list[Slot]] = {}
        """By whose bytes are still on them, so that a revocation finds them without a search."""
        self._free_count = 0
        self._dirty: deque[Slot] = deque()

    @property
    def free_count(self) -> int:
        return self._free_count + self.slot_count - self._fresh

    @property
    def dirty_count(self) -> int:
        return len(self._dirty)

    def take(self) -> Slot:
        """A slot; one that `is_dirty` is to be wiped before anything else is done with it."""
        if self._free:
            slot = self._take_free()
        elif self._fresh < self.slot_count:
            begin = self._fresh * self.slot_bytes
            slot = Slot(self._fresh, self._memory[begin : begin + self.slot_bytes])
            self._fresh += 1
        else:
            assert self._dirty, "more slots were promised than there are"
            slot = self._dirty.popleft()
        slot.generation += 1
        return slot

    def take_dirty(self) -> Slot | None:
        """The oldest slot to be wiped."""
        return self._dirty.popleft() if self._dirty else None

    def give(self, slot: Slot, owner: Owner) -> None:
        """Given back with bytes of this owner, which the next one to have it overwrites."""
        assert not slot.is_dirty
        self._free.setdefault(owner, []).append(slot)
        self._free_count += 1

    def soil_freed(self, is_stale: Callable[[Owner], bool]) -> list[Slot]:
        """Free slots with bytes of stale owners are dirty from now on."""
        soiled: list[Slot] = []
        for owner in [one for one in self._free if one is not NOBODY and is_stale(one)]:
            slots = self._free.pop(owner)
            self._free_count -= len(slots)
            for slot in slots:
                self.soil(slot)
            soiled.extend(slots)
        return soiled

    def soil(self, slot: Slot) -> None:
        """Given back with bytes that nobody may see again."""
        slot.is_dirty = True
        self._dirty.append(slot)

    def give_wiped(self, slot: Slot) -> None:
        """Given back with nothing on it."""
        self.give(slot, NOBODY)

    def _take_free(self) -> Slot:
        owner = next(reversed(self._free))
        slots = self._free[owner]
        self._free_count -= 1
        slot = slots.pop()
        if not slots:
            del self._free[owner]
        return slot


def wipe(slot: Slot) -> None:
    """Overwrite all of it. The caller alone has the slot."""
    view = slot.view
    for begin in range(0, len(view), _WIPE_BYTES):
        part = view[begin : begin + _WIPE_BYTES]
        part[:] = bytes(len(part))
    slot.is_dirty = False
