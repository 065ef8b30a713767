"""What a request is told to pull, and what becomes of that, as JSON.

    order   {"grant", "host", "port", "local", "source", "other"}              from the gateway
    pulled  {"end", "reason", "blocks", "tokens", "bytes", "ms", "first"}      told to it

`ready_ms` may be beside these: how long the source still computes what is asked for. `other` is a
second source, of the same fields, for when the first fails; `first` is how that
one failed, where the other was asked. Read strictly. Must never: believe a grant. Read `client.py`
for what is done with an order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from trunkline.core.transfer import (
    MAX_GRANT_LIFE_MS,
    MAX_NAME_BYTES,
    MAX_ORDER_BYTES,
    PullEnd,
    Reason,
)

MAX_SOURCES = 2
"""That one order names; the gateway is told."""
_MAX_LOCAL_CHARACTERS = 107  # of a unix socket's name
_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,255}")
_LOCAL = re.compile(rf"[A-Za-z0-9._-]{{0,{_MAX_LOCAL_CHARACTERS}}}")


class _WireSource(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    grant: str
    host: str
    port: int
    local: str
    source: str
    ready_ms: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_GRANT_LIFE_MS)] = 0.0


class _Wire(_WireSource, forbid_unknown_fields=True, kw_only=True):
    other: _WireSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """From where, and what allows it."""

    grant: str = field(repr=False)
    host: str
    port: int
    local: str
    source: str
    ready_ms: float = 0.0
    """How long the source is expected to need until it has computed what is asked for."""
    fault: Reason | None = None
    """Why nothing will be pulled by it."""
    other: PullOrder | None = None
    """Who is asked where this one fails; it has no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What became of one pull."""

    end: PullEnd
    reason: Reason | None
    """Why not all of it came; None where all did, or all was here already."""
    first_block: int = 0
    blocks: int = 0
    tokens: int = 0
    bytes: int = 0
    """As the profile has it."""
    ms: float = 0.0
    first: Pulled | None = None
    """How the first source failed, where this is about the other one."""

    def told(self) -> bytes:
        """The value of `x-trunkline-pulled`."""
        words: Mapping[str, Any] = {  # JSON
            "end": self.end.value,
            "reason": self.reason.value if self.reason else None,
            "blocks": self.blocks,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "ms": round(self.ms, 3),
        }
        if self.first is not None:
            assert self.first.reason is not None, "it failed"
            first = {"reason": self.first.reason.value, "ms": round(self.first.ms, 3)}
            words = {**words, "first": first}
        return msgspec.json.encode(words)


NO_PULLS = Pulled(end=PullEnd.REJECTED, reason=Reason.GRANT)
"""A worker without the fleet's transfer key cannot read any grant."""


def read_order(raw: bytes) -> PullOrder:
    """The order in a JSON text. Raises ValueError where it is not of this shape. An address or a
    name that nothing can be pulled by is the pull's fault, and no error.
    """
    if len(raw) > MAX_ORDER_BYTES:
        raise ValueError(f"it has {len(raw)} bytes, at most {MAX_ORDER_BYTES} are taken")
    try:
        wire = msgspec.json.decode(raw, type=_Wire)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return _order(wire, None if wire.other is None else _order(wire.other, None))


def _order(wire: _WireSource, other: PullOrder | None) -> PullOrder:
    return PullOrder(
        grant=wire.grant,
        host=wire.host,
        port=wire.port,
        local=wire.local,
        source=wire.source,
        ready_ms=wire.ready_ms,
        fault=_order_fault(wire),
        other=other,
    )


def _order_fault(wire: _WireSource) -> Reason | None:
    """What cannot be used of it; the grant itself is looked at later."""
    if not (_HOST.fullmatch(wire.host) and _LOCAL.fullmatch(wire.local)):
        return Reason.CONNECT
    if not 1 <= wire.port <= 65_535:
        return Reason.CONNECT
    is_named = 0 < len(wire.source.encode()) <= MAX_NAME_BYTES and wire.source.isprintable()
    return None if is_named else Reason.GRANT
