"""What a client has sent and we have not taken yet.

Owns the bytes between the socket and the messages. Every byte is looked at once and copied at most
twice, however small the pieces it comes in and however many messages it holds. Must never decide
how much is too much. Read `client.py` next.
"""

from __future__ import annotations

import re

_BARE_LF = re.compile(rb"(?<!\r)\n")


class Inbox:
    """Bytes in order of arrival. `left` is how many there are; a method would cost each request."""

    __slots__ = ("_at", "_data", "_searched", "left")

    def __init__(self) -> None:
        self._data: bytes | bytearray = b""
        self._at = 0
        self._searched = 0
        """Up to here there is no end of a head, nor a line that ends in a bare LF."""
        self.left = 0

    def add(self, data: bytes) -> None:
        held, at = self._data, self._at
        was_empty = not self.left
        self.left += len(data)
        if was_empty:
            self._data = data
            self._at = self._searched = 0
            return
        if isinstance(held, bytes):
            held = self._data = bytearray(memoryview(held)[at:])
        elif at:
            del held[:at]
        self._at = 0
        self._searched = max(0, self._searched - at)
        held += data

    def head_size(self) -> int:
        """Bytes of the head in front, its blank line included; 0 while it is not whole."""
        at = self._at
        end = self._data.find(b"\r\n\r\n", max(at, self._searched - 3))
        return end + 4 - at if end >= 0 else 0

    def has_bare_lf(self) -> bool:
        """Whether a line of the unfinished head ends in a bare LF. What was seen is not looked at
        again, by `head_size` neither: ask this after it.
        """
        found = _BARE_LF.search(self._data, max(self._at, self._searched))
        self._searched = len(self._data)
        return found is not None

    def take(self, size: int) -> bytes:
        """The first `size` bytes, or all there are."""
        at = self._at
        if size < self.left:
            self._at = at + size
            self.left -= size
            taken = self._data[at : at + size]
        else:
            taken = self._data[at:] if at else self._data
            self._data = b""
            self._at = self._searched = self.left = 0
        return taken if isinstance(taken, bytes) else bytes(taken)

    def put_back(self, data: bytes) -> None:
        """Return the end of what was taken last."""
        at = self._at - len(data)
        if at >= 0:
            self._at = at
            self.left += len(data)
        else:
            assert not self._data, "only what was taken last can be put back"
            self.add(data)

    def clear(self) -> None:
        self._data = b""
        self._at = self._searched = self.left = 0
