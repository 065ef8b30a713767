"""A place in KV memory and what is written on it: whose it is, what it is, and which use it is in.

Everything the point-of-use check compares stands on the block itself. Read `fence.py` for that
check, `cache.py` for the life of a block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from trunkline.core import simkv
from trunkline.kv import catalogue as kv
from trunkline.kv.tickets import Ticket
from trunkline.worker.requests import Region


class BlockState(Enum):
    """clean -> working -> ready -> (idle and hit again, or evicted) ; condemned -> clean.

    A block is READY exactly while the index has it.
    """

    CLEAN = "clean"
    WORKING = "working"
    """A sequence holds it, nobody else can find it."""
    READY = "ready"
    CONDEMNED = "condemned"
    """Nobody can find it any more; its bytes are still to be overwritten."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stamp:
    """Whose blocks these are. One record for all blocks of a zone of a sequence: compared by
    identity, since a block is filed under it each time one is kept.
    """

    ns: bytes = b""
    """Empty for requests without a ticket, as a stock engine has them."""
    subjects: tuple[str, ...] = ()
    epochs: tuple[int, ...] = ()


PLAIN = Stamp()


@dataclass(slots=True, eq=False, kw_only=True)
class Domain:
    """One quota domain: what of the cache is charged to it."""

    name: str
    floor_blocks: int = 0
    cap_blocks: int | None = None
    held: int = 0
    """READY blocks charged to it, in use or idle."""
    working: int = 0
    """Places of its sequences that nobody else can find."""
    reserved: int = 0
    """Places that its running sequences may still ask for, and are sure to get."""
    sequences: int = 0
    idle: OrderedDict[int, Block] = field(default_factory=OrderedDict[int, "Block"], repr=False)
    """Its READY blocks that no sequence holds, least recently freed first."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The same for the store behind the device, which counts its tiers together."""

    _erasure: kv.Erasure
    _disk_bytes: int
    """Of the condemned ones, what lay on disk."""

    @property
    def condemned_blocks(self) -> int:
        return self._erasure.condemned_blocks

    @property
    def erased_blocks(self) -> int:
        return self._erasure.erased_blocks

    @property
    def is_done(self) -> bool:
        return self._erasure.is_done

    def condemned_bytes(self) -> dict[str, int]:
        return self._by_tier(self._erasure.condemned_bytes)

    def erased_bytes(self) -> dict[str, int]:
        """Until all of it is done, what is erased counts for host memory first."""
        return self._by_tier(self._erasure.erased_bytes)

    def _by_tier(self, count: int) -> dict[str, int]:
        host_bytes = self._erasure.condemned_bytes - self._disk_bytes
        return {"host": min(count, host_bytes), "disk": max(0, count - host_bytes)}


@dataclass(slots=True, eq=False, kw_only=True)
class Erasure:
    """What one change of epochs condemned, and how far the overwriting has come."""

    rev: int
    condemned_blocks: int = 0
    condemned_bytes: int = 0
    erased_blocks: int = 0
    erased_bytes: int = 0
    aborted: int = 0
    behind: list[Behind] = field(default_factory=list["Behind"])
    """What of it lay behind the device."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was condemned."""
        return not (self.condemned_blocks or any(one.condemned_blocks for one in self.behind))

    @property
    def is_done(self) -> bool:
        is_here_done = self.erased_blocks == self.condemned_blocks
        return is_here_done and all(one.is_done for one in self.behind)


@dataclass(slots=True, eq=False)
class Block:
    """One place in KV memory."""

    index: int
    hash: bytes = b""
    """The whole 32-byte name; empty while the block holds nothing."""
    kv: bytes | bytearray = field(default=b"", repr=False)
    """Under the mask of the salt it was computed with."""
    references: int = 0
    state: BlockState = BlockState.CLEAN
    generation: int = 0
    """Raised each time that the place is given to somebody."""
    parent: bytes = b""
    """Name of the block before it; empty at the root."""
    stamp: Stamp = PLAIN
    checksum: int = 0
    domain: Domain | None = None
    """Who it is charged to; None for a place that nobody has."""
    idle_since: int = 0
    was_announced: bool = False
    """Condemned, and its removal is still to be told."""
    erasure: Erasure | None = None
    """Who is told when a condemned block is overwritten."""


