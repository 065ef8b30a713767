"""Audit records on their way to a sink that may be down: in order, again until it takes them.

A revocation waits a moment for its record and never depends on it: what cannot be written now is
written when a sink is back. Must never: hold back an effect. Read `revocation.py` for who fills it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from trunkline.errors import GatewayError
from trunkline.observe import EventLog

MAX_PENDING = 4_096
"""Records that wait for a sink. At the bound the oldest is dropped and counted: its change is in
the registry's log with its intent, from which the audit can be completed."""

RETRY_SECS = 1.0


@dataclass(slots=True, kw_only=True)
class _Pending:
    write: Callable[[], Awaitable[None]]
    is_written: asyncio.Event = field(default_factory=asyncio.Event)


class Outbox:
    """Writes what is put in, one after the other, until cancelled."""

    def __init__(self, log: EventLog, *, retry_secs: float = RETRY_SECS) -> None:
        self._log = log
        self._retry_secs = retry_secs
        self._queue: deque[_Pending] = deque()
        self._is_filled = asyncio.Event()
        self.dropped_records = 0
        """Since start."""

    @property
    def pending_records(self) -> int:
        return len(self._queue)

    def put(self, write: Callable[[], Awaitable[None]]) -> asyncio.Event:
        """`write` raises a GatewayError while no sink takes it. The event is set once it has."""
        pending = _Pending(write=write)
        if len(self._queue) >= MAX_PENDING:
            self._queue.popleft()
            self.dropped_records += 1
            self._log.error("audit.dropped", limit=MAX_PENDING, dropped=self.dropped_records)
        self._queue.append(pending)
        self._is_filled.set()
        return pending.is_written

    async def run(self) -> None:
        while True:
            await self._is_filled.wait()
            if not self._queue:
                self._is_filled.clear()
                continue
            pending = self._queue[0]
            try:
                await pending.write()
            except GatewayError as error:  # no sink, too busy, or the registry cannot be read
                self._log.warning("audit.down", pending=len(self._queue), why=str(error))
                await asyncio.sleep(self._retry_secs)
                continue
            except Exception as error:  # noqa: BLE001  # a record that no sink will ever take
                self.dropped_records += 1
                self._log.error("audit.unwritable", cause=error, dropped=self.dropped_records)
            else:
                pending.is_written.set()
            if self._queue and self._queue[0] is pending:  # it may have been dropped meanwhile
                self._queue.popleft()
