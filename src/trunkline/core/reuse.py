"""Least expected reuse first: how often a block's chain comes back, and how surely it still lives.

A session comes back again and again, and all of its blocks with it. So what is known of one block
is known of the next: a new block takes over the gap between uses from the block before it, unless
it begins a fork, of which nothing is known. Then

      value = p(chain lives) * saved ms per byte / max(gap - DUE * age, PATIENCE * age)

While a block is younger than it usually gets, each use of another one brings it nearer to its own,
so of many that come in turn the same ones stay; beyond that the value falls with the age, as with
least recently used first. Two classes learn `p`: chains that have come back
before, and those that have not. Both forget, as do gaps: each new one counts half, in logarithms.

Blocks that have gone leave ghosts, which keep when they were used and what gap they had.

Must never: look ahead, or keep more ghosts than `GHOST_REACH` capacities. Read `tournament.py`
next.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from trunkline.core.residents import LeafHeap, Resident

PATIENCE = 0.7
"""Of a chain's usual gap and its age, which one counts: best of .3, .5, .7, 1 and 1.5 on agents."""

DUE = 0.15
"""How much of its age counts for a block that is not yet due: 0 lets sessions that come in turn
push each other out, all of it trusts gaps that vary."""

GHOST_REACH = 2
"""Ghosts, in capacities: chains come back after a cache has long lost them. One costs up to a point
of hits, four and eight bring nothing more."""

MEMORY = 3
"""Uses after which what was counted has half its weight, in capacities."""

FIRST_GAP = 8
"""The gap of a chain that never came back, in capacities, before any has."""

PRICES = 8
"""Prices of blocks are told apart by powers of two, at most so many of them up and down."""


@dataclass(slots=True, kw_only=True)
class Ghost:
    """A block that has gone."""

    parent: bytes
    used_at: int
    gap: float


@dataclass(slots=True, kw_only=True)
class _Group:
    """Leaves whose values compare by gap and age alone."""

    is_known: bool
    price: float
    young: LeafHeap = field(default_factory=LeafHeap)
    """By what is left of the gap, longest first; none where gaps are not known."""
    ripening: LeafHeap = field(default_factory=LeafHeap)
    """The same ones by the use at which their age begins to count."""
    old: LeafHeap = field(default_factory=LeafHeap)
    """By last use, oldest first."""


