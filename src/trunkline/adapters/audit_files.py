"""The audit log in files: one line a record, in segments that are closed and then only read.

A segment is `audit-<first position>.jsonl`. A new line counts once it is on the disk. What stands
behind the last whole line at opening is a write that was cut off, never acknowledged, and is
dropped; a whole line that does not fit the chain is left as it is: the folder is broken, until all
of it was set aside. A folder or a file of it that is removed or replaced meanwhile is no longer
ours. Must never: change a line that was acknowledged. Read `ports/audit.py` for the contract.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from trunkline.adapters.durable import sync_directory
from trunkline.core.audit import (
    MAX_LINE_BYTES,
    Checkpoint,
    Fault,
    Head,
    follow,
    read_checkpoint,
    read_head,
    read_previous,
    read_record,
)
from trunkline.ports.audit import Segment, SinkBroken, SinkDown

SEGMENT_RECORDS = 10_000
MAX_ASIDE = 8
"""Folders of evidence in one sink. With that many something is wrong that a ninth would not mend.
"""
_PREFIX = "audit-"
_SUFFIX = ".jsonl"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSegment:
    """A closed segment."""

    path: Path
    first_seq: int
    last: Head
    last_wall_ms: int


class FileSink:
    """`ports.audit.AuditSink` over a folder."""

    def __init__(self, directory: Path, *, segment_records: int = SEGMENT_RECORDS) -> None:
        self.name = str(directory)
        self._files = SegmentFiles(directory, segment_records)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit-sink")

    async def open(self) -> Head:
        return await self._on_thread(self._files.open)

    async def append(self, lines: Sequence[bytes], head: Head) -> None:
        await self._on_thread(lambda: self._files.append(lines, head))

    async def rewind(self, head: Head) -> None:
        await self._on_thread(lambda: self._files.rewind(head))

    async def read(self, after_seq: int, limit: int) -> list[bytes]:
        return await self._on_thread(lambda: self._files.read(after_seq, limit))

    async def closed_segments(self) -> list[Segment]:
        return await self._on_thread(lambda: list(self._files.closed_segments()))

    async def drop_segment(self, segment: Segment) -> None:
        await self._on_thread(lambda: self._files.drop_segment(segment))

    async def set_aside(self) -> Head:
        return await self._on_thread(self._files.set_aside)

    async def check(self) -> None:
        await self._on_thread(self._files.check)

    async def close(self) -> None:
        await self._on_thread(self._files.close)
        self._thread.shutdown(wait=False)

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise SinkDown(f"{self.name}: {error.strerror or error}") from error
        except ValueError as error:  # what should be a record of ours is none
            raise SinkBroken(f"{self.name}: {error}") from error
        except RuntimeError as error:  # the thread is gone
            raise SinkDown(f"{self.name} is closed") from error


class SegmentFiles:
    """The folder itself. Blocking, and for one thread."""

    def __init__(self, directory: Path, segment_records: int = SEGMENT_RECORDS) -> None:
        self._directory = directory
        self._segment_records = segment_records
        self._lock_fd = -1
        self._fd = -1
        """The segment that is written to; -1 where the next line begins one."""
        self._path = directory
        self._lines: list[int] = []
        """Where each line of the open segment ends, in bytes."""
        self._first_seq = 1
        self._head = Head()

    def open(self) -> Head:
        """Take the folder, and find the end of the chain."""
        self._close_segment()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._lock_fd >= 0 and not _is_at(self._lock_path, self._lock_fd):
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self._lock_fd < 0:
            self._lock_fd = _take_lock(self._lock_path)
        self._head = Head()
        self._lines = []
        segments = segment_paths(self._directory)
        if segments:
            self._resume(segments)
        return self._head

    def append(self, lines: Sequence[bytes], head: Head) -> None:
        """Add lines that end at `head`; on the disk when it returns."""
        assert head.seq > self._head.seq
        self.check()
        if self._fd < 0:
            self._begin_segment(read_head(lines[0]).seq)
        _write_all(self._fd, b"".join(line + b"\n" for line in lines))
        os.fdatasync(self._fd)
        end = self._lines[-1] if self._lines else 0
        for line in lines:
            end += len(line) + 1
            self._lines.append(end)
        self._head = head
        is_closable = b'"kind":"CHECKPOINT"' in lines[-1][:MAX_LINE_BYTES]
        if is_closable and len(self._lines) >= self._segment_records:
            self._finish_segment()

    def rewind(self, head: Head) -> None:
        """Cut off what was written and never acknowledged."""
        found = self.open()
        if found == head:
            return
        if head.seq == 0 and len(segment_paths(self._directory)) == 1 and self._first_seq == 1:
            self._cut(0, head)
            return
        index = head.seq - self._first_seq
        if not 0 <= index < len(self._lines):
            raise SinkDown(f"{self.name_of_place}: position {head.seq} is not in its last segment")
        line = _line_at(self._path, self._lines, index)
        if read_head(line) != head:
            raise SinkBroken(f"{self.name_of_place} holds another record {head.seq}")
        self._cut(index + 1, head)

    def check(self) -> None:
        """That lock and segment are those that were opened. Raises SinkDown."""
        held = [(self._lock_path, self._lock_fd), (self._path, self._fd)]
        for path, fd in held:
            if fd >= 0 and not _is_at(path, fd):
                raise SinkDown(f"{path} was removed or replaced")

    @property
    def _lock_path(self) -> Path:
        return self._directory / "lock"

    @property
    def name_of_place(self) -> str:
        return str(self._directory)

    def read(self, after_seq: int, limit: int) -> list[bytes]:
        found: list[bytes] = []
        for line in log_lines(self._directory, after_seq):
            seq = read_head(line).seq  # a line that is none is told of, and not given
            if after_seq < seq <= self._head.seq:
                found.append(line)
            if len(found) >= limit or seq >= self._head.seq:
                break
        return found

    def closed_segments(self) -> Iterator[FileSegment]:
        for path in segment_paths(self._directory):
            if self._fd >= 0 and path == self._path:
                continue
            line = b""
            for line in lines_of(path):  # noqa: B007  # the last one is wanted
                pass
            wall_ms = read_record(line).get("ts_wall")
            assert isinstance(wall_ms, int)
            yield FileSegment(
                path=path,
                first_seq=_first_seq(path),
                last=read_head(line),
                last_wall_ms=wall_ms,
            )

    def drop_segment(self, segment: Segment) -> None:
        path = self._directory / _file_name(segment.first_seq)
        assert path != self._path or self._fd < 0
        path.unlink(missing_ok=True)
        sync_directory(self._directory)

    def set_aside(self) -> Head:
        """Keep what is here as evidence, out of the way."""
        self._close_segment()
        number = 1
        while (aside := self._directory / f"diverged-{number}").exists():
            number += 1
        if number > MAX_ASIDE:
            raise SinkDown(
                f"{self._directory} was set aside {MAX_ASIDE} times: look why, and move its folders"
                " diverged-* away"
            )
        aside.mkdir(mode=0o700)
        # The newest first: what a crash leaves behind is the beginning of a chain.
        for path in reversed(segment_paths(self._directory)):
            path.rename(aside / path.name)
        sync_directory(self._directory)
        return self.open()

    def close(self) -> None:
        self._close_segment()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _resume(self, segments: list[Path]) -> None:
        """Go on in the last segment, or behind it where it was closed."""
        path = segments[-1]
        head = Head()
        end = 0
        for line in lines_of(path):
            before = _beginning(path, line) if end == 0 else head
            after = follow(before, line)
            if isinstance(after, Fault):
                raise SinkBroken(f"{path}: position {after.seq}: {after.reason}")
            head = after
            end += len(line) + 1
            self._lines.append(end)
        self._path = path
        self._head = head
        self._first_seq = _first_seq(path)
        if not self._lines:
            self._drop_empty(segments)
        elif os.stat(path).st_mode & 0o200:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)
            if os.fstat(self._fd).st_size > end:
                os.ftruncate(self._fd, end)
                os.fsync(self._fd)

    def _drop_empty(self, segments: list[Path]) -> None:
        """A segment whose first line never became whole is none."""
        segments[-1].unlink()
        sync_directory(self._directory)
        if len(segments) > 1:
            self._resume(segments[:-1])

    def _cut(self, line_count: int, head: Head) -> None:
        os.chmod(self._path, 0o600)  # it may have been closed with what is cut off now
        fd = os.open(self._path, os.O_WRONLY)
        try:
            os.ftruncate(fd, self._lines[line_count - 1] if line_count else 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        assert self.open() == head

    def _begin_segment(self, seq: int) -> None:
        path = self._directory / _file_name(seq)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._path = path
        self._lines = []
        self._first_seq = seq
        sync_directory(self._directory)

    def _finish_segment(self) -> None:
        os.fchmod(self._fd, 0o400)
        os.fsync(self._fd)
        self._close_segment()

    def _close_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class CheckpointFile:
    """`ports.audit.CheckpointKeeper`: a file, best on another disk or machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit-checkpoints")

    async def keep(self, checkpoint: Checkpoint) -> None:
        await self._on_thread(lambda: self._keep(checkpoint))

    async def recent(self, limit: int) -> list[Checkpoint]:
        return await self._on_thread(lambda: read_checkpoints(self.path, limit))

    async def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _keep(self, checkpoint: Checkpoint) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = not self.path.exists()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # A torn line of an earlier write is overwritten: it was never acknowledged.
            data = os.pread(fd, os.fstat(fd).st_size, 0)
            end = data.rfind(b"\n") + 1
            os.ftruncate(fd, end)
            os.lseek(fd, end, os.SEEK_SET)
            _write_all(fd, checkpoint.line() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            sync_directory(self.path.parent)

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise SinkDown(f"{self.path}: {error.strerror or error}") from error
        except RuntimeError as error:
            raise SinkDown(f"{self.path} is closed") from error


def read_checkpoints(path: Path, limit: int | None = None) -> list[Checkpoint]:
    """The last `limit` kept ones (None: all), in order; none where there is no file. Raises
    SinkBroken, OSError.
    """
    if not path.exists():
        return []
    try:
        lines = deque(lines_of(path), maxlen=limit)
        return [read_checkpoint(msgspec.json.decode(line)) for line in lines]
    except (ValueError, msgspec.DecodeError) as error:
        raise SinkBroken(f"{path} holds what is no checkpoint: {error}") from error


def log_lines(directory: Path, after_seq: int = 0) -> Iterator[bytes]:
    """The lines of a log behind a position, for verification; takes no lock and judges nothing.

    A last line without its end is not given: it was never acknowledged.
    """
    paths = segment_paths(directory)
    begun = [number for number, path in enumerate(paths) if _first_seq(path) <= after_seq + 1]
    for number, path in enumerate(paths[begun[-1] if begun else 0 :]):
        skipped = after_seq + 1 - _first_seq(path) if begun and number == 0 else 0
        for index, line in enumerate(lines_of(path)):
            if index >= skipped:
                yield line


def segment_paths(directory: Path) -> list[Path]:
    """Oldest first: the names sort by position."""
    return sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}"))


def lines_of(path: Path) -> Iterator[bytes]:
    """Whole lines of a file, without their ends; one that is longer than any record as it is."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def _beginning(path: Path, line: bytes) -> Head:
    """Where the chain ends before the first line of a segment."""
    try:
        previous = read_previous(line)
    except ValueError as error:
        raise SinkBroken(f"{path} begins with what is no record") from error
    if previous.seq + 1 != _first_seq(path):
        raise SinkBroken(f"{path} begins with record {previous.seq + 1}")
    return previous


def _line_at(path: Path, ends: list[int], index: int) -> bytes:
    begin = ends[index - 1] if index else 0
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(ends[index] - begin - 1)


def _file_name(first_seq: int) -> str:
    return f"{_PREFIX}{first_seq:016d}{_SUFFIX}"


def _first_seq(path: Path) -> int:
    digits = path.name[len(_PREFIX) : -len(_SUFFIX)]
    if not digits.isdecimal():
        raise SinkBroken(f"{path} is no segment of ours")
    return int(digits)


def _is_at(path: Path, fd: int) -> bool:
    """Whether the open file is the one that stands there."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _take_lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise SinkDown(f"another process writes the audit log in {path.parent}") from error
    return fd


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
