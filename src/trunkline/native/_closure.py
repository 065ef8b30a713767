"""Which slots hold prefix-closed sets of blocks, so that `match` may bisect instead of walk.

A set is prefix-closed when the parent of each block in it is in it too. Engines evict leaves first,
so nearly all sets are; then, along one chain, what a slot holds is a prefix, and its length can be
found by bisection. This module counts, for each slot and view, blocks held without their parent.
Must never: touch an index. Read `_fallback.py` next, which calls it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

VIEWS = 3
"""Device, resident in any tier, and expected (near or predicted)."""


class Children:
    """Parent key -> the keys chained directly after it, of blocks that the index knows.

    A parent need not be known itself. Most have one child: that one is kept bare, without a set.
    """

    __slots__ = ("_by_parent",)

    def __init__(self) -> None:
        self._by_parent: dict[bytes, bytes | set[bytes]] = {}

    def add(self, parent: bytes, child: bytes) -> None:
        known = self._by_parent.get(parent)
        if known is None:
            self._by_parent[parent] = child
        elif isinstance(known, set):
            known.add(child)
        else:
            self._by_parent[parent] = {known, child}

    def discard(self, parent: bytes, child: bytes) -> None:
        known = self._by_parent[parent]
        if isinstance(known, set):
            known.discard(child)
        if not isinstance(known, set) or not known:
            del self._by_parent[parent]

    def of(self, parent: bytes) -> Iterable[bytes]:
        known = self._by_parent.get(parent)
        if known is None:
            return ()
        return known if isinstance(known, set) else (known,)


class Orphans:
    """For one view: how many blocks each slot holds without their parent, and which slots do."""

    __slots__ = ("_counts", "slots_mask")

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self.slots_mask = 0

    def move(self, slot: int, delta: int) -> None:
        if delta == 0:
            return
        count = self._counts[slot] + delta
        assert count >= 0, f"slot {slot} has {count} orphans"
        if count:
            self._counts[slot] = count
            self.slots_mask |= 1 << slot
        else:
            self.forget(slot)

    def forget(self, slot: int) -> None:
        self._counts.pop(slot, None)
        self.slots_mask &= ~(1 << slot)


def depths_of(
    block_count: int, slot_count: int, holed: int, views: Callable[[int], int]
) -> tuple[list[int], list[int], list[int]]:
    """Leading blocks of a chain in each view, by slot. `views(depth)`: the three views' masks of
    one block, side by side, device lowest; `holed`: bits whose sets may have holes.
    """
    closed = ((1 << VIEWS * slot_count) - 1) & ~holed
    found = closed_depths(block_count, closed, lambda depth: views(depth) & closed)
    if holed:
        found |= walked_depths(block_count, holed, views)
    depths = [0] * (VIEWS * slot_count)
    for bit, depth in found.items():
        depths[bit] = depth
    return depths[:slot_count], depths[slot_count : 2 * slot_count], depths[2 * slot_count :]


def closed_depths(block_count: int, everyone: int, probe: Callable[[int], int]) -> dict[int, int]:
    """For masks that only lose bits with depth: bit -> the first depth at which it is gone.

    `probe(depth)` answers the mask of one block, within `everyone`. Bits gone at depth 0 are left
    out. Two ends with equal masks settle the range between them.
    """
    depths: dict[int, int] = {}
    ranges = [(-1, block_count, everyone, 0)]
    while ranges:
        low, high, low_mask, high_mask = ranges.pop()
        lost = low_mask & ~high_mask
        if not lost:
            continue
        if high - low > 1:
            middle = (low + high) // 2
            middle_mask = probe(middle)
            ranges.append((low, middle, low_mask, middle_mask))
            ranges.append((middle, high, middle_mask, high_mask))
        elif high > 0:
            _set_all(depths, lost, high)
    return depths


def walked_depths(block_count: int, everyone: int, probe: Callable[[int], int]) -> dict[int, int]:
    """The same for masks of any shape: block by block, until nobody is left."""
    depths: dict[int, int] = {}
    alive = everyone
    for depth in range(block_count):
        if not alive:
            return depths
        mask = probe(depth)
        if depth:
            _set_all(depths, alive & ~mask, depth)
        alive &= mask
    if block_count:
        _set_all(depths, alive, block_count)
    return depths


def _set_all(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        low_bit = bits & -bits
        depths[low_bit.bit_length() - 1] = depth
        bits ^= low_bit