class Reuse:
    """An `Order`; every step is O(log leaves), amortised."""

    def __init__(self, *, capacity_bytes: int, copied_worth: float = 1.0) -> None:
        self._capacity_bytes = capacity_bytes
        self._copied_worth = copied_worth
        self._now = 0
        self._turn = 0
        self._leaf_count = 0
        self._capacity_blocks = 0.0
        self._groups: dict[tuple[bool, bool, int], _Group] = {}
        self._unit_price = 0.0
        self._kept = [1.0, 1.0]
        self._lost = [1.0, 1.0]
        """How often blocks of each class came back, and how often they did not."""
        self._first_gap = 0.0
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()
        self._ghost_after: dict[bytes, bytes] = {}
        """Parent -> the last ghost that came after it."""

    @property
    def ghost_count(self) -> int:
        return len(self._ghosts)

    @property
    def heap_size(self) -> int:
        """Of the largest heap, stale entries included: for a look at the bound."""
        groups = self._groups.values()
        return max((len(h) for g in groups for h in (g.young, g.ripening, g.old)), default=0)

    def added(self, block: Resident, before: Resident | None) -> None:
        self._see(block)
        ghost = self._ghosts.pop(block.key, None)
        if ghost is not None:
            self._buried(block.key, ghost)
            block.gap = ghost.gap
            self._came_back(block, block.used_at - ghost.used_at)
        elif before is not None and before.children == 1 and before.key not in self._ghost_after:
            block.gap = before.gap

    def adopted(self, block: Resident) -> None:
        self._see(block)

    def used(self, block: Resident, age: int) -> None:
        self._now = block.used_at
        self._came_back(block, age)
        if block.is_offered:
            self._line_up(block)

    def offered(self, block: Resident) -> None:
        self._leaf_count += 1
        self._line_up(block)

    def withdrawn(self, block: Resident) -> None:
        self._leaf_count -= 1
        block.turn = 0

    def removed(self, block: Resident) -> None:
        ghost = Ghost(parent=block.parent, used_at=block.used_at, gap=block.gap)
        self._ghosts[block.key] = ghost
        self._ghost_after[block.parent] = block.key
        while len(self._ghosts) > GHOST_REACH * self._capacity_blocks:
            key, ghost = self._ghosts.popitem(last=False)
            self._buried(key, ghost)
            self._lost[ghost.gap > 0.0] += 1

    def repriced(self, block: Resident) -> None:
        if block.is_offered:
            self._line_up(block)

    def first(self) -> Resident | None:
        least, chosen = math.inf, None
        for group in self._groups.values():
            self._ripen(group)
            price = self._chance(group.is_known) * group.price
            young = group.young.first()
            if young is not None:
                value = price / (young.gap - DUE * (self._now - young.used_at))
                if value < least:
                    least, chosen = value, young
            old = group.old.first()
            if old is not None:
                age = PATIENCE * (self._now - old.used_at + 1)
                value = price / (age if group.is_known else max(age, self._first_gap))
                if value < least:
                    least, chosen = value, old
        return chosen

    def _see(self, block: Resident) -> None:
        self._now = block.used_at
        if not self._capacity_blocks:
            self._unit_price = block.worth(1.0)
            self._capacity_blocks = max(1.0, self._capacity_bytes / block.size_bytes)
            self._first_gap = FIRST_GAP * self._capacity_blocks

    def _came_back(self, block: Resident, age: int) -> None:
        if block.gap:
            self._kept[1] += 1
            block.gap = math.sqrt(block.gap * age)
        else:
            self._kept[0] += 1
            self._first_gap += (age - self._first_gap) * _STEP
            block.gap = float(age)
        if self._kept[0] + self._kept[1] > MEMORY * self._capacity_blocks:
            self._kept = [1.0 + count / 2 for count in self._kept]
            self._lost = [1.0 + count / 2 for count in self._lost]

    def _chance(self, is_known: bool) -> float:
        return self._kept[is_known] / (self._kept[is_known] + self._lost[is_known])

    def _buried(self, key: bytes, ghost: Ghost) -> None:
        """A ghost is in the books no longer."""
        if self._ghost_after.get(ghost.parent) == key:
            del self._ghost_after[ghost.parent]

    def _line_up(self, block: Resident) -> None:
        self._turn += 1
        block.turn = self._turn
        group = self._group_of(block)
        ripe_at = block.used_at + block.gap / (PATIENCE + DUE)
        if not group.is_known or ripe_at <= self._now:
            group.old.push(block.used_at, block, self._leaf_count)
        else:
            group.young.push(-block.gap - DUE * block.used_at, block, self._leaf_count)
            group.ripening.push(ripe_at, block, self._leaf_count)

    def _ripen(self, group: _Group) -> None:
        while (block := group.ripening.first()) is not None:
            if group.ripening.first_rank() > self._now:
                return
            self._turn += 1
            block.turn = self._turn
            group.old.push(block.used_at, block, self._leaf_count)

    def _group_of(self, block: Resident) -> _Group:
        is_known = block.gap > 0.0
        exponent = round(math.log2(block.worth(1.0) / self._unit_price))
        exponent = max(-PRICES, min(PRICES, exponent))
        is_copied = block.copies > 0
        name = (is_known, is_copied, exponent)
        group = self._groups.get(name)
        if group is None:
            price = self._unit_price * 2.0**exponent * (self._copied_worth if is_copied else 1.0)
            group = self._groups[name] = _Group(is_known=is_known, price=price)
        return group


_STEP = 0.002
"""How far one gap moves the mean of first gaps."""
