"""Everything a worker's event stream can tell us, as plain records (inputs of the core).

Adapters translate an engine's wire format into these; nothing here knows ZeroMQ or msgpack.
Read `feed.py` next, which puts them in order.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from trunkline.core.records import EngineHash, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """A run of consecutive full blocks became resident.

    `hashes` (u64) are the engine's names, first to last; `parent` is the block before the first, None at
    the root. `tokens` (u32) covers the whole run: `len(hashes) * block_tokens` ids.
    """

    hashes: array[int]
    parent: EngineHash | None
    tokens: array[int] = field(repr=False)
    block_tokens: int
    tier: Tier
    salt: str | None
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """One copy of each of these blocks is gone from one tier."""

    hashes: array[int]
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """The worker dropped its whole prefix cache."""


CacheEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """What one message of the stream carried. `seq` counts batches from 0 at each engine start."""

    seq: int
    events: tuple[CacheEvent, ...]
