"""A log of any known kind -> one stream of `Call`s in order of time.

The first lines tell the format. A bad line is counted and named (`calls.py`), and never ends the
reading; what comes late is put in order within a window, and counted beyond it. Must never: hold
more than that window. Read `study.py` next, where the stream goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import msgspec

from trunkline.errors import TraceError
from trunkline.plan.calls import Call, Malformed, Reject, Rejects
from trunkline.plan.engine_lines import fields_of, is_engine_line
from trunkline.plan.lines import MAX_LINE_BYTES, Lines
from trunkline.plan.naming import Namer
from trunkline.plan.shapes import Shapes
from trunkline.plan.tables import Table

FIRST_LINES = 256
"""Lines that tell the format and the size of blocks."""
FIRST_BYTES = 16 << 20
"""Of them together; of one that is longer it is the first alone."""
SORT_WINDOW = 4_096
"""Calls that are held to put them in order of time."""
SORT_USES = 4_000_000
"""Blocks of all of them: 32 MB. Where prompts are longer, fewer calls are held."""
BLOCK_SIZES = (512, 16, 64, 32, 128, 256, 1_024)
"""Of block ids, in the order in which they are tried."""


class LogFormat(Enum):
    """How a log is to be read."""

    AUTO = "auto"
    JSON = "json"
    """One object a line: bodies, wrapped bodies, Mooncake, Bailian."""
    CSV = "csv"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What the log itself does not say."""

    format: LogFormat = LogFormat.AUTO
    block_tokens: int | None = None
    """Of block ids; None: as the first lines say."""
    tenant_field: str | None = None
    is_in_seconds: bool | None = None
    """Times since the log began; None: seconds for Bailian, else milliseconds."""
    max_line_bytes: int = MAX_LINE_BYTES


