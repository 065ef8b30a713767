"""Event loops whose time is virtual: where they would wait, it is later at once."""

from __future__ import annotations

import asyncio
import selectors
from dataclasses import dataclass

from trunkline.core.records import BootInstant, Instant, WallTime

QUIET_S = 0.1
"""For so long nothing has arrived on any socket: nothing is on its way within one process."""

Ready = list[tuple[selectors.SelectorKey, int]]


class _Leap(selectors.SelectSelector):
    """Waits for nothing but time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Ready:
        if timeout is None:
            raise AssertionError("everybody waits, and for nothing that could come")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what sleeps for minutes in milliseconds, in the same order each time."""

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        return self._leap.now_s

    def stall(self, secs: float) -> None:
        """This step takes so long; nothing else runs meanwhile."""
        self._leap.now_s += secs


class _LeapWhenQuiet(selectors.DefaultSelector):
    """Waits for sockets of this process as long as something may be on its way, and then leaps."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Ready:
        if timeout is None or timeout <= 0.0:
            return super().select(timeout)
        found = super().select(QUIET_S)
        if not found:
            self.now_s += timeout
        return found


class SocketLoop(asyncio.SelectorEventLoop):
    """Virtual time for both ends of real sockets: however slow the machine is, what is sent takes
    no time, and only who sleeps makes it later.
    """

    def __init__(self) -> None:
        self._leap = _LeapWhenQuiet()
        super().__init__(self._leap)

    def time(self) -> float:
        return self._leap.now_s


@dataclass(frozen=True, slots=True)
class LoopClock:
    """`ports.Clock` on the time of a loop. Its three clocks are apart, so that who takes one for
    another is found out.
    """

    loop: asyncio.AbstractEventLoop

    def now(self) -> Instant:
        return Instant(self.loop.time() * 1e3)

    def boot(self) -> BootInstant:
        return BootInstant(self.loop.time() * 1e3 + 77.0)

    def wall(self) -> WallTime:
        return WallTime(1.7e9 + self.loop.time())
