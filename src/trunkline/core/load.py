"""What is in front of a request at each worker: the gateway's own in-flight book.

`queue_ms` is the predicted prefill time of everything sent to a worker that has not given its first
token, less what the one in service has had already. Counts of requests say little (prompt lengths
span three decades), milliseconds of missed prefill say nearly all (reference: routing findings 2
and 6).

Every request enters once and leaves once, whatever happens to it; a second leave is ignored.
Must never: read a clock. Read `cost.py` next.
"""

from __future__ import annotations

import math

from trunkline.core.records import Instant

CHURN_HALF_LIFE_MS = 90_000.0
"""Half-life of the memory of recently placed cold prefill; 60 to 120 s did alike on four traces."""

CHURN_FLOOR_TOKENS = 4_096
"""Churn below about one long prompt says nothing: nothing is evicted for it."""

SLOW_START_FLOOR = 0.1
"""Of what a warm worker may queue, the least that a cold one may."""

_RESCALE_HALF_LIVES = 64.0
_TYPICAL_STEP = 0.1


class PrefillQueue:
    """Work sent to one worker and not yet begun to answer, oldest first; and its open streams."""

    __slots__ = (
        "_cold_ms",
        "_cold_window_ms",
        "_head_since",
        "_pending",
        "_reported_ms",
        "_streams",
        "_told_ms",
        "_total_ms",
        "churn",
        "foreign_ms",
        "scale",
        "slow_factor",
        "typical_ms",
        "worked_ms",
    )

    def __init__(self) -> None:
        self._pending: dict[int, float] = {}
        self._streams: set[int] = set()
        self._total_ms = 0.0
        self._head_since = Instant(0.0)
        self._cold_ms = self._cold_window_ms = 0.0
        self.slow_factor = 0.0
        """How often its queue counts beyond once: 0 for a warm worker, 9 at a slow start."""
        self.worked_ms = 0.0
        """Prefill sent here, ever."""
        self.churn = 0.0
        """Missed tokens placed here lately, in the scale of the book's `ChurnClock`."""
        self.scale = 1.0
        """Measured over predicted prefill time of this worker (calibration)."""
        self.foreign_ms = 0.0
        """Queue beyond this book: what other gateways say of theirs or, where it is more, what the
        worker reports.
        """
        self._reported_ms = 0.0
        self._told_ms = 0.0
        self.typical_ms = 0.0
        """Prefill of a recent request, smoothed; what a foreign one is taken for."""

    def start_slowly(self, window_ms: float) -> None:
        """A worker has come with an empty cache while others are warm. Until it was sent so much
        prefill, its queue counts more than it is: it misses what they hit. The weight of its queue
        falls from ten times to once, by the work that it was sent.
        """
        self._cold_ms = self._cold_window_ms = window_ms
        self._weigh()

    def start(self, ticket: int, prefill_ms: float, now: Instant) -> None:
        """A request was sent. Raises ValueError for a ticket that is already in the book."""
        if ticket in self._pending or ticket in self._streams:
            raise ValueError(f"ticket {ticket} is in the load book already")
        if not self._pending:
            self._head_since = now
        self._pending[ticket] = prefill_ms
        self._total_ms += prefill_ms
        self.worked_ms += prefill_ms
        if self._cold_ms > 0.0:
            self._cold_ms = max(0.0, self._cold_ms - prefill_ms)
            self._weigh()
        self.typical_ms += (prefill_ms - self.typical_ms) * _TYPICAL_STEP

    def first_token(self, ticket: int, now: Instant) -> None:
        """Its prefill is over; it decodes now."""
        if self._leave_queue(ticket, now):
            self._streams.add(ticket)

    def end(self, ticket: int, now: Instant) -> bool:
        """It left, in whatever state it was; False when it had left before."""
        if ticket in self._streams:
            self._streams.discard(ticket)
            return True
        return self._leave_queue(ticket, now)

    def queue_ms(self, now: Instant) -> float:
        """Predicted prefill time in front of a request that would be sent now."""
        pending = self._pending
        if not pending:
            return self.foreign_ms
        head_ms = next(iter(pending.values()))
        served_ms = now - self._head_since
        return self._total_ms - (served_ms if served_ms < head_ms else head_ms) + self.foreign_ms

    def prefilled_in_ms(self, ticket: int, now: Instant) -> float:
        """Predicted time until this request of the book gives its first token; all that is in
        front of it is served before. 0.0 for one that is not in the queue.
        """
        pending = self._pending
        if ticket not in pending:
            return 0.0
        head_ms = next(iter(pending.values()))
        total_ms = self.foreign_ms - min(now - self._head_since, head_ms)
        for other, prefill_ms in pending.items():
            total_ms += prefill_ms
            if other == ticket:
                break
        return total_ms

    def correct(self, waiting_count: int) -> None:
        """The worker says how many requests wait: those beyond our own are somebody else's."""
        self._reported_ms = max(0, waiting_count - len(self._pending)) * self.typical_ms
        self.foreign_ms = max(self._reported_ms, self._told_ms)

    def told(self, elsewhere_ms: float) -> None:
        """Other gateways say how much of their work waits there; 0.0 where they say no more."""
        self._told_ms = self.foreign_ms = elsewhere_ms
        if self._reported_ms > elsewhere_ms:
            self.foreign_ms = self._reported_ms

    def own_ms(self, now: Instant) -> float:
        """The part of `queue_ms` that is in this book."""
        return self.queue_ms(now) - self.foreign_ms

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    @property
    def in_flight_count(self) -> int:
        return len(self._pending) + len(self._streams)

    def _weigh(self) -> None:
        window_ms = self._cold_window_ms
        warm = 1.0 - self._cold_ms / window_ms if window_ms > 0.0 else 1.0
        self.slow_factor = 1.0 / max(SLOW_START_FLOOR, warm) - 1.0

    def _leave_queue(self, ticket: int, now: Instant) -> bool:
        prefill_ms = self._pending.get(ticket)
        if prefill_ms is None:
            return False
        if next(iter(self._pending)) == ticket:
            self._head_since = now  # the next one is served from here on
        del self._pending[ticket]
        # Sums of floats drift; an empty queue is exactly empty.
        self._total_ms = self._total_ms - prefill_ms if self._pending else 0.0
        return True


