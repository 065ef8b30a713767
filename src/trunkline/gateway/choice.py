"""A choice of worker that takes its time: a long prompt is being tokenised, a turn is waited for.

Owns the task, and what becomes of a choice that nobody waits for any more: it is cancelled, counts
as work until it has really ended, and a pick that comes in spite of that is ended, not lost. Read
`exchange.py` for who waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from trunkline import observe
from trunkline.gateway.contracts import AttemptEnd, Pick
from trunkline.gateway.line import Line

Outcome = Pick | Exception


class Choice:
    """`take` is called once with the pick or the error, unless it was dropped before."""

    __slots__ = ("_line", "_take", "_task")

    def __init__(
        self, line: Line, making: Awaitable[Pick], take: Callable[[Outcome], None]
    ) -> None:
        self._line = line
        self._take: Callable[[Outcome], None] | None = take
        self._task = line.spawn(self._wait(making))

    def drop(self) -> None:
        """Nobody waits for it any more; nothing where it was taken already."""
        if self._take is None or self._task.done():
            return
        self._take = None
        self._line.counters.late_picks += 1
        self._task.add_done_callback(self._is_over)
        self._task.cancel()

    async def _wait(self, making: Awaitable[Pick]) -> None:
        try:
            outcome: Outcome = await making
        except Exception as error:  # noqa: BLE001 - whoever waits tells a refusal from a bug
            outcome = error
        take, self._take = self._take, None
        if take is not None:
            take(outcome)
        elif isinstance(outcome, Pick):
            try:
                self._line.picker.ended(outcome, AttemptEnd.CLIENT_GONE, None)
            except Exception as error:  # noqa: BLE001 - nobody is left to be told
                self._line.counters.bugs += 1
                observe.log.error("exchange.bug", cause=error, worker=outcome.worker)

    def _is_over(self, _: asyncio.Task[None]) -> None:
        self._line.counters.late_picks -= 1
