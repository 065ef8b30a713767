"""Bytes of a trace file -> `TraceRequest`s, or a `TraceError` that says where and what.

Mooncake and Qwen-Bailian block ids, the same with other block sizes, and logs of OpenAI request
bodies; each as JSON lines, plain or gzip. The first line decides the format; fields that are not
known are ignored. Must never put prompt text in an error. Read `workloads.py` next.
"""

from __future__ import annotations

import gzip
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from trunkline.errors import TraceError
from trunkline.replay.traces import TraceRequest

MAX_LINE_BYTES = 16 << 20
MAX_TOKENS = 1 << 27
MAX_TIME_MS = 1e15
MAX_BLOCK_ID = (1 << 63) - 1
MAX_CHATS = 1 << 17
"""Chats of a Bailian file whose root is remembered; older ones start a session of their own."""

EPOCH_MS = 1e11
EPOCH_S = 1e8
"""A time above these is since 1970 in that unit; below, since the start of the trace in ms."""

GZIP_MAGIC = b"\x1f\x8b"
BLOCK_SIZES = (512, 64, 16, 32, 128, 256, 1024)
"""Sizes tried when the option is not given; the format's own comes first."""


class TraceFormat(Enum):
    """How the lines of a file are to be read."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What the file itself does not say."""

    format: TraceFormat = TraceFormat.AUTO
    block_tokens: int | None = None
    """None: told from the first line's ids and length."""
    time_divisor: float = 1.0
    """1,000 replays the week of ragpulse in ten minutes."""
    max_line_bytes: int = MAX_LINE_BYTES


@dataclass(slots=True)
class _Line:
    """One decoded line and where it stands; every complaint goes through `fail`."""

    path: Path
    number: int
    fields: dict[str, Any]

    def fail(self, name: str, expected: str) -> TraceError:
        got = _shown(self.fields[name]) if name in self.fields else "nothing"
        return TraceError(
            f"{self.path}:{self.number}: field {name}: expected {expected}, got {got}"
        )

    def whole(self, name: str, low: int, high: int) -> int:
        value = self.fields.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.fail(name, f"an integer from {low} to {high}")
        return value

    def time(self, name: str) -> float:
        value = self.fields.get(name)
        if type(value) not in (int, float) or not isfinite(cast(float, value)):
            raise self.fail(name, "a finite number")
        if not 0 <= cast(float, value) <= MAX_TIME_MS:
            raise self.fail(name, "a time from 0 on")
        return float(cast(float, value))

    def word(self, name: str) -> str | None:
        value = self.fields.get(name)
        if value is None:
            return None
        if type(value) is int:
            return str(value)
        if type(value) is not str or len(value) > 256:
            raise self.fail(name, "a name of at most 256 characters")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        value: object = self.fields.get(name)
        if not isinstance(value, list):
            raise self.fail(name, "a list of block ids")
        items = cast("list[object]", value)
        for index, item in enumerate(items):
            if type(item) is not int or not 0 <= item <= MAX_BLOCK_ID:
                raise TraceError(
                    f"{self.path}:{self.number}: field {name}[{index}]: expected an id from 0 to"
                    f" {MAX_BLOCK_ID}, got {_shown(item)}"
                )
        return tuple(cast("list[int]", items))


def read_trace(path: Path, options: ReadOptions | None = None) -> Iterator[TraceRequest]:
    """Stream the requests of a file. Raises TraceError at the first line that cannot be
    understood.
    """
    chosen = options or ReadOptions()
    if not chosen.time_divisor > 0.0:
        raise TraceError(f"time divisor {chosen.time_divisor} is not above 0")
    lines = _decoded_lines(path, chosen.max_line_bytes)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: no request in the file; expected one JSON object a line")
    parse = _parser(first, chosen)
    latest_ms = 0.0
    for line in _chain(first, lines):
        request = parse(line)
        if request.arrival_ms < latest_ms:
            raise TraceError(
                f"{path}:{line.number}: time goes back from {latest_ms:.0f} to"
                f" {request.arrival_ms:.0f} ms; expected lines sorted by time"
            )
        latest_ms = request.arrival_ms
        yield request


def detect_format(fields: dict[str, Any]) -> TraceFormat | None:
    """The format that has these fields; None when there is none."""
    if "hash_ids" in fields:
        return TraceFormat.BAILIAN if "chat_id" in fields else TraceFormat.MOONCAKE
    if "messages" in fields or "prompt" in fields:
        return TraceFormat.OPENAI
    return None


def _parser(first: _Line, options: ReadOptions) -> Callable[[_Line], TraceRequest]:
    kind = options.format
    if kind is TraceFormat.AUTO:
        detected = detect_format(first.fields)
        if detected is None:
            raise TraceError(
                f"{first.path}:{first.number}: unknown format; expected hash_ids (mooncake),"
                " chat_id and hash_ids (bailian), or messages or prompt (openai)"
            )
        kind = detected
    if kind is TraceFormat.OPENAI:
        return _OpenAiLines(first, options).parse
    return _BlockLines(first, options, is_bailian=kind is TraceFormat.BAILIAN).parse


