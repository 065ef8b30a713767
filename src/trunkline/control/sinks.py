"""The sinks of the audit log side by side: each as far as it is up, and brought level again.

A sink that fails is taken out, tried again at most once a retry interval, rewound to what it
acknowledged, and given what it missed from a sink that has it. One whose chain is another one, or
broken, is set aside as evidence and filled anew from one that is sound. Must never: wait for a
stuck disk longer than the time-out. Read `audit.py` next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trunkline.core.audit import Head, read_head, read_previous
from trunkline.errors import AuditDown
from trunkline.observe import EventLog
from trunkline.ports.audit import AuditSink, SinkBroken, SinkDown, SinkStuck
from trunkline.ports.clock import Clock

SINK_TIMEOUT_S = 2.0
RETRY_MS = 1_000.0
RECENT_LINES = 1_000
"""Kept in memory, to bring a sink level while the other one is gone."""
FILL_BATCH = 500

_T = TypeVar("_T")


class Disputed(AuditDown):
    """Every sink that can be opened is contradicted; `reasons` has why, sink by sink."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """What a sink had was moved away as evidence."""

    sink: str
    why: str


class Lane:
    """One sink, and what is known of it."""

    def __init__(self, sink: AuditSink, timeout_s: float, log: EventLog) -> None:
        self.sink = sink
        self.is_up = False
        self.is_broken = False
        """What it holds is no chain, as of when it was last opened."""
        self.is_disputed = False
        """It can be read, but not gone on with: signed checkpoints say otherwise."""
        self.acked: Head | None = None
        """The end of its chain, by its own word; None before it was ever open."""
        self.error = "not opened yet"
        self.failures = 0
        self._timeout_s = timeout_s
        self._log = log
        self._is_said_out = False
        self._stuck: asyncio.Future[Any] | None = None  # Any: of whatever call it was
        """A call that never came back. Nothing else is asked of the sink before it does."""

    def tell(self) -> None:
        """Say, once each, that the sink is out, and that it is back."""
        if not self.is_up and not self._is_said_out:
            self._log.warning("audit.sink_out", sink=self.sink.name, why=self.error)
        elif self.is_up and self._is_said_out:
            self._log.warning("audit.sink_back", sink=self.sink.name)
        self._is_said_out = not self.is_up

    def tell_aside(self, why: str) -> None:
        self._log.warning(
            "audit.set_aside", sink=self.sink.name, why=why, remedy="look at its folder diverged-N"
        )

    async def ask(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """One call to the sink, within the time-out. Raises SinkDown, and takes the lane out."""
        try:
            return await self._within_time(call)
        except SinkDown as error:
            self.is_up = False
            self.is_broken = isinstance(error, SinkBroken)
            self.failures += 1
            self.error = str(error)
            raise

    async def look(self, after_seq: int, limit: int) -> list[bytes]:
        """Lines for a check, which says nothing of the lane: the log goes on with it. Raises
        SinkDown.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self.sink.read(after_seq, limit)
        except TimeoutError as error:
            raise self._too_late() from error

    def _too_late(self) -> SinkStuck:
        return SinkStuck(f"{self.sink.name} did not answer within {self._timeout_s} s")

    async def _within_time(self, call: Callable[[], Awaitable[_T]]) -> _T:
        if self._stuck is not None:
            if not self._stuck.done():
                raise SinkDown(f"{self.sink.name} has not answered for a while")
            self._stuck.exception()
            self._stuck = None
        task = asyncio.ensure_future(call())
        done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        if not done:
            self._stuck = task
            raise self._too_late()
        return task.result()


Dispute = Callable[[Lane, Head], Awaitable[str]]
"""Why a sink that ends at this head is not to be gone on with; empty where it is. May raise
SinkDown.
"""


async def _undisputed(_lane: Lane, _head: Head) -> str:
    return ""


