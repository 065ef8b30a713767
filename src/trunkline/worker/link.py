"""One direction of a worker's network link, as a model: transfers go one after another.

Real KV of the simulated engine is 64 bytes a token, so moving it takes no time to speak of; a link
says how long it would take. Must never: read a clock or wait. `pulls.py` and `lending.py` wait.
"""

from __future__ import annotations

import math
import threading

from trunkline.core.records import Instant

_EVER = Instant(math.inf)


class Link:
    """First come, first served. Safe for threads."""

    def __init__(self, ms_per_token: float) -> None:
        self._ms_per_token = ms_per_token
        self._free_at = Instant(0.0)
        self._lock = threading.Lock()

    def ms_of(self, tokens: int) -> float:
        """What a transfer takes that has the link for itself."""
        return tokens * self._ms_per_token

    def book(
        self,
        tokens: int,
        now: Instant,
        *,
        begins_by: Instant = _EVER,
        through_by: Instant = _EVER,
    ) -> tuple[Instant, Instant] | None:
        """When a transfer that is asked for now begins and when it is through. None, and nothing is
        booked, where that is later than it is worth something.
        """
        with self._lock:
            begins = max(now, self._free_at)
            through = Instant(begins + self.ms_of(tokens))
            if begins > begins_by or through > through_by:
                return None
            self._free_at = through
            return begins, through
