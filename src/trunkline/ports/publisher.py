"""What a worker of ours says about its cache, and to whom."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trunkline.core.records import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStored:
    """Consecutive full blocks became resident. `hashes` are 32-byte names; `parent` None is the
    root."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: array[int] = field(repr=False)
    block_tokens: int
    salt: str | None = field(repr=False)
    begins_region: bool = False
    """A salt other than that of `parent` begins here: it is told though there is a parent."""
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """One copy of a block is gone."""

    hash: bytes
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCleared:
    """No block is resident any more."""


BlockEvent = RunStored | BlockRemoved | CacheCleared


class EventPublisher(Protocol):
    """One rank's event stream. Belongs to the event loop that made it."""

    endpoint: str
    """Where to subscribe; empty where nothing is published."""
    replay_endpoint: str
    topic: str
    buffer_batches: int

    def publish(self, events: Sequence[BlockEvent], *, is_sent: bool = True) -> None:
        """Number the batch, keep it for replays and send it, without ever waiting.

        With `is_sent=False` the message is lost on its way: subscribers see a gap and may ask
        again.
        """
        ...

    def close(self) -> None:
        """Stop at once. Batches not sent yet are lost."""
        ...


class PublisherFactory(Protocol):
    """Makes the publisher of one data-parallel rank on an address; port 0 lets the kernel pick."""

    def __call__(self, host: str, port: int, rank: int) -> EventPublisher: ...
