"""Which policy decides: each runs on a sample of the same uses, and the best one leads.

No policy is best on every trace, and none knows which it is on. So each has a shadow, a cache of
keys alone of 1/`SAMPLE` of the size, which sees 1/`SAMPLE` of the blocks, chosen by their keys:

      chain   a  b  c  d  e  f  g  h        all that is asked of the cache
      sample        c        f              the same chain, thinned: f comes after c

Blocks are sampled and not whole chains, since all chains of a trace may have one root, and since a
few dozen long sessions would leave a handful to judge by. A block's parent in the sample is the
nearest one before it that is in it, so leaves, forks and chains are what they are outside.

The score is the number of sampled blocks hit, and fades. A policy takes over where its score leads
by `LEAD`; the cache keeps its blocks, in the new one's order.

Must never: forget a block at a change, or let a shadow name a victim. Read `eviction.py` next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trunkline.core.residents import Order, Residents

SAMPLE = 8
"""One block of so many; a power of two."""

LEAD = 0.03
"""By how much a score must be above the leader's."""

NOISE = 2.0
"""And by how many square roots of it."""

FADE = 0.95
"""What is left of a score after each judgement."""

PERIOD = 1
"""Uses between judgements, in capacities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The leader changed: after how many uses, and what the scores were."""

    uses: int
    policy: str
    scores: dict[str, float]


class Tournament:
    """An `Evictor`; its cost is that of its leader and 1/`SAMPLE` of each policy's."""

    def __init__(self, makers: Mapping[str, Callable[[int], Order]], capacity_bytes: int) -> None:
        """The first of the makers' policies leads until another one is better."""
        assert makers, "a tournament needs a policy"
        self._makers = dict(makers)
        self._capacity_bytes = capacity_bytes
        shadow_bytes = max(1, capacity_bytes // SAMPLE)
        self.shadows = {
            name: Shadow(make(shadow_bytes), shadow_bytes) for name, make in makers.items()
        }
        self.leader = next(iter(makers))
        self._main = Residents(self._makers[self.leader](capacity_bytes))
        self._sampled: dict[bytes, _Sampled] = {}
        """For each resident block: what of the sample stands at it or before it."""
        self._used_bytes = 0
        self._uses = 0
        self.changes: list[Change] = []
        """The last ones, newest last."""

    def add(
        self,
        key: bytes,
        parent: bytes,
        *,
        size_bytes: int,
        saved_ms: float = 0.0,
        copies: int = 0,
    ) -> None:
        self._main.add(key, parent, size_bytes=size_bytes, saved_ms=saved_ms, copies=copies)
        before = self._sampled.get(parent)
        if not _is_in_sample(key):
            if before is not None:
                self._sampled[key] = before
        else:
            mine = _Sampled(key=key, parent=before.key if before else b"", size_bytes=size_bytes)
            self._sampled[key] = mine
            for shadow in self.shadows.values():
                shadow.use([mine])
        self._count(size_bytes, 1)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._main.touch(keys)
        sampled = self._sampled
        uses = [sampled[key] for key in keys if not key[-1] & _SAMPLE_MASK and key in sampled]
        if uses:
            for shadow in self.shadows.values():
                shadow.use(uses)
            self._count(SAMPLE * sum(use.size_bytes for use in uses), len(keys))

    def hold(self, key: bytes) -> None:
        self._main.hold(key)

    def release(self, key: bytes) -> None:
        self._main.release(key)

    def set_copies(self, key: bytes, copies: int) -> None:
        self._main.set_copies(key, copies)

    def remove(self, key: bytes) -> None:
        self._main.remove(key)
        self._sampled.pop(key, None)

    def victim(self) -> bytes | None:
        return self._main.victim()

    @property
    def scores(self) -> dict[str, float]:
        return {name: shadow.score for name, shadow in self.shadows.items()}

    def _count(self, size_bytes: int, uses: int) -> None:
        self._uses += uses
        self._used_bytes += size_bytes
        if self._used_bytes >= PERIOD * self._capacity_bytes:
            self._used_bytes = 0
            self._judge()

    def _judge(self) -> None:
        scores = self.scores
        best = max(scores, key=lambda name: scores[name])
        # Blocks are hit a chain at a time: scores of n differ by a few times sqrt(n) by chance.
        noise = NOISE * math.sqrt(scores[best])
        if scores[best] > (1.0 + LEAD) * scores[self.leader] + noise:
            self.leader = best
            self._main.reorder(self._makers[best](self._capacity_bytes))
            self.changes.append(Change(uses=self._uses, policy=best, scores=scores))
            del self.changes[:-MAX_CHANGES]
        for shadow in self.shadows.values():
            shadow.score *= FADE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """A block of the sample, and the one before it in it; empty where there is none."""

    key: bytes
    parent: bytes
    size_bytes: int


class Shadow:
    """A cache of keys alone under one policy; what it would have hit is its score."""

    def __init__(self, order: Order, capacity_bytes: int) -> None:
        self._residents = Residents(order)
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[bytes, int] = {}
        self._bytes = 0
        self.score = 0.0

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def use(self, run: Sequence[_Sampled]) -> None:
        """A run of one chain, root first."""
        sizes, residents = self._sizes, self._residents
        hit = 0
        for block in run:
            if block.key not in sizes:
                break
            hit += 1
        if hit:
            self.score += hit
            residents.touch([block.key for block in run[:hit]])
        for block in run[hit:]:
            if block.parent and block.parent not in sizes:
                break  # what it comes after did not stay
            if block.key in sizes:
                continue  # left from a time when what stands before it was unknown
            residents.add(block.key, block.parent, size_bytes=block.size_bytes)
            sizes[block.key] = block.size_bytes
            self._bytes += block.size_bytes
        while self._bytes > self._capacity_bytes:
            victim = residents.victim()
            assert victim is not None, "nobody holds a shadow's blocks"
            residents.remove(victim)
            self._bytes -= sizes.pop(victim)


MAX_CHANGES = 16
"""Changes of leader that are kept to be read."""

_SAMPLE_MASK = SAMPLE - 1


def _is_in_sample(key: bytes) -> bool:
    """Keys are digests, so any of their bits will do."""
    return not key[-1] & _SAMPLE_MASK
