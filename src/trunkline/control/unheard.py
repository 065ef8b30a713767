"""Of which ranks of a worker nothing is heard, and why: no heartbeats, no answers, no events.

Read `core/alarms.py` for how long that has to last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trunkline.control.hearing import Hearing
from trunkline.control.silence import NO_EVENTS
from trunkline.control.trouble import SHOWN
from trunkline.core.decision import Exclusion
from trunkline.core.fleet import WorkerState
from trunkline.core.records import BootInstant, WorkerId
from trunkline.core.repair import FeedState

CUT_OFF = "the connection to its cache events is down"


def unheard(
    states: Iterable[WorkerState], hearing: Hearing, boot: BootInstant
) -> Iterator[tuple[WorkerId, str]]:
    for state in states:
        feed = hearing.feeds.get(state.worker)
        if boot >= state.lease_ends_at:
            yield state.worker, SHOWN[Exclusion.LEASE]
        elif state.is_silent:
            yield state.worker, SHOWN[Exclusion.SILENT]
        elif hearing.is_silent:
            yield state.worker, NO_EVENTS
        elif feed is not None and feed.state is FeedState.SILENT:
            yield state.worker, CUT_OFF
