"""Reading the audit log for people: pages of records, and the check of the whole chain.

Works in small steps, as it shares its loop with the data plane, and looks at a bounded part of the
log for one page. Must never: write, or believe a line that it shows; `verify` is for that. Read
`core/audit.py` for what a line is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from trunkline.control.audit import WANTED_ACTION, AuditLog
from trunkline.control.sinks import SINK_TIMEOUT_S, Lane
from trunkline.core.audit import (
    Checkpoint,
    Fault,
    Head,
    IsSigned,
    Kind,
    Verification,
    read_head,
    read_record,
    verify,
)
from trunkline.errors import AuditDown, Busy
from trunkline.ports.audit import CheckpointKeeper, SinkDown, SinkStuck

MAX_SCANNED = 5_000
"""Records that are looked at for one page."""

MAX_KEPT = 10_000
"""Of the kept checkpoints so many, the last ones, are what a check is held against: a week."""

_NO_END = 2**53

_BATCH = 500
_STEP = 50  # lines between two turns of the loop: under a millisecond

Record = Mapping[str, object]


Read = Callable[[int, int], Awaitable[list[bytes]]]
"""`(after_seq, limit)` -> lines."""


class _Unreadable(Exception):
    """What stands at this position is no record."""

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCheck:
    """What the check of one sink found; None where the sink is out, for the reason given."""

    sink: str
    found: Verification | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """Records behind `after_seq`; None for the newest ones, at the end of what is looked at."""

    limit: int
    after_seq: int | None = None
    kind: str = ""
    from_ms: int | None = None
    to_ms: int | None = None
    subjects: frozenset[str] | None = None
    """Only records about these, as they stand under the audit key; None for all."""
    has_wanted: bool = True
    """Whether what was only wanted is among them: the record before a change that grants."""

    def is_met(self, record: Record) -> bool:
        wall_ms = record.get("ts_wall")
        at_ms = wall_ms if isinstance(wall_ms, int) else 0
        is_in_time = (self.from_ms is None or at_ms >= self.from_ms) and (
            self.to_ms is None or at_ms < self.to_ms
        )
        is_about_it = self.subjects is None or record.get("scope_path_hmac") in self.subjects
        is_only_wanted = record.get("kind") == Kind.INTENT.value and str(
            record.get("action")
        ).startswith(WANTED_ACTION)
        is_of_kind = not self.kind or record.get("kind") == self.kind
        return is_in_time and is_about_it and is_of_kind and (self.has_wanted or not is_only_wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Records in order, the first position that was looked at, and where to go on (None: the end
    of the log was reached).
    """

    records: Sequence[Record]
    scanned_from: int
    next_after: int | None


