"""Whom KV may be pulled from: what pulls have taught about single blocks and about workers.

    published       both workers take part: what paused them is forgotten
    miss, length    it has no such block: not asked for it for a while (its events will say so)
    digest          its bytes were wrong: never asked for that block again, and after three blocks
                    never for anything, in this life
    no answer       unknown. The source rests, first a second, then twice as long each time
    refused         the destination could not, or was not let: it rests likewise

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

_OF_SOURCE = frozenset(
    {Reason.TIMEOUT, Reason.CONNECT, Reason.LOST, Reason.PROTOCOL, Reason.INCARNATION}
)
"""What a source does that cannot serve pulls."""
_NOBODYS = frozenset({Reason.CLIENT, Reason.CLOSING, Reason.GIVEN_UP, Reason.EPOCH})
"""What says nothing about further pulls. All else is the destination's: it would happen again."""


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
        if record.strikes >= MAX_STRIKES:
            return 0
        if not record.doubts:
            return held
        return next((i for i in range(held) if record.doubts.get(keys[i], now) > now), held)

    def rests(self, worker: WorkerId, now: Instant) -> bool:
        """Whether it is to take no part in pulls for a while."""
        record = self._records.get(worker)
        return record is not None and now < record.paused_until

    def published(self, source: WorkerId, destination: WorkerId) -> None:
        """A pull went well from its beginning to its end."""
        for worker in (source, destination):
            record = self._records.get(worker)
            if record is not None:
                record.pause_ms, record.paused_until = 0.0, -math.inf
                self._drop_if_clean(worker, record)

    def failed(
        self,
        source: WorkerId,
        destination: WorkerId,
        reason: Reason,
        key: BlockKey,
        now: Instant,
        *,
        is_of_source: bool = False,
    ) -> None:
        """A pull ended with this reason at this block, the first that did not arrive. The
        destination may have found out that it was the source's fault.
        """
        match reason.lesson:
            case Lesson.REMOVE:
                self.phantoms += 1
                self._doubt(source, key, now + MISS_MS, now)
            case Lesson.QUARANTINE:
                self.wrong_bytes += 1
                is_known = self.is_quarantined(source, key)
                self._doubt(source, key, math.inf, now).strikes += not is_known
            case Lesson.UNKNOWN if reason not in _NOBODYS:
                worker = source if is_of_source or reason in _OF_SOURCE else destination
                record = self._records.setdefault(worker, _Record())
                if now < record.paused_until:
                    return  # of several that failed at once, one counts
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

    @property
    def suspect_count(self) -> int:
        return sum(self.is_suspect(worker) for worker in self._records)

    def is_quarantined(self, worker: WorkerId, key: BlockKey) -> bool:
        """Whether its bytes of this block were wrong once."""
        record = self._records.get(worker)
        return record is not None and record.doubts.get(key) == math.inf

    def __len__(self) -> int:
        return len(self._records)

    def _doubt(self, worker: WorkerId, key: BlockKey, until: float, now: Instant) -> _Record:
        record = self._records.setdefault(worker, _Record())
        record.doubts[key] = max(until, record.doubts.pop(key, 0.0))
        if len(record.doubts) > MAX_DOUBTS:
            passing = [old for old, end in record.doubts.items() if end < math.inf]
            over = [old for old in passing if record.doubts[old] <= now]
            for old in over or passing[:1] or list(record.doubts)[:1]:
                del record.doubts[old]
        return record

    def _drop_if_clean(self, worker: WorkerId, record: _Record) -> None:
        if not (record.doubts or record.strikes):
            del self._records[worker]