class ChurnClock:
    """The common scale of all workers' churn.

    Decaying 1,000 numbers at each decision is work; growing the weight of what is added is none. A
    token placed at time t adds `2 ** (t / half_life)`, so ratios between workers are those of true
    decay.
    """

    __slots__ = ("_origin", "_queues")

    def __init__(self, now: Instant) -> None:
        self._origin = now
        self._queues: list[PrefillQueue] = []

    def watch(self, queue: PrefillQueue) -> None:
        """Let a worker's churn take part in rescaling."""
        self._queues.append(queue)

    def unwatch(self, queue: PrefillQueue) -> None:
        self._queues.remove(queue)

    def floor(self, now: Instant) -> float:
        """`CHURN_FLOOR_TOKENS` in the present scale."""
        return CHURN_FLOOR_TOKENS * self._weight(now)

    def add(self, queue: PrefillQueue, missed_tokens: int, now: Instant) -> None:
        """Cold prefill of so many tokens was placed on a worker."""
        weight = self._weight(now)  # may change the churn of all, so it comes first
        queue.churn += missed_tokens * weight

    def _weight(self, now: Instant) -> float:
        half_lives = (now - self._origin) / CHURN_HALF_LIFE_MS
        if half_lives > _RESCALE_HALF_LIVES:
            # Also after days without a request: a negative power goes to 0, a positive overflows.
            faded = math.pow(2.0, -half_lives)
            for watched in self._queues:
                watched.churn *= faded
            self._origin = now
            return 1.0
        return math.pow(2.0, half_lives)