def wipe(block: Block) -> None:
    """Nothing is on it any more."""
    if isinstance(block.kv, bytearray):
        block.kv[:] = bytes(len(block.kv))
    block.kv = b""
    block.hash = block.parent = b""
    block.checksum = 0
    block.erasure = None
    block.was_announced = False
    block.state = BlockState.CLEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """Blocks of one prompt under one salt, from `first` on to the next zone."""

    first: int
    salt: str | None = field(repr=False)
    mask: bytes = field(repr=False)
    stamp: Stamp
    is_published: bool
    """Whether what the request computes here may be found by others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Under which terms a request uses the cache; the default is a stock engine's."""

    ticket: Ticket | None = None
    regions: tuple[Region, ...] = ()
    reuses: bool = True


STOCK = Terms()


@dataclass(slots=True, eq=False, kw_only=True)
class KvSequence:
    """The blocks bound to one request, and how far its KV goes."""

    zones: tuple[Zone, ...]
    tokens: array[int] = field(repr=False)
    """Prompt, then what was generated."""
    reserved: int
    """Blocks that it may still ask for, and is sure to get."""
    domain: Domain
    ticket: Ticket | None = None
    publishes: bool = True
    """Once false it stays false: no block is published behind one that is not."""
    blocks: list[Block] = field(default_factory=list[Block])
    hashes: list[bytes] = field(default_factory=list[bytes], repr=False)
    """Names of all full blocks of `tokens`; may be ahead of `blocks`."""
    bound: tuple[int, ...] = ()
    """The generation of each block that hit, as it was bound."""
    cached_tokens: int = 0
    loaded_blocks: int = 0
    """Of the hits, the last ones: how many were copied from a tier behind the device."""
    is_kept_behind: bool = True
    """Whether its next block goes into the tiers behind the device. Once false it stays false."""
    unkept: list[int] = field(default_factory=list[int])
    """Blocks that are computed and not yet offered to those tiers."""
    state: bytes = simkv.ROOT
    """What the model has read of the KV of `blocks`."""

    def zone_of(self, index: int) -> Zone:
        if len(self.zones) == 1:
            return self.zones[0]
        return next(zone for zone in reversed(self.zones) if zone.first <= index)


def zones_of(salt: str | None, terms: Terms, prompt_blocks: int) -> tuple[Zone, ...]:
    """The zones of a request. Regions end at the last full block of the prompt at the latest: what
    is generated is always the client's own.
    """
    ticket = terms.ticket
    zones: list[Zone] = []
    first = 0
    for number, region in enumerate(terms.regions):
        if first < prompt_blocks:
            ns = ticket.regions[number] if ticket else b""
            zones.append(_zone(first, region.salt, ticket, ns, is_published=ticket is None))
        first = min(first + region.blocks, prompt_blocks)
    ns = ticket.ns if ticket else b""
    zones.append(_zone(first, salt, ticket, ns, is_published=ticket is None or bool(ns)))
    return tuple(zones)


def _zone(
    first: int, salt: str | None, ticket: Ticket | None, ns: bytes, *, is_published: bool
) -> Zone:
    # What is shared is written by its designated filler, in a request of its own namespace: no
    # tenant can poison it, or be seen to have been the first.
    stamp = PLAIN
    if ticket is not None:
        stamp = Stamp(ns=ns, subjects=ticket.subjects, epochs=ticket.epochs)
    mask = simkv.salt_mask(salt)
    return Zone(first=first, salt=salt, mask=mask, stamp=stamp, is_published=is_published)
