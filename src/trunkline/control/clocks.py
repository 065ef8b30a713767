"""Says in the log when the wall clock jumped, and when the machine slept.

Nothing is decided by it: leases go by the boot clock, intervals by the monotonic one. But audit
records, keys' ends and everybody who compares logs go by the wall clock. Must never: take a pause
of this process for a jump of a clock. Read `ports/clock.py` for the three clocks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from trunkline.observe import EventLog
from trunkline.ports.clock import Clock

BEAT_S = 1.0
MIN_JUMP_MS = 1_000.0
"""Clocks that are slewed drift by half a millisecond a beat at the most."""
MAX_READING_MS = 100.0
"""Readings further apart than this say nothing of one another: the process stood still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """What happened since the look before, ms; 0.0 for what did not."""

    wall_ms: float
    """Forward is positive."""
    slept_ms: float


class ClockWatch:
    """Compares how far the clocks have gone from one look to the next."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._apart = self._read()

    def look(self) -> Jump | None:
        """None where all went at one pace, or nothing can be said."""
        before, now = self._apart, self._read()
        if now is None:
            return None
        self._apart = now
        if before is None:
            return None
        wall_ms, slept_ms = now[0] - before[0], now[1] - before[1]
        jump = Jump(
            wall_ms=wall_ms if abs(wall_ms) >= MIN_JUMP_MS else 0.0,
            slept_ms=slept_ms if slept_ms >= MIN_JUMP_MS else 0.0,
        )
        return jump if jump.wall_ms or jump.slept_ms else None

    def _read(self) -> tuple[float, float] | None:
        """How far the wall clock is before the boot clock, and that before the monotonic one."""
        boot = self._clock.boot()
        wall, monotonic = self._clock.wall(), self._clock.now()
        if self._clock.boot() - boot > MAX_READING_MS:
            return None
        return wall * 1_000.0 - boot, boot - monotonic


async def watch_clocks(clock: Clock, log: EventLog) -> None:
    """Until cancelled."""
    watch = ClockWatch(clock)
    while True:
        await asyncio.sleep(BEAT_S)
        jump = watch.look()
        if jump is None:
            continue
        if jump.slept_ms:
            log.warning(
                "clock.slept",
                seconds=round(jump.slept_ms / 1_000.0, 1),
                meaning="the machine was suspended: leases that ended meanwhile have ended",
            )
        if jump.wall_ms:
            log.warning(
                "clock.jumped",
                seconds=round(jump.wall_ms / 1_000.0, 1),
                meaning="the wall clock was set: no lease depends on it, times in logs, in the "
                "audit log and of keys that end do",
            )
