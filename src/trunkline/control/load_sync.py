"""What gateways tell one another of the work at their workers: a hint, ten times a second.

Each sends the prefill time of what it has sent to each worker and has no first token of. What the
others said is added up in the worker's book, so that gateways predict the same queue. With it goes
which blocks it expects there by its choices since the last word. Lost or late words cost time,
never an answer: a queue that is older than `FRESH_MS` counts no more, blocks are expected as long
as by our own choices. Must never: believe a number without a bound, or let a queue outlive its
sender. Read `core/load.py` for the book, `core/hearsay.py` for the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec

from trunkline.core.fleet import Fleet
from trunkline.core.hearsay import MAX_SAID_BLOCKS, MAX_SAID_RUNS, NO_WORKER, Hearsay
from trunkline.core.identity import DIGEST_BYTES, TAG_BYTES
from trunkline.core.keys import KeyRun
from trunkline.core.records import BootInstant, Instant, NamespaceTag, WorkerId
from trunkline.ports.board import Wire
from trunkline.ports.clock import Clock

BEAT_MS = 100.0
FRESH_MS = 500.0
"""Five beats: with as many lost, a gateway counts as having nothing sent."""
MAX_TOLD_WORKERS = 4_096
MAX_TELLERS = 64
"""Lives of other gateways; words of further ones are not taken."""
MAX_TOLD_MS = 600_000.0
MAX_WORD_BYTES = 768 << 10
"""Below what NATS takes by default. Of a longer word the blocks are left out."""
MAX_HEARD_BYTES = 2 << 20
"""More than the longest word that makes sense, with all workers named at length."""
MAX_PACKED_BYTES = (MAX_SAID_BLOCKS + 1) * DIGEST_BYTES
MAX_TOLD_RUNS = 2 * MAX_SAID_RUNS
"""A choice tells of one run, or of two: what is public, and the rest."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Worker = Annotated[WorkerId, msgspec.Meta(min_length=1, max_length=256)]
_Ms = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_TOLD_MS)]


