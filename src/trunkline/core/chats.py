"""What every dialect of conversations becomes: a chat, as the model's template is given it.

Owns the record and the refusal that the dialects share. Must never: put a client's words into an
error. Read `anthropic.py` and `responses.py` for the dialects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

Block = Mapping[str, Any]
_NOTHING: Block = {}


class BadBody(ValueError):
    """The body is none; `param` is the field at fault."""

    def __init__(self, param: str, wrong: str) -> None:
        super().__init__(f"{param}{wrong}" if wrong.startswith("[") else f"{param} {wrong}")
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a chat template is given, but for what depends on the template."""

    messages: list[dict[str, Any]] = field(repr=False)
    tools: list[dict[str, Any]] | None = field(default=None, repr=False)
    options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    thinks_not: bool = False
    """The client switched thinking off; how that is said depends on the template."""
    unknown: str = ""
    """What an engine makes of it that is not known here; empty where all of it is."""


def fields_of(value: Any) -> Block:  # any JSON
    """Of an object; of anything else none."""
    return value if is_object(value) else _NOTHING


def is_object(value: Any) -> TypeGuard[Block]:  # any JSON
    return type(value) is dict


def is_list(value: Any) -> TypeGuard[list[Any]]:  # any JSON
    return type(value) is list
