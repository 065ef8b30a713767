"""Orders that count uses: GDSF, S3-FIFO and W-TinyLFU, each made leaf first.

All three remember how often a block was used after it has gone, in a book of ghosts that holds no
more than the cache. Their papers: L. Cherkasova, "Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy", HPL-98-69; J. Yang et al., "FIFO Queues are All You Need
for Cache Eviction", SOSP 2023; G. Einziger, R. Friedman, B. Manes, "TinyLFU: A Highly Efficient
Cache Admission Policy", ToS 2017. Where those look at the end of a queue, these look at the leaf
that is nearest to it.

Must never: keep more ghosts than blocks. Read `reuse.py` next.
"""

from __future__ import annotations

from collections import OrderedDict

from trunkline.core.residents import LeafHeap, Resident


class Ghosts:
    """How often blocks that have gone were used; of the last ones, as many as are resident."""

    def __init__(self) -> None:
        self._uses: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def take(self, key: bytes) -> int:
        """0 where nothing is known; it is known no longer."""
        return self._uses.pop(key, 0)

    def bury(self, block: Resident, limit: int) -> None:
        self._uses[block.key] = block.uses
        while len(self._uses) > limit:
            self._uses.popitem(last=False)


class Gdsf:
    """Greedy-dual-size-frequency: a clock, which is the rank of the last one that went, plus uses
    times the saved ms of a byte. Every step is O(log leaves), amortised.
    """

    def __init__(self, *, copied_worth: float = 1.0) -> None:
        self._copied_worth = copied_worth
        self._clock = 0.0
        self._turn = 0
        self._leaf_count = 0
        self._count = 0
        self.heap = LeafHeap()
        self.ghosts = Ghosts()

    def added(self, block: Resident, before: Resident | None) -> None:
        block.uses += self.ghosts.take(block.key)
        self.adopted(block)

    def adopted(self, block: Resident) -> None:
        self._count += 1
        self._rank(block)

    def used(self, block: Resident, age: int) -> None:
        self._rank(block)
        if block.is_offered:
            self._line_up(block)

    def offered(self, block: Resident) -> None:
        self._leaf_count += 1
        self._line_up(block)

    def withdrawn(self, block: Resident) -> None:
        self._leaf_count -= 1
        block.turn = 0

    def removed(self, block: Resident) -> None:
        self._count -= 1
        self.ghosts.bury(block, self._count + 1)
        # Only what goes in its turn moves the clock; what was revoked may have had any rank.
        first = self.heap.first()
        if first is None or block.rank <= self.heap.first_rank():
            self._clock = max(self._clock, block.rank)

    def repriced(self, block: Resident) -> None:
        self.used(block, 0)

    def first(self) -> Resident | None:
        return self.heap.first()

    def _rank(self, block: Resident) -> None:
        block.rank = self._clock + block.uses * block.worth(self._copied_worth)

    def _line_up(self, block: Resident) -> None:
        self._turn += 1
        block.turn = self._turn
        self.heap.push(block.rank, block, self._leaf_count)


class S3Fifo:
    """A small queue that most leave after one use, a main queue with second chances, and ghosts
    that let a block straight into the main one. Every step is O(log leaves), amortised: a block
    has at most `MOST_CHANCES` before it goes.
    """

    SMALL_SHARE = 0.1
    MOST_CHANCES = 3

    def __init__(self, *, capacity_bytes: int, copied_worth: float = 1.0) -> None:
        self._small_bytes_limit = self.SMALL_SHARE * capacity_bytes
        self._copied_worth = copied_worth
        self._small_bytes = 0
        self._turn = 0
        self._leaf_count = 0
        self._count = 0
        self.heaps = (LeafHeap(), LeafHeap())
        """The small queue's leaves and the main one's, by when they came in (`rank`)."""
        self.ghosts = Ghosts()

    def added(self, block: Resident, before: Resident | None) -> None:
        known = self.ghosts.take(block.key)
        self._enter(block, _MAIN if known else _SMALL)

    def adopted(self, block: Resident) -> None:
        self._enter(block, _MAIN if block.uses > 1 else _SMALL)

    def used(self, block: Resident, age: int) -> None:
        pass

    def offered(self, block: Resident) -> None:
        self._leaf_count += 1
        self._line_up(block)

    def withdrawn(self, block: Resident) -> None:
        self._leaf_count -= 1
        block.turn = 0

    def removed(self, block: Resident) -> None:
        self._count -= 1
        if block.place == _SMALL:
            self._small_bytes -= block.size_bytes
        self.ghosts.bury(block, self._count + 1)

    def repriced(self, block: Resident) -> None:
        pass

    def first(self) -> Resident | None:
        while True:
            small, main = self.heaps[_SMALL].first(), self.heaps[_MAIN].first()
            is_small = small is not None and (
                main is None or self._small_bytes > self._small_bytes_limit
            )
            block = small if is_small else main
            if block is None or not self._chances(block):
                return block
            if block.place == _SMALL:
                self._small_bytes -= block.size_bytes
                self._count -= 1
                block.uses = 1
                self._enter(block, _MAIN)
            else:
                block.uses = min(block.uses, self.MOST_CHANCES + 1) - 1
                self._requeue(block)
            self._line_up(block)

    def _chances(self, block: Resident) -> int:
        chances = block.uses - 1
        return int(chances * self._copied_worth) if block.copies else chances

    def _enter(self, block: Resident, place: int) -> None:
        self._count += 1
        block.place = place
        if place == _SMALL:
            self._small_bytes += block.size_bytes
        self._requeue(block)

    def _requeue(self, block: Resident) -> None:
        self._turn += 1
        block.rank = float(self._turn)

    def _line_up(self, block: Resident) -> None:
        self._turn += 1
        block.turn = self._turn
        self.heaps[block.place].push(block.rank, block, self._leaf_count)


