"""W3C trace context: what a client's `traceparent` says, if it is a good one.

Anything that is not exactly as the standard has it is dropped with its `tracestate`, and so is a
`tracestate` that is none: a worker never sees a header that we could not read. Read `tracing.py`
for what is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_STATE_BYTES = 512
"""What the standard asks to be passed on at least; longer ones are dropped whole."""
_PARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?"
)
_STATE = re.compile(rb"[ -~]{1,%d}" % MAX_STATE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The span that asks us, in somebody else's hands."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: bytes
    """Their `tracestate`; empty for none."""


def parent_in(headers: Mapping[bytes, bytes]) -> Parent | None:
    """None where the head has no good `traceparent`."""
    told = headers.get(b"traceparent")
    if told is None:
        return None
    found = _PARENT.fullmatch(told)
    if found is None or (found[5] is not None and found[1] == b"00"):
        return None  # only later versions may say more
    state = headers.get(b"tracestate", b"")
    return Parent(
        trace_id=found[2].decode("ascii"),
        span_id=found[3].decode("ascii"),
        is_sampled=bool(int(found[4], 16) & 1),
        state=state if _STATE.fullmatch(state) else b"",
    )


def lines(trace_id: str, span_id: str, state: bytes, *, is_sampled: bool) -> bytes:
    """The header lines that say so to whoever is asked next."""
    parent = f"traceparent: 00-{trace_id}-{span_id}-{int(is_sampled):02x}\r\n".encode("ascii")
    return b"%btracestate: %b\r\n" % (parent, state) if state else parent
