"""What became resident and what went, until somebody takes it. Bounded: see `MAX_EVENTS`.

Not safe for threads by itself. Read `catalogue.py` next.
"""

from __future__ import annotations

from collections.abc import Sequence

from trunkline.core.records import Tier
from trunkline.kv.records import Added, Gone, Manifest, Overflowed, StoreEvent

MAX_EVENTS = 65_536
"""Beyond it all are dropped, and one event says so."""


class News:
    """Events in the order in which they happened."""

    def __init__(self, *, max_events: int = MAX_EVENTS) -> None:
        self._max_events = max_events
        self._events: list[StoreEvent] = []

    def take(self) -> list[StoreEvent]:
        events, self._events = self._events, []
        return events

    def gone(self, key: bytes, tier: Tier) -> None:
        self._tell(Gone(key=key, tier=tier))

    def added(self, manifests: Sequence[Manifest], tier: Tier) -> None:
        """They can be found; each unbroken run of one chain is one event."""
        run: list[Manifest] = []
        for manifest in manifests:
            if run and manifest.place.parent != run[-1].place.key:
                self._tell(_added(run, tier))
                run = []
            run.append(manifest)
        if run:
            self._tell(_added(run, tier))

    def _tell(self, event: StoreEvent) -> None:
        if len(self._events) >= self._max_events:
            self._events = [Overflowed()]
        self._events.append(event)


def _added(run: Sequence[Manifest], tier: Tier) -> Added:
    first = run[0]
    return Added(
        keys=tuple(manifest.place.key for manifest in run),
        parent=first.place.parent,
        first_index=first.place.index,
        tier=tier,
        owner=first.owner,
    )
