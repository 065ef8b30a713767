"""A file, plain or gzip -> its lines, each bounded, with how far the reading is.

Must never: hold more than one line, or stop at a bad one. Read `reader.py` next.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from trunkline.errors import TraceError
from trunkline.plan.calls import Reject, Rejects

MAX_LINE_BYTES = 16 << 20
GZIP_MAGIC = b"\x1f\x8b"
_SKIP_BYTES = 1 << 20
_TELL_EVERY = 256


class Lines:
    """Lines of one file, by number from 1. Those that are too long are counted, and not given."""

    def __init__(
        self,
        path: Path,
        rejects: Rejects,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        tell: Callable[[int], None] | None = None,
    ) -> None:
        """`tell` gets the bytes that have been read of the file as it lies on the disk."""
        self.path = path
        self._rejects = rejects
        self._max_line_bytes = max_line_bytes
        self._tell = tell
        self.count = 0

    def place(self, number: int) -> str:
        return f"{self.path.name}:{number}"

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Raises TraceError for a file that cannot be opened."""
        try:
            raw = self.path.open("rb")
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}") from error
        with raw:
            is_gzip = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw
            try:
                yield from self._lines(file, raw)
            except (OSError, EOFError, zlib.error):
                self._rejects.add(Reject.CUT_OFF, self.place(self.count + 1))

    def _lines(self, file: BinaryIO, raw: BinaryIO) -> Iterator[tuple[int, bytes]]:
        most = self._max_line_bytes
        while line := file.readline(most + 1):
            self.count += 1
            if len(line) > most:
                self._skip(file, line)
                self._rejects.add(Reject.TOO_LONG, self.place(self.count))
            else:
                yield self.count, line
            if self._tell is not None and self.count % _TELL_EVERY == 0:
                self._tell(raw.tell())

    def _skip(self, file: BinaryIO, line: bytes) -> None:
        while line and not line.endswith(b"\n"):
            line = file.readline(_SKIP_BYTES)
