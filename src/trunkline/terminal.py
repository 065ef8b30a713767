"""What verbs write to a terminal, and the times in it.

Must never: let what it shows steer the terminal. Read `words.py` for how a person is read, and
`tenant_answers.py` for who uses both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from trunkline.admin_client import Json
from trunkline.errors import ConfigError

OK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """Where a verb is run."""

    environ: Mapping[str, str]
    out: TextIO
    err: TextIO
    wall_s: Callable[[], float]
    """Seconds since 1970."""

    def say(self, text: str) -> None:
        self.out.write(text + "\n")

    def note(self, text: str) -> None:
        """Beside the result: what a program that reads it does not want."""
        self.err.write(text + "\n")


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
