"""One direction of a worker's network link, as a model: transfers go one after another.

Real KV of the simulated engine is 64 bytes a token, so moving it takes no time to speak of; a link
says how long it would take. Must never: read a clock or wait. `pulls.py` and `lending.py` wait.
"""

from __future__ import annotations

import threading

from trunkline.core.records import Instant


class Link:
    """First come, first served. Safe for threads."""

    def __init__(self, ms_per_token: float) -> None:
        self._ms_per_token = ms_per_token
        self._free_at = Instant(0.0)
        self._lock = threading.Lock()

    def ms_of(self, tokens: int) -> float:
        """What a transfer takes that has the link for itself."""
        return tokens * self._ms_per_token

    def book(self, tokens: int, now: Instant) -> tuple[Instant, Instant]:
        """When a transfer that is asked for now begins and when it is through."""
        with self._lock:
            begins = max(now, self._free_at)
            self._free_at = Instant(begins + self.ms_of(tokens))
            return begins, self._free_at
