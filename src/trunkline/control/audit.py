"""The audit log of one process: records in a chain, kept by several sinks, with signed checkpoints.

`write` returns when at least one sink has the record on its disk, and raises AuditDown otherwise;
`note` is for what has happened anyway: it waits, in a bounded queue, for a sink to come back. Must
never: take an id of a tenant in clear, or text of a prompt. Read `ledger.py` next, for how the
registry and this log go together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trunkline.control.sinks import SINK_TIMEOUT_S, Disputed, Lane, Lanes
from trunkline.control.unbroken import unbroken
from trunkline.core.audit import (
    AuditEvent,
    Checkpoint,
    Head,
    Kind,
    Stamp,
    pseudonym,
    read_checkpoint,
    read_head,
    read_record,
    seal,
)
from trunkline.core.epochs import Subject
from trunkline.errors import AuditDown, Busy
from trunkline.ports.audit import AuditSink, CheckpointKeeper, Segment, Signer, SinkDown
from trunkline.ports.clock import Clock

CHECKPOINT_RECORDS = 1_000
CHECKPOINT_MS = 60_000.0
MAX_PENDING = 1_000
MAX_WAITING_WRITES = 1_024
_RECENT_CHECKPOINTS = 100
"""Of the kept ones, those of the newest position among so many decide which sink is gone on with.
"""
REGISTRY_ACTION = "registry."
"""How the action of the one record begins that stands for one revision of the registry."""
WANTED_ACTION = "wanted."
"""How the action of a record begins that is of what somebody is about to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOrigin:
    """Who writes. `audit_key` (32 to 64 bytes) hides ids; destroying it makes old records
    anonymous."""

    host: str
    boot_id: str
    audit_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHealth:
    """For operators."""

    sinks_up: int
    sinks: int
    pending: int
    dropped: int
    """Records that did not happen to be kept, as the queue was full."""
    checkpoint_failures: int
    trouble: str


