"""Where an exchange stands, and how long it may stay there.

Owns the phases and their limits. One sweep asks for all exchanges, so a limit is kept to within the
time between two sweeps. Must never act on what it says. Read `exchange.py` next.
"""

from __future__ import annotations

from enum import Enum

from trunkline.config import RetryConfig, UpstreamConfig
from trunkline.errors import GatewayError, WorkerLost
from trunkline.gateway.upstream import timed_out

_GRACE_MS = 1_000
"""What has a timer of its own is looked at only this long after it, in case that it was lost."""


class Phase(Enum):
    PICKING = "picking"
    CONNECTING = "connecting"
    WAITING = "waiting"
    ANSWERING = "answering"
    PAUSING = "pausing"
    DONE = "done"


# In Python 3.11 a member costs 50 ns more where it is looked up in its class.
PICKING, CONNECTING, WAITING, ANSWERING, PAUSING, DONE = Phase


def overdue(
    phase: Phase, waited_ms: float, upstream: UpstreamConfig, retry: RetryConfig
) -> GatewayError | None:
    """What is wrong with having waited so long; None while nothing is."""
    answer_ms, idle_ms = upstream.first_byte_timeout_ms, upstream.stream_idle_timeout_ms
    match phase:
        case Phase.ANSWERING if waited_ms > idle_ms:
            return timed_out("was silent", idle_ms)
        case Phase.WAITING if waited_ms > answer_ms:
            return timed_out("did not answer", answer_ms)
        case Phase.PICKING if waited_ms > answer_ms:
            return timed_out("was not chosen", answer_ms)
        case Phase.CONNECTING if waited_ms > upstream.connect_timeout_ms + _GRACE_MS:
            text = f"no connection to the worker within {upstream.connect_timeout_ms} ms"
            return WorkerLost(text)
        case Phase.PAUSING if waited_ms > retry.retry_max_backoff_ms + _GRACE_MS:
            return WorkerLost("the pause before the next attempt did not end")
        case _:
            return None
