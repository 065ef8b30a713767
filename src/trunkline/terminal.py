"""What verbs write to a terminal, and how they read the words of a person: times, durations, ids.

Must never: let what it shows steer the terminal. Read `tenant_answers.py` for who uses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from trunkline.admin_client import Json
from trunkline.errors import ConfigError
from trunkline.leaf import read_bounded

OK = 0
MAX_TOKENS_FILE_BYTES = 4 << 20
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """Where a verb is run."""

    environ: Mapping[str, str]
    out: TextIO
    err: TextIO

    def say(self, text: str) -> None:
        self.out.write(text + "\n")

    def note(self, text: str) -> None:
        """Beside the result: what a program that reads it does not want."""
        self.err.write(text + "\n")


def seconds_of(text: str) -> int:
    """`30d` in seconds. Raises ConfigError."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ConfigError(f"--expires {text}: give a whole number and s, m, h, d or w, like 30d")
    return int(found[1]) * _SECONDS[found[2]]


def tokens_in(path: str) -> list[int]:
    """Token ids from a file. Raises ConfigError that names the first word that is none."""
    raw, _ = read_bounded(path, MAX_TOKENS_FILE_BYTES, "--tokens: file")
    words = raw.replace(b"[", b" ").replace(b"]", b" ").replace(b",", b" ").split()
    for word in words:
        if not word.isdigit() or len(word) > 10:
            shown = word[:20].decode("ascii", "replace")
            raise ConfigError(f"--tokens {path}: {shown!r} is no token id")
    return [int(word) for word in words]


def wall_ms_of(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{flag} {text} is no time; give 2026-01-31T12:00:00+00:00") from None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1_000)


def time_text(wall_ms: float) -> str:
    return datetime.fromtimestamp(wall_ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def print_json(answer: Json, terminal: Terminal) -> int:
    terminal.say(json.dumps(answer, indent=2, ensure_ascii=False))
    return OK


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], terminal: Terminal) -> int:
    table = [tuple(head), *(tuple(printable(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminal.say("  ".join(cells).rstrip())
    return OK


def printable(text: str) -> str:
    """What is shown of a log that somebody may have written into does not steer the terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
