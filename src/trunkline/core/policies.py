"""The ways to choose among priced workers, by the names that users know.

`cache_aware` is ours and the default; the others are the baselines that every report shows beside
it. To add one: write a class with `choose`, and put it in `POLICIES`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from trunkline.core.cost import CostColumns
from trunkline.core.decision import Reason
from trunkline.core.fleet import WorkerState
from trunkline.core.placement import HashRing
from trunkline.core.records import WorkerId

_NEAR_MS = 0.01
"""Costs closer than this are equal, and a seeded draw decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The usable workers (never none) with what each holds and costs, in one order."""

    states: list[WorkerState]
    matched_tokens: list[int]
    columns: CostColumns
    home_key: bytes | None
    home_slack_ms: float
    """How much dearer than the cheapest worker a home may be and still be chosen: the fixed part of
    one prefill, so that homes are kept in a calm fleet and left in a busy one.
    """
    is_prompt_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Index into the question's lists, and the rule that fired."""

    index: int
    reason: Reason


class Policy(Protocol):
    """One way to choose. It may keep a cursor, and draws only from the generator it was given."""

    def choose(self, question: Question) -> Choice: ...


class CacheAware:
    """Least cost; among equals a seeded draw. What nobody holds goes to the cheaper of its two
    homes.
    """

    def __init__(self, ring: HashRing, rng: random.Random) -> None:
        self._ring = ring
        self._rng = rng

    def choose(self, question: Question) -> Choice:
        costs = question.columns.cost_ms
        cheapest_ms = min(costs)
        if not question.is_prompt_known:
            home = self._home(question, cheapest_ms)
            index = self._draw(costs, cheapest_ms) if home is None else home
            return Choice(index=index, reason=Reason.LOAD_ONLY)
        most = max(question.matched_tokens)
        if most == 0:
            home = self._home(question, cheapest_ms)
            if home is not None:
                return Choice(index=home, reason=Reason.COLD_HOME)
            return Choice(index=self._draw(costs, cheapest_ms), reason=Reason.COLD_CHEAPEST)
        index = self._draw(costs, cheapest_ms)
        if question.columns.pulled_tokens[index]:
            return Choice(index=index, reason=Reason.CACHE_PULL)
        is_passed = question.matched_tokens[index] < most
        return Choice(index=index, reason=Reason.CACHE_PASSED if is_passed else Reason.CACHE_HIT)

    def _home(self, question: Question, cheapest_ms: float) -> int | None:
        """The cheaper home, if it is usable and not much dearer than the cheapest worker of all."""
        if question.home_key is None:
            return None
        homes = self._ring.homes(question.home_key)
        at = [i for i, state in enumerate(question.states) if state.worker in homes]
        if not at:
            return None
        costs = question.columns.cost_ms
        best = min(at, key=costs.__getitem__)
        return best if costs[best] <= cheapest_ms + question.home_slack_ms else None

    def _draw(self, costs: list[float], cheapest_ms: float) -> int:
        limit_ms = cheapest_ms + _NEAR_MS
        near = [i for i, cost_ms in enumerate(costs) if cost_ms <= limit_ms]
        return near[0] if len(near) == 1 else near[self._rng.randrange(len(near))]


class RoundRobin:
    """Each usable worker in turn."""

    def __init__(self, ring: HashRing, rng: random.Random) -> None:
        self._next = 0

    def choose(self, question: Question) -> Choice:
        index = self._next % len(question.states)
        self._next += 1
        return Choice(index=index, reason=Reason.POLICY)


class LeastQueue:
    """Fewest queued milliseconds of prefill, blind to caches: the strong baseline."""

    def __init__(self, ring: HashRing, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, question: Question) -> Choice:
        queues = question.columns.queue_ms
        least_ms = min(queues) + _NEAR_MS
        near = [i for i, queue_ms in enumerate(queues) if queue_ms <= least_ms]
        return Choice(index=near[self._rng.randrange(len(near))], reason=Reason.POLICY)


class PowerOfTwo:
    """The less queued of two drawn workers."""

    def __init__(self, ring: HashRing, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, question: Question) -> Choice:
        count = len(question.states)
        drawn = [self._rng.randrange(count), self._rng.randrange(count)]
        return Choice(
            index=min(drawn, key=question.columns.queue_ms.__getitem__), reason=Reason.POLICY
        )


class ConsistentHash:
    """The prefix's first home on the ring that is usable; a draw where nothing is known of the
    prompt.
    """

    def __init__(self, ring: HashRing, rng: random.Random) -> None:
        self._ring = ring
        self._rng = rng

    def choose(self, question: Question) -> Choice:
        index_of: dict[WorkerId, int] = {s.worker: i for i, s in enumerate(question.states)}
        if question.home_key is not None:
            # In ring order, since the first ones may be down or tried already.
            for worker in self._ring.walk(question.home_key):
                if worker in index_of:
                    return Choice(index=index_of[worker], reason=Reason.POLICY)
        return Choice(index=self._rng.randrange(len(question.states)), reason=Reason.POLICY)


class Random:
    """A seeded draw."""

    def __init__(self, ring: HashRing, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, question: Question) -> Choice:
        return Choice(index=self._rng.randrange(len(question.states)), reason=Reason.POLICY)


class PolicyFactory(Protocol):
    """What `POLICIES` holds: a policy's class."""

    def __call__(self, ring: HashRing, rng: random.Random) -> Policy: ...


POLICIES: dict[str, PolicyFactory] = {
    "cache_aware": CacheAware,
    "round_robin": RoundRobin,
    "least_queue": LeastQueue,
    "power_of_two": PowerOfTwo,
    "consistent_hash": ConsistentHash,
    "random": Random,
}
