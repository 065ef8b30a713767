"""Logs: events with fields, one line each, that never hold a secret or a prompt.

`log.info("lease.expired", worker=worker, held_ms=512)`. Only plain values are written out; a
body, a list of messages or an object appears as its type and size. Must never grow a line without
bound, or let a value break out of its line. `configure` is called once, by the entry point.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections import OrderedDict, deque
from collections.abc import Iterable, Sized
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Literal, TextIO

from trunkline.errors import ConfigError

_MAX_VALUE_CHARS = 512
MAX_FILE_BYTES = 64 << 20
MAX_FILES = 8
"""Of one process: then the oldest goes."""
_MAX_TRACE_CHARS = 4_096
_MAX_SECRETS = 16_384
_MAX_QUIET_KEYS = 4_096
_QUIET_S = 1.0
_ALWAYS = frozenset({"config.refused"})
"""Each is the only answer to what somebody asked for (a SIGHUP): never held back."""
_WITHHELD = frozenset(
    {"prompt", "messages", "content", "body", "text", "completion", "answer"}
    | {"authorization", "api_key", "admin_api_key", "secret", "password", "cookie", "headers"}
)
"""Fields that are never written, whatever they hold: contents and credentials."""

Level = Literal["debug", "info", "warning", "error"]
Scalar = str | int | float | bool | None


class EventLog:
    """Writes events to one logger of the standard library. Holds no state of its own."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields, None)

    def info(self, event: str, /, **fields: object) -> None:
        self._write(logging.INFO, event, fields, None)

    def warning(self, event: str, /, **fields: object) -> None:
        """Something an operator can act on. The same event of the same worker: once a second."""
        self._write(logging.WARNING, event, fields, None)

    def error(self, event: str, /, *, cause: BaseException | None = None, **fields: object) -> None:
        """As a warning; `cause` adds its traceback, on the same line."""
        self._write(logging.ERROR, event, fields, cause)

    def _write(
        self, level: int, event: str, fields: dict[str, object], cause: BaseException | None
    ) -> None:
        if self._logger.isEnabledFor(level):
            info = (type(cause), cause, cause.__traceback__) if cause is not None else None
            self._logger.log(level, event, exc_info=info, extra={"fields": fields})


log = EventLog("trunkline")
"""What most modules use; stateless, so one is enough."""


class Redactor:
    """Knows the secrets of this process and takes them out of any text."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._whole: set[str] = set()
        self._order: deque[str] = deque()
        for secret in secrets:
            self.add(secret)

    def add(self, secret: str) -> None:
        """From now on hidden. At the bound the oldest is forgotten: workers come and go."""
        if not secret or secret in self._whole:
            return
        if len(self._order) >= _MAX_SECRETS:
            self._whole.discard(self._order.popleft())
        self._whole.add(secret)
        self._order.append(secret)

    def clean(self, text: str) -> str:
        """`text` without secrets; one below 4 characters is hidden only where it stands alone."""
        if text in self._whole:
            return "***"
        for secret in self._order:
            if len(secret) >= 4 and secret in text:
                text = text.replace(secret, "***")
        return text


class Quiet(logging.Filter):
    """Lets a warning through once a second; the next one says how many were held back."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.msg in _ALWAYS:
            return True
        fields = getattr(record, "fields", {})
        key = (record.name, str(record.msg)[:_MAX_VALUE_CHARS], str(fields.get("worker", "")))
        began, held = self._seen.pop(key, (float("-inf"), 0))
        # A wall clock set back must not silence anything: hence the absolute value.
        is_due = abs(record.created - began) >= _QUIET_S
        self._seen[key] = (record.created, 0) if is_due else (began, held + 1)
        if len(self._seen) > _MAX_QUIET_KEYS:
            self._seen.popitem(last=False)
        if is_due and held:
            record.fields = {**fields, "suppressed_count": held}
        return is_due


