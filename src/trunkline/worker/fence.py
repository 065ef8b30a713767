"""What a worker may believe, and the check at the point of use.

One fence a worker, over all its ranks: its freshness lease and epochs, and why reuse was refused.
The check runs just before a sequence's blocks are bound, and again before its first byte leaves;
what it refuses is computed. Must never: let a block be used without a valid lease. Read `agent.py`
for how the lease comes in, `cache.py` for who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from trunkline.core import simkv
from trunkline.core.freshness import Freshness, Taken
from trunkline.core.records import BootInstant
from trunkline.kv.tickets import Ticket
from trunkline.worker.blocks import Block, BlockState, Stamp

# Looked up once: these are compared for each block.
_READY = BlockState.READY


class Reason(Enum):
    """Why a block was not used, in the order in which it is checked."""

    LEASE = "lease"
    """No valid lease, or behind the revision that the request needs."""
    NS = "ns"
    HASH = "hash"
    EPOCH = "epoch"
    GEN = "gen"
    """Not READY, or its memory was given away since."""
    LAYOUT = "layout"
    SUM = "sum"
    CHAIN = "chain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a block has to be to serve as one block of one prompt."""

    ns: bytes
    name: bytes
    generation: int
    """As in the index, or as it was when the block was bound."""
    parent: bytes
    kv_bytes: int


class Guard(Protocol):
    """What the cache asks before it uses or publishes for a request with a ticket."""

    def refusal(self, ticket: Ticket) -> Reason | None:
        """Why nothing at all may be reused or published for it now; None when it may."""
        ...

    def fault(self, block: Block, expected: Expected) -> Reason | None:
        """Why this block is not to be used; None when it is. `refusal` comes before it."""
        ...

    def count(self, reason: Reason) -> None:
        """A use was refused."""
        ...


@dataclass(slots=True, kw_only=True)
class Fence:
    """The guard of a worker with an agent."""

    freshness: Freshness
    boot: Callable[[], BootInstant]
    refused: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    grants: dict[Taken, int] = field(default_factory=lambda: dict.fromkeys(Taken, 0))

    def refusal(self, ticket: Ticket) -> Reason | None:
        if not self.freshness.may_use(ticket.rev, self.boot()):
            return Reason.LEASE
        if not self.freshness.is_current(ticket.subjects, ticket.epochs):
            return Reason.EPOCH
        return None

    def fault(self, block: Block, expected: Expected) -> Reason | None:
        if block.stamp.ns != expected.ns:
            return Reason.NS
        if block.hash != expected.name:
            return Reason.HASH
        if not self._is_current(block.stamp):
            return Reason.EPOCH
        if block.state is not _READY or block.generation != expected.generation:
            return Reason.GEN
        if len(block.kv) != expected.kv_bytes:
            return Reason.LAYOUT
        if simkv.checksum(block.kv) != block.checksum:
            return Reason.SUM
        if block.parent != expected.parent:
            return Reason.CHAIN
        return None

    def count(self, reason: Reason) -> None:
        self.refused[reason] += 1

    def _is_current(self, stamp: Stamp) -> bool:
        return self.freshness.is_current(stamp.subjects, stamp.epochs)


class Closed:
    """The guard where nobody grants leases: requests with a ticket are computed."""

    def refusal(self, ticket: Ticket) -> Reason | None:
        return Reason.LEASE

    def fault(self, block: Block, expected: Expected) -> Reason | None:
        return Reason.LEASE

    def count(self, reason: Reason) -> None:
        pass
