"""The record of one routing choice: every candidate, every term in milliseconds, the outcome, the
reason.

Logs, the admin port, the replay report and the response header all print this same record.
Candidates are kept as columns, since a decision among 1,000 workers is made often and read seldom.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trunkline.core.records import WorkerId


class Reason(Enum):
    """Which rule chose."""

    CACHE_HIT = "cache-hit"
    CACHE_PULL = "cache-pull"
    """The rest of what another worker has is taken from there."""
    CACHE_PASSED = "cache-passed"
    """Somebody held more of the prefix, but waiting there cost more than computing again."""
    COLD_HOME = "cold-home"
    COLD_CHEAPEST = "cold-cheapest"
    LOAD_ONLY = "load-only"
    """Nothing is known of the prompt."""
    POLICY = "policy"
    """A baseline policy chose without looking at costs."""


class Plan(Enum):
    """Where the beginning of the prompt's KV comes from."""

    LOCAL = "local"
    PULL = "pull"
    RECOMPUTE = "recompute"


class Exclusion(Enum):
    """Why a worker was no candidate."""

    TRIED = "tried"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    BREAKER = "breaker-open"
    WATERMARK = "watermark"
    LEASE = "lease-expired"
    WARMING = "warming"
    """It has just come and takes over what is hot before it takes requests."""
    ADAPTER = "no-such-adapter"
    """It does not serve the adapter that is asked for."""
    ASLEEP = "asleep"
    """Its engine sleeps or is paused."""
    CHECKING = "checking"
    """It has just come, and whether it keeps tenants apart is being tested."""
    SILENT = "silent"
    """It neither answered nor gave a token for some heartbeats."""
    SUSPECT = "suspect"
    """Its streams missed their deadlines twice."""
    EJECTED = "ejected"
    """They did so again: it is out for a while."""
    ISOLATION = "isolation-failed"
    """It reused KV under another salt: no request of a tenant goes there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """`net_gain = saved prefill - queue - transfer - imbalance` against the best cache-blind
    choice, ms.
    """

    saved_prefill_ms: float
    queue_ms: float
    transfer_ms: float
    imbalance_ms: float

    @property
    def net_ms(self) -> float:
        return self.time_ms - self.imbalance_ms

    @property
    def time_ms(self) -> float:
        """What of it is time. Imbalance is a price: no request waits for it."""
        return self.saved_prefill_ms - self.queue_ms - self.transfer_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Columns over the workers that passed the hard filters, in slot order; tokens and ms."""

    workers: list[WorkerId]
    matched_tokens: list[int]
    pulled_tokens: list[int]
    queue_ms: list[float]
    transfer_ms: list[float]
    miss_ms: list[float]
    imbalance_ms: list[float]
    decode_pressure_ms: list[float]
    cost_ms: list[float]
    excluded: dict[WorkerId, Exclusion] = field(default_factory=dict[WorkerId, Exclusion])

    def rows(self) -> list[dict[str, Any]]:
        """One dict a candidate, for people."""
        return [
            {
                "worker": worker,
                "matched_tokens": self.matched_tokens[i],
                "pulled_tokens": self.pulled_tokens[i],
                "queue_ms": round(self.queue_ms[i], 3),
                "transfer_ms": round(self.transfer_ms[i], 3),
                "miss_ms": round(self.miss_ms[i], 3),
                "imbalance_ms": round(self.imbalance_ms[i], 3),
                "decode_pressure_ms": round(self.decode_pressure_ms[i], 3),
                "cost_ms": round(self.cost_ms[i], 3),
            }
            for i, worker in enumerate(self.workers)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came true of one choice; times in ms from when the attempt was sent."""

    end: str
    predicted_ms: float
    """When the prefill was expected to be over: queue, transfer and miss of the choice."""
    first_byte_ms: float | None
    """When a good answer began, which is near its first token only where it is streamed."""
    took_ms: float
    predicted_tokens: int
    reused_tokens: int | None
    """As the worker says; None where it does not."""
    is_stream: bool = False

    def as_dict(self) -> dict[str, Any]:
        first = self.first_byte_ms
        return {
            "end": self.end,
            "predicted_ms": round(self.predicted_ms, 3),
            "first_byte_ms": None if first is None else round(first, 3),
            "took_ms": round(self.took_ms, 3),
            "predicted_tokens": self.predicted_tokens,
            "reused_tokens": self.reused_tokens,
            "is_stream": self.is_stream,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One choice. `choice` indexes the columns of `candidates`."""

    request_id: str
    policy: str
    prompt_tokens: int
    choice: int
    reason: Reason
    gain: Gain
    candidates: Candidates
    source: WorkerId | None = None
    """From whom the chosen worker pulls; None where it pulls nothing."""
    source_ready_ms: float = 0.0
    """How long that one is expected to need until it has computed all of it."""
    notes: tuple[str, ...] = ()
    """What was out of order in the fleet when it was made."""

    @property
    def worker(self) -> WorkerId:
        return self.candidates.workers[self.choice]

    @property
    def matched_tokens(self) -> int:
        return self.candidates.matched_tokens[self.choice]

    @property
    def pulled_tokens(self) -> int:
        """Leading tokens behind the matched ones that are to come from the source."""
        return self.candidates.pulled_tokens[self.choice]

    @property
    def expected_tokens(self) -> int:
        """What the worker is expected to find or to be given, and not to compute."""
        return self.matched_tokens + self.pulled_tokens

    @property
    def plan(self) -> Plan:
        if self.pulled_tokens:
            return Plan.PULL
        return Plan.LOCAL if self.matched_tokens else Plan.RECOMPUTE

    @property
    def miss_ms(self) -> float:
        return self.candidates.miss_ms[self.choice]

    def compact(self) -> str:
        """One line for a response header."""
        index = self.choice
        pull = ""
        if self.pulled_tokens:
            pull = (
                f"pulled={self.pulled_tokens}; source={self.source}; "
                f"transfer_ms={self.candidates.transfer_ms[index]:.1f}; "
            )
        return (
            f"worker={self.worker}; reason={self.reason.value}; matched={self.matched_tokens}"
            f"/{self.prompt_tokens}; {pull}queue_ms={self.candidates.queue_ms[index]:.1f}; "
            f"miss_ms={self.miss_ms:.1f}; gain_ms={self.gain.net_ms:.1f}; policy={self.policy}"
            + (f"; degraded={len(self.notes)}" if self.notes else "")
        )

    def as_dict(self) -> dict[str, Any]:
        """The whole record, ready for JSON."""
        return {
            "request_id": self.request_id,
            "policy": self.policy,
            "worker": self.worker,
            "reason": self.reason.value,
            "plan": self.plan.value,
            "source": self.source,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": self.matched_tokens,
            "pulled_tokens": self.pulled_tokens,
            "net_gain_ms": round(self.gain.net_ms, 3),
            "gain": {
                "saved_prefill_ms": round(self.gain.saved_prefill_ms, 3),
                "queue_ms": round(self.gain.queue_ms, 3),
                "transfer_ms": round(self.gain.transfer_ms, 3),
                "imbalance_ms": round(self.gain.imbalance_ms, 3),
            },
            "notes": list(self.notes),
            "candidates": self.candidates.rows(),
            "excluded": {
                worker: reason.value for worker, reason in self.candidates.excluded.items()
            },
        }
