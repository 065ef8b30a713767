"""Whether a queue only absorbs a burst or is overloaded, and who is turned away then.

CoDel (K. Nichols, V. Jacobson, "Controlling Queue Delay", ACM Queue 2012): a queue whose oldest
entry never waits less than a target (500 ms) through a whole interval (2 s) is no burst any more.
Clients of a gateway do not slow down by themselves as TCP does, so what follows is not CoDel's ever
faster dropping: while the queue is overloaded, whoever is predicted to wait longer than its class
may is refused as it comes, and the oldest go that have waited for three targets, as long as enough
are left to keep the workers busy. It is over when nobody had to be refused for an interval.

What is sent on waits again, at its worker. Both waits together are held against the target, and as
turns are taken here, not there, half of the target is the most that a worker has in front of it
while the queue is overloaded.

    priority   refused as it comes when it is predicted to wait, here and there, beyond
    low        half the target, counting all that wait
    normal     the target, at its tenant's own turn
    high       twice the target, at its tenant's own turn

So the lowest goes first: what all wait is at least what any tenant waits for its turn. Must never:
read a clock, or refuse anybody while there is no overload. Read `fairness.py` for turns.
"""

from __future__ import annotations

from enum import Enum

from trunkline.core.records import Instant

TARGET_MS = 500.0
INTERVAL_MS = 2_000.0
SLOUGH = 3.0
"""Targets that an entry may wait while the queue is overloaded: 1.5 s."""
WORKER_SHARE = 0.5
"""Of the target, what a worker may have in front of it while the queue is overloaded."""
OUTFLOW_HALF_LIFE_MS = 1_000.0
"""How fast an outflow forgets: a few longest prefills, so that one of them is not taken for it."""


class Priority(Enum):
    """Who is refused first where not all can be served."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class Overload:
    """See the module. One a queue."""

    __slots__ = ("_interval_ms", "_low_until", "_refused_at", "is_on", "target_ms")

    def __init__(self, *, target_ms: float = TARGET_MS, interval_ms: float = INTERVAL_MS) -> None:
        """A target of 0 never refuses."""
        self.take(target_ms=target_ms, interval_ms=interval_ms)
        self._low_until = Instant(0.0)
        """The last time that the oldest entry was below the target."""
        self._refused_at = Instant(0.0)
        self.is_on = False

    def take(self, *, target_ms: float, interval_ms: float) -> None:
        """These from here on."""
        assert target_ms >= 0.0, target_ms
        assert interval_ms > 0.0, interval_ms
        self.target_ms = target_ms
        self._interval_ms = interval_ms

    @property
    def slough_ms(self) -> float:
        """What an entry may wait while it is on."""
        return SLOUGH * self.target_ms

    def look(self, oldest_wait_ms: float, now: Instant) -> bool:
        """Take note of how long the oldest entry has waited, 0 where there is none; whether the
        queue is overloaded.
        """
        if oldest_wait_ms <= self.target_ms or not self.target_ms:
            self._low_until = now
            if self.is_on and now - self._refused_at >= self._interval_ms:
                self.is_on = False
        elif not self.is_on and now - self._low_until >= self._interval_ms:
            self.is_on = True
            self._refused_at = now  # it lasts an interval at least
        return self.is_on

    def refused(self, now: Instant) -> None:
        """Somebody was turned away for it."""
        self._refused_at = now

    def room_ms(self, calm_ms: float) -> float:
        """What a worker may have in front of it that may have so much without overload."""
        return min(calm_ms, WORKER_SHARE * self.target_ms) if self.is_on else calm_ms

    def allowed_ms(self, priority: Priority) -> float:
        """What one of this class may be predicted to wait, at its worker included."""
        match priority:
            case Priority.LOW:
                return 0.5 * self.target_ms
            case Priority.NORMAL:
                return self.target_ms
            case Priority.HIGH:
                return 2.0 * self.target_ms


class Outflow:
    """How many entries leave a queue in turn, over the last second or so in which any waited."""

    __slots__ = ("_at", "_left", "_over_ms")

    def __init__(self) -> None:
        self._left = 0.0
        self._over_ms = 0.0
        self._at = Instant(0.0)

    def resume(self, now: Instant) -> None:
        """Somebody waits again: the time since the last one left says nothing."""
        self._at = now

    def left(self, now: Instant) -> None:
        """One left in its turn."""
        self._fade(now)
        self._left += 1.0

    def wait_ms(self, entries: float, now: Instant) -> float:
        """How long so many take to leave. Before any has, one takes as long as it did so far."""
        self._fade(now)
        return entries * self._over_ms / (self._left or 1.0)

    def _fade(self, now: Instant) -> None:
        passed_ms = now - self._at
        if passed_ms <= 0.0:
            return
        kept = 2.0 ** (-passed_ms / OUTFLOW_HALF_LIFE_MS)
        self._left *= kept
        self._over_ms = self._over_ms * kept + passed_ms
        self._at = now
