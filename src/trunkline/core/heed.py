"""Who does as it is told: workers that are sent with an order to pull and take no notice of it.

An order that is not understood costs nothing but the time that was counted on, every time anew, and
nobody says so. A worker that took no notice `MAX_UNHEEDED` times in a row is alarmed, and left out
for `PAUSE_MS`; then a single order tries again. Read `sources.py` for what the ends of pulls teach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trunkline.core.records import Instant, WorkerId

MAX_UNHEEDED = 5
"""In a row."""
PAUSE_MS = 600_000.0


@dataclass(slots=True, kw_only=True)
class _Record:
    unheeded: int = 0
    is_alarmed: bool = False
    left_out_until: float = -math.inf


class Heed:
    """One for a fleet. Nothing is kept of a worker that took notice last."""

    def __init__(self) -> None:
        self._records: dict[WorkerId, _Record] = {}
        self.unheeded = 0
        """Orders that nobody took notice of, since start."""

    def heeded(self, worker: WorkerId) -> None:
        """It did something about an order, well or not."""
        self._records.pop(worker, None)

    def ignored(self, worker: WorkerId, now: Instant) -> bool:
        """It answered as if there had been no order. Whether that is to be alarmed, once."""
        self.unheeded += 1
        record = self._records.setdefault(worker, _Record())
        record.unheeded += 1
        if record.unheeded < MAX_UNHEEDED:
            return False
        record.left_out_until = now + PAUSE_MS
        is_new = not record.is_alarmed
        record.is_alarmed = True
        return is_new

    def is_left_out(self, worker: WorkerId, now: Instant) -> bool:
        """Whether nothing is ordered there for now."""
        record = self._records.get(worker)
        return record is not None and now < record.left_out_until

    @property
    def alarmed(self) -> tuple[WorkerId, ...]:
        """Those that take no notice."""
        return tuple(name for name, record in self._records.items() if record.is_alarmed)

    def forget(self, worker: WorkerId) -> None:
        """It left, or lives anew."""
        self._records.pop(worker, None)