class AuditLog:
    """Belongs to the event loop that made it. Its owner calls `tick` each second or so."""

    def __init__(
        self,
        sinks: Sequence[AuditSink],
        *,
        signer: Signer,
        keeper: CheckpointKeeper,
        clock: Clock,
        origin: AuditOrigin,
        checkpoint_records: int = CHECKPOINT_RECORDS,
        max_pending: int = MAX_PENDING,
        sink_timeout_s: float = SINK_TIMEOUT_S,
    ) -> None:
        self._lanes = Lanes(sinks, clock, timeout_s=sink_timeout_s)
        self._signer = signer
        self._keeper = keeper
        self._clock = clock
        self._origin = origin
        self._checkpoint_records = checkpoint_records
        self._pending: deque[AuditEvent] = deque()
        self._max_pending = max_pending
        self._dropped = 0
        self._dropped_unsaid = 0
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._is_established = False
        self._checkpoint_seq = 0
        self._checkpoint_at_ms = clock.now()
        self._refusal = ""
        """Why the log is not gone on with, and what to do; empty where it is."""
        self._unkept: Checkpoint | None = None
        """The newest checkpoint, where the second place does not have it yet."""
        self._checkpoint_failures = 0
        self._audited_rev = 0

    @property
    def audited_rev(self) -> int:
        """The registry's revision up to which there is a record for each change."""
        return self._audited_rev

    @property
    def head(self) -> Head:
        """Where the log ends, as far as is known."""
        return self._lanes.head or Head()

    @property
    def is_established(self) -> bool:
        """Whether it is known where the log ends."""
        return self._is_established

    @property
    def lanes(self) -> Sequence[Lane]:
        """Its sinks one by one, for `audit_reader.py` to look into."""
        return self._lanes.lanes

    def health(self) -> AuditHealth:
        return AuditHealth(
            sinks_up=self._lanes.up_count,
            sinks=len(self._lanes.lanes),
            pending=len(self._pending),
            dropped=self._dropped,
            checkpoint_failures=self._checkpoint_failures,
            trouble=self._refusal or self._lanes.why_down(),
        )

    def pseudonym(self, subject: Subject | str) -> str:
        """What stands in a record for a subject."""
        return pseudonym(self._origin.audit_key, str(subject))

    async def open(self) -> bool:
        """Find the end of the log; whether there is a sink. Without one, `tick` goes on trying."""
        async with self._lock:
            try:
                await unbroken(self._establish())
            except AuditDown:
                return False
            finally:
                self._lanes.tell()
            return True

    async def write(self, event: AuditEvent) -> Head:
        """Keep a record durably. Raises AuditDown where no sink can, Busy where too many wait."""
        if self._waiting >= MAX_WAITING_WRITES:
            raise Busy(f"{self._waiting} records wait for the audit log, at most that many may")
        self._waiting += 1
        try:
            async with self._lock:
                return await unbroken(self._write(event))
        finally:
            self._waiting -= 1
            self._lanes.tell()

    async def note(self, event: AuditEvent) -> bool:
        """Keep a record of what has happened anyway; whether it is durable already.

        Otherwise it waits for a sink. When the queue is full the newest is dropped and counted, and
        the log will say how many.
        """
        try:
            await self.write(event)
        except (AuditDown, Busy):
            if len(self._pending) >= self._max_pending:
                self._dropped += 1
                self._dropped_unsaid += 1
            else:
                self._pending.append(event)
            return False
        return True

    async def tick(self) -> None:
        """Bring sinks back, write what waits, and make a checkpoint when it is time."""
        async with self._lock:
            await unbroken(self._tick())
            self._lanes.tell()

    async def prune(self, cutoff_wall_ms: int, reason: str) -> int:
        """Remove closed segments whose last record is older; how many records went from each sink.

        The TOMBSTONE is durable before anything is removed, and the checkpoint at the end of what
        was removed stays in the second place. Raises AuditDown.
        """
        async with self._lock:
            return await unbroken(self._prune(cutoff_wall_ms, reason))

    async def read(self, after_seq: int, limit: int) -> list[bytes]:
        """Lines for showing. Raises AuditDown."""
        return await self._lanes.read(after_seq, limit)

    async def close(self) -> None:
        """With a last checkpoint, where a sink takes it."""
        async with self._lock:
            if self._is_established and self.head.seq > self._checkpoint_seq:
                await unbroken(self._tick(is_last=True))
            await self._lanes.close()

    async def _write(self, event: AuditEvent) -> Head:
        await self._establish()
        if self._lanes.up_count == 0:
            await self._lanes.revive()
        await self._flush()
        head = await self._append(event)
        if head.seq - self._checkpoint_seq >= self._checkpoint_records:
            await self._checkpoint()
        return head

    async def _append(self, event: AuditEvent) -> Head:
        line, head = seal(event, self.head, self._stamp())
        if not await self._lanes.append(line, head):
            raise AuditDown(f"no audit sink takes a record: {self._lanes.why_down()}")
        if event.rev > self._audited_rev and event.action.startswith(REGISTRY_ACTION):
            self._audited_rev = event.rev
        return head

    async def _flush(self) -> None:
        """What waited comes before what is new."""
        while self._lanes.asides:
            aside = self._lanes.asides[0]
            await self._append(
                AuditEvent(
                    kind=Kind.OUTCOME,
                    action="audit.diverged",
                    result=aside.sink,
                    reason=aside.why,
                )
            )
            self._lanes.asides.pop(0)
        while self._pending:
            await self._append(self._pending[0])
            self._pending.popleft()
        if self._dropped_unsaid:
            counts = {"records": self._dropped_unsaid}
            await self._append(AuditEvent(kind=Kind.OUTCOME, action="audit.dropped", counts=counts))
            self._dropped_unsaid = 0

    async def _tick(self, *, is_last: bool = False) -> None:
        try:
            await self._establish()
            await self._lanes.check()
            self._lanes.tell()
            await self._lanes.revive()
            await self._flush()
            is_time = self._clock.now() - self._checkpoint_at_ms >= CHECKPOINT_MS
            if self.head.seq > self._checkpoint_seq and (is_time or is_last):
                await self._checkpoint()
            elif self._unkept is not None:
                await self._keep(self._unkept)
        except AuditDown:
            return  # the lanes count it; `health` says why

    async def _establish(self) -> None:
        if self._is_established:
            return
        kept = await self._newest_kept()
        try:
            head = await self._lanes.establish(partial(self._dispute, kept or ()))
            was_refused, self._refusal = bool(self._refusal), ""
        except Disputed as error:
            self._refusal = self._remedy(error.reasons[0], kept or ())
            raise AuditDown(self._refusal) from error
        marks_count = await self._recall(head)
        self._is_established = True
        if kept is not None and not kept and (was_refused or marks_count > 1):
            # It was signed and nothing of that is kept (of one mark alone a crash may have cut off
            # the copy): whoever reads the log is to know.
            self._pending.appendleft(
                AuditEvent(kind=Kind.OUTCOME, action="audit.checkpoints_gone", actor="audit")
            )

    async def _newest_kept(self) -> list[Checkpoint] | None:
        """Our own of the newest position: several where two processes signed. None where they
        cannot be read.
        """
        try:
            kept = await self._keeper.recent(_RECENT_CHECKPOINTS)
        except SinkDown:
            self._checkpoint_failures += 1
            return None
        own = [checkpoint for checkpoint in kept if self._is_ours(checkpoint)]
        newest_seq = max((checkpoint.head.seq for checkpoint in own), default=0)
        return [checkpoint for checkpoint in own if checkpoint.head.seq == newest_seq]

    async def _dispute(self, kept: Sequence[Checkpoint], lane: Lane, head: Head) -> str:
        """A sink that is shorter than, or other than, what was signed is not gone on with."""
        if not kept or kept[0].head.seq == 0:
            return ""
        signed = kept[0].head
        if any(checkpoint.head != signed for checkpoint in kept):
            return f"two checkpoints of record {signed.seq} were signed that contradict one another"
        found = head
        if head.seq > signed.seq:
            lines = await lane.ask(lambda: lane.sink.read(signed.seq - 1, 1))
            found = read_head(lines[0]) if lines else Head()
        if found == signed:
            return ""
        return f"it ends at {head.seq} and is not what was signed at {signed.seq}"

    def _remedy(self, reason: str, kept: Sequence[Checkpoint]) -> str:
        """What an operator does about a log that the kept checkpoints contradict."""
        place, seq = self._keeper.name, kept[0].head.seq
        go_on = f"go on with the log as it is, without that proof: mv {place} {place}.disputed"
        if all(checkpoint.head == kept[0].head for checkpoint in kept):
            go_on = f"put a copy of the log back that has record {seq} as it was signed; or {go_on}"
        return f"the audit log is not gone on with: {reason}. Remedy: {go_on}. No restart is needed"

    async def _recall(self, head: Head) -> int:
        """From the end of the log: the last checkpoint, and up to where the registry is told of.
        How many checkpoints were seen.
        """
        window = 2 * self._checkpoint_records
        while True:
            begin = max(0, head.seq - window)
            records = await self._records(begin, head.seq)
            marks = [r for r in records if r.get("kind") == Kind.CHECKPOINT.value]
            if marks or begin == 0 or len(records) < head.seq - begin:
                break
            window *= 2
        if marks:
            checkpoint = read_checkpoint(marks[-1].get("proof"))
            self._checkpoint_seq = checkpoint.head.seq + 1
            self._audited_rev = checkpoint.rev
        for record in records:
            if str(record.get("action")).startswith(REGISTRY_ACTION):
                self._audited_rev = max(self._audited_rev, int(record.get("rev", 0)))
        return len(marks)

    async def _records(self, after_seq: int, until_seq: int) -> list[dict[str, Any]]:
        # Any: JSON of our own, checked where it is used
        found: list[dict[str, Any]] = []
        while after_seq < until_seq:
            lines = await self._lanes.read(after_seq, 500)
            if not lines:
                break
            found += [read_record(line) for line in lines]
            after_seq = read_head(lines[-1]).seq
        return found

    async def _checkpoint(self) -> None:
        """Sign the head in the log, and the log with that record in the second place."""
        signed = self._signed(self.head)
        event = AuditEvent(
            kind=Kind.CHECKPOINT, action="audit.checkpoint", actor="audit", proof=signed.proof()
        )
        head = await self._append(event)
        self._checkpoint_seq = head.seq
        self._checkpoint_at_ms = self._clock.now()
        await self._keep(self._signed(head))

    async def _keep(self, checkpoint: Checkpoint) -> None:
        self._unkept = checkpoint
        try:
            async with asyncio.timeout(SINK_TIMEOUT_S):
                await self._keeper.keep(checkpoint)
        except (SinkDown, TimeoutError):
            self._checkpoint_failures += 1  # the next tick tries again
            return
        self._unkept = None

    def _signed(self, head: Head) -> Checkpoint:
        checkpoint = Checkpoint(
            head=head,
            wall_ms=round(self._clock.wall() * 1_000),
            rev=self._audited_rev,
            key_id=self._signer.key_id,
        )
        return replace(checkpoint, signature=self._signer.sign(checkpoint.message()))

    def _is_ours(self, checkpoint: Checkpoint) -> bool:
        is_this_key = checkpoint.key_id == self._signer.key_id
        return is_this_key and self._signer.is_signed(checkpoint.message(), checkpoint.signature)

    async def _prune(self, cutoff_wall_ms: int, reason: str) -> int:
        await self._establish()
        doomed = [(lane, s) for lane, s in await self._old_segments(cutoff_wall_ms)]
        if not doomed:
            return 0
        last = max((segment.last for _, segment in doomed), key=lambda head: head.seq)
        first_seq = min(segment.first_seq for _, segment in doomed)
        # The anchor of verification from here on; the end of a segment is a checkpoint's record.
        await self._keep(self._signed(last))
        if self._unkept is not None:
            raise AuditDown("the second place of checkpoints cannot be written")
        proof = {
            "first_seq": str(first_seq),
            "last_seq": str(last.seq),
            "hash": last.hash.hex(),
        }
        await self._append(
            AuditEvent(
                kind=Kind.TOMBSTONE,
                action="audit.prune",
                actor="audit",
                reason=reason,
                counts={"records": last.seq - first_seq + 1},
                proof=proof,
            )
        )
        for lane, segment in doomed:
            try:
                await lane.ask(lambda lane=lane, segment=segment: lane.sink.drop_segment(segment))
            except SinkDown as error:
                raise AuditDown(str(error)) from error
        return last.seq - first_seq + 1

    async def _old_segments(self, cutoff_wall_ms: int) -> list[tuple[Any, Segment]]:
        # Any: a lane, which only `sinks.py` needs to name
        found: list[tuple[Any, Segment]] = []
        for lane in self._lanes.lanes:
            if not lane.is_up:
                continue
            try:
                segments = await lane.ask(lane.sink.closed_segments)
            except SinkDown as error:
                raise AuditDown(str(error)) from error
            for segment in segments:
                if segment.last_wall_ms >= cutoff_wall_ms:
                    break
                found.append((lane, segment))
        return found

    def _stamp(self) -> Stamp:
        return Stamp(
            wall_ms=round(self._clock.wall() * 1_000),
            boot_ms=round(self._clock.boot()),
            boot_id=self._origin.boot_id,
            host=self._origin.host,
        )
