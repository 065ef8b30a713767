"""A progress line for people: redrawn on a terminal; elsewhere a line each tenth, but not more than
one in ten seconds, and the last.

Must never write more often than it says, nor anywhere but to the given stream. Read `run.py` next.
"""

from __future__ import annotations

from typing import TextIO

from trunkline.ports.clock import Clock

REDRAW_MS = 100.0
BAR_CELLS = 28
TENTHS = 10
QUIET_MS = 10_000.0


class Progress:
    """Counts what is done of a known total."""

    def __init__(
        self, stream: TextIO, total: int, label: str, clock: Clock, unit: str = ""
    ) -> None:
        self._stream = stream
        self._total = total
        self._label = label
        self._clock = clock
        self._unit = unit
        self._is_terminal = stream.isatty()
        self._began_at = clock.now()
        self._drawn_at_ms = float("-inf")
        self._told_at_ms: float = self._began_at
        self._tenths = 0
        self._done = 0
        self._lost = 0
        self._is_ended = False

    def step(self, *, is_lost: bool = False) -> None:
        """One more is done."""
        self._lost += is_lost
        self._reach(self._done + 1)

    def reach_bytes(self, count: int) -> None:
        """So many bytes of a file are done, where the total is in KiB."""
        self._reach(min(count >> 10, self._total))

    def fill(self) -> None:
        """All is done."""
        self._reach(self._total)
        self.end()

    def _reach(self, done: int) -> None:
        if done == self._done:
            return
        self._done = done
        if self._is_terminal:
            now = self._clock.now()
            if now - self._drawn_at_ms >= REDRAW_MS or self._done == self._total:
                self._drawn_at_ms = now
                self._stream.write("\r" + self._line() + "\x1b[K")
                self._stream.flush()
            return
        tenths = TENTHS * self._done // self._total if self._total else TENTHS
        is_last = self._done == self._total
        is_quiet = self._clock.now() - self._told_at_ms < QUIET_MS
        if tenths > self._tenths and (is_last or not is_quiet):
            self._tenths = tenths
            self._told_at_ms = self._clock.now()
            self._stream.write(self._line() + "\n")
            self._stream.flush()

    def end(self) -> None:
        """Leave the line as it stands. May be called twice."""
        if self._is_terminal and self._done and not self._is_ended:
            self._stream.write("\r" + self._line() + "\x1b[K\n")
            self._stream.flush()
        self._is_ended = True

    def _line(self) -> str:
        share = self._done / self._total if self._total else 1.0
        filled = round(BAR_CELLS * share)
        elapsed_s = (self._clock.now() - self._began_at) / 1_000.0
        lost = f", {self._lost:,} lost" if self._lost else ""
        return (
            f"{self._label}  [{'#' * filled}{'.' * (BAR_CELLS - filled)}] {share:4.0%}"
            f"  {self._done:,}/{self._total:,}{self._unit}{lost}  {elapsed_s:.0f} s"
        )
