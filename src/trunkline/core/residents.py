"""Which blocks are resident, and which of them may go: leaves that nobody holds.

A prefix is of use only as far as it is whole, so no block goes before those that come after it. A
block of which another one is resident that names it as its parent is not a leaf; a held block keeps
all before it by that rule alone. What order leaves go in is an `Order`'s to say, which hears of
each block that becomes a leaf or stops being one.

Must never: choose by itself, read a clock, or keep anything of a block that was removed. Read
`eviction.py` for who uses it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """One block that is here, and what an order notes about it."""

    key: bytes
    parent: bytes
    size_bytes: int
    saved_ms: float
    copies: int
    children: int = 0
    """Resident blocks that name it as their parent."""
    holds: int = 0
    used_at: int = 0
    """The use at which it was used last; all uses are numbered, and each number is given once."""
    uses: int = 1
    is_offered: bool = False
    """It is a leaf that nobody holds, and its order knows."""
    turn: int = 0
    """Tells entries of it in its order's heaps that are not stale; 0 where none is not."""
    place: int = 0
    """In which of its order's queues it is."""
    rank: float = 0.0
    """What its order goes by."""
    gap: float = 0.0
    """Uses between two uses of it, as far as an order has estimated that; 0 where it has not."""

    def worth(self, copied_worth: float) -> float:
        """What a use of it saves for each byte that it takes; without a price all ms are alike."""
        saved = self.saved_ms or 1.0
        return (saved * copied_worth if self.copies else saved) / self.size_bytes


class Order(Protocol):
    """A policy: it hears of everything, and names the leaf that goes first."""

    def added(self, block: Resident, before: Resident | None) -> None:
        """It is new here; `before` is its parent where that is resident."""
        ...

    def adopted(self, block: Resident) -> None:
        """It was here before this order came. They come in the order of their last use."""
        ...

    def used(self, block: Resident, age: int) -> None:
        """A prompt used it again, so many uses after it did last."""
        ...

    def offered(self, block: Resident) -> None:
        """It may go from now on."""
        ...

    def withdrawn(self, block: Resident) -> None:
        """It may not any more: it is held, or has a child, or is gone."""
        ...

    def removed(self, block: Resident) -> None:
        """It has gone, after it was withdrawn."""
        ...

    def repriced(self, block: Resident) -> None:
        """Its number of copies elsewhere changed."""
        ...

    def first(self) -> Resident | None:
        """Which of those that are offered goes first; it stays offered until it is removed."""
        ...


class Residents:
    """An `Evictor` that leaves the order to an `Order`, which can be exchanged at any time."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._blocks: dict[bytes, Resident] = {}
        self._awaited: dict[bytes, int] = {}
        """Children that are resident of parents that are not; at most one entry a block."""
        self._uses = 0
        self._next: Resident | None = None
        """The victim, until something happens."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def add(
        self,
        key: bytes,
        parent: bytes,
        *,
        size_bytes: int,
        saved_ms: float = 0.0,
        copies: int = 0,
    ) -> None:
        assert key not in self._blocks, "a block is added once until it is removed"
        assert key != parent, "a block is not its own parent"
        assert size_bytes > 0, size_bytes
        assert saved_ms >= 0.0, saved_ms
        assert copies >= 0, copies
        self._next = None
        self._uses += 1
        block = Resident(
            key=key,
            parent=parent,
            size_bytes=size_bytes,
            saved_ms=saved_ms,
            copies=copies,
            children=self._awaited.pop(key, 0),
            used_at=self._uses,
        )
        self._blocks[key] = block
        before = self._blocks.get(parent)
        if before is None:
            self._awaited[parent] = self._awaited.get(parent, 0) + 1
        else:
            before.children += 1
            self._look_at(before)
        self._order.added(block, before)
        self._look_at(block)

    def touch(self, keys: Sequence[bytes]) -> None:
        """From the end, so that what stands in front counts as used later."""
        self._next = None
        blocks, used, uses = self._blocks, self._order.used, self._uses
        for key in reversed(keys):
            block = blocks.get(key)
            if block is not None:
                uses += 1
                age = uses - block.used_at
                block.used_at = uses
                block.uses += 1
                used(block, age)
        self._uses = uses

    def hold(self, key: bytes) -> None:
        block = self._blocks[key]
        block.holds += 1
        self._look_at(block)

    def release(self, key: bytes) -> None:
        block = self._blocks[key]
        assert block.holds > 0, "a block is released as often as it was held"
        block.holds -= 1
        self._look_at(block)

    def set_copies(self, key: bytes, copies: int) -> None:
        assert copies >= 0, copies
        block = self._blocks.get(key)
        if block is not None and block.copies != copies:
            block.copies = copies
            self._next = None
            self._order.repriced(block)

    def remove(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        self._next = None
        if block.is_offered:
            block.is_offered = False
            self._order.withdrawn(block)
        if block.children:
            self._awaited[key] = block.children
        before = self._blocks.get(block.parent)
        if before is not None:
            before.children -= 1
            assert before.children >= 0, before.children
            self._look_at(before)
        elif self._awaited[block.parent] > 1:
            self._awaited[block.parent] -= 1
        else:
            del self._awaited[block.parent]
        self._order.removed(block)

    def victim(self) -> bytes | None:
        if self._next is None:
            self._next = self._order.first()
        if self._next is None:
            return None
        assert self._next.is_offered, "only a leaf that nobody holds may go"
        return self._next.key

    def reorder(self, order: Order) -> None:
        """Go by another order from now on, with the same blocks; O(blocks log blocks)."""
        self._order = order
        self._next = None
        for block in sorted(self._blocks.values(), key=lambda each: each.used_at):
            block.turn = block.place = 0
            block.rank = 0.0
            order.adopted(block)
            if block.is_offered:
                order.offered(block)

    def _look_at(self, block: Resident) -> None:
        """Tell the order where a block has become one that may go, or is one no longer."""
        may_go = not (block.children or block.holds)
        if may_go != block.is_offered:
            self._next = None
            block.is_offered = may_go
            if may_go:
                self._order.offered(block)
            else:
                self._order.withdrawn(block)


class LeafHeap:
    """Leaves by rank, least first; of equal ones, the one that was pushed first.

    An entry counts as long as the block's `turn` is what it was then, so a block is in as many
    heaps as it was pushed to with one turn, and leaves all of them by getting another.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Resident]] = []

    def __len__(self) -> int:
        """Stale entries included: for a look at the bound."""
        return len(self._entries)

    def push(self, rank: float, block: Resident, leaf_count: int) -> None:
        """`leaf_count` is how many are offered at most: stale entries are swept by it."""
        entries = self._entries
        heapq.heappush(entries, (rank, block.turn, block))
        if len(entries) > 2 * leaf_count + SLACK_ENTRIES:
            entries[:] = [entry for entry in entries if entry[1] == entry[2].turn]
            heapq.heapify(entries)

    def first(self) -> Resident | None:
        entries = self._entries
        while entries and entries[0][1] != entries[0][2].turn:
            heapq.heappop(entries)
        return entries[0][2] if entries else None

    def first_rank(self) -> float:
        """Of what `first` has just given."""
        return self._entries[0][0]


SLACK_ENTRIES = 64
"""Stale heap entries beyond twice the leaves before they are swept."""
