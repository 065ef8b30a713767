"""Which blocks are resident, and which of them may go: leaves that nobody holds.

A prefix is of use only as far as it is whole, so no block goes before those that come after it. A
block of which another one is resident that names it as its parent is not a leaf; a held block keeps
all before it by that rule alone. What order leaves go in is an `Order`'s to say, which hears of
each block that becomes a leaf or stops being one.

Must never: choose by itself, read a clock, or keep anything of a block that was removed. Read
`eviction.py` for who uses it.
"""

from __future__ import annotations

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
    """Tells the one entry of it in its order's books that is not stale."""
    place: int = 0
    """In which of its order's queues it is."""
    rank: float = 0.0
    """What its order goes by."""


class Order(Protocol):
    """A policy: it hears of everything, and names the leaf that goes first."""

    def added(self, block: Resident, before: Resident | None) -> None:
        """It is new here; `before` is its parent where that is resident."""
        ...

    def used(self, block: Resident) -> None:
        """A prompt used it again; `used_at` and `uses` are the new ones already."""
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
    """An `Evictor` that leaves the order to an `Order`."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._blocks: dict[bytes, Resident] = {}
        self._awaited: dict[bytes, int] = {}
        """Children that are resident of parents that are not; at most one entry a block."""
        self._uses = 0

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
        blocks, order = self._blocks, self._order
        for key in reversed(keys):
            block = blocks.get(key)
            if block is not None:
                self._uses += 1
                block.used_at = self._uses
                block.uses += 1
                order.used(block)

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
            self._order.repriced(block)

    def remove(self, key: bytes) -> None:
        block = self._blocks.pop(key)
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
        block = self._order.first()
        if block is None:
            return None
        assert block.is_offered, "only a leaf that nobody holds may go"
        return block.key

    def _look_at(self, block: Resident) -> None:
        """Tell the order where a block has become one that may go, or is one no longer."""
        may_go = not (block.children or block.holds)
        if may_go != block.is_offered:
            block.is_offered = may_go
            if may_go:
                self._order.offered(block)
            else:
                self._order.withdrawn(block)
