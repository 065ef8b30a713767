"""Whom KV may be pulled from: what pulls have taught about single blocks and about workers.

    published       the worker answers: what was held against it is forgotten
    miss, length    it has no such block: not asked for it for a while (its events will say so)
    digest          its bytes were wrong: never asked for that block again, and after three of these
                    never for anything, in this life
    no answer       unknown. Not asked for anything, first a second, then twice as long each time

The directory stays what the events say; this only narrows who is a source. Must never: take silence
for absence. Read `routing.py` for who asks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from trunkline.core.keys import KeyChain
from trunkline.core.records import BlockKey, Instant, WorkerId
from trunkline.core.transfer import Lesson, Reason

MAX_DOUBTS = 1_024
"""Blocks of one worker that are held in doubt; the oldest doubt is dropped for a new one."""
MISS_MS = 10_000.0
"""By then its events have told, or it holds the block anew."""
MAX_STRIKES = 3
FIRST_PAUSE_MS, MOST_PAUSE_MS = 1_000.0, 60_000.0

_SILENT = frozenset(
    {Reason.TIMEOUT, Reason.CONNECT, Reason.LOST, Reason.PROTOCOL, Reason.BUSY, Reason.INCARNATION}
)
"""What a worker does that cannot serve pulls. All else is no fault of the source."""


@dataclass(slots=True, kw_only=True)
class _Record:
    """What is held against one life of one worker."""

    doubts: OrderedDict[BlockKey, float] = field(default_factory=OrderedDict[BlockKey, float])
    """Block -> until when it is not asked for."""
    strikes: int = 0
    pause_ms: float = 0.0
    paused_until: float = -math.inf


class Sources:
    """One for a fleet. Nothing is kept of a worker that nothing is held against."""

    def __init__(self) -> None:
        self._records: dict[WorkerId, _Record] = {}
        self.phantoms = 0
        """Blocks that the directory named and the worker did not have."""
        self.wrong_bytes = 0

    def blocks(self, worker: WorkerId, keys: KeyChain, held: int, now: Instant) -> int:
        """How many of the `held` leading blocks of a chain it may be asked for."""
        record = self._records.get(worker)
        if record is None:
            return held
        if record.strikes >= MAX_STRIKES or now < record.paused_until:
            return 0
        if not record.doubts:
            return held
        return next((i for i in range(held) if record.doubts.get(keys[i], now) > now), held)

    def published(self, worker: WorkerId) -> None:
        """It served a pull well."""
        record = self._records.get(worker)
        if record is not None:
            record.pause_ms, record.paused_until = 0.0, -math.inf
            self._drop_if_clean(worker, record)

    def failed(self, worker: WorkerId, reason: Reason, key: BlockKey, now: Instant) -> None:
        """A pull from it ended with this reason at this block, the first that did not arrive."""
        match reason.lesson:
            case Lesson.REMOVE:
                self.phantoms += 1
                self._doubt(worker, key, now + MISS_MS, now)
            case Lesson.QUARANTINE:
                self.wrong_bytes += 1
                self._doubt(worker, key, math.inf, now).strikes += 1
            case Lesson.UNKNOWN if reason in _SILENT:
                record = self._records.setdefault(worker, _Record())
                record.pause_ms = min(max(2 * record.pause_ms, FIRST_PAUSE_MS), MOST_PAUSE_MS)
                record.paused_until = now + record.pause_ms
            case Lesson.UNKNOWN:
                pass

    def forget(self, worker: WorkerId) -> None:
        """It left, or lives anew."""
        self._records.pop(worker, None)

    def is_suspect(self, worker: WorkerId) -> bool:
        """Whether its bytes were wrong too often for anybody to pull from it."""
        record = self._records.get(worker)
        return record is not None and record.strikes >= MAX_STRIKES

    def __len__(self) -> int:
        return len(self._records)

    def _doubt(self, worker: WorkerId, key: BlockKey, until: float, now: Instant) -> _Record:
        record = self._records.setdefault(worker, _Record())
        record.doubts[key] = max(until, record.doubts.pop(key, 0.0))
        if len(record.doubts) > MAX_DOUBTS:
            over = [old for old, end in record.doubts.items() if end <= now]
            for old in over:
                del record.doubts[old]
            if not over:
                record.doubts.popitem(last=False)
        return record

    def _drop_if_clean(self, worker: WorkerId, record: _Record) -> None:
        if not (record.doubts or record.strikes):
            del self._records[worker]