class _BlockLines:
    """Mooncake's fields, or Bailian's: the latter in seconds, with chats instead of sessions."""

    def __init__(self, first: _Line, options: ReadOptions, *, is_bailian: bool) -> None:
        self._is_bailian = is_bailian
        self._to_ms = (1_000.0 if is_bailian else 1.0) / options.time_divisor
        self._roots: OrderedDict[int, int] = OrderedDict()
        self._block_tokens = options.block_tokens or self._told_block_tokens(first)

    def parse(self, line: _Line) -> TraceRequest:
        input_tokens = line.whole("input_length", 1, MAX_TOKENS)
        block_ids = line.ids("hash_ids")
        blocks = -(-input_tokens // self._block_tokens)
        if not blocks - 1 <= len(block_ids) <= blocks:
            raise TraceError(
                f"{line.path}:{line.number}: field hash_ids: expected {blocks} ids for"
                f" {input_tokens} tokens in blocks of {self._block_tokens}, got {len(block_ids)}"
            )
        return TraceRequest(
            arrival_ms=line.time("timestamp") * self._to_ms,
            input_tokens=input_tokens,
            output_tokens=line.whole("output_length", 0, MAX_TOKENS),
            block_ids=block_ids,
            block_tokens=self._block_tokens,
            session=self._chat_root(line) if self._is_bailian else line.word("session_id"),
            model=line.word("model"),
        )

    def _told_block_tokens(self, line: _Line) -> int:
        tokens, count = line.whole("input_length", 1, MAX_TOKENS), len(line.ids("hash_ids"))
        own = 16 if self._is_bailian else 512
        for size in (own, *BLOCK_SIZES):
            if tokens // size <= count <= -(-tokens // size):
                return size
        raise TraceError(
            f"{line.path}:{line.number}: field hash_ids: {count} ids for {tokens} tokens fit no"
            " usual block size; give the block size by option"
        )

    def _chat_root(self, line: _Line) -> str:
        chat = line.whole("chat_id", 0, MAX_BLOCK_ID)
        parent = line.fields.get("parent_chat_id")
        root = chat
        if parent is not None and parent != -1:
            number = line.whole("parent_chat_id", -1, MAX_BLOCK_ID)
            root = self._roots.get(number, number)
        self._roots[chat] = root
        if len(self._roots) > MAX_CHATS:
            self._roots.popitem(last=False)
        return str(root)


class _OpenAiLines:
    """Bodies of `/v1/chat/completions` or `/v1/completions`, with an optional time."""

    OWN_FIELDS = ("timestamp", "created", "session_id")

    def __init__(self, first: _Line, options: ReadOptions) -> None:
        self._divisor = options.time_divisor
        names = [name for name in ("timestamp", "created") if name in first.fields]
        self._time_name = names[0] if names else None
        self._start_ms, self._to_ms = 0.0, 1.0
        if self._time_name is not None:
            start = first.time(self._time_name)
            is_seconds = self._time_name == "created" or EPOCH_S <= start < EPOCH_MS
            self._to_ms = 1_000.0 if is_seconds else 1.0
            self._start_ms = start * self._to_ms if start >= EPOCH_S else 0.0

    def parse(self, line: _Line) -> TraceRequest:
        arrival_ms = 0.0
        if self._time_name is not None:
            arrival_ms = line.time(self._time_name) * self._to_ms - self._start_ms
            if arrival_ms < 0.0:
                raise line.fail(self._time_name, "lines sorted by time")
        body = {name: value for name, value in line.fields.items() if name not in self.OWN_FIELDS}
        session = line.word("session_id") or line.word("prompt_cache_key") or line.word("user")
        return TraceRequest(
            arrival_ms=arrival_ms / self._divisor,
            input_tokens=self._input_tokens(line),
            output_tokens=self._output_tokens(line),
            session=session,
            model=line.word("model"),
            body=body,
        )

    def _input_tokens(self, line: _Line) -> int:
        """Exact for token ids; for text a guess of 4 characters a token, which usage later
        corrects.
        """
        messages, prompt = line.fields.get("messages"), line.fields.get("prompt")
        if isinstance(messages, list) and messages:
            return max(1, len(msgspec.json.encode(messages)) // 4)
        if isinstance(prompt, str):
            return max(1, len(prompt) // 4)
        if isinstance(prompt, list) and all(
            type(item) is int for item in cast("list[object]", prompt)
        ):
            return len(cast("list[int]", prompt))
        if messages is not None:
            raise TraceError(
                f"{line.path}:{line.number}: field messages: expected a list of messages"
            )
        raise TraceError(f"{line.path}:{line.number}: field prompt: expected a text or token ids")

    def _output_tokens(self, line: _Line) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            if line.fields.get(name) is not None:
                return line.whole(name, 0, MAX_TOKENS)
        return 16


def _chain(first: _Line, rest: Iterator[_Line]) -> Iterator[_Line]:
    yield first
    yield from rest


def _decoded_lines(path: Path, max_line_bytes: int) -> Iterator[_Line]:
    number = 0
    try:
        with _open(path) as file:
            while True:
                raw = file.readline(max_line_bytes + 1)
                if not raw:
                    return
                number += 1
                if len(raw) > max_line_bytes:
                    raise TraceError(f"{path}:{number}: line is longer than {max_line_bytes} bytes")
                if raw.strip():
                    yield _Line(path, number, _decoded(raw, path, number))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read after line {number}: {error}") from error


def _decoded(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}:{number}: expected one JSON object, but {error}") from error
    except RecursionError as error:
        raise TraceError(
            f"{path}:{number}: expected one JSON object, got one nested too deep"
        ) from error
    if not isinstance(value, dict):
        raise TraceError(f"{path}:{number}: expected one JSON object, got {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as probe:
        is_gzip = probe.read(2) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb")) if is_gzip else path.open("rb")


def _shown(value: object) -> str:
    """A number, cut short; of anything else only its type, as it may be prompt text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 1 << 80 else "a huge integer"
    return repr(value) if isinstance(value, float) else type(value).__name__
