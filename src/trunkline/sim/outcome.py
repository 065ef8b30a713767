"""What a run of the fleet model counted. `figures.py` makes of it what reports print."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from trunkline.core.records import WorkerId


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run counted."""

    ttft_ms: list[float] = field(default_factory=list[float])
    input_tokens: int = 0
    hit_tokens: int = 0
    hit_requests: int = 0
    host_tokens: int = 0
    """Of the hit ones, those that were loaded from host memory."""
    pulled_tokens: int = 0
    """Of the hit ones, those that came from another worker."""
    pulls: int = 0
    failed_pulls: int = 0
    transfer_bytes: int = 0
    transfer_ms: float = 0.0
    plans: Counter[str] = field(default_factory=Counter[str])
    over_claims: int = 0
    false_hits: int = 0
    lost: int = 0
    retried: int = 0
    used_after_lease: int = 0
    queue_ms: float = 0.0
    queues_ms: list[dict[WorkerId, float]] = field(default_factory=list[dict[WorkerId, float]])
    """Of all workers, at each tick since one more came."""
    work_ms: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    lookup_us: list[float] = field(default_factory=list[float])
    directory_blocks: int = 0
    directory_bytes: int = 0
    directory_agrees: bool = True
    """Whether, all events delivered, the directory holds exactly what the workers hold."""
    hot_prefix_holders: int = 0
    """Workers that hold the first block of each of the three hottest roots at the end, at the
    least.
    """
    hot_copies_most: int = 0
    """Workers that held the whole prefix that the workload makes hot, at one time at the most."""
    hot_copies_end: int = 0
    feed_gaps: int = 0
    feed_replays: int = 0
