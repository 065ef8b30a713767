"""Raises writers and kills them: run as a program by `test_kills.py`, never imported.

`kill_nursery.py store|sink FOLDER KILLS SEED` forks one child after the other. A child opens what
the last one left, checks that every record is what its position says, reports where it begins, and
appends until it is killed, acknowledging each record on a pipe. The parent holds what was
acknowledged against where the next child begins.
"""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from trunkline.adapters.audit_files import SegmentFiles
from trunkline.adapters.sqlite_store import SqliteLog
from trunkline.core.audit import AuditEvent, Checkpoint, Head, Kind, Stamp, read_record, seal

REPORT = struct.Struct("<Q")
STAMP = Stamp(wall_ms=0, boot_ms=0, boot_id="b", host="h")
SEGMENT_RECORDS = 40
PATIENCE_S = 30.0
Ack = Callable[[int], None]


def expected(number: int) -> bytes:
    """Records of all lengths, now and then over several pages."""
    return b"%d:" % number + bytes(9_000 if number % 50 == 0 else number * 37 % 500)


def write_store(folder: Path, ack: Ack) -> None:
    log = SqliteLog(folder / "registry.db")
    head = log.head()[0]
    assert log.high_water() == head, "a kill is no restored backup"
    for rev, record in log.read(max(0, head - 20), 20):
        assert record == expected(rev), rev
    ack(head)
    while True:
        head = log.append(head, expected(head + 1))
        ack(head)


def event(head: Head) -> AuditEvent:
    """What follows `head`."""
    number = head.seq + 1
    if number % SEGMENT_RECORDS == 0:
        proof = Checkpoint(head=head, wall_ms=0).proof()
        return AuditEvent(kind=Kind.CHECKPOINT, action="kill", rev=number, proof=proof)
    return AuditEvent(kind=Kind.LOGIN, action="kill", rev=number, reason="x" * (number * 7 % 500))


def write_sink(folder: Path, ack: Ack) -> None:
    files = SegmentFiles(folder / "audit", SEGMENT_RECORDS)
    head: Head = files.open()
    for line in files.read(max(0, head.seq - 20), 20):
        record = read_record(line)
        assert record["rev"] == record["seq"], record
    ack(head.seq)
    while True:
        line, head = seal(event(head), head, STAMP)
        files.append([line], head)
        ack(head.seq)


WRITERS: dict[str, Callable[[Path, Ack], None]] = {"store": write_store, "sink": write_sink}


def raise_and_kill(
    write: Callable[[Path, Ack], None], folder: Path, chance: random.Random
) -> list[int]:
    """One life. What it reported: first where it began, then what it acknowledged."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            write(folder, lambda number: _report(theirs, number))
        finally:
            os._exit(1)
    os.close(theirs)
    reports = [_read(ours)]
    reports.extend(_read(ours) for _ in range(chance.randrange(3)))
    # Some die between two records, some in the middle of one.
    select.select([], [], [], chance.random() * 0.002)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    while (rest := os.read(ours, REPORT.size)) != b"":
        reports.append(REPORT.unpack(rest)[0])
    os.close(ours)
    return reports


def _report(fd: int, number: int) -> None:
    os.write(fd, REPORT.pack(number))


def _read(fd: int) -> int:
    ready, _, _ = select.select([fd], [], [], PATIENCE_S)
    data = os.read(fd, REPORT.size) if ready else b""
    if len(data) != REPORT.size:
        raise SystemExit("a child could not open what the last one left")
    return int(REPORT.unpack(data)[0])


def main(what: str, folder: str, kills: str, seed: str) -> None:
    chance = random.Random(int(seed))
    acknowledged = 0
    unacknowledged = 0
    for life in range(int(kills)):
        begin, *acks = raise_and_kill(WRITERS[what], Path(folder), chance)
        if begin < acknowledged:
            raise SystemExit(f"life {life}: begins at {begin}, {acknowledged} was acknowledged")
        unacknowledged += begin - acknowledged
        assert acks == list(range(begin + 1, begin + 1 + len(acks)))
        acknowledged = acks[-1] if acks else begin
    sys.stdout.write(f"{acknowledged} {unacknowledged}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
