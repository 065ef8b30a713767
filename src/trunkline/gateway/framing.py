"""Where a chunked message ends: one strict reader for both directions.

Owns the state between two reads of a chunked body. It finds chunk edges without touching the
payload, so that a relay can pass buffers on unchanged, and it can collect the payload where
somebody needs it whole. Must never guess: a malformed chunk raises. Read `relay.py` next.
"""

from __future__ import annotations

import re

_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})(?:[\t ]*;[\t !-~\x80-\xff]{0,255})?\r\n")
_SIZE_LINE_BYTES = 15 + 256 + 16
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t !-~\x80-\xff]*+\r\n")
_TRAILER_BYTES = 8 << 10


class BrokenFraming(Exception):
    """The bytes are not a chunked body."""


class ChunkReader:
    """Follows one chunked body.

        size line ──► payload ──► CRLF ──► size line ──► ... ──► `0` line ──► (trailers) ──► CRLF
        _skip = 0     _skip counts payload and CRLF     _is_last

    `boundary` is the offset in the latest buffer behind its last whole chunk: up to there the
    receiver stands between two chunks. It is negative or 0 where the buffer completes no chunk.
    """

    __slots__ = ("_carry", "_is_last", "_skip", "_takes_trailers", "boundary", "chunks", "pieces")

    def __init__(self, *, takes_trailers: bool, collects: bool) -> None:
        self._skip = 0
        self._carry = b""
        self._is_last = False
        self._takes_trailers = takes_trailers
        self.boundary = 0
        self.chunks = 0
        """Size lines read, the last one not counted."""
        self.pieces: list[bytes] | None = [] if collects else None

    @property
    def whole_chunks(self) -> int:
        """Chunks of which nothing is missing."""
        return self.chunks - 1 if self._skip else self.chunks

    def feed(self, data: bytes) -> int:
        """Take one buffer. Returns the offset behind the end of the message, or -1 while it goes
        on.
        """
        skip = self._skip
        size = len(data)
        if skip > size:
            if self.pieces is not None:
                self.pieces.append(data[: skip - 2])
            self._skip = skip - size
            self.boundary = 0
            if skip - size == 1 and data[-1] != 13:
                raise BrokenFraming("a chunk does not end in CRLF")
            return -1
        if self._carry:
            return self._feed_carried(data)
        if self._is_last:
            return self._finish(data, 0)
        if skip:
            self._end_chunk(data, skip)
        return self._size_lines(data, skip)

    def _feed_carried(self, data: bytes) -> int:
        carried = len(self._carry)
        data, self._carry = self._carry + data, b""
        end = self._finish(data, 0) if self._is_last else self._size_lines(data, 0)
        self.boundary -= carried
        return end - carried if end >= 0 else -1

    def _end_chunk(self, data: bytes, skip: int) -> None:
        """The open chunk ends inside `data`, `skip` bytes in."""
        if data[max(skip - 2, 0) : skip] != b"\r\n"[-skip:]:
            raise BrokenFraming("a chunk does not end in CRLF")
        if self.pieces is not None and skip > 2:
            self.pieces.append(data[: skip - 2])

    def _size_lines(self, data: bytes, position: int) -> int:
        """From one size line to the next, until `data` is used up."""
        size = len(data)
        match_size = _SIZE.match
        while position < size:
            self.boundary = position
            match = match_size(data, position)
            if match is None:
                if size - position > _SIZE_LINE_BYTES or b"\n" in data[position:]:
                    raise BrokenFraming("a chunk size line is malformed or too long")
                self._carry = data[position:]
                self._skip = 0
                return -1
            length = int(match[1], 16)
            start = match.end()
            if length == 0:
                self._is_last = True
                self._skip = 0
                return self._finish(data, start)
            self.chunks += 1
            position = start + length + 2
            if position <= size and data[position - 2 : position] != b"\r\n":
                raise BrokenFraming("a chunk does not end in CRLF")
            if self.pieces is not None:
                self.pieces.append(data[start : start + length])
        if position == size:
            self.boundary = size
        elif position == size + 1 and data[-1] != 13:
            raise BrokenFraming("a chunk does not end in CRLF")
        self._skip = position - size
        return -1

    def _finish(self, data: bytes, position: int) -> int:
        """Behind the `0` line: nothing but the blank line, or trailers where they are taken."""
        while True:
            if data.startswith(b"\r\n", position):
                return position + 2
            rest = data[position:]
            if rest in {b"", b"\r"}:
                break
            if not self._takes_trailers:
                raise BrokenFraming("trailers are not taken")
            match = _TRAILER.match(rest)
            if match is None:
                if len(rest) > _TRAILER_BYTES or b"\n" in rest:
                    raise BrokenFraming("a trailer is malformed or too long")
                break
            position += match.end()
        self._carry = data[position:]
        return -1