class WTinyLfu:
    """A small window by recency in front of a segmented main part; who leaves the window has to
    have been used more often than whom it would push out. Uses of ghosts count, and all are halved
    every `MEMORY` capacities of uses. Every step is O(log leaves), amortised.
    """

    WINDOW_SHARE = 0.01
    PROTECTED_SHARE = 0.8
    MEMORY = 10

    def __init__(self, *, capacity_bytes: int, copied_worth: float = 1.0) -> None:
        main_bytes = (1.0 - self.WINDOW_SHARE) * capacity_bytes
        self._limits = (self.WINDOW_SHARE * capacity_bytes, self.PROTECTED_SHARE * main_bytes)
        self._capacity_bytes = capacity_bytes
        self._copied_worth = copied_worth
        self._bytes = [0, 0, 0]
        self._used_bytes = 0
        self._turn = 0
        self._leaf_count = 0
        self._count = 0
        self._halvings = 0
        self.heaps = (LeafHeap(), LeafHeap(), LeafHeap())
        """Leaves in the window, on probation and protected, by last use."""
        self._window: OrderedDict[bytes, Resident] = OrderedDict()
        self._protected: OrderedDict[bytes, Resident] = OrderedDict()
        """All that are there, by when they came."""
        self.ghosts = Ghosts()

    def added(self, block: Resident, before: Resident | None) -> None:
        block.uses += self._aged(self.ghosts.take(block.key))
        self._enter(block, _WINDOW)
        self._window[block.key] = block
        self._note(block)
        if sum(self._bytes) <= self._capacity_bytes:
            # As long as there is room nobody has to be pushed out.
            while self._bytes[_WINDOW] > self._limits[0] and len(self._window) > 1:
                self._move(next(iter(self._window.values())), _PROBATION)

    def adopted(self, block: Resident) -> None:
        self._enter(block, _PROBATION)

    def used(self, block: Resident, age: int) -> None:
        block.uses = self._current(block)
        self._note(block)
        if block.place != _PROTECTED:
            self._move(block, _PROTECTED)
            while self._bytes[_PROTECTED] > self._limits[1] and len(self._protected) > 1:
                self._move(next(iter(self._protected.values())), _PROBATION)
        elif block.is_offered:
            self._line_up(block)

    def offered(self, block: Resident) -> None:
        self._leaf_count += 1
        self._line_up(block)

    def withdrawn(self, block: Resident) -> None:
        self._leaf_count -= 1
        block.turn = 0

    def removed(self, block: Resident) -> None:
        self._leave(block)
        block.uses = self._current(block) + (self._halvings << _EPOCH_SHIFT)
        self.ghosts.bury(block, self._count + 1)

    def repriced(self, block: Resident) -> None:
        pass

    def first(self) -> Resident | None:
        weakest = self.heaps[_PROBATION].first() or self.heaps[_PROTECTED].first()
        while True:
            candidate = self.heaps[_WINDOW].first()
            if candidate is None or weakest is None:
                return candidate or weakest
            if self._bytes[_WINDOW] <= self._limits[0]:
                return weakest
            if self._weight(candidate) <= self._weight(weakest):
                return candidate
            self._move(candidate, _PROBATION)

    def _weight(self, block: Resident) -> float:
        uses = self._current(block)
        return uses * self._copied_worth if block.copies else uses

    def _current(self, block: Resident) -> int:
        """Uses, halved as often as all were since they were noted: `rank` says when that was."""
        behind = self._halvings - int(block.rank)
        if behind:
            block.uses = max(1, block.uses >> behind)
            block.rank = float(self._halvings)
        return block.uses

    def _aged(self, noted: int) -> int:
        return (noted & _USES_MASK) >> (self._halvings - (noted >> _EPOCH_SHIFT)) if noted else 0

    def _note(self, block: Resident) -> None:
        self._used_bytes += block.size_bytes
        if self._used_bytes > self.MEMORY * self._capacity_bytes:
            self._used_bytes = 0
            self._halvings += 1

    def _enter(self, block: Resident, place: int) -> None:
        block.rank = float(self._halvings)
        self._count += 1
        self._bytes[place] += block.size_bytes
        block.place = place

    def _leave(self, block: Resident) -> None:
        self._count -= 1
        self._bytes[block.place] -= block.size_bytes
        self._protected.pop(block.key, None)
        self._window.pop(block.key, None)

    def _move(self, block: Resident, place: int) -> None:
        self._bytes[block.place] -= block.size_bytes
        self._bytes[place] += block.size_bytes
        block.place = place
        self._window.pop(block.key, None)
        if place == _PROTECTED:
            self._protected[block.key] = block
        else:
            self._protected.pop(block.key, None)
        if block.is_offered:
            self._line_up(block)

    def _line_up(self, block: Resident) -> None:
        self._turn += 1
        block.turn = self._turn
        self.heaps[block.place].push(block.used_at, block, self._leaf_count)


_SMALL, _MAIN = 0, 1
_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2
_EPOCH_SHIFT = 40
_USES_MASK = (1 << _EPOCH_SHIFT) - 1
