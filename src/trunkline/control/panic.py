"""Says when more than half of a fleet is in doubt, so that all of it is routed to, and when not.

Must never: change the fleet. Read `core/fleet.py` for the rule.
"""

from __future__ import annotations

import asyncio

from trunkline.core.fleet import Fleet
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock

_BEAT_S = 0.25


async def watch_panic(fleet: Fleet, clock: Clock, log: EventLog) -> None:
    """Until cancelled."""
    was_panicking = False
    while True:
        usable, _ = fleet.usable(clock.boot())
        if fleet.is_panicking != was_panicking:
            was_panicking = fleet.is_panicking
            if was_panicking:
                log.error(
                    "panic.routing",
                    workers=len(usable),
                    meaning="more than half of the workers are silent, late or failing: none is "
                    "left out for that",
                )
            else:
                log.info("panic.over", workers=len(usable))
        await asyncio.sleep(_BEAT_S)
