"""Where the registry keeps its log: append-only records under gap-free revisions.

Shaped so that a stream with an expected-last-sequence check can stand behind it as well as a file.
`adapters/sqlite_store.py` is the embedded one, `control/memory_store.py` the twin for tests.
"""

from __future__ import annotations

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