class LogReader:
    """Reads one log once. Its counts are complete when the stream has ended."""

    def __init__(
        self,
        path: Path,
        namer: Namer,
        options: ReadOptions | None = None,
        tell: Callable[[int], None] | None = None,
    ) -> None:
        self._path = path
        self._namer = namer
        self._options = options or ReadOptions()
        self._tell = tell
        self.rejects = Rejects()
        self.other_lines = 0
        """Lines of an engine's log that are about something else."""
        self.late = 0
        """Calls that came too late to be put in order; they count at the time of the one before."""
        self.without_time = 0
        self.kind = LogFormat.AUTO
        self.lines = 0

    def calls(self) -> Iterator[Call]:
        """Raises TraceError for a file that cannot be opened, or in which there is no request."""
        lines = Lines(
            self._path,
            self.rejects,
            max_line_bytes=self._options.max_line_bytes,
            tell=self._tell,
        )
        count = 0
        for call in self._ordered(self._parsed(lines)):
            count += 1
            yield call
        self.lines = lines.count
        if not count:
            raise TraceError(f"{self._path}: {self._why_empty()}")

    def _why_empty(self) -> str:
        told = ", ".join(
            f"{count} x {reason.value} ({self.rejects.places[reason][0]} first)"
            for reason, count in self.rejects.counts.most_common()
        )
        told = told or "no line that says anything of a request"
        return f"no request in the file: {told}"

    def _parsed(self, lines: Lines) -> Iterator[Call]:
        stream = iter(lines)
        first = _first_of(stream)
        kind = self._options.format
        self.kind = _told_format([raw for _, raw in first]) if kind is LogFormat.AUTO else kind
        rows: Iterable[tuple[int, dict[str, Any]]]
        if self.kind is LogFormat.CSV:
            rows = Table(_Resumed(lines, chain(first, stream)), self.rejects)
            shapes = self._shapes([])
        elif self.kind is LogFormat.VLLM:
            rows, shapes = self._engine_rows(lines, chain(first, stream)), self._shapes([])
        else:
            rows = self._objects(lines, chain(first, stream))
            shapes = self._shapes([found for _, raw in first if (found := _try_object(raw))])
        size = 0
        for number, fields in rows:
            try:
                call = shapes.call(fields)
                size = size or call.block_tokens
                if call.block_tokens != size:  # prompts among ids, or the reverse
                    raise Malformed(Reject.BAD_BLOCKS)
                call.line = number
                yield call
            except Malformed as bad:
                self.rejects.add(bad.reason, lines.place(number))

    def _shapes(self, first: list[dict[str, Any]]) -> Shapes:
        with_ids = [fields for fields in first if "hash_ids" in fields]
        is_bailian = any("chat_id" in fields for fields in with_ids)
        in_seconds = self._options.is_in_seconds
        return Shapes(
            self._namer,
            block_tokens=self._options.block_tokens or _told_block_tokens(with_ids, is_bailian),
            tenant_field=self._options.tenant_field,
            relative_ms=1e3 if (is_bailian if in_seconds is None else in_seconds) else 1.0,
        )

    def _objects(
        self, lines: Lines, stream: Iterable[tuple[int, bytes]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, raw in stream:
            if not raw.strip():
                continue
            try:
                yield number, decoded(raw)
            except Malformed as bad:
                self.rejects.add(bad.reason, lines.place(number))

    def _engine_rows(
        self, lines: Lines, stream: Iterable[tuple[int, bytes]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, raw in stream:
            try:
                fields = fields_of(raw)
            except Malformed as bad:
                self.rejects.add(bad.reason, lines.place(number))
                continue
            if fields is None:
                self.other_lines += 1
            else:
                yield number, fields

    def _ordered(self, calls: Iterable[Call]) -> Iterator[Call]:
        """By time, within a window; calls without a time stay where they are."""
        heap: list[tuple[float, int, Call]] = []
        latest_ms = float("-inf")
        known_ms = 0.0
        uses = 0
        for number, call in enumerate(calls):
            if call.at_ms is None:
                self.without_time += 1
            known_ms = known_ms if call.at_ms is None else call.at_ms
            heapq.heappush(heap, (known_ms, number, call))
            uses += len(call.blocks)
            while len(heap) > SORT_WINDOW or uses > SORT_USES:
                latest_ms, call = self._next(heap, latest_ms)
                uses -= len(call.blocks)
                yield call
        while heap:
            latest_ms, call = self._next(heap, latest_ms)
            yield call

    def _next(self, heap: list[tuple[float, int, Call]], latest_ms: float) -> tuple[float, Call]:
        at_ms, _, call = heapq.heappop(heap)
        if at_ms < latest_ms:
            self.late += 1
            call.at_ms = at_ms = latest_ms
        return at_ms, call


class _Resumed(Lines):
    """Lines of which the first have been looked at."""

    def __init__(self, lines: Lines, stream: Iterable[tuple[int, bytes]]) -> None:
        self.path = lines.path
        self._stream = stream

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        yield from self._stream


def decoded(raw: bytes) -> dict[str, Any]:
    """One line of JSON. Raises Malformed."""
    try:
        value = msgspec.json.decode(raw)
    except RecursionError as error:
        raise Malformed(Reject.TOO_DEEP) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Malformed(Reject.NOT_JSON) from error
    if not isinstance(value, dict):
        raise Malformed(Reject.NO_OBJECT)
    return cast("dict[str, Any]", value)


def _first_of(stream: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    first: list[tuple[int, bytes]] = []
    size = 0
    for number, raw in islice(stream, FIRST_LINES):
        first.append((number, raw))
        size += len(raw)
        if size >= FIRST_BYTES:
            break
    return first


def _try_object(raw: bytes) -> dict[str, Any] | None:
    try:
        return decoded(raw)
    except Malformed:
        return None


def _told_format(first: list[bytes]) -> LogFormat:
    """What most lines are, objects or an engine's words about a request; of neither, a table. An
    empty object tells nothing.
    """
    objects = sum(raw.lstrip().startswith(b"{") and bool(_try_object(raw)) for raw in first)
    told = sum(is_engine_line(raw) for raw in first)
    if objects or told:
        return LogFormat.JSON if objects >= told else LogFormat.VLLM
    head = next((raw for raw in first if raw.strip()), b"")
    is_table = any(mark in head for mark in b",;\t") and not head.lstrip().startswith((b"{", b"["))
    return LogFormat.CSV if is_table else LogFormat.JSON


def _told_block_tokens(first: list[dict[str, Any]], is_bailian: bool) -> int:
    """The size that fits most of the first lines, of equal ones the format's own."""
    own = 16 if is_bailian else 512
    lengths = [
        (tokens, len(cast("list[object]", ids)))
        for fields in first
        if type(tokens := fields.get("input_length")) is int
        and isinstance(ids := fields["hash_ids"], list)
    ]
    sizes = (own, *(size for size in BLOCK_SIZES if size != own))
    fits = {
        size: sum(tokens // size <= count <= -(-tokens // size) for tokens, count in lengths)
        for size in sizes
    }
    return max(sizes, key=fits.__getitem__)
