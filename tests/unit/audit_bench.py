"""An audit log over real folders, with sinks that can be made to fail, and what its tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from registry_bench import run

from hand_clock import HandClock
from trunkline.adapters.audit_files import CheckpointFile, FileSink, log_lines, read_checkpoints
from trunkline.adapters.signing import Ed25519Signer
from trunkline.control.audit import AuditLog, AuditOrigin
from trunkline.core.audit import AuditEvent, Head, Kind, Verification, read_record, verify
from trunkline.ports.audit import AuditSink, SinkDown

SIGNER = Ed25519Signer(bytes(range(32)))
ORIGIN = AuditOrigin(host="h", boot_id="b", audit_key=bytes(32))
SMALL = 10
"""Records between checkpoints, and in a segment."""


class WeakSink(FileSink):
    """A folder on a disk that fails when told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, segment_records=SMALL)
        self.is_down = False
        self.fails_after_write = False
        self.is_stuck = False
        """Whoever reads waits for ever."""
        self.gate: asyncio.Event | None = None
        """An append waits for it."""
        self.begun = asyncio.Event()

    async def open(self) -> Head:
        self._require_up()
        return await super().open()

    async def append(self, lines: Sequence[bytes], head: Head) -> None:
        self._require_up()
        self.begun.set()
        if self.gate is not None:
            await self.gate.wait()
        await super().append(lines, head)
        if self.fails_after_write:
            raise SinkDown("the sync failed")

    async def read(self, after_seq: int, limit: int) -> list[bytes]:
        self._require_up()
        if self.is_stuck:
            await asyncio.get_running_loop().create_future()
        return await super().read(after_seq, limit)

    def _require_up(self) -> None:
        if self.is_down:
            raise SinkDown("the disk is gone")


class AuditBench:
    """One process after the other over the same two folders and the same second place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = HandClock()
        self.copies = root / "elsewhere" / "checkpoints.jsonl"
        self.sinks: list[WeakSink] = []

    def folder(self, name: str) -> Path:
        return self.root / name

    def begin(self, *, max_pending: int = 100, timeout_s: float = 60.0) -> AuditLog:
        """The log of a new process."""
        self.sinks = [WeakSink(self.folder(name)) for name in ("a", "b")]
        sinks: list[AuditSink] = [*self.sinks]
        return AuditLog(
            sinks,
            signer=SIGNER,
            keeper=CheckpointFile(self.copies),
            clock=self.clock,
            origin=ORIGIN,
            checkpoint_records=SMALL,
            max_pending=max_pending,
            sink_timeout_s=timeout_s,
        )

    async def die(self) -> None:
        """The process ends without a word."""
        for sink in self.sinks:
            await sink.close()

    async def retry(self, audit: AuditLog) -> None:
        """A moment later."""
        self.clock.ms += 1_000.0
        await audit.tick()

    def records(self, name: str) -> list[dict[str, object]]:
        return [read_record(line) for line in log_lines(self.folder(name))]

    def actions(self, name: str) -> list[object]:
        """Without the checkpoints."""
        kept = [r for r in self.records(name) if r["kind"] != Kind.CHECKPOINT.value]
        return [r["action"] for r in kept]

    def verified(self, name: str) -> Verification:
        return verify(
            log_lines(self.folder(name)),
            checkpoints=read_checkpoints(self.copies),
            is_signed=SIGNER.is_signed,
        )


def login(number: int = 0) -> AuditEvent:
    return AuditEvent(kind=Kind.LOGIN, action=f"login.{number}")


Scenario = Callable[[AuditBench], Awaitable[None]]


def played(scenario: Scenario, root: Path) -> AuditBench:
    bench = AuditBench(root)

    async def play() -> None:
        try:
            await scenario(bench)
        finally:
            for sink in bench.sinks:
                sink._thread.shutdown()

    run(play())
    return bench
