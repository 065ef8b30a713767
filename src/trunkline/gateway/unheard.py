"""What a worker is still to tell us of, by the name that we gave it: few, and not for ever.

Read `pulls.py`, which waits for the ends of pulls that a connector tells with its leases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from trunkline.core.records import Instant, WorkerId
from trunkline.core.transfer import MAX_GRANT_LIFE_MS

MAX_AWAITED = 4_096
"""At the bound the oldest is given up."""
AWAIT_MS = MAX_GRANT_LIFE_MS + 10_000.0

_Thing = TypeVar("_Thing")


class Unheard(Generic[_Thing]):
    """Oldest first."""

    def __init__(self) -> None:
        self._awaited: OrderedDict[str, tuple[WorkerId, Instant, _Thing]] = OrderedDict()

    def add(self, name: str, worker: WorkerId, thing: _Thing, now: Instant) -> Iterator[_Thing]:
        """One more to be told by that worker. Gives what is not waited for any longer: iterate."""
        self._awaited[name] = (worker, Instant(now + AWAIT_MS), thing)
        while self._awaited:
            _, until, oldest = next(iter(self._awaited.values()))
            if until > now and len(self._awaited) <= MAX_AWAITED:
                return
            self._awaited.popitem(last=False)
            yield oldest

    def take(self, name: str, worker: str) -> _Thing | None:
        """What that worker tells of now; None where it was not to, or had told before."""
        known = self._awaited.get(name)
        if known is None or known[0].partition("@")[0] != worker:
            return None
        del self._awaited[name]
        return known[2]
