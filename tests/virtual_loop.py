"""An event loop whose time is virtual: where it would wait, it is later at once."""

from __future__ import annotations

import asyncio
import selectors


class _Leap(selectors.SelectSelector):
    """Waits for nothing but time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
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
