"""What waits at each worker, told between gateways: a hint, ten times a second.

Each sends the prefill time of what it has sent to each worker and has no first token of. What the
others said is added up in the worker's book, so that gateways predict the same queue. Lost or late
words cost time, never an answer: what is older than `FRESH_MS` counts no more. Must never: believe
a number without a bound, or let a word outlive its sender. Read `core/load.py` for the book.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec

from trunkline.core.fleet import Fleet
from trunkline.core.records import BootInstant, Instant, WorkerId
from trunkline.ports.board import Wire
from trunkline.ports.clock import Clock

BEAT_MS = 100.0
FRESH_MS = 500.0
"""Five beats: with as many lost, a gateway counts as having nothing sent."""
MAX_TOLD_WORKERS = 4_096
MAX_TELLERS = 64
"""Lives of other gateways; words of further ones are not taken."""
MAX_TOLD_MS = 600_000.0

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Ms = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_TOLD_MS)]


class _Word(msgspec.Struct, array_like=True):
    life: _Name
    queued: Annotated[dict[_Name, _Ms], msgspec.Meta(max_length=MAX_TOLD_WORKERS)]


class LoadSync:
    """Of one gateway. Give it a task for `run`."""

    def __init__(self, life: str, wire: Wire, clock: Clock) -> None:
        self._life = life
        self._wire = wire
        self._clock = clock
        self._fleets: Sequence[Fleet] = ()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Word)
        self._told: dict[str, tuple[BootInstant, dict[str, float]]] = {}
        """By teller: when it was heard, and what it said."""
        self._raised: set[WorkerId] = set()
        """Workers whose book has something of others in it."""
        self._had_work = False
        self.refused = 0
        """Words that made no sense, or came from too many."""
        wire.hear(self.take)

    async def run(self, fleets: Sequence[Fleet]) -> None:
        self._fleets = fleets
        while True:
            body = self.word(self._clock.now())
            if body is not None:
                await self._wire.send(body)
            self.settle(self._clock.boot())
            await asyncio.sleep(BEAT_MS / 1_000.0)

    def word(self, now: Instant) -> bytes | None:
        """What is to be told; None where there is nothing, and was nothing before."""
        queued: dict[str, float] = {}
        for fleet in self._fleets:
            for state in fleet.states():
                own_ms = state.queue.own_ms(now)
                if own_ms >= 1.0 and len(queued) < MAX_TOLD_WORKERS:
                    queued[state.worker] = min(round(own_ms, 1), MAX_TOLD_MS)
        had_work, self._had_work = self._had_work, bool(queued)
        if not queued and not had_work:
            return None
        return self._encoder.encode(_Word(life=self._life, queued=queued))

    def take(self, body: bytes) -> None:
        """What somebody said; in the books at once."""
        try:
            word = self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError):
            self.refused += 1
            return
        if word.life == self._life:
            return
        if word.life not in self._told and len(self._told) >= MAX_TELLERS:
            self.refused += 1
            return
        now = self._clock.boot()
        self._told[word.life] = (now, word.queued)
        self.settle(now)

    def settle(self, now: BootInstant) -> None:
        """Add up what is fresh, and forget the rest."""
        for life in [life for life, (at, _) in self._told.items() if now - at > FRESH_MS]:
            del self._told[life]
        if not self._told and not self._raised:
            return
        sums: dict[str, float] = {}
        for _, queued in self._told.values():
            for worker, queue_ms in queued.items():
                sums[worker] = sums.get(worker, 0.0) + queue_ms
        raised: set[WorkerId] = set()
        for fleet in self._fleets:
            for name in self._raised.union(map(WorkerId, sums)):
                state = fleet.get(name)
                if state is not None:
                    elsewhere_ms = sums.get(name, 0.0)
                    state.queue.told(elsewhere_ms)
                    if elsewhere_ms:
                        raised.add(name)
        self._raised = raised
