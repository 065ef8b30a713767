"""One direction of a worker's network link, as a model: transfers go one after another.

    booked   ▓▓▓▓▓▓▓▓▓░░░░░░▓▓▓▓▓▓│ free from here on
                      given back: the next transfer that fits goes there

Real KV of the simulated engine is 64 bytes a token, so moving it takes no time to speak of; a link
says how long it would take. Who was told its turn keeps it: nobody moves up. Must never: read a
clock or wait. `pulls.py` and `lending.py` wait.
"""

from __future__ import annotations

import math
import threading

from trunkline.core.records import Instant

_EVER = Instant(math.inf)
MAX_GAPS = 64
"""Turns that were given back and lie before others'. Of more, the one that ends first is lost."""

Turn = tuple[Instant, Instant]
"""When a transfer begins and when it is through."""


class Link:
    """First come, first served. Safe for threads."""

    def __init__(self, ms_per_token: float) -> None:
        self._ms_per_token = ms_per_token
        self._free_at = Instant(0.0)
        self._gaps: list[Turn] = []
        """Before `_free_at`, in order, apart from each other."""
        self._lock = threading.Lock()

    @property
    def free_at(self) -> Instant:
        """When the last transfer that was booked is through."""
        with self._lock:
            return self._free_at

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
    ) -> Turn | None:
        """When a transfer that is asked for now begins and when it is through. None, and nothing is
        booked, where that is later than it is worth something.
        """
        duration_ms = self.ms_of(tokens)
        with self._lock:
            self._gaps = [gap for gap in self._gaps if gap[1] > now]
            fitting = (gap for gap in self._gaps if max(now, gap[0]) + duration_ms <= gap[1])
            gap = next(fitting, None)
            begins = max(now, self._free_at if gap is None else gap[0])
            through = Instant(begins + duration_ms)
            if begins > begins_by or through > through_by:
                return None
            if gap is None:
                self._free_at = through
            elif through < gap[1]:
                self._gaps[self._gaps.index(gap)] = (through, gap[1])
            else:
                self._gaps.remove(gap)
            return begins, through

    def give_back(self, turn: Turn, now: Instant) -> None:
        """What is left of a turn is not used. Once for each turn; of one that is over nothing is
        left.
        """
        begins, through = max(turn[0], now), turn[1]
        if begins >= through:
            return
        with self._lock:
            gaps: list[Turn] = []
            for gap in sorted([*self._gaps, (begins, through)]):
                assert not gaps or gaps[-1][1] <= gap[0], "a turn was given back twice"
                if gaps and gaps[-1][1] == gap[0]:
                    gap = (gaps.pop()[0], gap[1])
                gaps.append(gap)
            if gaps[-1][1] == self._free_at:
                self._free_at = gaps.pop()[0]
            self._gaps = gaps[-MAX_GAPS:]
