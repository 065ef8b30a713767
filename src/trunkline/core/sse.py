"""Bytes of a server-sent event stream -> the data of its events, however they are cut.

Lines may end in LF, CRLF or CR, even where a CRLF falls between two reads. Must never hold more
than one event of bounded size. Read `gateway/journal.py` and `replay/client.py` for who asks.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 4 << 20


class EventTooLong(ValueError):
    """An event does not end within `MAX_EVENT_BYTES`."""


class EventSplitter:
    """Feed bytes, get the `data` of each finished event."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._ended_in_cr = False
        self._has_line = False

    @property
    def is_between_events(self) -> bool:
        """Whether what was fed ends where an event ends: what follows is one of its own."""
        return not self._rest and not self._has_line

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that this chunk completes. Raises EventTooLong."""
        if not chunk:
            return []
        if self._ended_in_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
        self._ended_in_cr = chunk[-1:] == b"\r"
        text = self._rest + chunk
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = text.split(b"\n")
        self._rest = lines.pop()
        events = [event for line in lines if (event := self._line(line)) is not None]
        if len(self._rest) + self._data_bytes > self._max_event_bytes:
            raise EventTooLong(f"an event is longer than {self._max_event_bytes} bytes")
        return events

    def _line(self, line: bytes) -> bytes | None:
        self._has_line = bool(line)
        if not line:
            if not self._data:
                return None
            event = b"\n".join(self._data)
            self._data, self._data_bytes = [], 0
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
        return None
