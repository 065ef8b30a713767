"""What this gateway knows of workers, told to a gateway that knows less; and the other way round.

A gateway that began a moment ago, or whose stream of a worker's events has a gap that the worker's
ring does not cover any more, asks the others at the registry. One that knows more stands still at
a batch, puts down all it knows as of that batch in slices between which the loop goes on, and goes
on itself; the pieces wait in bounded memory until they are fetched, or for half a minute. The one
that asked takes them in at the very same batch (`core/standstill.py`), and goes on with what it
heard meanwhile. Whatever goes wrong, it goes on with what it knew.

Must never: tell what it has a doubt of, or know a namespace by another's word alone. Read
`sibling_words.py` for the words.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from trunkline.control.sibling_words import (
    Ask,
    Fetch,
    Made,
    Offer,
    Piece,
    Seal,
    Take,
    ToldLineage,
    Word,
    heard,
    told,
)
from trunkline.core.directory import SWEEP_BLOCKS, Directory
from trunkline.core.epochs import EpochTable
from trunkline.core.feed import FeedState, WorkerFeed
from trunkline.core.handover import Lineage, Rows, Standing
from trunkline.core.records import Instant, NamespaceTag, WorkerId
from trunkline.core.repair import Pause
from trunkline.observe import EventLog
from trunkline.ports.board import Answer, Calls
from trunkline.ports.clock import Clock
from trunkline.ports.store import StoreDown

SLICE_ROWS = SWEEP_BLOCKS
"""Put down or taken in between two turns of the loop: about a millisecond."""
MAX_SNAPSHOT_BYTES = 96 << 20
"""Of all that waits to be fetched: 1.8 million blocks. More is not handed over."""
MAX_SNAPSHOTS = 2
SNAPSHOT_MS = 30_000.0
"""What was not fetched to its end by then is forgotten."""
MAX_LINEAGE_BYTES = 384 << 10
"""Of one piece. What is under the namespaces beyond it is not told."""
MAX_UNPLACED_A_PIECE = 32_768
MAX_ANSWERS = 8
"""Questions that are being answered at a time; further ones are not heard."""
MAX_AT_ONCE = 4
"""Workers of which all is taken in at a time."""
LOOK_S = 0.5
OFFER_S = 1.0
MODEST_S = 0.3
"""So much later offers who knows that it lacks the blocks of some namespace: a gateway that lacks
none is heard first."""
MADE_S = 5.0
PIECE_S = 2.0
REACH_S = 3.0
"""Until the batch has come here that the other gateway was at."""
POLL_S = 0.02
FIRST_PAUSE_MS, MOST_PAUSE_MS = 1_000.0, 60_000.0


class Names(Protocol):
    """The namespaces of one model."""

    def lineage(self, tag: NamespaceTag) -> Lineage | None: ...

    def take_in(self, told: Lineage, table: EpochTable) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What there is of one model."""

    directory: Directory
    names: Names
    feeds: dict[WorkerId, WorkerFeed]
    """Those of workers that have left are in it until somebody looks."""
    block_tokens: Callable[[WorkerId], int | None]

    def following(self) -> Iterator[tuple[WorkerId, WorkerFeed]]:
        for worker, feed in list(self.feeds.items()):
            if feed.state is FeedState.ENDED:
                del self.feeds[worker]
            else:
                yield worker, feed


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingParts:
    """What a gateway among others works with."""

    life: str
    calls: Calls
    seal: Seal
    clock: Clock
    log: EventLog
    begin: Callable[[Coroutine[Any, Any, None], str], object]
    """Begin a task of ours."""
    others: Callable[[], int]
    """How many other gateways there are."""
    table: Callable[[], EpochTable]
    draw: Callable[[int], bytes]
    """`draw(n)`: n unguessable bytes."""


@dataclass(slots=True, kw_only=True)
class HandoverStats:
    """For metrics, from the beginning of this life."""

    taken: int = 0
    taken_blocks: int = 0
    failed: int = 0
    told: int = 0
    told_blocks: int = 0


@dataclass(slots=True, kw_only=True)
class _Snapshot:
    made: Made
    frames: list[bytes]
    size_bytes: int
    ends_at: Instant


