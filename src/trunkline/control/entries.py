"""The places of one worker in the fleet, one a data-parallel rank; they change together.

Owns what is asked and said of all of them at once. Must never: decide that something changes
(`member.py` does). Read `core/fleet.py` for what a place is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from trunkline.core.decision import Exclusion
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.pace import Standing
from trunkline.core.records import BootInstant, WorkerId


class Entries:
    """Empty while the worker has not joined."""

    def __init__(self, fleet: Fleet) -> None:
        self.workers: list[WorkerId] = []
        self._fleet = fleet

    def add(self, state: WorkerState) -> None:
        self._fleet.add(state)
        self.workers.append(state.worker)

    def states(self) -> list[WorkerState]:
        found = (self._fleet.get(worker) for worker in self.workers)
        return [state for state in found if state is not None]

    def is_healthy(self) -> bool:
        """Whether its probes have not taken it out; so too while it has not joined."""
        return all(state.is_healthy for state in self.states())

    def is_beating(self) -> bool:
        """Whether heartbeats tell how full it is; they hold as long as its lease."""
        return any(math.isfinite(state.lease_ends_at) for state in self.states())

    def exclusion(self, boot: BootInstant) -> Exclusion | None:
        """Why routing leaves one of them out now. That it drains comes first: an operator wanted
        it.
        """
        if any(state.is_draining for state in self.states()):
            return Exclusion.DRAINING
        _, excluded = self._fleet.usable(boot)
        return next((excluded[worker] for worker in self.workers if worker in excluded), None)

    def set_unhealthy(self) -> None:
        for worker in self.workers:
            self._fleet.update(worker, is_healthy=False)

    @property
    def in_flight_count(self) -> int:
        return sum(state.queue.in_flight_count for state in self.states())

    def set_draining(self, *, is_draining: bool) -> None:
        for worker in self.workers:
            self._fleet.update(worker, is_draining=is_draining)

    def set_breaker(self, *, is_open: bool) -> None:
        for state in self.states():
            if state.is_breaker_open != is_open:
                self._fleet.update(state.worker, is_breaker_open=is_open)

    def is_silent(self) -> bool:
        return any(state.is_silent for state in self.states())

    def set_silent(self, *, is_silent: bool) -> None:
        for state in self.states():
            if state.is_silent != is_silent:
                self._fleet.update(state.worker, is_silent=is_silent)

    def set_standing(self, standing: Standing) -> None:
        for state in self.states():
            if state.standing is not standing:
                self._fleet.update(state.worker, standing=standing)

    def set_asleep(self, *, is_asleep: bool) -> None:
        for state in self.states():
            if state.is_asleep != is_asleep:
                self._fleet.update(state.worker, is_asleep=is_asleep)

    def let_in(self) -> None:
        """Its first self-test is waited for no longer."""
        for state in self.states():
            if state.is_unchecked:
                self._fleet.update(state.worker, is_unchecked=False)

    def set_leaking(self, *, is_leaking: bool) -> None:
        for state in self.states():
            if state.is_leaking != is_leaking:
                self._fleet.update(state.worker, is_leaking=is_leaking)

    def set_full(self, *, is_full: bool) -> None:
        for state in self.states():
            if state.is_full != is_full:
                self._fleet.update(state.worker, is_full=is_full)


def rank_headers(
    ranks: Mapping[WorkerId, int], worker: WorkerId, name: str
) -> tuple[tuple[str, str], ...]:
    """What picks one rank out at a worker that has several."""
    if len(ranks) == 1 and worker == name:
        return ()
    return (("x-data-parallel-rank", str(ranks[worker])),)
