"""What a worker is still to tell us of, by the name that we gave it: few, and not for ever.

    begin ──(the answer is over)──► end ──(nothing was told in time)──► overdue
       └────────────── take: it was told ──┘

It may be told long before the answer is over, and a little after. Read `pulls.py`, which waits for
the ends of pulls that a connector tells with its leases.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from trunkline.core.records import Instant, WorkerId

MAX_AWAITED = 4_096
"""At the bound the oldest is forgotten: nothing is learnt of it."""
AWAIT_MS = 10_000.0
"""Once the answer is over. Leases come each second."""

_Thing = TypeVar("_Thing")


class Unheard(Generic[_Thing]):
    """Oldest first."""

    def __init__(self) -> None:
        self._begun: OrderedDict[str, tuple[WorkerId, _Thing]] = OrderedDict()
        self._ended: OrderedDict[str, Instant] = OrderedDict()
        """Of these, the ones whose answer is over: until when they are waited for."""

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, name: str, worker: WorkerId, thing: _Thing) -> None:
        """That worker is to tell of it."""
        self._begun[name] = (worker, thing)
        if len(self._begun) > MAX_AWAITED:
            oldest, _ = self._begun.popitem(last=False)
            self._ended.pop(oldest, None)

    def end(self, name: str, now: Instant) -> None:
        """If it was not told yet, it is to be told soon."""
        if name in self._begun:
            self._ended[name] = Instant(now + AWAIT_MS)

    def take(self, name: str, worker: str) -> _Thing | None:
        """What that worker tells of now; None where it was not to, or had told before."""
        known = self._begun.get(name)
        if known is None or known[0].partition("@")[0] != worker:
            return None
        del self._begun[name]
        self._ended.pop(name, None)
        return known[1]

    def overdue(self, now: Instant) -> list[_Thing]:
        """What should have been told by now; it is not waited for any longer."""
        late: list[_Thing] = []
        while self._ended:
            name, until = next(iter(self._ended.items()))
            if until > now:
                break
            del self._ended[name]
            late.append(self._begun.pop(name)[1])
        return late