class _Told(msgspec.Struct, array_like=True):
    worker: _Worker
    tag: Annotated[NamespaceTag, msgspec.Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
    first_block: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    packed: Annotated[bytes, msgspec.Meta(max_length=MAX_PACKED_BYTES)]


class _Word(msgspec.Struct, array_like=True):
    life: _Name
    queued: Annotated[dict[_Worker, _Ms], msgspec.Meta(max_length=MAX_TOLD_WORKERS)]
    told: Annotated[list[_Told], msgspec.Meta(max_length=MAX_TOLD_RUNS)] = msgspec.field(
        default_factory=list[_Told]
    )
    """Nothing from gateways that are older than this field."""


class LoadSync:
    """Of one gateway. Give it a task for `run`."""

    def __init__(
        self, life: str, wire: Wire, clock: Clock, *, max_word_bytes: int = MAX_WORD_BYTES
    ) -> None:
        """`max_word_bytes`: what the wire carries."""
        self._life = life
        self._max_word_bytes = max_word_bytes
        self._wire = wire
        self._clock = clock
        self._fleets: Sequence[Fleet] = ()
        self._hearsay: Sequence[Hearsay] = ()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Word)
        self._told: dict[str, tuple[BootInstant, dict[WorkerId, float]]] = {}
        """By teller: when it was heard, and what it said."""
        self._raised: set[WorkerId] = set()
        """Workers whose book has something of others in it, if we know them."""
        self._had_work = False
        self.refused = 0
        """Words that made no sense, or came from too many."""
        self.left_out_blocks = 0
        """Of words that were too long with them."""
        self.strange_blocks = 0
        """Of workers that are not known here."""
        wire.hear(self.take)

    async def run(self, fleets: Sequence[Fleet], hearsay: Sequence[Hearsay]) -> None:
        self.attach(fleets, hearsay)
        while True:
            body = self.word(self._clock.now())
            if body is not None:
                await self._wire.send(body)
            self.settle(self._clock.boot())
            for one in self._hearsay:
                one.expire(self._clock.now())
            await asyncio.sleep(BEAT_MS / 1_000.0)

    def attach(self, fleets: Sequence[Fleet], hearsay: Sequence[Hearsay]) -> None:
        """What there is to tell of, and what is to know what others tell."""
        self._fleets, self._hearsay = fleets, hearsay
        self._add_up()

    def word(self, now: Instant) -> bytes | None:
        """What is to be told; None where there is nothing, and was nothing before."""
        queued: dict[WorkerId, float] = {}
        for fleet in self._fleets:
            for state in fleet.states():
                own_ms = state.queue.own_ms(now)
                if own_ms >= 1.0 and len(queued) < MAX_TOLD_WORKERS:
                    queued[state.worker] = min(round(own_ms, 1), MAX_TOLD_MS)
        drained = [told for one in self._hearsay for told in one.drained()]
        told = [
            _Told(worker, run.tag, run.first_block, run.packed)
            for worker, run in drained[:MAX_TOLD_RUNS]
        ]
        self.left_out_blocks += sum(run.block_count for _, run in drained[MAX_TOLD_RUNS:])
        had_work, self._had_work = self._had_work, bool(queued)
        if not queued and not had_work and not told:
            return None
        word = _Word(life=self._life, queued=queued, told=told[:MAX_TOLD_RUNS])
        body = self._encoder.encode(word)
        if len(body) > self._max_word_bytes:
            self.left_out_blocks += sum(run.block_count for _, run in drained[:MAX_TOLD_RUNS])
            word.told = []
            body = self._encoder.encode(word)
        return body

    def take(self, body: bytes) -> None:
        """What somebody said; in the books at once."""
        if len(body) > MAX_HEARD_BYTES:
            self.refused += 1
            return
        try:
            word = self._decoder.decode(body)
            runs = [KeyRun(told.tag, told.first_block, told.packed) for told in word.told]
        except (msgspec.DecodeError, RecursionError, ValueError):
            self.refused += 1
            return
        if word.life == self._life:
            return
        if word.life not in self._told and len(self._told) >= MAX_TELLERS:
            self.refused += 1
            return
        now = self._clock.boot()
        self._told[word.life] = (now, word.queued)
        self._forget_old(now)
        self._add_up()
        heard_at = self._clock.now()
        for told, run in zip(word.told, runs, strict=True):
            self._pass_on(told.worker, run, heard_at)

    def ends(self) -> list[tuple[str, int]]:
        """What became of the blocks that were to be told, and of those that were heard."""
        stats = [one.stats for one in self._hearsay]
        left_out = self.left_out_blocks + sum(one.left_out for one in stats)
        return [
            ("told", sum(one.said for one in stats) - self.left_out_blocks),
            ("left-out", left_out),
            ("taken", sum(one.taken for one in stats)),
            ("loose", sum(one.loose for one in stats)),
            ("stale", sum(one.stale for one in stats)),
            ("no-worker", self.strange_blocks),
        ]

    def _pass_on(self, worker: WorkerId, run: KeyRun, now: Instant) -> None:
        """To the model whose worker it is."""
        for one in self._hearsay:
            if one.hear(worker, run, now) is not NO_WORKER:
                return
        self.strange_blocks += run.block_count

    def settle(self, now: BootInstant) -> None:
        """What is not fresh any more goes out of the books."""
        if self._forget_old(now):
            self._add_up()

    def _forget_old(self, now: BootInstant) -> bool:
        """Whether there was any."""
        old = [life for life, (at, _) in self._told.items() if now - at > FRESH_MS]
        for life in old:
            del self._told[life]
        return bool(old)

    def _add_up(self) -> None:
        """What all have told, into the books."""
        if not self._told and not self._raised:
            return
        sums: dict[WorkerId, float] = {}
        for _, queued in self._told.values():
            if not sums:
                sums = queued.copy()
                continue
            for worker, queue_ms in queued.items():
                sums[worker] = sums.get(worker, 0.0) + queue_ms
        sums.update(dict.fromkeys(self._raised - sums.keys(), 0.0))
        for fleet in self._fleets:
            for name, elsewhere_ms in sums.items():
                state = fleet.get(name)
                if state is not None:
                    state.queue.told(elsewhere_ms)
        self._raised = {name for name, elsewhere_ms in sums.items() if elsewhere_ms}
