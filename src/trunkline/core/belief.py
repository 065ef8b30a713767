"""How much of what a worker told of its cache counts: all, nothing, or less as time passes.

Nothing while its stream is being put in order again, and less and less while the connection to it
is down: it serves and evicts on, and nobody tells. What it told is then believed to be there still
with a probability that halves each minute, after the three seconds in which a connection may well
come back; a prompt is priced by what so many of its blocks save. After three minutes all of it is
given up, and the worker is known by what we send there, as one without events is.

    connected ──(lost)──► doubted: 1 up to 3 s, then half each 60 s ──(183 s)──► given up
        ▲                    │                                                      │
        └──(made anew, and a replay has shown what was missed)──────────────────────┘

Must never: raise what was told above what it is. Read `feed.py` for who owns one.
"""

from __future__ import annotations

import math

from trunkline.core.actions import Action, FeedCutOff, FeedHeard, FeedTrusted, FeedUntrusted
from trunkline.core.directory import Directory
from trunkline.core.records import Instant, WorkerId

GRACE_MS = 3_000.0
"""Three heartbeats."""
HALF_LIFE_MS = 60_000.0
"""The lower end of the time in which what is placed on a worker crowds out half of what was there
before (60 to 120 s on four traces; `load.py`).
"""
GIVEN_UP_MS = GRACE_MS + 3.0 * HALF_LIFE_MS
"""One eighth is left then: what we sent there since says more."""
LOOK_MS = 1_000.0
"""How often what is believed is brought up to date."""


def share_at(silent_ms: float) -> float:
    """Of what was told, what is expected to be there still after so long without news."""
    if silent_ms <= GRACE_MS:
        return 1.0
    return math.pow(2.0, -(silent_ms - GRACE_MS) / HALF_LIFE_MS)


class Belief:
    """That in one worker's entries; the feed says what it knows of the stream."""

    def __init__(self, worker: WorkerId, directory: Directory) -> None:
        self._worker = worker
        self._directory = directory
        self._is_trusted = True
        self._silent_since: Instant | None = None
        self._is_given_up = False
        self._looked_at = Instant(0.0)

    @property
    def is_silent(self) -> bool:
        """The connection is down."""
        return self._silent_since is not None

    def disconnected(self, now: Instant) -> None:
        if self._silent_since is None:
            self._silent_since = self._looked_at = now

    def reconnected(self) -> list[Action]:
        """What was missed is asked for now, and nothing told before was made less of for good."""
        was_given_up, self._is_given_up = self._is_given_up, False
        self._silent_since = None
        self._directory.doubt(self._worker, 1.0)
        return [FeedHeard(worker=self._worker)] if was_given_up else []

    def next_due(self) -> Instant | None:
        """When time alone changes something here."""
        if self._silent_since is None or self._is_given_up:
            return None
        return Instant(max(self._looked_at + LOOK_MS, self._silent_since + GRACE_MS))

    def look(self, now: Instant) -> list[Action]:
        """Doubt as much as is due by now; with `FeedCutOff` it is to be forgotten."""
        if self._silent_since is None or self._is_given_up:
            return []
        self._looked_at = now
        silent_ms = now - self._silent_since
        self._is_given_up = silent_ms >= GIVEN_UP_MS
        self._directory.doubt(self._worker, 1.0 if self._is_given_up else share_at(silent_ms))
        if not self._is_given_up:
            return []
        reason = f"its event connection has been down for {silent_ms / 1_000.0:.0f} s"
        return [FeedCutOff(worker=self._worker, reason=reason)]

    def show(self, is_trusted: bool, reason: str) -> list[Action]:
        """Whether the stream is in order; the directory goes by it at once."""
        if is_trusted == self._is_trusted:
            return []
        self._is_trusted = is_trusted
        self._directory.trust(self._worker, is_trusted)
        if is_trusted:
            return [FeedTrusted(worker=self._worker)]
        reason = reason or "learning what the worker holds"
        return [FeedUntrusted(worker=self._worker, reason=reason)]
