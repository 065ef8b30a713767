"""A clock that tests move by hand."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.core.records import BootInstant, Instant, WallTime

WALL_MS = 1_800_000_000_000
"""What the wall clock says when the others begin."""


@dataclass(slots=True)
class HandClock:
    """`ports.Clock` that stands still until it is moved. Its three clocks are apart, so that who
    takes one for another is found out.
    """

    ms: float = 0.0
    set_by_ms: float = 0.0
    """How far the wall clock was set forward."""
    slept_ms: float = 0.0

    def now(self) -> Instant:
        return Instant(self.ms)

    def boot(self) -> BootInstant:
        return BootInstant(self.ms + self.slept_ms + 1_000.0)

    def wall(self) -> WallTime:
        return WallTime((WALL_MS + self.ms + self.slept_ms + self.set_by_ms) / 1_000.0)
