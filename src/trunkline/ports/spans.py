"""What a trace says of one piece of work, and who takes it elsewhere. `adapters/otlp.py` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from trunkline.core.records import WallTime


class SpanKind(Enum):
    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Ids are lower-case hex, as W3C has them. Attributes hold no contents and no credentials."""

    name: str
    kind: SpanKind
    trace_id: str
    span_id: str
    parent_id: str
    """Empty where the trace begins with it."""
    is_parent_remote: bool = False
    began: WallTime
    ended: WallTime
    attributes: Mapping[str, str | int | float | bool] = field(
        default_factory=dict[str, "str | int | float | bool"]
    )
    error: str = ""
    """Why it failed; empty for what went well."""


class SpanExport(Protocol):
    """Sends spans away. Called on a thread of its own, one call at a time."""

    def __call__(self, spans: Sequence[Span], /) -> bool:
        """Whether they arrived. Takes seconds at most, and does not raise."""
        ...
