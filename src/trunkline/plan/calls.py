"""What a plan keeps of one logged request, and what it says of lines that it could not read.

A `Call` holds names of blocks, never text. Must never: quote a line. Read `reader.py` next.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

MAX_NAMED_REJECTS = 5
"""Places that are named for each reason; further ones are counted."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One request of a log."""

    at_ms: float | None
    """Since 1970, or since the log began; None where the log has no times."""
    tokens: int
    output_tokens: int
    blocks: array[int] = field(repr=False)
    """Names of the full blocks, each in the context of all before it, as 64-bit numbers."""
    block_tokens: int
    tenant: str | None = None
    user: str | None = None
    session: str | None = None
    model: str | None = None
    line: int = 0
    """Where it stands in the log."""
    usage_tokens: int | None = None
    """Prompt tokens as the engine counted them, where the log says so."""

    @property
    def most_hits(self) -> int:
        """Blocks that a cache can answer: the last token is always computed."""
        return min(len(self.blocks), max(0, self.tokens - 1) // self.block_tokens)


class Reject(Enum):
    """Why a line is no request."""

    TOO_LONG = "longer than the limit"
    NOT_JSON = "not JSON"
    TOO_DEEP = "nested too deep"
    NO_OBJECT = "JSON, but no object"
    NO_PROMPT = "no prompt in it"
    BAD_PROMPT = "a prompt that is none"
    BAD_TIME = "a time that is none"
    BAD_COUNT = "a token count that is none"
    BAD_BLOCKS = "block ids that do not fit"
    BAD_NAME = "a user, session or model that is no name"
    BAD_COLUMNS = "not the columns of the header"
    OPEN_QUOTES = "quotes that do not close"
    CUT_OFF = "the file ends in the middle"


class Malformed(Exception):
    """A line that is no request. Never leaves this folder."""

    def __init__(self, reason: Reject) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Rejects:
    """Lines that were left out: counted by reason, the first of each named by file and line."""

    def __init__(self) -> None:
        self.counts: Counter[Reject] = Counter()
        self.places: dict[Reject, list[str]] = {}

    def add(self, reason: Reject, place: str) -> None:
        self.counts[reason] += 1
        named = self.places.setdefault(reason, [])
        if len(named) < MAX_NAMED_REJECTS:
            named.append(place)

    @property
    def total(self) -> int:
        return sum(self.counts.values())
