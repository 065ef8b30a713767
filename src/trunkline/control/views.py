"""What goes in and out of the membership: a worker as named, as heard of, and as shown.

Plain records; no secret but the one inside an `Endpoint`, which is never printed. Read `member.py`
next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum

from trunkline.control.engine import LoadReport
from trunkline.core.alarms import Alarm, AlarmKind
from trunkline.core.alignment import Examination
from trunkline.core.decision import Exclusion
from trunkline.core.directory import Directory
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import WorkerState
from trunkline.core.records import BlockKey, Instant, Tier, WorkerId
from trunkline.core.residency import FeedStats
from trunkline.ports.worker import Endpoint, EngineKind, EventSource
from trunkline.written import host_port


class Mode(Enum):
    """How we know what a worker holds."""

    CONNECTING = "connecting"
    EXACT = "exact"
    DIGEST = "digest"
    APPROXIMATE = "approximate"
    BLIND = "blind"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker as an operator names it."""

    name: str
    endpoint: Endpoint
    block_tokens: int | None = None
    """None takes what the worker says, or the configured default."""
    labels: tuple[tuple[str, str], ...] = ()
    model_id: str = ""
    """It is taken only if it serves this model; empty takes what the fleet serves."""
    event_sources: tuple[EventSource, ...] = ()
    """Where its cache events come from, for an engine that does not announce them."""
    agent: Endpoint | None = None
    """Where a connector inside the engine takes leases and orders, on a port of its own."""
    p2p: tuple[str, int] | None = None
    """Where the engine's own peer-to-peer tier lends its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a digest-mode worker posts each second."""

    name: str
    boot_nonce: str
    counter: int
    checkpoints: frozenset[BlockKey]
    is_complete: bool
    memory_ratio: float
    load_ratio: float
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckView:
    """What the self-test of a worker came to."""

    examination: Examination | None
    """The last that came to its end; None while none has."""
    unfinished: str
    """Why the one after it did not; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmView:
    """One alarm that is on."""

    kind: AlarmKind
    rank: WorkerId
    why: str
    lasts_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """One worker for operators; no secrets."""

    name: str
    url: str
    mode: Mode
    reason: str
    """Why it may not be chosen, else why it is in this mode."""
    exclusion: Exclusion | None
    """Why it may not be chosen now; None where it may, or has not joined."""
    is_draining: bool
    breaker: int
    block_tokens: int | None
    capacity_blocks: int | None
    model_id: str
    engine: EngineKind
    engine_version: str
    """Empty where it does not say."""
    max_model_len: int | None
    degraded: tuple[str, ...]
    ranks: tuple[RankView, ...]
    labels: dict[str, str]
    check: CheckView
    endpoint: Endpoint = field(repr=False)
    """For whoever asks it something; it is never shown."""
    load: LoadReport | None = None
    """What it said last of how busy it is."""
    alarms: tuple[AlarmView, ...] = ()
    is_other_model: bool = False
    """It answers, and is not taken, since it serves another model or cannot keep tenants apart."""
    is_replayable: bool = True
    """What was missed of its events can be had again; so too where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank of a worker: what is in flight there and what its directory entries are worth."""

    worker: WorkerId
    incarnation: int
    in_flight: int
    queue_ms: float
    scale: float
    """Measured over predicted time, as calibration has it."""
    held_blocks: int
    held_in_tiers: dict[str, int]
    """Of these, in each tier that has any; one may be in several."""
    predicted_blocks: int
    believed_share: float
    """Of what it told, what counts."""
    feed_state: str
    feed_stats: dict[str, int]


def shown_url(endpoint: Endpoint) -> str:
    """The worker's URL, without its key."""
    scheme = "https" if endpoint.tls else "http"
    return f"{scheme}://{host_port(endpoint.host, endpoint.port)}{endpoint.base_path}"


def alarm_views(alarms: Iterable[Alarm], now: Instant) -> tuple[AlarmView, ...]:
    """As they stand now."""
    return tuple(
        AlarmView(kind=one.kind, rank=one.worker, why=one.why, lasts_ms=now - one.since)
        for one in alarms
    )


def rank_view(
    state: WorkerState, directory: Directory, feed: WorkerFeed | None, now: Instant
) -> RankView:
    """One rank as it stands now."""
    worker = state.worker
    return RankView(
        worker=worker,
        incarnation=directory.incarnation(worker),
        in_flight=state.queue.in_flight_count,
        queue_ms=state.queue.queue_ms(now),
        scale=state.queue.scale,
        held_blocks=directory.held_count(worker),
        held_in_tiers={
            tier.name.lower(): count
            for tier, count in zip(Tier, directory.tier_counts(worker), strict=True)
            if count
        },
        predicted_blocks=directory.predicted_count(worker),
        believed_share=directory.believed_share(worker),
        feed_state=feed.state.value if feed else "none",
        feed_stats=_counts(feed.stats) if feed else {},
    )


def _counts(stats: FeedStats) -> dict[str, int]:
    """By name. `asdict` would look into each number for what it may be made of."""
    return {one.name: getattr(stats, one.name) for one in fields(stats)}
