"""The truth of one modelled worker: prefix caches with a capacity, least recently used leaf first.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredUse:
    """The same over both tiers: `device` and `host` say what changed in each."""

    hit_blocks: int
    """Leading blocks that were in one tier or the other."""
    loaded_blocks: int
    """Those of them that were in the host tier only."""
    false_hits: int
    device: Use
    host: Use | None


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
        for key, block_id in zip(reversed(keys), reversed(block_ids[: len(keys)]), strict=True):
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = block_id
        evicted: list[bytes] = []
        while len(blocks) > self._capacity_blocks:
            evicted.append(blocks.popitem(last=False)[0])
        return Use(hit_blocks=hit_blocks, evicted=evicted, false_hits=false_hits)

    def run(self, keys: list[bytes]) -> int:
        """How many leading blocks are here."""
        for count, key in enumerate(keys):
            if key not in self._blocks:
                return count
        return len(keys)

    def held(self) -> set[bytes]:
        return set(self._blocks)

    def holds(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)


class TieredCache:
    """A device tier, and behind it a host tier that gets a copy of every block, as vLLM offloads.

    `host_blocks` 0 is no host tier.
    """

    def __init__(self, *, device_blocks: int, host_blocks: int) -> None:
        self.device = PrefixCache(device_blocks)
        self.host = PrefixCache(host_blocks) if host_blocks else None

    def use(self, keys: list[bytes], block_ids: array[int]) -> TieredUse:
        """A prompt is placed: all its blocks are in both tiers afterwards."""
        hit_blocks = self.run(keys)
        device = self.device.use(keys, block_ids)
        host = self.host.use(keys, block_ids) if self.host is not None else None
        return TieredUse(
            hit_blocks=hit_blocks,
            loaded_blocks=max(0, hit_blocks - device.hit_blocks),
            false_hits=device.false_hits + (host.false_hits if host is not None else 0),
            device=device,
            host=host,
        )

    def run(self, keys: list[bytes]) -> int:
        """How many leading blocks are here. Each tier loses the end of a prefix first, so the
        longer of two runs has them all.
        """
        return max(self.device.run(keys), self.host.run(keys) if self.host is not None else 0)

    def holds(self, key: bytes) -> bool:
        return self.device.holds(key) or (self.host is not None and self.host.holds(key))

    def keys(self) -> bytes:
        """All keys of both, sorted and packed; for comparing the directory with the truth."""
        held = self.device.held()
        if self.host is not None:
            held |= self.host.held()
        return b"".join(sorted(held))
