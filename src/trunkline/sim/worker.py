"""The truth about one modelled worker: what it holds, what it computes now, and its two links.

Its prefill server takes one job at a time, of those that lack nothing the one that is ready for
longest: a job that waits for KV from elsewhere holds up nobody. Links carry one pull after another,
in each direction. Read `model.py` for who drives it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from trunkline.core.events import CacheEvent
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import WorkerState
from trunkline.core.keys import KeyChain
from trunkline.core.records import Tier, WorkerId
from trunkline.replay.traces import TraceRequest
from trunkline.sim.cache import TieredCache, TieredUse, Use
from trunkline.sim.publisher import Publisher, removed_event, stored_event


@dataclass(slots=True, kw_only=True)
class Job:
    """One request on its way."""

    request: TraceRequest
    keys: KeyChain
    arrival_ms: float
    tried: frozenset[WorkerId] = frozenset()
    attempt: int = 0
    placed_ms: float = 0.0
    prefill_ms: float = 0.0
    owed_from: int = 0
    is_pulling: bool = False
    """This and the one before are what the gateway expects of it (`core/debts.py`)."""
    pull: Pull | None = None
    """What it pulls, and has not got."""
    lacks: int = 0
    """Pulls, its own and others', that have to end before it is ready for the server."""
    followers: list[int] = field(default_factory=list[int])
    """Tickets of jobs of this worker that need what it waits for."""
    askers: list[int] = field(default_factory=list[int])
    """Tickets of jobs elsewhere that pull what it computes."""


@dataclass(slots=True, kw_only=True)
class Pull:
    """Blocks that one job is to get from another worker."""

    source: ModelWorker
    keys: list[bytes]
    waits_for: set[int] = field(default_factory=set[int])
    """Tickets of jobs of the source that have still to compute some of them."""
    asked_ms: float = 0.0
    missing: int = 0
    """Blocks that were not there any more when it was their turn."""


@dataclass(slots=True, kw_only=True)
class ModelWorker:
    """One worker and its part of the run."""

    state: WorkerState
    cache: TieredCache
    publisher: Publisher
    feed: WorkerFeed
    is_dead: bool = False
    jobs: dict[int, Job] = field(default_factory=dict[int, Job])
    """Jobs without a first token yet, by ticket."""
    ready: deque[int] = field(default_factory=deque[int])
    """Tickets of jobs that wait for the server and for nothing else."""
    coming: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Blocks that are placed and not there yet: by which job they come."""
    serving: int | None = None
    sends_until_ms: float = 0.0
    receives_until_ms: float = 0.0

    @property
    def name(self) -> WorkerId:
        return self.state.worker

    def next_job(self) -> Job | None:
        """The server is free: whom it serves now."""
        self.serving = self.ready.popleft() if self.ready else None
        return None if self.serving is None else self.jobs[self.serving]

    def die(self) -> dict[int, Job]:
        """Everything it was doing ends; the jobs that have to begin anew."""
        self.is_dead = True
        self.ready.clear()
        self.coming.clear()
        jobs, self.jobs = self.jobs, {}
        return jobs

    def expect(self, ticket: int, keys: list[bytes]) -> None:
        """A job brings these blocks."""
        self.coming.update(dict.fromkeys(keys, ticket))

    def follow(self, ticket: int, hits: list[bytes]) -> int:
        """Wait for jobs here that have still to get what these blocks need; how many they are."""
        coming = {self.coming[key] for key in hits if key in self.coming}
        leaders = [leader for leader in sorted(coming) if self.jobs[leader].lacks]
        for leader in leaders:
            self.jobs[leader].followers.append(ticket)
        return len(leaders)

    def arrived(self, ticket: int, keys: Iterable[bytes]) -> None:
        """They are there."""
        for key in keys if self.coming else ():
            if self.coming.get(key) == ticket:
                del self.coming[key]

    def receive(self, source: ModelWorker, now_ms: float, took_ms: float) -> float:
        """A pull that takes so long on idle links; when it is over."""
        started_ms = max(now_ms, source.sends_until_ms, self.receives_until_ms)
        source.sends_until_ms = self.receives_until_ms = started_ms + took_ms
        return started_ms + took_ms


def cache_events(keys: list[bytes], ids: array[int], salt: str, use: TieredUse) -> list[CacheEvent]:
    """What a worker tells of a prompt that was placed there."""
    events = _tier_events(keys, ids, salt, use.device, Tier.DEVICE)
    return events + (
        _tier_events(keys, ids, salt, use.host, Tier.HOST) if use.host is not None else []
    )


def _tier_events(
    keys: list[bytes], ids: array[int], salt: str, use: Use, tier: Tier
) -> list[CacheEvent]:
    events: list[CacheEvent] = []
    if use.hit_blocks < len(keys):
        events.append(stored_event(keys, ids, use.hit_blocks, salt, tier))
    if use.evicted:
        events.append(removed_event(use.evicted, tier))
    return events
