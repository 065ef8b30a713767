"""The machine's own clocks. The one place of the shell that reads them.

Must never mix them: intervals on the monotonic clock, leases on the boot clock, people on the wall
clock. Read `ports/clock.py` for who asks.
"""

from __future__ import annotations

import time

from trunkline.core.records import BootInstant, Instant, WallTime

# Linux has a clock that goes on while the machine is suspended. Elsewhere (macOS) the nearest thing
# is the monotonic one, which on macOS stops in sleep: a lease then ends late by the time slept.
_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """`ports.Clock` on the operating system."""

    __slots__ = ()

    def now(self) -> Instant:
        return Instant(time.monotonic() * 1_000.0)

    def boot(self) -> BootInstant:
        return BootInstant(time.clock_gettime(_BOOT_CLOCK) * 1_000.0)

    def wall(self) -> WallTime:
        return WallTime(time.time())
