"""What one life of a worker has been seen to do, and from when on its silence is a fault.

A gray worker is one whose health says yes and whose users say no. Two deadlines come from its own
history: one for the first token, one for the next. Each that is missed is a strike, and so is a
worker that gives its tokens far slower than it used to:

    GOOD ──two strikes──► SUSPECT ──a third──► EJECTED ──its time is over──► GOOD
      ▲                      │
      └──the older fades─────┘

A worker without a history has ten times as long as the others of its pool; a pool without one calls
nothing a fault that the settings do not call one. Pure: time is an argument. Must never: hold one
worker's pace against another that has its own. Read `fleet.py` for how much of a fleet may be left
out for it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from trunkline.core.records import Instant

FIRST_TOKEN_FACTOR = 3.0
FIRST_TOKEN_SLACK_MS = 2_000.0
GAP_FACTOR = 20.0
GAP_FLOOR_MS = 5_000.0
"""First token: 3 x predicted prefill + queue + 2 s; next one: 20 x the median, 5 s at least."""
GONE_MS = 3_000.0
"""Three heartbeats: no token is waited for any longer, but for predicted prefill, where nothing
else is heard of the worker either."""

STRIKES_SUSPECT, STRIKES_EJECTED = 2, 3
STRIKE_APART_MS = 1_000.0
"""What is missed within it is one strike: a stall breaks all streams of a worker at once."""
STRIKE_LASTS_MS = 60_000.0
EJECTED_MS, MAX_EJECTED_MS = 30_000.0, 300_000.0
"""The first time out, doubled with each further one."""

NEWCOMER_FACTOR = 10.0
"""It may be a slower machine than the others are."""

HISTORY_FIRST, HISTORY_GAPS = 8, 32
"""Observations before which there is no history."""
_KEPT_FIRST, _KEPT_GAPS = 16, 128
_MEDIAN_EVERY = 16
_PREDICTED_FLOOR_MS = 250.0
"""Of shorter predictions the rest of the way is the larger part."""

WINDOW_MS = 10_000.0
WINDOW_TOKENS = 50
"""A judgement on the pace takes so long, and so many tokens."""
SLOW_FACTOR = 8.0
"""From an empty batch to a full one an engine's steps grow some five times: that is no fault."""
_PACE_STEP, _PACE_MOST = 0.2, 1.25


class Standing(Enum):
    """Whether a worker gets new requests, as far as its pace tells."""

    GOOD = "good"
    SUSPECT = "suspect"
    EJECTED = "ejected"


