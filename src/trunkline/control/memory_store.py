"""The registry's log in memory: the twin of the embedded store, for tests and for `--auth off`.

Holds what a process needs for its own life and no longer. Faults can be planted: a store that is
down, and a write that happens although its answer is lost. Read `ports/store.py` for the contract.
"""

from __future__ import annotations

from enum import Enum

from trunkline.ports.store import StoreConflict, StoreDown


class Fault(Enum):
    """What the next append meets."""

    REFUSED = "refused"
    """Nothing is written."""
    ANSWER_LOST = "answer-lost"
    """It is written, and the writer is told that the store is down."""


class MemoryStore:
    """`ports.store.Store` in a list. Belongs to one event loop."""

    def __init__(self, records: list[bytes] | None = None, *, high_water: int = 0) -> None:
        self.records = [] if records is None else records
        self.is_down = False
        self.next_faults: list[Fault] = []
        """What the next appends meet, in order; then they succeed."""
        self._high_water = max(high_water, len(self.records))

    async def append(self, expected_rev: int, record: bytes) -> int:
        self._require_up()
        fault = self.next_faults.pop(0) if self.next_faults else None
        if fault is Fault.REFUSED:
            raise StoreDown("the append was refused")
        if expected_rev != len(self.records):
            raise StoreConflict(len(self.records))
        self.records.append(record)
        self._high_water = max(self._high_water, len(self.records))
        if fault is Fault.ANSWER_LOST:
            raise StoreDown("the answer was lost")
        return len(self.records)

    async def read(self, after_rev: int, limit: int) -> list[tuple[int, bytes]]:
        self._require_up()
        rows = self.records[after_rev : after_rev + limit]
        return list(enumerate(rows, start=after_rev + 1))

    async def head(self) -> int:
        self._require_up()
        return len(self.records)

    async def high_water(self) -> int:
        self._require_up()
        return self._high_water

    async def close(self) -> None:
        self.is_down = True

    def _require_up(self) -> None:
        if self.is_down:
            raise StoreDown("the store is down")