class AuditReader:
    """Of one log. `shown(record)` below is what of a record may be shown; None for nothing."""

    def __init__(
        self, log: AuditLog, *, keeper: CheckpointKeeper, is_signed: IsSigned, key_id: str = ""
    ) -> None:
        """With `key_id`, of the key that `is_signed` goes by, another one's signature is told from
        a forged one.
        """
        self._key_id = key_id
        self._log = log
        self._keeper = keeper
        self._is_signed = is_signed
        self._is_verifying = False

    async def page(self, query: AuditQuery, shown: Callable[[Record], Record | None]) -> AuditPage:
        """Raises AuditDown."""
        end_seq = self._log.head.seq
        if query.after_seq is None:
            return await self._newest(query, shown, end_seq)
        until_seq = min(end_seq, query.after_seq + MAX_SCANNED)
        found: list[Record] = []
        last_seq = query.after_seq
        async for seq, record in self._records(query.after_seq, until_seq):
            last_seq = seq
            view = shown(record) if query.is_met(record) else None
            if view is not None:
                found.append(view)
            if len(found) >= query.limit:
                break
        else:
            last_seq = until_seq
        return AuditPage(
            records=found,
            scanned_from=query.after_seq + 1,
            next_after=last_seq if last_seq < end_seq else None,
        )

    async def _newest(
        self, query: AuditQuery, shown: Callable[[Record], Record | None], end_seq: int
    ) -> AuditPage:
        after_seq = max(0, end_seq - MAX_SCANNED)
        found: deque[Record] = deque(maxlen=query.limit)
        async for _, record in self._records(after_seq, end_seq):
            view = shown(record) if query.is_met(record) else None
            if view is not None:
                found.append(view)
        return AuditPage(records=list(found), scanned_from=after_seq + 1, next_after=None)

    async def verify(self, extra: Sequence[Checkpoint] = ()) -> list[SinkCheck]:
        """Check all there is up to now, in each sink, against the checkpoints kept in the second
        place and those in `extra`. Raises AuditDown without any sink, Busy: one at a time.
        """
        if self._is_verifying:
            raise Busy("the audit log is being verified already; ask again when that has ended")
        self._is_verifying = True
        try:
            checkpoints = [*extra, *await self._kept()]
            checks = [await self._checked(lane, checkpoints) for lane in self._log.lanes]
        finally:
            self._is_verifying = False
        if all(check.found is None for check in checks):
            raise AuditDown(f"no audit sink can be read: {checks[0].why}")
        return checks

    async def _checked(self, lane: Lane, checkpoints: list[Checkpoint]) -> SinkCheck:
        name = lane.sink.name
        if not (lane.is_up or lane.is_disputed):
            return SinkCheck(sink=name, found=None, why=lane.error)
        try:
            return SinkCheck(sink=name, found=await self._verify(lane.look, checkpoints))
        except SinkStuck as error:
            return SinkCheck(sink=name, found=None, why=str(error))

    async def _verify(self, read: Read, checkpoints: list[Checkpoint]) -> Verification:
        # Where it is not known how far the log goes, each sink is read to its own end.
        end = self._log.head if self._log.is_established else None
        waiting = deque(sorted(checkpoints, key=lambda checkpoint: checkpoint.head.seq))
        begin: Head | None = None
        head: Head | None = None
        met = 0
        try:
            async for lines in _steps(read, 0, _NO_END if end is None else end.seq):
                last_seq, due = _last_seq(lines), list[Checkpoint]()
                while waiting and waiting[0].head.seq <= last_seq:
                    due.append(waiting.popleft())
                step = self._verified(lines, due, head)
                begin, head = begin or step.start, step.head
                met += step.checkpoints
                if step.fault is not None:
                    return _verified(begin, head, met, step.fault)
        except _Unreadable as error:
            fault = Fault(seq=error.seq, reason="the line is no record, or cannot be read")
            return _verified(begin or Head(), head or Head(), met, fault)
        rest = self._verified((), waiting, head)
        fault = rest.fault or (None if end is None else _fault_at_end(rest.head, end))
        return _verified(begin or Head(), rest.head, met + rest.checkpoints, fault)

    def _verified(
        self, lines: Sequence[bytes], checkpoints: Sequence[Checkpoint], start: Head | None
    ) -> Verification:
        return verify(
            lines,
            checkpoints=checkpoints,
            is_signed=self._is_signed,
            start=start,
            key_id=self._key_id,
        )

    async def _kept(self) -> list[Checkpoint]:
        try:
            async with asyncio.timeout(SINK_TIMEOUT_S):
                return await self._keeper.recent(MAX_KEPT)
        except (SinkDown, TimeoutError):
            return []  # the log's own health tells of it

    async def _records(self, after_seq: int, until_seq: int) -> AsyncGenerator[tuple[int, Record]]:
        async for lines in _steps(self._log.read, after_seq, until_seq):
            for line in lines:
                record = read_record(line)
                seq = record.get("seq")
                assert isinstance(seq, int), "a line of our own log without a position"
                if seq <= until_seq:
                    yield seq, record


async def _steps(read: Read, after_seq: int, until_seq: int) -> AsyncGenerator[list[bytes]]:
    """The lines behind a position, in small lists; the loop has a turn between two of them. Raises
    SinkStuck, which says nothing of any line.
    """
    batch = _BATCH
    while after_seq < until_seq:
        try:
            lines = await read(after_seq, min(batch, until_seq - after_seq))
        except SinkStuck:
            raise
        except (SinkDown, ValueError) as error:
            if batch == 1:
                raise _Unreadable(after_seq + 1) from error
            batch = 1  # one by one from here, to name the line
            continue
        if not lines:
            return
        for begin in range(0, len(lines), _STEP):
            yield lines[begin : begin + _STEP]
            await asyncio.sleep(0)
        after_seq = max(after_seq + 1, read_head(lines[-1]).seq)


def _last_seq(lines: Sequence[bytes]) -> int:
    return read_head(lines[-1]).seq


def _fault_at_end(found: Head, written: Head) -> Fault | None:
    """The log as it stands on the disk, against where this process wrote its last record."""
    if found.seq < written.seq:
        reason = f"the log ends here; it had reached {written.seq}"
        return Fault(seq=found.seq + 1, reason=reason)
    if found != written:
        return Fault(seq=found.seq, reason="the last record is not the one that was written")
    return None


def _verified(start: Head, head: Head, met: int, fault: Fault | None) -> Verification:
    return Verification(start=start, head=head, checkpoints=met, fault=fault)