@dataclass(slots=True, kw_only=True)
class _Patience:
    pause: Pause = field(default_factory=lambda: Pause(FIRST_PAUSE_MS, MOST_PAUSE_MS))
    due_at: Instant = Instant(0.0)


class _Missed(Exception):
    """A handover came to nothing; why."""


class Siblings:
    """Of one gateway. Give it a task for `run`."""

    def __init__(self, parts: SiblingParts, sides: Sequence[Side]) -> None:
        self._parts = parts
        self._sides = sides
        self._snapshots: dict[str, _Snapshot] = {}
        self._answering = 0
        self._making = asyncio.Lock()
        self._patience: dict[WorkerFeed, _Patience] = {}
        self.stats = HandoverStats()
        parts.calls.answer(self._heard)

    async def run(self) -> None:
        """Until cancelled: ask for what is missing here."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._forget_old()
            due = self._due() if self._parts.others() else []
            async with asyncio.TaskGroup() as group:
                for side, worker, feed in due[:MAX_AT_ONCE]:
                    group.create_task(self._try_take(side, worker, feed))

    # -- taking ------------------------------------------------------------------------------------

    def _due(self) -> list[tuple[Side, WorkerId, WorkerFeed]]:
        now = self._parts.clock.now()
        due: list[tuple[Side, WorkerId, WorkerFeed]] = []
        waiting: dict[WorkerFeed, _Patience] = {}
        for side in self._sides:
            for worker, feed in side.following():
                if not feed.standstill.is_wanted():
                    continue
                patience = self._patience.get(feed) or _Patience()
                waiting[feed] = patience
                if feed.is_settled and now >= patience.due_at:
                    due.append((side, worker, feed))
        self._patience = waiting
        return sorted(due, key=lambda one: self._patience[one[2]].due_at)

    async def _try_take(self, side: Side, worker: WorkerId, feed: WorkerFeed) -> None:
        parts, patience = self._parts, self._patience[feed]
        began_at = parts.clock.now()
        token = feed.standstill.begin(began_at) if feed.is_settled else None
        if token is None:
            return
        try:
            block_count = await self._take(side, worker, feed, token)
        except (_Missed, StoreDown) as missed:
            self.stats.failed += 1
            parts.log.info("handover.missed", worker=worker, why=str(missed))
        except Exception as error:  # noqa: BLE001  # of one worker: it must not end the gateway
            self.stats.failed += 1
            parts.log.error("handover.failed", cause=error, worker=worker)
        else:
            self.stats.taken += 1
            self.stats.taken_blocks += block_count
            took_ms = parts.clock.now() - began_at
            parts.log.info("handover.taken", worker=worker, blocks=block_count, took_ms=took_ms)
        finally:
            feed.standstill.go_on(token)
            patience.due_at = Instant(parts.clock.now() + patience.pause.take())

    async def _take(self, side: Side, worker: WorkerId, feed: WorkerFeed, token: int) -> int:
        """How many blocks came. Raises _Missed, StoreDown."""
        here = feed.standstill.standing(token)
        block_tokens = side.block_tokens(worker)
        if here is None or block_tokens is None:
            raise _Missed("it has left")
        ask = Ask(
            life=self._parts.life,
            number=self._parts.draw(16).hex(),
            worker=worker,
            block_tokens=block_tokens,
            seq=here.seq,
            knows_since=here.base,
        )
        offer = await self._call(ask, OFFER_S)
        if not isinstance(offer, Offer):
            raise _Missed("no gateway offers what it knows")
        made = await self._call(Take(to=offer.life, ask=ask), MADE_S)
        if not isinstance(made, Made):
            raise _Missed("what was offered was not made")
        at = Standing(seq=made.seq, fingerprint=made.fingerprint, base=made.base)
        await self._reach(feed, token, at)
        block_count = 0
        for index in range(made.piece_count):
            piece = await self._call(Fetch(to=offer.life, number=ask.number, index=index), PIECE_S)
            if not isinstance(piece, Piece) or piece.index != index:
                raise _Missed(f"piece {index} of {made.piece_count} did not come")
            block_count += self._take_in(side, feed, token, piece, at)
        if not feed.standstill.complete(token, at):
            raise _Missed("more was heard of it than could wait")
        return block_count

    async def _reach(self, feed: WorkerFeed, token: int, at: Standing) -> None:
        """Go on to the batch that the other gateway was at."""
        ends_at = self._parts.clock.now() + REACH_S * 1_000.0
        if not feed.standstill.go_to(token, at.seq):
            raise _Missed("the other gateway knows less by now")
        while (here := feed.standstill.standing(token)) is None:
            if not feed.standstill.is_on(token) or self._parts.clock.now() >= ends_at:
                raise _Missed(f"batch {at.seq} did not come")
            await asyncio.sleep(POLL_S)
        if (here.seq, here.fingerprint) != (at.seq, at.fingerprint):
            raise _Missed("it is another life of the worker")

    def _take_in(self, side: Side, feed: WorkerFeed, token: int, piece: Piece, at: Standing) -> int:
        table = self._parts.table()
        for word in piece.lineages:
            lineage = heard(word)
            if lineage is not None:
                side.names.take_in(lineage, table)
        tags = tuple(NamespaceTag(tag) for tag in piece.tags)
        rows = Rows(packed=piece.packed, tags=tags)
        unplaced = array("Q", piece.unplaced[: len(piece.unplaced) // 8 * 8])
        try:
            is_in = feed.standstill.adopt(token, rows, unplaced, at)
        except ValueError as error:  # sealed by a gateway of ours that makes other rows
            raise _Missed(str(error)) from error
        if not is_in:
            raise _Missed("it does not agree with what is known here, or there is no room")
        return rows.count

    async def _call(self, word: Ask | Take | Fetch, wait_s: float) -> Word | None:
        """The answer to this very question; None for another. Raises StoreDown."""
        answer = self._parts.seal.open(
            await self._parts.calls.call(self._parts.seal.close(word), wait_s)
        )
        number = word.ask.number if isinstance(word, Take) else word.number
        if not isinstance(answer, Offer | Made | Piece) or answer.number != number:
            return None
        return answer

    # -- telling -----------------------------------------------------------------------------------

    def _heard(self, frame: bytes, answer: Answer) -> None:
        if self._answering >= MAX_ANSWERS:
            return  # who asked asks again, or somebody else
        word = self._parts.seal.open(frame)
        match word:
            case Ask() if word.life != self._parts.life:
                work = self._offer(word, answer)
            case Take() if word.to == self._parts.life:
                work = self._make(word.ask, answer)
            case Fetch() if word.to == self._parts.life:
                work = self._tell(word, answer)
            case _:
                return
        self._answering += 1
        self._parts.begin(self._answered(work), "an answer to a gateway")

    async def _answered(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # of one answer: it must not end the gateway
            self._parts.log.error("handover.failed", cause=error)
        finally:
            self._answering -= 1

    async def _offer(self, ask: Ask, answer: Answer) -> None:
        found = self._find(ask)
        if found is not None and found[1].standstill.lacks_namespaces:
            await asyncio.sleep(MODEST_S)
            found = self._find(ask)
        if found is not None and len(self._snapshots) < MAX_SNAPSHOTS:
            await answer(self._parts.seal.close(Offer(number=ask.number, life=self._parts.life)))

    def _find(self, ask: Ask) -> tuple[Side, WorkerFeed] | None:
        """What is known of the worker, if it is more than the other one knows, and sure."""
        worker = WorkerId(ask.worker)
        for side in self._sides:
            feed = side.feeds.get(worker)
            if feed is None or side.block_tokens(worker) != ask.block_tokens:
                continue
            since = feed.standstill.knows_since
            if feed.state is FeedState.LIVE and (since == 0 or since < ask.knows_since):
                return side, feed
        return None

    async def _make(self, ask: Ask, answer: Answer) -> None:
        async with self._making:
            found = self._find(ask)
            if found is None or len(self._snapshots) >= MAX_SNAPSHOTS:
                return
            side, feed = found
            token = await self._stood(feed, ask.seq)
            if token is None:
                return
            try:
                snapshot = await self._put_down(side, feed, token, ask)
            finally:
                feed.standstill.go_on(token)
        if snapshot is not None:
            self._snapshots[ask.number] = snapshot
            await answer(self._parts.seal.close(snapshot.made))

    async def _stood(self, feed: WorkerFeed, seq: int) -> int | None:
        """Stand still at this batch or a later one, with nothing in doubt."""
        ends_at = self._parts.clock.now() + OFFER_S * 1_000.0
        while self._parts.clock.now() < ends_at and feed.state is FeedState.LIVE:
            is_sure = feed.is_settled and not feed.parked_count
            token = feed.standstill.begin(self._parts.clock.now()) if is_sure else None
            if token is not None:
                at = feed.standstill.standing(token)
                if at is not None and at.seq >= seq:
                    return token
                feed.standstill.go_on(token)
            await asyncio.sleep(POLL_S)
        return None

    async def _put_down(
        self, side: Side, feed: WorkerFeed, token: int, ask: Ask
    ) -> _Snapshot | None:
        """None where the feed went on before all was put down, or where it is too much."""
        at = feed.standstill.standing(token)
        assert at is not None, "it stands still now"
        frames: list[bytes] = []
        size_bytes = sum(snapshot.size_bytes for snapshot in self._snapshots.values())
        before_bytes, block_count = size_bytes, 0
        for piece, row_count in self._pieces(side, feed, ask):
            frames.append(self._parts.seal.close(piece))
            size_bytes += len(frames[-1])
            block_count += row_count
            if size_bytes > MAX_SNAPSHOT_BYTES:
                return None
            await asyncio.sleep(0)
            if feed.standstill.standing(token) != at or feed.state is not FeedState.LIVE:
                return None
        made = Made(
            number=ask.number,
            seq=at.seq,
            fingerprint=at.fingerprint,
            base=at.base,
            piece_count=len(frames),
        )
        self.stats.told += 1
        self.stats.told_blocks += block_count
        ends_at = Instant(self._parts.clock.now() + SNAPSHOT_MS)
        return _Snapshot(
            made=made, frames=frames, size_bytes=size_bytes - before_bytes, ends_at=ends_at
        )

    def _pieces(self, side: Side, feed: WorkerFeed, ask: Ask) -> Iterator[tuple[Piece, int]]:
        """All that is known, slice by slice: each is taken when it is asked for."""
        index, start = 0, 0
        known: set[NamespaceTag] = set()
        unplaced = feed.standstill.unplaced()
        while start >= 0:
            rows = side.directory.export(feed.worker, start, SLICE_ROWS)
            start = rows.next_start
            lineages = self._lineages(side, rows, known)
            yield (
                Piece(
                    number=ask.number,
                    index=index,
                    packed=rows.packed,
                    tags=rows.tags,
                    lineages=lineages,
                ),
                rows.count,
            )
            index += 1
        for begin in range(0, len(unplaced), MAX_UNPLACED_A_PIECE):
            some = unplaced[begin : begin + MAX_UNPLACED_A_PIECE].tobytes()
            yield Piece(number=ask.number, index=index, unplaced=some), 0
            index += 1

    def _lineages(
        self, side: Side, rows: Rows, known: set[NamespaceTag]
    ) -> tuple[ToldLineage, ...]:
        words: list[ToldLineage] = []
        left_bytes = MAX_LINEAGE_BYTES
        for tag in rows.tags:
            lineage = side.names.lineage(tag) if tag and tag not in known else None
            if lineage is not None:
                word = told(lineage)
                left_bytes -= len(msgspec.msgpack.encode(word))
                words += [word] if left_bytes >= 0 else []
        known.update(rows.tags)
        return tuple(words)

    async def _tell(self, fetch: Fetch, answer: Answer) -> None:
        snapshot = self._snapshots.get(fetch.number)
        if snapshot is None or fetch.index >= len(snapshot.frames):
            return
        frame = snapshot.frames[fetch.index]
        if fetch.index == len(snapshot.frames) - 1:
            del self._snapshots[fetch.number]
        await answer(frame)

    def _forget_old(self) -> None:
        now = self._parts.clock.now()
        for number in [n for n, one in self._snapshots.items() if one.ends_at <= now]:
            del self._snapshots[number]
