"""When what came of one request: its attempts, its first token, its end.

Owns what the data plane counts of a request beside its outcome, and tells its trace. Must never
decide anything. Read `exchange.py` for who tells it.
"""

from __future__ import annotations

from trunkline.gateway.contracts import AttemptEnd, InferenceRequest, Pick
from trunkline.gateway.head import AnswerHead
from trunkline.gateway.line import Line
from trunkline.gateway.mending import Passage


class Course:
    """See the module."""

    __slots__ = ("_line", "_picked_ms", "_request", "_started_ms", "attempts", "ttft_ms")

    def __init__(self, line: Line, request: InferenceRequest) -> None:
        self._line = line
        self._request = request
        self.attempts = 0
        self._started_ms = line.now_ms()
        self._picked_ms = self._started_ms
        """Of the last attempt; looked at only where it is told."""
        self.ttft_ms: float | None = None
        """To the first token that the client got; None before it."""

    def picked(self, pick: Pick) -> None:
        """An attempt begins."""
        self.attempts += 1
        self._line.counters.attempts += 1
        if pick.decision_header:
            self._picked_ms = self._line.now_ms()
        if self._request.trace is not None:
            self._request.trace.picked(pick, self._line.now_ms())

    def told(self) -> str:
        """Behind a decision, to those who may see it: how many attempts it took, and what of its
        time went by before the last of them, in line and in thought.
        """
        if not self._request.grant.sees_decisions:
            return ""
        overhead_ms = self._picked_ms - self._started_ms
        return f"; attempts={self.attempts}; overhead_ms={overhead_ms:.2f}"

    def headed(self, head: AnswerHead) -> None:
        """Its worker began to answer."""
        if self._request.trace is not None:
            self._request.trace.headed(head)

    def attempt_over(self, end: AttemptEnd) -> None:
        if self._request.trace is not None:
            self._request.trace.attempt_over(end, self._line.now_ms())

    def first_token(self) -> None:
        """Of an attempt; the client saw that of the first one."""
        if self.ttft_ms is None:
            self.ttft_ms = self._line.now_ms() - self._started_ms
            self._line.counters.ttft.observe(self.ttft_ms / 1_000.0)

    def over(self, relay: Passage | None, *, is_whole: bool) -> int:
        """All of it is over; how many bytes of an answer went out."""
        counters, taken_ms = self._line.counters, self._line.now_ms() - self._started_ms
        counters.durations[self._request.route].observe(taken_ms / 1_000.0)
        if relay is None:
            return 0
        if self._request.trace is not None and self._request.trace.record is not None:
            self._request.trace.used(relay.usage())
        if is_whole and relay.is_events and self.ttft_ms is not None:
            further = relay.events_delivered - 1
            if further > 0:
                counters.tpot.observe((taken_ms - self.ttft_ms) / 1_000.0 / further)
        bytes_out = relay.bytes_out
        counters.answer_bytes += bytes_out
        return bytes_out
