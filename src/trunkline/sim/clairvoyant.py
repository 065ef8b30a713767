"""The most that any cache of a size could hit on a trace: Belady's rule, with the future known.

After each prompt, of all blocks, its own included, the one goes that is used again latest, of equal
ones the deepest. What stands in front of a block is used again no later than it, so prefixes stay
whole by themselves, and the rule, which is optimal for blocks of one size that need not be taken
in, is the limit for prefixes as well. Must never: be used for more than a limit to compare with.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def belady_hits(prompts: Sequence[Sequence[bytes]], capacity_blocks: int) -> int:
    """Of prompts given as the keys of their blocks, root first."""
    never = len(prompts)
    next_use: dict[bytes, int] = {}
    after: list[list[int]] = []
    for index in range(len(prompts) - 1, -1, -1):
        after.append([next_use.get(key, never) for key in prompts[index]])
        next_use.update(dict.fromkeys(prompts[index], index))
    after.reverse()
    resident: dict[bytes, tuple[int, int]] = {}
    heap: list[tuple[int, int, bytes]] = []
    hits = 0
    for keys, uses in zip(prompts, after, strict=True):
        for key in keys:
            if key not in resident:
                break
            hits += 1
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            if use == never:
                resident.pop(key, None)
                continue
            resident[key] = (-use, -depth)
            heapq.heappush(heap, (-use, -depth, key))
        while len(resident) > capacity_blocks:
            use, depth, key = heapq.heappop(heap)
            if resident.get(key) == (use, depth):
                del resident[key]
    return hits
