"""A trace of a request that is over, for what sends it."""

from __future__ import annotations

import random

from hand_clock import HandClock
from trunkline.gateway.contracts import Route
from trunkline.gateway.counters import AccessRecord
from trunkline.gateway.tracing import Trace, Tracer


def ended() -> Trace:
    """A request that was recorded and is over."""
    over: list[Trace] = []
    clock = HandClock()
    tracer = Tracer(dice=random.Random(1), now_ms=clock.now, wall=clock.wall, sink=over.append)
    trace = tracer.begin({}, Route.CHAT)
    assert trace is not None
    access = AccessRecord(
        request_id="r", client_request_id="", trace_id=trace.trace_id, method="POST", path="/v1",
        status=200, code="", worker="", attempts=0, request_bytes=0, answer_bytes=0, ttft_ms=None,
        duration_ms=1.0,
    )  # fmt: skip
    tracer.end(trace, access)
    return over[0]
