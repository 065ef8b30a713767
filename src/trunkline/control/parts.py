"""What all members of a gateway share: the tables they write, and how they reach their workers.

Put together by `wiring.py`. Read `member.py` next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trunkline.config import BreakerConfig, HealthConfig, RoutingConfig
from trunkline.control.discovery import Facts, FindSources, FleetModel
from trunkline.control.holdings import Holdings
from trunkline.core.directory import Directory
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import Fleet
from trunkline.core.pace import Pace
from trunkline.core.records import WorkerId
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock
from trunkline.ports.worker import (
    EventSource,
    Examine,
    FeedRunner,
    Fetch,
    Targets,
    WorkerAgent,
)

HELD_PER_CAPACITY = 2
HELD_SLACK_BLOCKS = 1_024
"""A worker's events may fill this much of its announced capacity in the directory, so that the
nonsense of one leaves room for the others. Twice: its offloaded blocks are listed too."""


@dataclass(slots=True, kw_only=True)
class MemberParts:
    """What all members share."""

    fleet: Fleet
    directory: Directory
    targets: Targets
    clock: Clock
    fetch: Fetch
    make_feed: Callable[[WorkerId, EventSource], WorkerFeed]
    run_feed: FeedRunner
    find_sources: FindSources
    model: FleetModel
    health: HealthConfig
    breaker: BreakerConfig
    routing: RoutingConfig
    default_block_tokens: int
    log: EventLog
    pool_pace: Pace = field(default_factory=Pace)
    """What all workers do; those without a history of their own are held against it."""
    inexact: Callable[[Facts], str] = lambda _facts: ""
    """Asked as a worker joins: why our keys are not of its blocks; empty where they are."""
    on_other: Callable[[str], None] = lambda _name: None
    """Told the name of a worker that serves another model than this one."""
    on_left: Callable[[str], None] = lambda _name: None
    """Told the name of a worker that left by itself, as its time for it was over."""
    holdings: Holdings | None = None
    """None where nothing is ever revoked: everybody is one tenant."""
    examine: Examine | None = None
    """Tests a worker; None where nobody does."""
    keeps_apart: bool = False
    """Tenants are to be kept apart: a worker that does not is given none of their requests."""

    def is_full(self, memory_ratio: float, load_ratio: float) -> bool:
        """Whether a worker is above a watermark: it keeps its prefixes and gets no new ones."""
        routing = self.routing
        return memory_ratio > routing.memory_watermark or load_ratio > routing.load_watermark

    def as_read(self, facts: Facts) -> Facts:
        """Less its events where those are of other blocks than we have keys of."""
        why_not = self.inexact(facts)
        if not why_not:
            return facts
        return replace(facts, sources=(), no_events=why_not, is_exact=False)

    def agent(self, name: str) -> WorkerAgent | None:
        """What stands beside a worker that has just joined, or is another than it was."""
        holder = self.holdings.find(name) if self.holdings else None
        if holder is not None:
            holder.look_again()
        return holder


def directory_bounds(capacity_blocks: int | None) -> dict[str, int]:
    """What a worker may fill of the directory, where it says how much it can hold."""
    if capacity_blocks is None:
        return {}
    max_held = HELD_PER_CAPACITY * capacity_blocks + HELD_SLACK_BLOCKS
    return {"max_predicted": capacity_blocks, "max_held": max_held}