class Lanes:
    """All sinks of one log, the first being the one that is read first."""

    def __init__(
        self, sinks: Sequence[AuditSink], clock: Clock, *, timeout_s: float = SINK_TIMEOUT_S
    ) -> None:
        assert sinks
        # A logger each: the same event of two sinks at once is two.
        self.lanes = [
            Lane(sink, timeout_s, EventLog(f"trunkline.audit.{number}"))
            for number, sink in enumerate(sinks)
        ]
        self.head: Head | None = None
        """Where the log ends; None until a sink has said so."""
        self.asides: list[Aside] = []
        """What was set aside and is not in the log yet."""
        self._clock = clock
        self._retry_at_ms = -RETRY_MS
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=RECENT_LINES)

    @property
    def up_count(self) -> int:
        return sum(lane.is_up for lane in self.lanes)

    def why_down(self) -> str:
        return "; ".join(f"{lane.sink.name}: {lane.error}" for lane in self.lanes if not lane.is_up)

    def tell(self) -> None:
        for lane in self.lanes:
            lane.tell()

    async def establish(self, dispute: Dispute = _undisputed) -> Head:
        """Open what can be opened; the longest chain that nothing contradicts is the log. Raises
        AuditDown without any, Disputed where each is contradicted.
        """
        if self.head is not None:
            return self.head
        heads = [(await self._opened(lane), lane) for lane in self.lanes]
        self.head = await self._longest(heads, dispute)
        for head, lane in heads:
            lane.is_up = head == self.head
        for head, lane in heads:
            if not lane.is_up and (head is not None or lane.is_broken):
                await self._level(lane, head)
        return self.head

    async def _longest(self, heads: Sequence[tuple[Head | None, Lane]], dispute: Dispute) -> Head:
        """Where the longest chain ends of those that nothing contradicts."""
        reasons: list[str] = []
        opened = [(head, lane) for head, lane in heads if head is not None]
        for head, lane in sorted(opened, key=lambda each: -each[0].seq):
            try:
                why = await dispute(lane, head)
            except SinkDown:
                continue  # counted in the lane
            lane.is_disputed = bool(why)
            if not why:
                return head
            lane.error = why
            lane.acked = None  # whatever is put there instead is not this process's to cut
            reasons.append(f"{lane.sink.name}: {why}")
        if reasons:
            raise Disputed(reasons)
        raise AuditDown(f"no audit sink can be opened: {self.why_down()}")

    async def append(self, line: bytes, head: Head) -> bool:
        """One more line for every sink that is up; whether at least one keeps it."""
        assert self.head is not None
        up = [lane for lane in self.lanes if lane.is_up]
        kept = await asyncio.gather(*(self._kept(lane, line, head) for lane in up))
        if not any(kept):
            return False
        self.head = head
        self._recent.append((head.seq, line))
        return True

    async def revive(self, *, is_forced: bool = False) -> None:
        """Try the sinks that are out, at most once a retry interval."""
        now = self._clock.now()
        is_due = is_forced or now - self._retry_at_ms >= RETRY_MS
        if not is_due or self.up_count == len(self.lanes):
            return
        self._retry_at_ms = now
        for lane in self.lanes:
            if lane.is_up:
                continue
            head = await self._opened(lane)
            if head is not None or lane.is_broken:
                await self._level(lane, head)

    async def check(self) -> None:
        """Take out those whose place is gone, also where nothing is written."""
        for lane in self.lanes:
            if lane.is_up:
                try:
                    await lane.ask(lane.sink.check)
                except SinkDown:
                    continue  # counted in the lane, which is out now

    async def read(self, after_seq: int, limit: int) -> list[bytes]:
        """From the first sink that can. Raises AuditDown."""
        for lane in self.lanes:
            if not lane.is_up:
                continue
            try:
                return await lane.ask(lambda lane=lane: lane.sink.read(after_seq, limit))
            except SinkDown:
                continue  # counted in the lane; the next one may know
        raise AuditDown(f"no audit sink can be read: {self.why_down()}")

    async def _kept(self, lane: Lane, line: bytes, head: Head) -> bool:
        try:
            await lane.ask(lambda: lane.sink.append([line], head))
        except SinkDown:
            return False
        lane.acked = head
        return True

    async def _opened(self, lane: Lane) -> Head | None:
        """Where the sink's chain ends, after what it never acknowledged was taken away."""
        acked = lane.acked
        try:
            head = await lane.ask(lane.sink.open)
            if acked is not None and head.seq > acked.seq:
                await lane.ask(lambda: lane.sink.rewind(acked))
                head = acked
        except SinkDown:
            return None
        lane.is_broken = lane.is_disputed = False
        lane.acked = head
        return head

    async def _level(self, lane: Lane, head: Head | None) -> None:
        """Give a sink what it missed (None: it is broken, and misses all); then it is up again."""
        assert self.head is not None
        why = lane.error if head is None or lane.is_disputed else "it has another chain"
        try:
            if head is None or not await self._is_on_chain(head):
                head = await lane.ask(lane.sink.set_aside)
                self.asides.append(Aside(sink=lane.sink.name, why=why))
                lane.tell_aside(why)
                lane.is_broken = False
            while head.seq < self.head.seq:
                lines = await self._missed(head.seq)
                end = read_head(lines[-1])
                await lane.ask(lambda lines=lines, end=end: lane.sink.append(lines, end))
                head = end
        except (SinkDown, AuditDown) as error:
            lane.error = str(error)
            return
        lane.acked = head
        lane.is_disputed = False
        lane.is_up = head == self.head

    async def _is_on_chain(self, head: Head) -> bool:
        assert self.head is not None
        if head.seq == 0 or head == self.head:
            return True
        if head.seq >= self.head.seq:
            return False
        return read_previous((await self._missed(head.seq))[0]) == head

    async def _missed(self, after_seq: int) -> list[bytes]:
        """Lines behind a position, at least one."""
        if self._recent and self._recent[0][0] <= after_seq + 1:
            return [line for seq, line in self._recent if seq > after_seq][:FILL_BATCH]
        lines = await self.read(after_seq, FILL_BATCH)
        if not lines:
            raise AuditDown(f"nobody has what follows record {after_seq} of the audit log")
        return lines

    async def close(self) -> None:
        for lane in self.lanes:
            try:
                await lane.ask(lane.sink.close)
            except SinkDown:
                continue  # it is being left behind anyway
