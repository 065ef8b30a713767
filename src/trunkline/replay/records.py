"""What is known of one replayed request once it is over. Owns no behaviour. Read `results.py`
next.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum


class Verdict(Enum):
    """Whether the answer was the right one for its prompt."""

    RIGHT = "right"
    WRONG = "wrong"
    """KV of another prompt or another tenant was used: a false hit."""
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back over the wire, with times on the loop's clock in ms."""

    sent_at_ms: float
    first_token_at_ms: float | None
    ended_at_ms: float
    status: int
    """0: no status line came."""
    lost_reason: str = ""
    """Empty: the answer is complete."""
    token_ids: array[int] = field(default_factory=lambda: array("I"), repr=False)
    text: str = field(default="", repr=False)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    decision: str = ""
    """The `x-trunkline-decision` header, where the gateway sends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request: when, how it went, what was reused."""

    index: int
    arrival_ms: float
    """When it was due, since the run began, wall clock."""
    client_late_ms: float
    """How much later than due it was sent, through our own limit or load."""
    session: str | None
    lost_reason: str
    status: int
    ttft_ms: float | None
    duration_ms: float
    prompt_tokens: int
    cached_tokens: int | None
    """None: the worker does not say."""
    output_tokens: int
    verdict: Verdict
    worker: str | None
    matched_tokens: int | None
    """What the gateway believed to be resident, where it says so."""
    queue_ms: float | None
    """What the gateway predicted as wait, where it says so."""
    reason: str | None = None
    """Which rule of the gateway's chose the worker, where it says so."""

    @property
    def is_lost(self) -> bool:
        return bool(self.lost_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionNote:
    """What the compact decision header says."""

    worker: str | None = None
    matched_tokens: int | None = None
    queue_ms: float | None = None
    reason: str | None = None


def read_decision(header: str) -> DecisionNote:
    """Parse `worker=w1; matched=64/96; queue_ms=1.5; ...`; what is missing or odd is None."""
    pairs = dict(item.strip().split("=", 1) for item in header.split(";") if "=" in item)
    matched = pairs.get("matched", "").partition("/")[0]
    queue = pairs.get("queue_ms", "")
    try:
        queue_ms = float(queue) if queue else None
    except ValueError:
        queue_ms = None
    return DecisionNote(
        worker=pairs.get("worker"),
        matched_tokens=int(matched) if matched.isdecimal() else None,
        queue_ms=queue_ms,
        reason=pairs.get("reason"),
    )
