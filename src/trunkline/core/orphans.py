"""Runs of blocks that cannot be placed yet, and blocks that never will be.

A run whose parent is unknown is parked until the parent arrives or its time is up; it is never
attached to a root. A block that is removed while it is parked leaves a hole: what is behind it is a
part of its own, which waits for the removed block to come back. Blocks that we cannot name (unknown
salt, media, a run that was given up) are remembered by hash, so that their descendants are dropped
at once instead of being parked one by one.

Must never: touch the directory, or take longer than the blocks of a call and of what it takes out.
Everything here is bounded. Read `residency.py` next.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trunkline.core.events import BlocksStored
from trunkline.core.records import EngineHash, Instant, Tier

MAX_PARKED_TOKENS = 1 << 22
"""16 MiB of token ids a worker: parked runs are bounded in memory as well as in number."""
MAX_PARKED_BLOCKS = 1 << 16
"""Each block is indexed by its hash, which costs more than its tokens."""
MAX_UNPLACED_BLOCKS = 1 << 16

_Place = tuple[int, int]  # a parked run, and the index of a block in it


@dataclass(slots=True)
class _Parked:
    run: BlocksStored
    expires_at: Instant
    is_here: bytearray
    """For each block of the run, 1 until it is removed or taken."""
    starts: set[int]
    """Where its parts begin; a part ends at the next block that is not here."""

    def end_of(self, start: int) -> int:
        end = self.is_here.find(0, start)
        return len(self.is_here) if end < 0 else end

    def parent_of(self, start: int) -> EngineHash:
        parent = self.run.parent if start == 0 else EngineHash(self.run.hashes[start - 1])
        assert parent is not None, "a run at the root has no parent to wait for"
        return parent

    def part(self, start: int, end: int) -> BlocksStored:
        run, size = self.run, self.run.block_tokens
        if (start, end) == (0, len(run.hashes)):
            return run
        return replace(
            run,
            hashes=run.hashes[start:end],
            tokens=run.tokens[start * size : end * size],
            parent=self.parent_of(start),
        )


class Orphans:
    """One worker's parked runs and unplaced blocks. Runs expire in the order they were parked."""

    def __init__(self, *, max_parked_runs: int, parked_ttl_ms: float) -> None:
        self._max_parts = max_parked_runs
        self._ttl_ms = parked_ttl_ms
        self._parked: OrderedDict[int, _Parked] = OrderedDict()
        self._by_parent: dict[EngineHash, dict[_Place, None]] = {}
        self._by_copy: dict[tuple[int, Tier], dict[int, int]] = {}  # hash, tier -> run -> index
        # Not a plain dict: taking its oldest again and again would search past all taken before.
        self._unplaced: OrderedDict[int, None] = OrderedDict()
        self._part_count = 0
        self._token_count = 0
        self._block_count = 0
        self._next_id = 0

    def __len__(self) -> int:
        """Parked runs, each part of a run with holes counted for itself."""
        return self._part_count

    @property
    def token_count(self) -> int:
        """Tokens kept. A run keeps all its tokens until nothing of it is parked any more."""
        return self._token_count

    @property
    def unplaced_count(self) -> int:
        return len(self._unplaced)

    def clear(self) -> None:
        self._parked.clear()
        self._by_parent.clear()
        self._by_copy.clear()
        self._unplaced.clear()
        self._part_count = self._token_count = self._block_count = 0

    # -- parked runs -------------------------------------------------------------------------------

    def park(self, run: BlocksStored, now: Instant) -> bool:
        """Keep a run for its parent; False (and nothing kept) at the bound. No hash comes twice."""
        count = len(run.hashes)
        is_full = (
            self._part_count >= self._max_parts
            or self._token_count + len(run.tokens) > MAX_PARKED_TOKENS
            or self._block_count + count > MAX_PARKED_BLOCKS
        )
        if is_full:
            return False
        run_id, self._next_id = self._next_id, self._next_id + 1
        self._parked[run_id] = _Parked(
            run, Instant(now + self._ttl_ms), bytearray(b"\x01") * count, set()
        )
        self._token_count += len(run.tokens)
        self._block_count += count
        for index, engine_hash in enumerate(run.hashes):
            self._by_copy.setdefault((engine_hash, run.tier), {})[run_id] = index
        self._add_part(run_id, 0)
        return True

    def take_children(self, hashes: Iterable[int]) -> list[BlocksStored]:
        """Unpark what waits for one of these blocks, oldest first."""
        if not self._by_parent:
            return []
        places = {
            place for parent in hashes for place in self._by_parent.get(EngineHash(parent), ())
        }
        return [self._take_part(*place) for place in sorted(places)]

    def expire(self, now: Instant) -> int:
        """Give up the runs whose time has come; their blocks count as unplaced from here on. How
        many runs, parts counted apart.
        """
        part_count = 0
        while self._parked:
            oldest = next(iter(self._parked))
            parked = self._parked[oldest]
            if parked.expires_at > now:
                break
            for start in sorted(parked.starts):
                self.add_unplaced(self._take_part(oldest, start).hashes)
                part_count += 1
        return part_count

    def next_expiry(self) -> Instant | None:
        """When the oldest run's time is up; None while nothing is parked."""
        return next((parked.expires_at for parked in self._parked.values()), None)

    def names(self, engine_hash: int, tier: Tier) -> bool:
        """Whether some parked run holds a copy of the block in that tier."""
        return (engine_hash, tier) in self._by_copy

    def remove(self, engine_hash: int, tier: Tier) -> bool:
        """One copy of a parked block is gone; what was behind it waits for it to come back."""
        copies = self._by_copy.get((engine_hash, tier))
        if copies is None:
            return False
        run_id = next(reversed(copies))
        index = copies[run_id]
        parked = self._parked[run_id]
        self._forget_copy(run_id, parked, index)
        parked.is_here[index] = 0
        if index in parked.starts:
            self._drop_part(run_id, index)
        behind = index + 1
        if behind < len(parked.is_here) and parked.is_here[behind]:
            is_full = self._part_count >= self._max_parts
            self._add_part(run_id, behind)
            if is_full:
                self.add_unplaced(self._take_part(run_id, behind).hashes)
        self._release_if_empty(run_id)
        return True

    # Every block that is here belongs to one part, and each part is listed under its parent.

    def _add_part(self, run_id: int, start: int) -> None:
        parked = self._parked[run_id]
        parked.starts.add(start)
        self._by_parent.setdefault(parked.parent_of(start), {})[run_id, start] = None
        self._part_count += 1

    def _drop_part(self, run_id: int, start: int) -> None:
        parked = self._parked[run_id]
        parked.starts.remove(start)
        parent = parked.parent_of(start)
        waiting = self._by_parent[parent]
        del waiting[run_id, start]
        if not waiting:
            del self._by_parent[parent]
        self._part_count -= 1

    def _take_part(self, run_id: int, start: int) -> BlocksStored:
        parked = self._parked[run_id]
        end = parked.end_of(start)
        self._drop_part(run_id, start)
        for index in range(start, end):
            self._forget_copy(run_id, parked, index)
        parked.is_here[start:end] = bytes(end - start)
        self._release_if_empty(run_id)
        return parked.part(start, end)

    def _forget_copy(self, run_id: int, parked: _Parked, index: int) -> None:
        copy = (parked.run.hashes[index], parked.run.tier)
        copies = self._by_copy[copy]
        del copies[run_id]
        if not copies:
            del self._by_copy[copy]

    def _release_if_empty(self, run_id: int) -> None:
        parked = self._parked.get(run_id)
        if parked is not None and not parked.starts:
            del self._parked[run_id]
            self._token_count -= len(parked.run.tokens)
            self._block_count -= len(parked.run.hashes)

    # -- unplaced blocks ---------------------------------------------------------------------------

    def is_unplaced(self, engine_hash: int) -> bool:
        return engine_hash in self._unplaced

    def unplaced(self) -> array[int]:
        """All that have no place, the oldest first."""
        return array("Q", self._unplaced)

    def add_unplaced(self, hashes: array[int]) -> None:
        """Remember blocks that have no place; beyond 65,536 the oldest are forgotten."""
        self._unplaced.update(dict.fromkeys(hashes))
        while len(self._unplaced) > MAX_UNPLACED_BLOCKS:
            self._unplaced.popitem(last=False)

    def drop_unplaced(self, hashes: array[int]) -> None:
        """Forget blocks that are gone, or that have found their place."""
        if self._unplaced:
            for engine_hash in hashes:
                self._unplaced.pop(engine_hash, None)
