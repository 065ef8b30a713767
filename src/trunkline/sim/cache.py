"""The truth of one modelled worker: a prefix cache with a capacity, least recently used leaf first.

Keys are the real block keys; beside each stands the trace's own id of the block, which names the
whole prefix. A key that meets another id is a false hit, and is counted as one. Read `model.py`
next.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What one prompt found and changed: leading blocks hit, and keys evicted to make room."""

    hit_blocks: int
    evicted: list[bytes]
    false_hits: int


class PrefixCache:
    """At most `capacity_blocks` blocks; a prompt's blocks are usable as soon as it is placed."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[bytes, int] = OrderedDict()

    def use(self, keys: list[bytes], block_ids: array[int]) -> Use:
        """Reuse the leading run, insert the rest, evict what is over. Roots count as used last, so
        that a prefix is always evicted from its end.
        """
        blocks = self._blocks
        hit_blocks = 0
        false_hits = 0
        for key in keys:
            held_id = blocks.get(key)
            if held_id is None:
                break
            false_hits += held_id != block_ids[hit_blocks]
            hit_blocks += 1
        for index in range(len(keys) - 1, -1, -1):
            key = keys[index]
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = block_ids[index]
        evicted: list[bytes] = []
        while len(blocks) > self._capacity_blocks:
            evicted.append(blocks.popitem(last=False)[0])
        return Use(hit_blocks=hit_blocks, evicted=evicted, false_hits=false_hits)

    def keys(self) -> bytes:
        """All keys, sorted and packed; for comparing the directory with the truth."""
        return b"".join(sorted(self._blocks))

    def holds(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)
