"""What the dashboard shows of a gateway at one moment, as records that go over the wire.

Fields that are left out have their default: a fleet of 1,000 workers is some 200 kB. Must never:
hold a prompt, a key of a worker, or a name of a tenant. Read `live.py` for who sends it,
`trunkline/overview_side.py` for who fills it in.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

SHOWN_DECISIONS = 50
SHOWN_PREFIXES = 12


class WorkerShown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker."""

    worker: str
    state: str
    mode: str
    reason: str = ""
    model: str = ""
    engine: str = ""
    breaker: str = "closed"
    alarms: list[str] = []
    """Kinds of those that are on."""
    load_ms: float = 0.0
    """Predicted prefill in front of a new request."""
    active: int = 0
    chosen: int = 0
    """Requests sent there since it joined."""
    prompt_tokens: int = 0
    """Of answers that told their reuse."""
    hit_tokens: int = 0
    """Of these, reused as the worker says."""
    capacity_blocks: int | None = None
    """Of all tiers; None where it does not say."""
    held_blocks: int = 0
    """Blocks that it told of."""
    tiers: dict[str, int] = {}
    """The same by tier; a block may lie in several."""
    memory: float | None = None
    """Share of its KV memory in use, as it says; None where it does not."""
    expected_blocks: int = 0
    """What our own choices let us expect there."""
    feed: str = "none"
    believed: float | None = None
    """Of what it told, the share that counts; None where it tells nothing."""
    incarnation: int = 0


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of times, in ms."""

    p50: float
    p95: float
    p99: float


class Foregone(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of the last minutes beside what the least queue would have chosen for the same
    requests, both as predicted at the time; and what was observed of those that were streamed.
    """

    looked_at: int
    """Choices in the sample."""
    span_ms: float
    """Over so long."""
    streamed: int
    chosen: Quantiles | None
    least_queue: Quantiles | None
    observed: Quantiles | None
    """Of the streamed ones: from sending to the first token."""
    predicted_of_observed: Quantiles | None
    """Of the very same ones, to see how good predictions are."""
    saved_ms: float
    """Least queue less the choice, added up; may be below 0."""
    saved_ms_each: float
    dearer_share: float
    """Of the choices, those predicted to begin later than under the least queue."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since start, but for what waits or runs now."""

    requests: dict[str, int]
    """Finished ones by class."""
    active: int
    waiting: int
    refused: int
    decisions: int
    reasons: dict[str, int]
    prompt_tokens: int
    promised_tokens: int
    hit_tokens: int
    """Reused, and not computed after all."""
    saved_prefill_ms: float
    """Prefill that choices were predicted to spare, against the best choice blind to caches."""
    net_saved_ms: float
    """The same less what it costs in queue and transfer."""
    over_claims: int
    ttft: Quantiles | None
    """From the end of the request to its first token, from buckets."""
    ttft_count: int
    foregone: Foregone


class Integrity(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway can see of false hits."""

    false_hits: int
    """Answers that reused KV though nobody else was ever given their salt."""
    leaking: int
    """Workers that reused KV under another salt in their self-test: each is a false hit."""
    tested: int
    """Workers whose self-test went to its end."""
    workers: int
    refused_pulls: int
    """Pulls whose bytes failed their check: nobody was served them."""


class PrefixShown(msgspec.Struct, frozen=True, kw_only=True):
    """One beginning that many prompts have in common."""

    prefix: str
    """The first half of its block key."""
    tokens: int
    requests: float
    """Each worth half as much after a minute."""
    holders: int | None
    """Workers that hold or expect all of it; None for one of a public prefix."""


class DecisionShown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice, without its candidates."""

    request: str
    at_ms: float
    worker: str
    reason: str
    plan: str
    prompt_tokens: int
    matched_tokens: int
    pulled_tokens: int = 0
    net_ms: float = 0.0
    predicted_ms: float = 0.0
    """When the prefill was expected to be over."""
    end: str = ""
    """Empty while it runs."""
    first_ms: float | None = None
    is_stream: bool = False
    took_ms: float | None = None
    reused_tokens: int | None = None
    process: int | None = None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one gateway, or at several of one fleet."""

    at_ms: float
    """Wall clock."""
    up_ms: float
    processes: int
    workers: list[WorkerShown]
    traffic: Traffic
    integrity: Integrity
    prefixes: list[PrefixShown]
    decisions: list[DecisionShown]
    """The latest first."""


class DecisionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which choices; empty takes all."""

    text: str = ""
    """In the request's id or the worker's name."""
    reason: str = ""
    end: str = ""
    limit: int = SHOWN_DECISIONS


class OverviewSource(Protocol):
    """Who knows all of it; called on the loop."""

    def overview(self) -> Overview: ...

    def chosen(self, wanted: DecisionFilter) -> list[DecisionShown]:
        """Of the kept choices those that are wanted, the latest first."""
        ...
