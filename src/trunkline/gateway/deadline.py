"""Whether what a client waits for can still be in time: asked before a worker is given the work,
and while nothing of the answer has come.

A request whose deadline cannot be met is not begun: it would take its worker's time from others and
end in nothing. Where the fleet is busy, that is what a later try may find otherwise (429); where
even an idle worker would take too long, it is the time-out that is wrong (504). Must never: read a
clock, or shorten what nobody asked to be shortened. Read `wishes.py` for where deadlines come from.
"""

from __future__ import annotations

from trunkline.core.decision import Decision
from trunkline.core.rates import retry_after_s
from trunkline.core.records import Instant
from trunkline.errors import DeadlinePassed, DeadlineUnmet
from trunkline.gateway.contracts import InferenceRequest


def past(deadline: Instant | None, now_ms: float) -> DeadlinePassed | None:
    """What is wrong with having no first byte yet; None while the client still waits for it."""
    if deadline is None or now_ms < deadline:
        return None
    return DeadlinePassed("no answer began within the time-out that the client gave")


def require_time(request: InferenceRequest, decision: Decision, now: Instant) -> None:
    """Raises DeadlinePassed or DeadlineUnmet where the chosen worker's first token is predicted to
    come too late. Whoever was refused for others in front is told when these will be gone.
    """
    if request.deadline is None:
        return
    late = past(request.deadline, now)
    if late is not None:
        raise late
    left_ms = request.deadline - now
    candidates, choice = decision.candidates, decision.choice
    ahead_ms = candidates.queue_ms[choice] + candidates.transfer_ms[choice]
    if ahead_ms + decision.miss_ms <= left_ms:
        return
    if decision.miss_ms > left_ms:
        text = f"its prompt takes {decision.miss_ms:.0f} ms, the client waits {left_ms:.0f} ms"
        raise DeadlinePassed(text)
    raise unmet(ahead_ms, left_ms - decision.miss_ms)


def unmet(ahead_ms: float, left_ms: float) -> DeadlineUnmet:
    """Others are in front for longer than the client waits."""
    error = DeadlineUnmet(
        f"{ahead_ms:.0f} ms of work are in front of it, the client waits {left_ms:.0f} ms"
    )
    error.retry_after_s = retry_after_s(ahead_ms - left_ms)
    return error
