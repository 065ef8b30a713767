"""Runs of blocks that cannot be placed yet, and blocks that never will be.

A run whose parent is unknown is parked until the parent arrives or its time is up; it is never
attached to a root. Blocks that we cannot name (unknown salt, media, a run that was given up) are
remembered by hash, so that their descendants are dropped at once instead of being parked one by
one.

Must never: touch the directory. Everything here is bounded. Read `residency.py` next.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from trunkline.core.events import BlocksStored
from trunkline.core.records import EngineHash, Instant, Tier

_Key = TypeVar("_Key", bound=int)

MAX_PARKED_TOKENS = 1 << 22
"""16 MiB of token ids a worker: parked runs are bounded in memory as well as in number."""

MAX_UNPLACED_BLOCKS = 1 << 16


@dataclass(slots=True)
class _Parked:
    run: BlocksStored
    expires_at: Instant


class Orphans:
    """One worker's parked runs and unplaced blocks.

    Runs expire in the order they were parked; a part of a split run may wait one more time-to-live.
    """

    def __init__(self, *, max_parked_runs: int, parked_ttl_ms: float) -> None:
        self._max_runs = max_parked_runs
        self._ttl_ms = parked_ttl_ms
        self._parked: dict[int, _Parked] = {}
        self._by_parent: dict[EngineHash, list[int]] = {}
        self._by_hash: dict[int, list[int]] = {}
        self._unplaced: dict[int, None] = {}
        self._token_count = 0
        self._next_id = 0

    def __len__(self) -> int:
        """Parked runs."""
        return len(self._parked)

    @property
    def token_count(self) -> int:
        return self._token_count

    @property
    def unplaced_count(self) -> int:
        return len(self._unplaced)

    def clear(self) -> None:
        self._parked.clear()
        self._by_parent.clear()
        self._by_hash.clear()
        self._unplaced.clear()
        self._token_count = 0

    # -- parked runs -------------------------------------------------------------------------------

    def park(self, run: BlocksStored, now: Instant) -> bool:
        """Keep a run for its parent; False (and nothing kept) at the bound."""
        return self._keep(run, Instant(now + self._ttl_ms))

    def take_children(self, hashes: Iterable[int]) -> list[BlocksStored]:
        """Unpark the runs that wait for one of these blocks, oldest first."""
        if not self._by_parent:
            return []
        ids = [
            run_id for parent in hashes for run_id in self._by_parent.get(EngineHash(parent), ())
        ]
        return [self._unpark(run_id).run for run_id in sorted(set(ids))]

    def expire(self, now: Instant) -> list[BlocksStored]:
        """Give up the runs whose time has come; their blocks count as unplaced from here on."""
        dropped: list[BlocksStored] = []
        while self._parked:
            oldest = next(iter(self._parked))
            if self._parked[oldest].expires_at > now:
                break
            run = self._unpark(oldest).run
            self.add_unplaced(run.hashes)
            dropped.append(run)
        return dropped

    def next_expiry(self) -> Instant | None:
        """When the oldest run's time is up; None while nothing is parked."""
        return next((parked.expires_at for parked in self._parked.values()), None)

    def names(self, engine_hash: int) -> bool:
        """Whether some parked run holds a copy of the block."""
        return engine_hash in self._by_hash

    def remove(self, engine_hash: int, tier: Tier) -> bool:
        """One copy of a parked block is gone: what is left of its run stays parked, in two parts.

        The blocks behind the hole now wait for the removed block to come back, which is the truth.
        """
        for run_id in self._by_hash.get(engine_hash, ()):
            parked = self._parked[run_id]
            if parked.run.tier == tier:
                self._split(run_id, parked.run.hashes.index(engine_hash))
                return True
        return False

    def _split(self, run_id: int, index: int) -> None:
        parked = self._unpark(run_id)
        run, size = parked.run, parked.run.block_tokens
        before = replace(run, hashes=run.hashes[:index], tokens=run.tokens[: index * size])
        after = replace(
            run,
            hashes=run.hashes[index + 1 :],
            tokens=run.tokens[(index + 1) * size :],
            parent=EngineHash(run.hashes[index]),
        )
        for part in (before, after):
            if part.hashes and not self._keep(part, parked.expires_at):
                self.add_unplaced(part.hashes)

    def _keep(self, run: BlocksStored, expires_at: Instant) -> bool:
        assert run.parent is not None, "a run at the root has no parent to wait for"
        is_full = len(self._parked) >= self._max_runs
        if is_full or self._token_count + len(run.tokens) > MAX_PARKED_TOKENS:
            return False
        run_id, self._next_id = self._next_id, self._next_id + 1
        self._parked[run_id] = _Parked(run, expires_at)
        self._token_count += len(run.tokens)
        self._by_parent.setdefault(run.parent, []).append(run_id)
        for engine_hash in set(run.hashes):
            self._by_hash.setdefault(engine_hash, []).append(run_id)
        return True

    def _unpark(self, run_id: int) -> _Parked:
        parked = self._parked.pop(run_id)
        self._token_count -= len(parked.run.tokens)
        assert parked.run.parent is not None
        _drop(self._by_parent, parked.run.parent, run_id)
        for engine_hash in set(parked.run.hashes):
            _drop(self._by_hash, engine_hash, run_id)
        return parked

    # -- unplaced blocks ---------------------------------------------------------------------------

    def is_unplaced(self, engine_hash: int) -> bool:
        return engine_hash in self._unplaced

    def add_unplaced(self, hashes: array[int]) -> None:
        """Remember blocks that have no place; beyond 65,536 the oldest are forgotten."""
        self._unplaced.update(dict.fromkeys(hashes))
        while len(self._unplaced) > MAX_UNPLACED_BLOCKS:
            del self._unplaced[next(iter(self._unplaced))]

    def drop_unplaced(self, hashes: array[int]) -> None:
        """Forget blocks that are gone, or that have found their place."""
        if self._unplaced:
            for engine_hash in hashes:
                self._unplaced.pop(engine_hash, None)


def _drop(index: dict[_Key, list[int]], key: _Key, run_id: int) -> None:
    ids = index[key]
    ids.remove(run_id)
    if not ids:
        del index[key]
