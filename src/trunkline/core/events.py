"""Everything a worker's event stream can tell us, as plain records (inputs of the core).

Adapters translate an engine's wire format into these; nothing here knows ZeroMQ or msgpack.
Read `feed.py` next, which puts them in order.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from trunkline.core.records import EngineHash, Tier, WallTime

_OBJECT_BYTES = 200
"""A record and its array, without what is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """A run of consecutive full blocks became resident.

    `hashes` (u64) are the engine's names, first to last; `parent` is the block before the first,
    None at the root. `tokens` (u32) covers the whole run: `len(hashes) * block_tokens` ids.
    """

    hashes: array[int]
    parent: EngineHash | None
    tokens: array[int] = field(repr=False)
    block_tokens: int
    tier: Tier
    salt: str | None
    adapter: str | None = None
    """What else they were computed with; no chain of ours names such blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """One copy of each of these blocks is gone from one tier."""

    hashes: array[int]
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """The worker dropped its whole prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksUnnamed:
    """Blocks that are resident but that no chain of ours can name (media, prompt embeddings).

    Remembered only so that their children are not taken for orphans.
    """

    hashes: array[int]


CacheEvent = BlocksStored | BlocksRemoved | AllBlocksCleared | BlocksUnnamed


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """What one message of the stream carried. `seq` counts batches from 0 at each engine start.

    `fingerprint` is a 64-bit digest of the payload, its timestamp included: equal for a repeat of
    one batch, different for a batch of another engine life with the same `seq`.
    """

    seq: int
    events: tuple[CacheEvent, ...]
    fingerprint: int = 0
    rank: int | None = None
    """Data-parallel rank that the batch names; None where it names none."""
    sent_at: WallTime = WallTime(0.0)
    ignored_count: int = 0
    """Events left out by rule: other attention groups, event types we do not know."""
    bad_count: int = 0
    """Events left out because they make no sense."""

    def size_bytes(self) -> int:
        """What holding it back costs in memory, about."""
        size = _OBJECT_BYTES
        for event in self.events:
            size += _OBJECT_BYTES
            if not isinstance(event, AllBlocksCleared):
                size += 8 * len(event.hashes)
            if isinstance(event, BlocksStored):
                size += _OBJECT_BYTES + 4 * len(event.tokens)
        return size
