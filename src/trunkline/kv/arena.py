"""The memory of a store: equal slots in one piece, each given to one block at a time.

    free ──take──► somebody's ──give──► free
                        └──soil──► dirty ──(wiped by whoever takes it, or by `erase`)──► free

Must never: give a slot to two, or one with another's bytes to anybody. Not safe for threads by
itself: the store's lock is around every call but `wipe`. Read `store.py` next.
"""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import dataclass

_WIPE_BYTES = 1 << 16


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
        self._free: list[Slot] = []
        self._dirty: deque[Slot] = deque()

    @property
    def free_count(self) -> int:
        return len(self._free) + self.slot_count - self._fresh

    @property
    def dirty_count(self) -> int:
        return len(self._dirty)

    def take(self) -> Slot:
        """A slot; one that `is_dirty` is to be wiped before anything else is done with it."""
        if self._free:
            slot = self._free.pop()
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

    def give(self, slot: Slot) -> None:
        assert not slot.is_dirty
        self._free.append(slot)

    def soil(self, slot: Slot) -> None:
        """Given back with bytes that nobody may see again."""
        slot.is_dirty = True
        self._dirty.append(slot)


def wipe(slot: Slot) -> None:
    """Overwrite all of it. The caller alone has the slot."""
    view = slot.view
    for begin in range(0, len(view), _WIPE_BYTES):
        part = view[begin : begin + _WIPE_BYTES]
        part[:] = bytes(len(part))
    slot.is_dirty = False
