"""When a failing worker is left alone, and how it comes back.

    CLOSED ──failures in a row──► OPEN ──pause over──► HALF_OPEN ──successes in a row──► CLOSED
                                   ▲                       │
                                   └───────one failure─────┘

Pure: time is an argument. What the client did wrong never gets here: an answer below 500 is a
success, and a client that left says nothing. Read `fleet.py` for who asks.
"""

from __future__ import annotations

from enum import IntEnum

from trunkline.core.records import Instant


class BreakerState(IntEnum):
    """The numbers are those of the `worker_cb_state` metric."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class Breaker:
    """The breaker of one worker."""

    __slots__ = (
        "_failure_threshold",
        "_failures",
        "_opened_at",
        "_pause_ms",
        "_state",
        "_success_threshold",
        "_successes",
        "_trial_at",
    )

    def __init__(self, *, failure_threshold: int, success_threshold: int, pause_ms: float) -> None:
        self._failure_threshold = failure_threshold
        self._success_threshold = success_threshold
        self._pause_ms = pause_ms
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._successes = 0
        self._opened_at = Instant(0.0)
        self._trial_at: Instant | None = None
        """When the trial in flight was let through; None where there is none."""

    def state(self, now: Instant) -> BreakerState:
        if self._state is BreakerState.OPEN and now - self._opened_at >= self._pause_ms:
            return BreakerState.HALF_OPEN
        return self._state

    def is_usable(self, now: Instant) -> bool:
        """Whether an attempt may be made. Half open: one trial at a time.

        A trial whose end was never told stops counting after the pause, so that no breaker stays
        half open for ever.
        """
        match self.state(now):
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return False
            case BreakerState.HALF_OPEN:
                return self._trial_at is None or now - self._trial_at >= self._pause_ms

    def begin(self, now: Instant) -> None:
        """An attempt starts at this worker."""
        if self.state(now) is BreakerState.HALF_OPEN:
            if self._state is BreakerState.OPEN:
                self._state = BreakerState.HALF_OPEN
                self._successes = 0
            self._trial_at = now

    def succeeded(self) -> None:
        """An attempt ended with any answer below 500."""
        self._failures = 0
        self._trial_at = None
        if self._state is BreakerState.HALF_OPEN:
            self._successes += 1
            if self._successes >= self._success_threshold:
                self._state = BreakerState.CLOSED

    def failed(self, now: Instant) -> None:
        """An attempt ended with a failure of the worker."""
        self._failures += 1
        self._trial_at = None
        is_spent = self._failures >= self._failure_threshold
        if self._state is BreakerState.HALF_OPEN or (
            self._state is BreakerState.CLOSED and is_spent
        ):
            self._state = BreakerState.OPEN
            self._opened_at = now

    def abandoned(self) -> None:
        """The client left: the attempt says nothing about the worker."""
        self._trial_at = None
