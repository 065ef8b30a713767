"""Least recently used first: the order that every other one is measured against.

A block with a live copy elsewhere counts as unused for longer than it is: for its true age, divided
by what is left of its worth. So the leaves are in two heaps, and only their tops are compared.
"""

from __future__ import annotations

import heapq

from trunkline.core.residents import Resident


class Recency:
    """An `Order`; every step is O(log leaves), amortised."""

    def __init__(self, *, copied_worth: float = 1.0) -> None:
        assert 0.0 <= copied_worth <= 1.0, copied_worth
        self._copied_worth = copied_worth
        self._now = 0
        self._turn = 0
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])
        """Of leaves that are only here, and of those with copies; some entries are stale."""
        self._offered_count = 0

    @property
    def heap_sizes(self) -> tuple[int, int]:
        """Stale entries included: for a look at the bound."""
        return len(self._heaps[0]), len(self._heaps[1])

    def added(self, block: Resident, before: Resident | None) -> None:
        self._now = block.used_at

    def used(self, block: Resident) -> None:
        self._now = block.used_at
        if block.is_offered:
            self._line_up(block)

    def offered(self, block: Resident) -> None:
        self._offered_count += 1
        self._line_up(block)

    def withdrawn(self, block: Resident) -> None:
        self._offered_count -= 1
        block.turn = 0

    def removed(self, block: Resident) -> None:
        pass

    def repriced(self, block: Resident) -> None:
        if block.is_offered:
            self._line_up(block)

    def first(self) -> Resident | None:
        only, copied = self._top(0), self._top(1)
        if only is None or copied is None:
            return only or copied
        # One more than the age: what has just been used is not worth endlessly much.
        only_age = self._now - only.used_at + 1
        copied_age = self._now - copied.used_at + 1
        return copied if copied_age >= only_age * self._copied_worth else only

    def _top(self, which: int) -> Resident | None:
        heap = self._heaps[which]
        while heap and heap[0][1] != heap[0][2].turn:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _line_up(self, block: Resident) -> None:
        self._turn += 1
        block.turn = self._turn
        which = 1 if block.copies and self._copied_worth < 1.0 else 0
        heap = self._heaps[which]
        heapq.heappush(heap, (block.used_at, self._turn, block))
        if len(heap) > 2 * self._offered_count + _SLACK:
            heap[:] = [entry for entry in heap if entry[1] == entry[2].turn]
            heapq.heapify(heap)


_Entry = tuple[int, int, Resident]

_SLACK = 64
"""Stale heap entries beyond twice the leaves before they are swept."""
