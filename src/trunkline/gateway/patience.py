"""How long a stream may be silent, as the history of its worker tells; and what it adds to that.

The settings' time-outs are for every answer; these are for streams before workers whose pace is
known, and far shorter; shorter still where nothing at all is heard of the worker. What is late by
them is tried elsewhere, where nothing has gone out yet.
Must never: act on it. Read `exchange.py` for who does, `core/pace.py` for the limits.
"""

from __future__ import annotations

from array import array

from trunkline.core.decision import Decision
from trunkline.core.pace import GONE_MS, Pace
from trunkline.core.records import Instant
from trunkline.errors import WorkerLate, WorkerLost
from trunkline.gateway.contracts import InferenceRequest, Pick


def dismissed(pick: Pick | None) -> WorkerLost | None:
    """Why nothing more is taken from this worker, however well it answers; None while it is."""
    if pick is None or pick.stay is None or not pick.stay.is_over:
        return None
    return WorkerLost("the worker was drained, and the time for its last answers is over")


def lateness(pick: Pick | None, waited_ms: float, *, has_first_token: bool) -> WorkerLate | None:
    """What is wrong with a stream's having been silent for so long; None while nothing is."""
    if pick is None or pick.pace is None:
        return None
    if not has_first_token:
        limit_ms, what = pick.first_token_ms, "first"
    else:
        limit_ms, what = pick.pace.gap_limit_ms(), "further"
        # Others' prefills take turns with its steps in many engines: that is no fault of theirs.
        limit_ms = None if limit_ms is None else limit_ms + pick.ahead_ms()
    if limit_ms is None:
        return None
    if waited_ms > GONE_MS and pick.stay is not None and pick.stay.is_gone():
        limit_ms = min(limit_ms, GONE_MS + pick.ahead_ms())
    if waited_ms <= limit_ms:
        return None
    return WorkerLate(f"the worker gave no {what} token for more than {limit_ms:.0f} ms")


def first_token_ms(
    request: InferenceRequest, decision: Decision, pace: Pace | None, *, cold_ms: float
) -> float | None:
    """How long the first token of a stream may take whose prompt is known; `cold_ms`, if the worker
    has to compute all of it. None where there is no history, or nothing is streamed.
    """
    if pace is None or not request.is_stream or not isinstance(request.prompt, array):
        return None
    candidates, choice = decision.candidates, decision.choice
    queue_ms = candidates.queue_ms[choice] + candidates.transfer_ms[choice]
    return pace.first_token_limit_ms(prefill_ms=cold_ms, queue_ms=queue_ms)


def moved(pick: Pick | None, tokens: int, span_ms: float, now_ms: float) -> None:
    """The worker gave so many further tokens of a stream within this time."""
    if pick is not None and pick.pace is not None:
        pick.pace.moved(tokens, span_ms, Instant(now_ms))
