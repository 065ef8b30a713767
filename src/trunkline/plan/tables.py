"""Lines of CSV -> rows as objects, where one column holds a request as JSON, or a prompt as text.

A quoted field may hold line breaks. A quote that never closes costs its own line: reading goes on
behind it, and the lines that were taken for its field are read again. Must never: hold more than
`MAX_ROW_LINES` lines. Read `reader.py` next.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from typing import Any

from trunkline.plan.calls import Reject, Rejects
from trunkline.plan.lines import MAX_LINE_BYTES, Lines

MAX_ROW_LINES = 2_000
MAX_COLUMNS = 1_000
DELIMITERS = (",", ";", "\t")
TEXTS = ("prompt", "text", "input", "input_text", "query", "question", "user_prompt")
"""Columns that hold a prompt as it is, by name."""


class Table:
    """Rows below a header; the first line is the header."""

    def __init__(self, lines: Lines, rejects: Rejects) -> None:
        self._lines = iter(lines)
        self._place = lines.place
        self._rejects = rejects
        self._again: deque[tuple[int, bytes]] = deque()
        self._header: list[str] = []
        self._delimiter = ","

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and fields of each row."""
        while (record := self._record()) is not None:
            number, text = record
            if not text.strip():
                continue
            cells = self._cells(text)
            if not self._header:
                self._header = cells or [""]
            elif cells is None or len(cells) != len(self._header):
                self._rejects.add(Reject.BAD_COLUMNS, self._place(number))
            else:
                yield number, _fields(dict(zip(self._header, cells, strict=True)))

    def _record(self) -> tuple[int, str] | None:
        """The next row's text: lines until all quotes are closed."""
        first = self._next_line()
        if first is None:
            return None
        number, raw = first
        held = [first]
        quotes, size = raw.count(b'"'), len(raw)
        while quotes % 2:
            following = self._next_line()
            if following is not None:
                held.append(following)
                quotes += following[1].count(b'"')
                size += len(following[1])
            if following is None or len(held) > MAX_ROW_LINES or size > MAX_LINE_BYTES:
                self._again.extendleft(reversed(held[1:]))
                self._rejects.add(Reject.OPEN_QUOTES, self._place(number))
                return self._record_after()
        text = b"".join(line for _, line in held).decode("utf-8", "replace")
        if len(held) > 1 and self._header:
            cells = self._cells(text)
            if cells is None or len(cells) != len(self._header):
                self._again.extendleft(reversed(held[1:]))
        return number, text

    def _record_after(self) -> tuple[int, str] | None:
        """What follows a line that was given up: an empty row, so that depth stays flat."""
        return 0, ""

    def _next_line(self) -> tuple[int, bytes] | None:
        return self._again.popleft() if self._again else next(self._lines, None)

    def _cells(self, text: str) -> list[str] | None:
        if not self._header:
            counts = {mark: text.count(mark) for mark in DELIMITERS}
            self._delimiter = max(DELIMITERS, key=counts.__getitem__)
        before = csv.field_size_limit(MAX_LINE_BYTES)
        try:
            # One record: whatever line breaks are left stand inside quotes.
            rows = csv.reader([text.rstrip("\r\n")], delimiter=self._delimiter, strict=True)
            cells = next(rows, None)
        except csv.Error:
            return None
        finally:
            csv.field_size_limit(before)
        return cells if cells is None or len(cells) <= MAX_COLUMNS else None


def _fields(row: dict[str, str]) -> dict[str, Any]:
    """By the names that `shapes.py` knows: a column of JSON wraps a body, text is a prompt."""
    fields: dict[str, Any] = {name.strip().strip("\ufeff"): cell for name, cell in row.items()}
    lowered = {name.lower(): value for name, value in fields.items()}
    fields = {**lowered, **fields}
    if not any(fields.get(name) for name in ("messages", "prompt")):
        for cell in row.values():
            if cell.lstrip().startswith("{"):
                return {**fields, "body": cell.strip()}
            if cell.lstrip().startswith("[{"):
                return {**fields, "messages": cell.strip()}
        text = next((fields[name] for name in TEXTS if fields.get(name)), None)
        if text is not None:
            return {**fields, "prompt": text}
    return fields
