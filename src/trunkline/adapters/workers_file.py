"""Workers that a file names: looked at each second, read anew when it is another one.

`NAME.toml` has a table `[[workers]]` for each, any other name a line for each: a URL, or a JSON
object. Fields: `url`, `api_key`, `labels`, `model_id`, `draining`. Write a new file beside it and
rename that over it; half a file is a mistake, and a mistake leaves the workers as they are. Read
`ports/workers.py` next.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from trunkline.errors import ConfigError
from trunkline.ports.workers import NamedWorker

LOOK_S = 1.0
MAX_BYTES = 4 << 20
MAX_WORKERS = 4_096

_Text = Annotated[str, Meta(max_length=4_096)]
_Label = Annotated[str, Meta(max_length=256)]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: Annotated[str, Meta(min_length=1, max_length=2_048)]
    api_key: _Text = ""
    labels: Annotated[dict[_Label, _Label], Meta(max_length=64)] = {}
    model_id: _Label = ""
    draining: bool = False


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: list[_Line] = []


_Signature = tuple[int, int, int, int]


class WorkersFile:
    """The `WorkerSource` of one file."""

    def __init__(self, path: Path, *, look_s: float = LOOK_S) -> None:
        self.name = f"file {path}"
        self._path = path
        self._look_s = look_s

    def read(self) -> list[NamedWorker]:
        """What it names now. Raises ConfigError that says what is wrong with it, and where."""
        return self._read()[0]

    async def run(
        self, tell: Callable[[Sequence[NamedWorker]], None], on_trouble: Callable[[str], None]
    ) -> None:
        known: _Signature | None = None
        while True:
            try:
                if await asyncio.to_thread(self._signature) != known:
                    named, known = await asyncio.to_thread(self._read)
                    tell(named)
            except ConfigError as error:
                known = None
                on_trouble(str(error))
            await asyncio.sleep(self._look_s)

    def _signature(self) -> _Signature:
        try:
            return _signed(os.stat(self._path))
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from error

    def _read(self) -> tuple[list[NamedWorker], _Signature]:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                raw = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from error
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{self._path} is larger than {MAX_BYTES} bytes")
        lines = self._toml(raw) if self._path.suffix == ".toml" else self._lines(raw)
        if len(lines) > MAX_WORKERS:
            raise ConfigError(f"{self._path} names {len(lines)} workers, at most {MAX_WORKERS}")
        if status.st_mode & stat.S_IROTH and any(line.api_key for line in lines):
            raise ConfigError(
                f"{self._path} holds an api_key and everyone may read it; chmod 600 it"
            )
        return [_named(line) for line in lines], _signed(status)

    def _toml(self, raw: bytes) -> list[_Line]:
        try:
            return msgspec.convert(tomllib.loads(raw.decode("utf-8")), _Document).workers
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{self._path}: {error}") from error

    def _lines(self, raw: bytes) -> list[_Line]:
        found: list[_Line] = []
        for number, line in enumerate(raw.split(b"\n"), 1):
            text = line.strip()
            if not text or text.startswith(b"#"):
                continue
            try:
                is_object = text.startswith(b"{")
                found.append(_LINES.decode(text) if is_object else _Line(url=text.decode("ascii")))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise ConfigError(f"{self._path}, line {number}: {error}") from error
        return found


_LINES = msgspec.json.Decoder(_Line)


def _named(line: _Line) -> NamedWorker:
    return NamedWorker(
        url=line.url,
        api_key=line.api_key,
        labels=tuple(sorted(line.labels.items())),
        model_id=line.model_id,
        is_draining=line.draining,
    )


def _signed(status: os.stat_result) -> _Signature:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
