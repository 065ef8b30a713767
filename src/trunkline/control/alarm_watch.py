"""Looks each second whether an alarm of a fleet's workers begins or ends, and writes that down.

One line when it begins and one when it ends. Must never: change the fleet; alarms are for people.
Read `core/alarms.py` for the bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from trunkline.core.alarms import REMEDY, AlarmEnd, AlarmKind
from trunkline.core.fleet import Fleet
from trunkline.core.records import WorkerId
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock

BEAT_S = 1.0


async def watch_alarms(
    fleet: Fleet,
    unheard: Callable[[], Mapping[WorkerId, str]],
    unheeding: Callable[[], Collection[WorkerId]],
    clock: Clock,
    log: EventLog,
) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(BEAT_S)
        here = [state.worker for state in fleet.states()]
        for change in fleet.alarms.look(dict.fromkeys(here), unheard(), unheeding(), clock.now()):
            if isinstance(change, AlarmEnd):
                kind, lasted_ms = change.alarm.kind.value, round(change.lasted_ms)
                log.info("alarm.ended", kind=kind, worker=change.alarm.worker, lasted_ms=lasted_ms)
            elif change.kind is not AlarmKind.UNHEEDED:  # that is said as it happens
                log.warning(  # an event for each kind: of one, only a line a second is written
                    f"alarm.{change.kind.value.replace('-', '_')}",
                    worker=change.worker,
                    why=change.why,
                    remedy=REMEDY[change.kind],
                )