class Numbered(logging.Filter):
    """Adds to each of our events which of several processes it is of."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self._process = process

    def filter(self, record: logging.LogRecord) -> bool:
        given: dict[str, object] | None = getattr(record, "fields", None)
        if given is not None:
            record.fields = {**given, "process": self._process}
        return True


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING lease.expired worker=w1 held_ms=512`"""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _parts(record, self._redactor)
        words = [_stamp(record), f"{record.levelname:<7}", _word(event)]
        words += [f"{name}={_word(_plain(value))}" for name, value in fields.items()]
        return " ".join(words)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time`, `level`, `event`, then the fields."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _parts(record, self._redactor)
        head = {"time": _stamp(record), "level": record.levelname.lower(), "event": event}
        named = {name if name not in head else f"{name}_": value for name, value in fields.items()}
        return json.dumps(head | named, allow_nan=False)


def configure(
    level: Level,
    shape: Literal["text", "json"],
    *,
    secrets: Iterable[str] = (),
    stream: TextIO | None = None,
    process: int | None = None,
    folder: str = "",
) -> Redactor:
    """Set up logging of this process; foreign libraries are heard from warnings upward. `process`
    is its number where several write to one log. With a `folder` lines go into a file there, too;
    raises ConfigError where none can be written.

    Secrets that become known later (a worker's key) are given to the answer's `add`.
    """
    redactor = Redactor(secrets)
    handlers: list[logging.Handler] = [logging.StreamHandler(stream or sys.stderr)]
    if folder:
        handlers.append(_file_in(folder, process))
    for handler in handlers:
        formatter = JsonFormatter(redactor) if shape == "json" else LineFormatter(redactor)
        handler.setFormatter(formatter)
        handler.addFilter(Quiet())
        if process is not None:
            handler.addFilter(Numbered(process))
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(logging.WARNING)
    set_level(level)
    return redactor


def _file_in(folder: str, process: int | None) -> logging.Handler:
    """Of bounded size, with its predecessors beside it; each process has its own."""
    from logging.handlers import RotatingFileHandler  # 10 ms: for those alone who want files

    name = "trunkline.log" if process is None else f"trunkline-{process}.log"
    try:
        os.makedirs(folder, exist_ok=True)
        return RotatingFileHandler(
            os.path.join(folder, name),
            maxBytes=MAX_FILE_BYTES,
            backupCount=MAX_FILES - 1,
            encoding="utf-8",
        )
    except OSError as error:
        raise ConfigError(f"log_dir {folder}: {error.strerror}") from error


def set_level(level: Level) -> None:
    """Another least level from here on."""
    logging.getLogger("trunkline").setLevel(level.upper())


def _parts(record: logging.LogRecord, redactor: Redactor) -> tuple[str, dict[str, Scalar]]:
    """Event and fields, as plain values without secrets, bounded."""
    given: dict[str, Any] | None = getattr(record, "fields", None)
    fields: dict[str, Scalar] = {}
    if given is None:
        # Another library's record: its text is data, not an event.
        event, given = record.name, {"message": record.getMessage()}
    else:
        event = str(record.msg)
    for name, value in given.items():
        fields[name] = "***" if name in _WITHHELD else _scalar(value, redactor)
    if record.exc_info and record.exc_info[0] is not None:
        trace = "".join(traceback.format_exception(*record.exc_info))
        fields["trace"] = redactor.clean(trace)[-_MAX_TRACE_CHARS:]
    return redactor.clean(event)[:_MAX_VALUE_CHARS], fields


def _scalar(value: object, redactor: Redactor) -> Scalar:
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, BaseException):
        value = f"{type(value).__name__}: {value}"
    if not isinstance(value, str):
        size = f" of {len(value)}" if isinstance(value, Sized) else ""
        return f"<{type(value).__name__}{size}>"
    text = redactor.clean(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}...[{len(text)}]"


def _plain(value: Scalar) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _word(text: str) -> str:
    """Text as one word; quoted as JSON where a space or a control character would break it."""
    is_word = text.isprintable() and text != "" and not any(mark in text for mark in ' "=')
    return text if is_word else json.dumps(text)


def _stamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1_000:03d}Z"
