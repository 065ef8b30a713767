"""Reloads in the audit log: who wanted one, and which settings it changed, by their names.

As with other acts of operators the wish is kept first, and where no sink can keep it nothing is
read; then what came of it. Where everybody is one tenant there is no such log, and nothing is kept.
Of several processes the parent reads the settings, and the first one has the log. Must never: write
down the value of a setting. Read `reload.py` for what a reload is, `seat.py` for both sides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from trunkline.administration import Administration
from trunkline.administration_reach import method_of
from trunkline.control.changes import Intent
from trunkline.core.records import WallTime
from trunkline.errors import AuditDown, GatewayError
from trunkline.gateway.backend import Call
from trunkline.observe import EventLog
from trunkline.reload import Reloaded

SIGNAL = "SIGHUP"
"""Who wanted it, where that is all that is known."""
MAX_NAMES_CHARS = 400

Reload = Callable[[], Awaitable[Reloaded]]


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wish, or what came of it."""

    by: Intent
    result: str = ""
    """Empty for the wish."""
    reason: str = ""


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """What a process tells its parent of who may have the settings read."""

    by: Intent


Keep = Callable[[Note], Awaitable[None]]
"""Raises AuditDown for a wish that cannot be kept."""


class ReloadRecord:
    """See the module. `keep` puts a note into the log."""

    def __init__(self, keep: Keep, wall: Callable[[], WallTime]) -> None:
        self.keep = keep
        self._wall = wall

    async def recorded(self, by: Intent, reload: Reload) -> Reloaded:
        """Raises AuditDown, and nothing was read then; ConfigError as a reload does."""
        await self.keep(Note(by=by))
        try:
            outcome = await reload()
        except GatewayError as error:
            await self.keep(Note(by=by, result="refused", reason=error.code))
            raise
        await self.keep(Note(by=by, result="done", reason=_names_in(outcome)))
        return outcome

    async def hung_up(self, reload: Reload, log: EventLog) -> None:
        """Told by a signal. Raises ConfigError."""
        by = Intent(actor=SIGNAL, auth_method="signal", wall_ms=self._wall_ms())
        try:
            await self.recorded(by, reload)
        except AuditDown as error:
            log.error("config.refused", why=str(error), meaning="all stays as it was")

    async def asked(self, call: Call, reload: Reload) -> Reloaded:
        """Told at the admin port. Raises as `recorded` does."""
        return await self.recorded(self._who(call), reload)

    async def asks(self, call: Call) -> Asking:
        """For a parent, which reads the settings itself."""
        return Asking(by=self._who(call))

    def _who(self, call: Call) -> Intent:
        caller = call.caller
        return Intent(
            actor=caller.actor,
            auth_method=method_of(caller),
            source=caller.source,
            request_id=caller.request_id,
            wall_ms=self._wall_ms(),
        )

    def _wall_ms(self) -> int:
        return int(self._wall() * 1_000.0)


def in_audit_log(administration: Administration | None) -> Keep:
    """Nowhere, where there is no such log."""

    async def keep(note: Note) -> None:
        if administration is not None:
            await administration.note_reload(note.by, note.result, note.reason)

    return keep


def _names_in(outcome: Reloaded) -> str:
    """Which settings, never what they are."""
    words = f"changed: {', '.join(outcome.changed) or 'nothing'}"
    if outcome.needs_restart:
        words += f"; waits for a restart: {', '.join(outcome.needs_restart)}"
    return words if len(words) <= MAX_NAMES_CHARS else words[: MAX_NAMES_CHARS - 3] + "..."
