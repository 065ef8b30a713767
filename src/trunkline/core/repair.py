"""The vocabulary of a feed's repairs: its states and bounds, one open replay, pauses that grow.

Owns no decision. Read `feed.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trunkline.core.records import Instant

REPLAY_PATIENCE = 6
"""A replay that makes progress may take this many times its time-out in all."""

MAX_REPAIRS = 3
"""Replays for one stretch of buffered batches; then it is taken as lost."""
MAX_BUFFERED_BYTES = 64 << 20
"""The buffer of live batches is bounded in memory as well as in number."""
DRAIN_BATCHES = 256
DRAIN_BYTES = 2 << 20
"""Buffered batches applied in one call, so that no call holds the loop for long; at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedLimits:
    """The bounds of one feed; `DirectoryConfig` has the same names."""

    max_buffered_batches: int = 65_536
    max_parked_runs: int = 1_024
    parked_ttl_ms: float = 5_000.0
    replay_timeout_ms: float = 5_000.0


class FeedState(Enum):
    """What a feed is doing; for people, metrics and `/workers`."""

    LIVE = "live"
    REPLAYING = "replaying"
    RELEARNING = "relearning"
    SILENT = "silent"
    """The connection is down: what was told counts, and for less and less."""
    BLIND = "blind"
    ENDED = "ended"
    """The worker has left, or registered anew: this feed does nothing any more."""


class ReplayKind(Enum):
    """What a replay is for."""

    REPAIR = "repair"
    """Fill a gap, or prove after a reconnect that there is none. Begins with a batch we know."""
    LEARN = "learn"
    """Nothing is known: take whatever the publisher still holds."""
    RESYNC = "resync"
    """Begin anew from older batches than we began with, if the publisher still holds them."""


class OpenReplay:
    """One replay that was asked for and has not ended."""

    __slots__ = ("_last_deadline", "_timeout_ms", "deadline", "from_seq", "has_begun", "kind",
                 "replay_id")  # fmt: skip

    def __init__(
        self, replay_id: int, kind: ReplayKind, from_seq: int, now: Instant, timeout_ms: float
    ) -> None:
        self.replay_id = replay_id
        self.kind = kind
        self.from_seq = from_seq
        self.has_begun = False
        self.deadline = Instant(now + timeout_ms)
        self._timeout_ms = timeout_ms
        self._last_deadline = Instant(now + REPLAY_PATIENCE * timeout_ms)

    def note_progress(self, now: Instant) -> None:
        """A batch came: wait for the next as long again, within the patience of the whole."""
        self.deadline = Instant(min(now + self._timeout_ms, self._last_deadline))


class Pause:
    """A pause that doubles each time it is taken, up to a bound."""

    def __init__(self, first_ms: float, longest_ms: float) -> None:
        self._first_ms = first_ms
        self._longest_ms = longest_ms
        self._next_ms = first_ms

    def take(self) -> float:
        taken_ms = self._next_ms
        self._next_ms = min(2 * taken_ms, self._longest_ms)
        return taken_ms

    def reset(self) -> None:
        self._next_ms = self._first_ms
