"""What the probes of a worker add up to, and when it is looked at next.

    usable --(failures in a row, or one refused connection)--> out --(passes in a row)--> new life

Owns the counts and the pace. Must never: ask the worker itself, or change the fleet (`member.py`
does). Read `probe.py` for one question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from trunkline.config import HealthConfig

PROBE_GAP_SECS = 0.5
"""Least pause between two probes, whatever gives reason for one; so many failing requests make no
flood of probes. Where the interval is shorter, that is the least."""
UNHEARD_SECS = 1.0
"""A heartbeat. Who leaves a probe unanswered for so long is not heard any more, whatever the
time-out of the probe; it takes more than that to call it a fault."""


class Health:
    """The probes of one worker. `begin` with each of its lives."""

    def __init__(self, settings: Callable[[], HealthConfig]) -> None:
        """`settings`: those in force, which may become others."""
        self.is_unheard = False
        """The last probe had no answer in time, and none came to anything else since."""
        self._settings = settings
        self._is_answered = False
        self._doubt = asyncio.Event()
        self._failures_count = 0
        self._passes_count = 0
        self._is_refused = False

    def begin(self) -> None:
        """Nothing is known of this life."""
        self._doubt.clear()
        self._failures_count = self._passes_count = 0
        self._is_refused = self.is_unheard = False

    def doubt(self) -> None:
        """A request failed there, or waits: do not wait for the next probe's turn."""
        self._doubt.set()

    def heard(self) -> None:
        """An answer came, to this or to any other question, and whatever it says."""
        self._is_answered, self.is_unheard = True, False

    def refused(self) -> None:
        """Nobody listens there, so that asking often costs nothing: whoever answers next has begun
        a new life, and should not wait for an interval. Its machine did answer.
        """
        self.heard()
        self._is_refused = True
        self._doubt.set()

    async def until_due(self) -> None:
        """The pause before a probe; a doubt cuts it short."""
        whole_secs = self._settings().health_check_interval_secs
        gap_secs = min(whole_secs, PROBE_GAP_SECS)
        await asyncio.sleep(gap_secs)
        if not self._is_refused:
            try:
                async with asyncio.timeout(whole_secs - gap_secs):
                    await self._doubt.wait()
            except TimeoutError:
                pass  # nothing gave a doubt: its turn has come
        self._doubt.clear()

    async def follow(self, probe: Awaitable[str], tokens: Callable[[], int]) -> str:
        """What came of a probe; when nothing comes of it, and no token meanwhile (`tokens` counts
        them), the worker is unheard.
        """
        self._is_answered, tokens_before = False, tokens()
        probing = asyncio.ensure_future(probe)
        try:
            await asyncio.wait([probing], timeout=UNHEARD_SECS)
            self.is_unheard = not self._is_answered and tokens() == tokens_before
            return await probing
        finally:
            probing.cancel()

    def passed(self) -> bool:
        """A probe was answered well; True when that makes enough in a row."""
        self._failures_count = 0
        self._passes_count += 1
        return self._passes_count >= self._settings().health_success_threshold

    def failed(self) -> bool:
        """A probe failed; True when that makes enough in a row."""
        self._passes_count = 0
        self._failures_count += 1
        return self._failures_count >= self._settings().health_failure_threshold
