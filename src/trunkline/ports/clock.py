"""Time, as the shell may ask for it. `adapters/clock.py` has the real one."""

from __future__ import annotations

from typing import Protocol

from trunkline.core.records import BootInstant, Instant, WallTime


class Clock(Protocol):
    """Three clocks with three types; see `core/records.py` for what each is for."""

    def now(self) -> Instant: ...
    def boot(self) -> BootInstant: ...
    def wall(self) -> WallTime: ...
