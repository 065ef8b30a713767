"""The workers a gateway can choose from, and the hard filters in front of every choice.

A worker with data-parallel ranks is one entry a rank. The list of usable workers is kept and
rebuilt only when something changed, so that a decision does not pay for questions whose answer is
the same as before. A doubt (silence, strikes, an open breaker) leaves out half of the workers at
the most: where it is more of them, the fault is likelier ours or the load's, and all are routed to.
Must never: let an expired lease or a draining worker through. Read `routing.py` next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from trunkline.core.alarms import AlarmBook
from trunkline.core.decision import Exclusion
from trunkline.core.headroom import Headroom
from trunkline.core.load import ChurnClock, PrefillQueue
from trunkline.core.pace import Standing
from trunkline.core.placement import HashRing
from trunkline.core.records import BootInstant, Instant, Slot, WorkerId


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """What routing knows of one worker. Change it through `Fleet.update`."""

    worker: WorkerId
    slot: Slot
    block_tokens: int
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    is_healthy: bool = True
    is_draining: bool = False
    is_breaker_open: bool = False
    is_silent: bool = False
    """It neither answered nor gave a token for some heartbeats."""
    standing: Standing = Standing.GOOD
    """What its streams say of it."""
    is_full: bool = False
    """Above the memory or load watermark: keeps its prefixes, gets no new ones."""
    is_warming: bool = False
    """It takes over what is hot; chosen only where nobody else is usable."""
    is_asleep: bool = False
    """Its engine sleeps or is paused: what is sent there waits until it is woken."""
    is_unchecked: bool = False
    """Its first self-test is still going on, and tenants are to be kept apart."""
    is_leaking: bool = False
    """A self-test saw that it does not keep tenants apart, as it must."""
    lease_ends_at: BootInstant = BootInstant(math.inf)
    """Infinite for workers without heartbeats; their health is probed."""


class Changes(TypedDict, total=False):
    """What `Fleet.update` changes of a `WorkerState`."""

    is_healthy: bool
    is_draining: bool
    is_breaker_open: bool
    is_silent: bool
    standing: Standing
    is_full: bool
    is_warming: bool
    is_asleep: bool
    is_unchecked: bool
    is_leaking: bool


class Fleet:
    """All workers of one model. Owns the hash ring, the common clock of churn, the headroom and the
    alarms.
    """

    def __init__(self, *, virtual_nodes: int, now: Instant) -> None:
        self.ring = HashRing(virtual_nodes)
        self.churn = ChurnClock(now)
        self.headroom = Headroom(now)
        self.alarms = AlarmBook()
        self._states: dict[WorkerId, WorkerState] = {}
        self._usable: list[WorkerState] | None = None
        self._excluded: dict[WorkerId, Exclusion] = {}
        self._recheck_at = BootInstant(math.inf)
        self._block_sizes: list[int] = []
        self.is_panicking = False
        """More than half is in doubt, so that all are routed to; as of the last look."""
        self.panics_count = 0
        """How often it came to that."""

    def start_slowly(self, state: WorkerState, window_ms: float) -> None:
        """A worker is about to be added with an empty cache: where others have one that is filled,
        its queue weighs more until it was sent so much prefill.
        """
        others = [other.queue for other in self._states.values()]
        if window_ms > 0.0 and any(other.worked_ms >= window_ms for other in others):
            state.queue.start_slowly(window_ms)
            # As much as any other took in: the empty cache is no reason to wait there.
            state.queue.churn = sum(other.churn for other in others) / len(others)

    def add(self, state: WorkerState) -> None:
        """Raises ValueError for a worker that is here already."""
        if state.worker in self._states:
            raise ValueError(f"{state.worker} is in the fleet already")
        self._states[state.worker] = state
        self.ring.add(state.worker)
        self.churn.watch(state.queue)
        self._forget_answers()

    def remove(self, worker: WorkerId) -> None:
        """Forget a worker; nothing happens when it is unknown."""
        state = self._states.pop(worker, None)
        if state is not None:
            self.ring.remove(worker)
            self.churn.unwatch(state.queue)
            self.alarms.forget(worker)
            self._forget_answers()

    def get(self, worker: WorkerId) -> WorkerState | None:
        return self._states.get(worker)

    def states(self) -> list[WorkerState]:
        """All workers, in the order they were added."""
        return list(self._states.values())

    def block_sizes(self) -> list[int]:
        """The distinct block sizes of the workers, in the order they came; nearly always one."""
        if not self._block_sizes:
            self._block_sizes = list(dict.fromkeys(s.block_tokens for s in self._states.values()))
        return self._block_sizes

    def update(self, worker: WorkerId, **changes: Unpack[Changes]) -> None:
        """Change what the filters ask about; what is not named stays as it is."""
        state = self._states.get(worker)
        if state is None:
            return
        for name, value in changes.items():
            setattr(state, name, value)
        self._usable = None

    def renew_lease(self, worker: WorkerId, ends_at: BootInstant) -> None:
        """A heartbeat came: the worker may be routed to until then."""
        state = self._states.get(worker)
        if state is not None:
            state.lease_ends_at = ends_at
            self._usable = None

    def usable(
        self, boot: BootInstant, tried: frozenset[WorkerId] = frozenset()
    ) -> tuple[list[WorkerState], dict[WorkerId, Exclusion]]:
        """Workers that may be chosen now, and why each other one may not. Do not change the
        answers.
        """
        if self._usable is None or boot >= self._recheck_at:
            self._rebuild(boot)
        assert self._usable is not None
        if not tried:
            return self._usable, self._excluded
        left = [state for state in self._usable if state.worker not in tried]
        again = {s.worker: Exclusion.TRIED for s in self._usable if s.worker in tried}
        return left, {**self._excluded, **again}

    def _forget_answers(self) -> None:
        self._usable = None
        self._block_sizes = []

    def _rebuild(self, boot: BootInstant) -> None:
        self._usable, self._excluded = [], {}
        doubted: dict[WorkerId, Exclusion] = {}
        self._recheck_at = BootInstant(math.inf)
        for state in self._states.values():
            reason = _exclusion(state, boot)
            if reason is not None:
                self._excluded[state.worker] = reason
                continue
            doubt = _doubt(state)
            if doubt is not None:
                doubted[state.worker] = doubt
            self._usable.append(state)
            self._recheck_at = min(self._recheck_at, state.lease_ends_at)
        self._settle(doubted)
        ready = [state for state in self._usable if not state.is_warming]
        if ready:
            warming = [state.worker for state in self._usable if state.is_warming]
            self._excluded.update(dict.fromkeys(warming, Exclusion.WARMING))
            self._usable = ready

    def _settle(self, doubted: dict[WorkerId, Exclusion]) -> None:
        """Leave out who is in doubt, or panic."""
        assert self._usable is not None
        was_panicking = self.is_panicking
        self.is_panicking = 2 * len(doubted) > len(self._usable)
        if not self.is_panicking:
            self._excluded.update(doubted)
            self._usable = [state for state in self._usable if state.worker not in doubted]
        elif not was_panicking:
            self.panics_count += 1


def _exclusion(state: WorkerState, boot: BootInstant) -> Exclusion | None:
    if not state.is_healthy:
        return Exclusion.UNHEALTHY
    if state.is_draining:
        return Exclusion.DRAINING
    if boot >= state.lease_ends_at:
        return Exclusion.LEASE
    if state.is_asleep:
        return Exclusion.ASLEEP
    if state.is_leaking:
        return Exclusion.ISOLATION
    if state.is_unchecked:
        return Exclusion.CHECKING
    return None


def _doubt(state: WorkerState) -> Exclusion | None:
    if state.is_breaker_open:
        return Exclusion.BREAKER
    if state.is_silent:
        return Exclusion.SILENT
    match state.standing:
        case Standing.GOOD:
            return None
        case Standing.SUSPECT:
            return Exclusion.SUSPECT
        case Standing.EJECTED:
            return Exclusion.EJECTED
