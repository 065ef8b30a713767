"""How far back each block was used last, in distinct blocks: the hits of every cache size at once.

A cache that loses the least recently used leaf first hits a block if fewer distinct blocks than it
holds came since (a prompt's root counts as used last, as in `sim/cache.py`). Blocks whose last use
was in one prompt lie side by side in that order, so it is enough to count them by prompt.

Where there are too many blocks, those are followed whose hash is small, and a cache shrinks by the
same rate (SHARDS, Waldspurger 2015): a name stands for its whole prefix, so each block can be drawn
alone. Blocks that the draw took too many or too few of are made up for where hits are nearest, as
hot blocks are what a draw gets wrong. Must never: hold more than `max_blocks`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from math import ceil

MAX_BLOCKS = 1 << 20
"""Blocks that are followed at once: some 100 MB."""
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_MIN_SLOTS = 1 << 16


class ReuseDistances:
    """Takes in prompts as names of their blocks, in order."""

    def __init__(self, capacities: Sequence[int], *, max_blocks: int = MAX_BLOCKS) -> None:
        """`capacities` of the caches that are asked about, in blocks, rising."""
        self.capacities = list(capacities)
        assert self.capacities == sorted(self.capacities), "capacities rise"
        self._max_blocks = max_blocks
        self._scaled = [float(capacity) for capacity in capacities]
        self._hits = [0.0] * (len(self.capacities) + 1)
        self._last: dict[int, int] = {}
        self._live = _Sums(_MIN_SLOTS)
        self._slot = 0
        self._below = _MASK + 1
        self.rate = 1.0
        """Share of all blocks that is followed."""
        self.asked = 0
        """Blocks that could have been hits."""
        self._followed = 0.0

    def use(self, names: Sequence[int], most: int) -> None:
        """One prompt, of which the leading `most` blocks could be hits."""
        self.asked += most
        if self.rate < 1.0:
            below = self._below
            taken = [name for name in names if (name * _MIX) & _MASK < below]
            most = sum((name * _MIX) & _MASK < below for name in names[:most])
            names = taken
        self._followed += most / self.rate
        if not names:
            return
        slot = self._next_slot()
        new = dict.fromkeys(names, slot)
        if len(new) != len(names):  # no prompt of one chain has a block twice
            names = list(new)
            most = min(most, len(names))
        self._move(names, most)
        self._last.update(new)
        self._live.add(slot, len(new))
        while len(self._last) > self._max_blocks:
            self._thin()

    def hit_blocks(self) -> list[float]:
        """By capacity; the last one is that of a cache without limit."""
        missing = self.asked - self._followed
        sums: list[float] = []
        total = missing
        for hits in self._hits:
            total += hits
            sums.append(min(max(total, 0.0), float(self.asked)))
        return sums

    def distinct_blocks(self) -> float:
        """How many different blocks there were."""
        return len(self._last) / self.rate

    def __len__(self) -> int:
        return len(self._last)

    def _move(self, names: Sequence[int], most: int) -> None:
        """Count where the leading blocks are, and take all of them from there."""
        slots = list(map(self._last.get, names))
        found: list[tuple[int, int]] = []
        known = 0
        for slot, run in groupby(slots):
            if slot is None:
                break
            count = len(list(run))
            counted = min(count, most - known)
            if counted > 0:
                self._count(self._live.above(slot), counted)
            found.append((slot, count))
            known += count
        for slot, count in found:
            self._live.add(slot, -count)
        for slot in slots[known:]:
            if slot is not None:  # a name behind an unknown one: ids that are no prefixes
                self._live.add(slot, -1)

    def _count(self, first: int, count: int) -> None:
        """Blocks `first`, `first + 1`, ... of the order of last use."""
        scaled, weight = self._scaled, 1.0 / self.rate
        end = first + count
        low, high = bisect_right(scaled, first), bisect_right(scaled, end - 1)
        for index in range(low, high):
            upto = min(end, ceil(scaled[index]))
            self._hits[index] += (upto - first) * weight
            first = upto
        self._hits[high] += (end - first) * weight

    def _next_slot(self) -> int:
        if self._slot >= len(self._live):
            self._renumber()
        self._slot += 1
        return self._slot - 1

    def _renumber(self) -> None:
        """Prompts of which nothing is left give their places up."""
        order = sorted(set(self._last.values()))
        place = {slot: index for index, slot in enumerate(order)}
        for name, slot in self._last.items():
            self._last[name] = place[slot]
        size = _MIN_SLOTS
        while size < 2 * len(order):
            size *= 2
        self._live = _Sums(size)
        self._slot = len(order)
        self._live.fill(Counter(self._last.values()))

    def _thin(self) -> None:
        """Follow half as many blocks."""
        self._below >>= 1
        self.rate /= 2.0
        self._scaled = [capacity * self.rate for capacity in self.capacities]
        below = self._below
        self._last = {n: slot for n, slot in self._last.items() if (n * _MIX) & _MASK < below}
        self._renumber()


class _Sums:
    """Counts by place, and how many lie above one (a Fenwick tree)."""

    def __init__(self, size: int) -> None:
        self._tree = array("q", bytes(8 * (size + 1)))
        self._total = 0

    def __len__(self) -> int:
        return len(self._tree) - 1

    def fill(self, counts: dict[int, int]) -> None:
        for place, count in counts.items():
            self.add(place, count)

    def add(self, place: int, count: int) -> None:
        tree, size = self._tree, len(self._tree)
        self._total += count
        place += 1
        while place < size:
            tree[place] += count
            place += place & -place

    def above(self, place: int) -> int:
        tree = self._tree
        total = self._total
        place += 1
        while place:
            total -= tree[place]
            place &= place - 1
        return total