class Pace:
    """One for each life of a worker. The data plane tells what it sees, and asks what to expect."""

    __slots__ = (
        "_ejected_count", "_ejected_until", "_first_ratios", "_gap_floor_ms", "_gaps",
        "_median_gap_ms", "_pool", "_strikes", "_unread_gaps", "_usual_gap_ms", "_window_began",
        "_window_ms", "_window_tokens", "tokens",
    )  # fmt: skip

    def __init__(self, *, gap_floor_ms: float = GAP_FLOOR_MS, pool: Pace | None = None) -> None:
        """`gap_floor_ms`: no pause between two tokens that is shorter is ever a fault. `pool` is
        what all workers of the pool do, told by each of them; None for no such thing.
        """
        self._pool = pool
        self.tokens = 0
        """All that it gave; rises while anything is heard on any stream."""
        self._gap_floor_ms = gap_floor_ms
        self._first_ratios: deque[float] = deque(maxlen=_KEPT_FIRST)
        self._gaps: deque[float] = deque(maxlen=_KEPT_GAPS)
        self._unread_gaps = 0
        self._median_gap_ms: float | None = None
        self._usual_gap_ms: float | None = None
        self._window_began = Instant(0.0)
        self._window_ms = 0.0
        self._window_tokens = 0
        self._strikes: deque[Instant] = deque(maxlen=STRIKES_EJECTED)
        self._ejected_until: Instant | None = None
        self._ejected_count = 0

    # -- what is seen ----------------------------------------------------------------------------

    def first_token(self, *, predicted_ms: float, observed_ms: float) -> None:
        """A stream's first token came, so long after it was sent; queue and prefill predicted."""
        self.tokens += 1
        self._first_ratios.append(observed_ms / (predicted_ms + _PREDICTED_FLOOR_MS))
        if self._pool is not None:
            self._pool.first_token(predicted_ms=predicted_ms, observed_ms=observed_ms)

    def moved(self, tokens: int, span_ms: float, now: Instant) -> None:
        """A stream gave so many further tokens within a time that ended now."""
        assert tokens > 0, "a stream moves by tokens"
        self.tokens += tokens
        self._note_gap(span_ms / tokens)
        if self._pool is not None:
            self._pool._note_gap(span_ms / tokens)  # one of its own kind
        if not self._window_tokens:
            self._window_began = now
        self._window_tokens += tokens
        self._window_ms += span_ms
        if now - self._window_began >= WINDOW_MS and self._window_tokens >= WINDOW_TOKENS:
            self._end_window(now)

    def missed(self, now: Instant) -> None:
        """A deadline of one of its streams went by."""
        if self._strikes and now - self._strikes[-1] < STRIKE_APART_MS:
            return
        if self._is_out(now):
            return  # what was sent before it was taken out
        self._strikes.append(now)
        if self._live_strikes(now) >= STRIKES_EJECTED:
            lasts_ms = min(EJECTED_MS * 2.0**self._ejected_count, MAX_EJECTED_MS)
            self._ejected_count += 1
            self._ejected_until = Instant(now + lasts_ms)
            self._strikes.clear()

    # -- what may be expected --------------------------------------------------------------------

    def first_token_limit_ms(self, *, prefill_ms: float, queue_ms: float) -> float | None:
        """How long a first token may take. `prefill_ms` of the whole prompt: that the worker holds
        less of it than was thought is no fault. None without a history.
        """
        if len(self._first_ratios) < HISTORY_FIRST:
            pool = self._pool
            if pool is None:
                return None
            known = pool.first_token_limit_ms(prefill_ms=prefill_ms, queue_ms=queue_ms)
            return None if known is None else NEWCOMER_FACTOR * known
        # The slowest of the last few, against what was predicted: predictions are calibrated
        # slowly and within bounds, and of a worker that is much slower they stay wrong.
        ratio = max(1.0, *self._first_ratios)
        return ratio * (FIRST_TOKEN_FACTOR * prefill_ms + queue_ms) + FIRST_TOKEN_SLACK_MS

    def gap_limit_ms(self) -> float | None:
        """How long a stream may be silent between two tokens. None without a history."""
        if self._median_gap_ms is None:
            known = None if self._pool is None else self._pool.gap_limit_ms()
            return None if known is None else max(self._gap_floor_ms, NEWCOMER_FACTOR * known)
        return max(self._gap_floor_ms, GAP_FACTOR * self._median_gap_ms)

    def standing(self, now: Instant) -> Standing:
        if self._is_out(now):
            return Standing.EJECTED
        is_suspect = self._live_strikes(now) >= STRIKES_SUSPECT
        return Standing.SUSPECT if is_suspect else Standing.GOOD

    # -- inside ----------------------------------------------------------------------------------

    def _is_out(self, now: Instant) -> bool:
        return self._ejected_until is not None and now < self._ejected_until

    def _live_strikes(self, now: Instant) -> int:
        return sum(now - at < STRIKE_LASTS_MS for at in self._strikes)

    def _note_gap(self, gap_ms: float) -> None:
        self._gaps.append(gap_ms)
        self._unread_gaps += 1
        if self._unread_gaps >= _MEDIAN_EVERY and len(self._gaps) >= HISTORY_GAPS:
            self._unread_gaps = 0
            self._median_gap_ms = sorted(self._gaps)[len(self._gaps) // 2]

    def _end_window(self, now: Instant) -> None:
        """Hold its pace against what it was. A worker that stays slow becomes so in the end: what
        is usual moves by a quarter at most.
        """
        gap_ms, usual_ms = self._window_ms / self._window_tokens, self._usual_gap_ms
        self._window_ms, self._window_tokens = 0.0, 0
        if usual_ms is None:
            self._usual_gap_ms = gap_ms
            return
        if gap_ms > SLOW_FACTOR * usual_ms and gap_ms > _PREDICTED_FLOOR_MS / SLOW_FACTOR:
            self.missed(now)
        moved_ms = usual_ms + (gap_ms - usual_ms) * _PACE_STEP
        self._usual_gap_ms = min(moved_ms, usual_ms * _PACE_MOST)
