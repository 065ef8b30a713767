"""Least recently used first: the order that every other one is measured against.

A block with a live copy elsewhere counts as unused for longer than it is: for its true age, divided
by what is left of its worth. So the leaves are in two heaps, and only their tops are compared.
"""

from __future__ import annotations

from trunkline.core.residents import LeafHeap, Resident


class Recency:
    """An `Order`; every step is O(log leaves), amortised."""

    def __init__(self, *, copied_worth: float = 1.0) -> None:
        assert 0.0 <= copied_worth <= 1.0, copied_worth
        self._copied_worth = copied_worth
        self._now = 0
        self._turn = 0
        self._leaf_count = 0
        self.heaps = (LeafHeap(), LeafHeap())
        """Of leaves that are only here, and of those with copies."""

    def added(self, block: Resident, before: Resident | None) -> None:
        self._now = block.used_at

    def adopted(self, block: Resident) -> None:
        self._now = block.used_at

    def used(self, block: Resident, age: int) -> None:
        self._now = block.used_at
        if block.is_offered:
            self._line_up(block)

    def offered(self, block: Resident) -> None:
        self._leaf_count += 1
        self._line_up(block)

    def withdrawn(self, block: Resident) -> None:
        self._leaf_count -= 1
        block.turn = 0

    def removed(self, block: Resident) -> None:
        pass

    def repriced(self, block: Resident) -> None:
        if block.is_offered:
            self._line_up(block)

    def first(self) -> Resident | None:
        only, copied = self.heaps[0].first(), self.heaps[1].first()
        if only is None or copied is None:
            return only or copied
        # One more than the age: what has just been used is not worth endlessly much.
        only_age = self._now - only.used_at + 1
        copied_age = self._now - copied.used_at + 1
        return copied if copied_age >= only_age * self._copied_worth else only

    def _line_up(self, block: Resident) -> None:
        self._turn += 1
        block.turn = self._turn
        is_less = block.copies and self._copied_worth < 1.0
        self.heaps[1 if is_less else 0].push(block.used_at, block, self._leaf_count)
