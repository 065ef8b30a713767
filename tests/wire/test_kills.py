"""Writers of the registry's log and of the audit log are killed 1,000 times each, in mid-append.

Real processes and SIGKILL: what the kernel was given stays, what it was not is gone. The caches of
a disk are not tested by this; against them stand the syncs before each acknowledgement.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trunkline.adapters.audit_files import SegmentFiles, log_lines, segment_paths
from trunkline.adapters.sqlite_store import SqliteLog
from trunkline.core.audit import AuditEvent, Head, Kind, Stamp, seal, verify

NURSERY = Path(__file__).with_name("kill_nursery.py")
KILLS = 1_000
STAMP = Stamp(wall_ms=0, boot_ms=0, boot_id="b", host="h")


def nursed(what: str, folder: Path) -> tuple[int, int]:
    """How many records were acknowledged in the end, and how many more were found than that."""
    end = subprocess.run(
        [sys.executable, str(NURSERY), what, str(folder), str(KILLS), "1"],
        capture_output=True,
        check=False,
        timeout=280,
    )
    assert end.returncode == 0, end.stderr.decode()[-2_000:]
    acknowledged, unacknowledged = end.stdout.split()
    return int(acknowledged), int(unacknowledged)


@pytest.mark.slow
def test_no_acknowledged_change_is_lost_over_1000_kills(tmp_path: Path) -> None:
    acknowledged, _ = nursed("store", tmp_path)
    assert acknowledged > KILLS
    log = SqliteLog(tmp_path / "registry.db")
    assert log.head()[0] >= acknowledged
    log.close()


@pytest.mark.slow
def test_no_acknowledged_audit_record_is_lost_over_1000_kills(tmp_path: Path) -> None:
    acknowledged, _ = nursed("sink", tmp_path)
    assert acknowledged > KILLS
    report = verify(log_lines(tmp_path / "audit"))
    assert report.fault is None
    assert report.head.seq >= acknowledged
    files = SegmentFiles(tmp_path / "audit")
    assert files.open().seq >= acknowledged
    files.close()


def a_line(head: Head, number: int) -> tuple[bytes, Head]:
    return seal(AuditEvent(kind=Kind.LOGIN, action=f"n{number}"), head, STAMP)


def test_a_write_that_was_cut_off_at_any_byte_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path)
    head = files.open()
    heads = [head]
    for number in range(3):
        line, head = a_line(head, number)
        files.append([line], head)
        heads.append(head)
    files.close()
    path = segment_paths(tmp_path)[0]
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [*range(0, ends[1], 9), *range(ends[1], ends[2] + 1)]:
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:cut])
        files = SegmentFiles(tmp_path)
        complete = sum(end <= cut for end in ends)
        assert files.open() == heads[complete], cut
        line, after = a_line(heads[complete], 9)
        if cut % 5 == 0:
            files.append([line], after)
            assert verify(log_lines(tmp_path)).head == after, cut
        files.close()


LIMITED = """
import resource, signal, sys
from pathlib import Path
from trunkline.adapters.audit_files import SegmentFiles
from trunkline.core.audit import AuditEvent, Kind, Stamp, seal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
files, stamp = SegmentFiles(Path(sys.argv[1])), Stamp(wall_ms=0, boot_ms=0, boot_id="b", host="h")
head = files.open()
try:
    while True:
        line, after = seal(AuditEvent(kind=Kind.LOGIN, action="n"), head, stamp)
        files.append([line], after)
        head = after
except OSError as error:
    files.rewind(head)
    assert files.open() == head
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    files.append([line], after)
    print(after.seq, error.strerror)
"""


@pytest.mark.parametrize("limit_bytes", [400, 1_000, 5_000, 20_001])
def test_a_file_that_may_not_grow_refuses_and_goes_on_when_it_may(
    tmp_path: Path, limit_bytes: int
) -> None:
    end = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(limit_bytes)],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert end.returncode == 0, end.stderr.decode()
    seq, words = end.stdout.decode().split(maxsplit=1)
    assert words.strip() == "File too large"
    report = verify(log_lines(tmp_path))
    assert (report.fault, report.head.seq) == (None, int(seq))
