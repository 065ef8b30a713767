"""Reading the audit log for people: pages of records, and the check of the whole chain.

Works in small steps, as it shares its loop with the data plane, and looks at a bounded part of the
log for one page. Must never: write, or believe a line that it shows; `verify` is for that. Read
`core/audit.py` for what a line is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from trunkline.control.audit import AuditLog
from trunkline.core.audit import (
    Checkpoint,
    Fault,
    Head,
    IsSigned,
    Verification,
    read_head,
    read_record,
    verify,
)
from trunkline.errors import AuditDown, Busy
from trunkline.ports.audit import CheckpointKeeper, SinkDown

MAX_SCANNED = 5_000
"""Records that are looked at for one page."""

_BATCH = 500
_STEP = 50  # lines between two turns of the loop: under a millisecond

Record = Mapping[str, object]


class Unreadable(AuditDown):
    """A line of the log is no record any more: `verify` says so too, as its fault."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"audit record {seq} cannot be read; `trunkline audit verify` tells more")
        self.seq = seq


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """Records behind `after_seq`; None for the newest ones, at the end of what is looked at."""

    limit: int
    after_seq: int | None = None
    kind: str = ""
    from_ms: int | None = None
    to_ms: int | None = None

    def is_met(self, record: Record) -> bool:
        wall_ms = record.get("ts_wall")
        at_ms = wall_ms if isinstance(wall_ms, int) else 0
        is_in_time = (self.from_ms is None or at_ms >= self.from_ms) and (
            self.to_ms is None or at_ms < self.to_ms
        )
        return is_in_time and (not self.kind or record.get("kind") == self.kind)

    @property
    def is_filtered(self) -> bool:
        return bool(self.kind) or self.from_ms is not None or self.to_ms is not None


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

    def __init__(self, log: AuditLog, *, keeper: CheckpointKeeper, is_signed: IsSigned) -> None:
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

    async def verify(self, extra: Sequence[Checkpoint] = ()) -> Verification:
        """Check all there is up to now, against the checkpoint kept in the second place and those
        in `extra`. Raises AuditDown, Busy: one at a time.
        """
        if self._is_verifying:
            raise Busy("the audit log is being verified already; ask again when that has ended")
        self._is_verifying = True
        try:
            return await self._verify(extra)
        finally:
            self._is_verifying = False

    async def _verify(self, extra: Sequence[Checkpoint]) -> Verification:
        end = self._log.head
        checkpoints = [*extra, *await self._kept()]
        begin: Head | None = None
        head: Head | None = None
        met = 0
        try:
            async for lines in self._steps(0, end.seq):
                due = [c for c in checkpoints if c.head.seq <= _last_seq(lines)]
                checkpoints = [c for c in checkpoints if c not in due]
                step = verify(lines, checkpoints=due, is_signed=self._is_signed, start=head)
                begin, head = begin or step.start, step.head
                met += step.checkpoints
                if step.fault is not None:
                    return _verified(begin, head, met, step.fault)
        except Unreadable as error:
            fault = Fault(seq=error.seq, reason="the line is no record")
            return _verified(begin or Head(), head or Head(), met, fault)
        rest = verify((), checkpoints=checkpoints, is_signed=self._is_signed, start=head)
        fault = rest.fault or _fault_at_end(rest.head, end)
        return _verified(begin or Head(), rest.head, met + rest.checkpoints, fault)

    async def _kept(self) -> list[Checkpoint]:
        try:
            kept = await self._keeper.newest()
        except SinkDown:
            return []  # the log's own health tells of it
        return [] if kept is None else [kept]

    async def _records(self, after_seq: int, until_seq: int) -> AsyncGenerator[tuple[int, Record]]:
        async for lines in self._steps(after_seq, until_seq):
            for line in lines:
                record = read_record(line)
                seq = record.get("seq")
                assert isinstance(seq, int), "a line of our own log without a position"
                if seq <= until_seq:
                    yield seq, record

    async def _steps(self, after_seq: int, until_seq: int) -> AsyncGenerator[list[bytes]]:
        batch = _BATCH
        while after_seq < until_seq:
            try:
                lines = await self._log.read(after_seq, min(batch, until_seq - after_seq))
            except ValueError as error:  # one by one from here, to name the line
                if batch == 1:
                    raise Unreadable(after_seq + 1) from error
                batch = 1
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
