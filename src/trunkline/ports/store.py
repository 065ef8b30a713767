"""Where the registry keeps its log: append-only records under gap-free revisions.

Shaped so that a stream with an expected-last-sequence check can stand behind it as well as a file.
`adapters/sqlite_store.py` is the embedded one, `adapters/nats_store.py` the one that several
gateways share, `control/memory_store.py` the twin for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StoreConflict(Exception):
    """Somebody else appended first; `head` is the revision that is there now."""

    def __init__(self, head: int) -> None:
        super().__init__(f"the log is at revision {head}")
        self.head = head


class StoreDown(Exception):
    """The store cannot say or keep anything now. What was asked for has not happened, or, where a
    write was cut off, may have: read before trying again.
    """


class StoreTaken(Exception):
    """Another process writes to this log. The message names where it is."""


class StoreBroken(Exception):
    """What is kept is no log of ours, or was changed behind our back. The message names where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """The newest revision, and a digest of the log up to it: the same in two copies of one log."""

    rev: int
    digest: bytes


class StoreBehind(StoreDown):
    """The log ends before what was acknowledged: its data was lost, or an older copy put in its
    place. `tip` is where it ends.
    """

    def __init__(self, tip: Tip) -> None:
        super().__init__(f"the log ends at {tip.rev}, and more was acknowledged")
        self.tip = tip


class StoreForked(StoreBroken):
    """Two copies of one log have gone different ways. The message names where."""


class Store(Protocol):
    """One writer at a time; revisions are 1, 2, 3, ... without a gap."""

    async def append(self, expected_rev: int, record: bytes) -> int:
        """Durably add a record behind revision `expected_rev`; its own revision. Raises
        StoreConflict where the head is another one, StoreDown.
        """
        ...

    async def read(self, after_rev: int, limit: int) -> list[tuple[int, bytes]]:
        """Up to `limit` records behind `after_rev`, in order. Raises StoreDown."""
        ...

    async def head(self) -> int:
        """The newest revision; 0 for an empty log. Raises StoreDown."""
        ...

    async def high_water(self) -> int:
        """The newest revision that was ever acknowledged, remembered apart from the log.

        Above the head where the log was replaced by an older copy (or by another log: then by 1).
        Raises StoreDown.
        """
        ...

    async def close(self) -> None: ...


class ChainedStore(Store, Protocol):
    """A store that knows its log by digests."""

    async def tip(self) -> Tip:
        """Raises StoreDown, StoreBehind."""
        ...

    async def digest_at(self, rev: int) -> bytes:
        """The digest of the log up to a revision; empty for 0. Raises StoreDown."""
        ...


class SharedStore(ChainedStore, Protocol):
    """A log that several gateways write, each of which keeps a copy."""

    @property
    def moves(self) -> int:
        """Times that records seen here were found lost and put in again by somebody else."""
        ...

    def forget(self) -> None:
        """What is there counts, also where it is less than was seen: the caller mends it."""
        ...
