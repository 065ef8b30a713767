"""What the gateway promised of its workers' caches, and what came true: plain counters.

Owns no decision. Read `picker.py` for who counts, `operations.py` for who shows it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from trunkline import observe
from trunkline.core.decision import Decision, Plan
from trunkline.core.keys import KeyChain
from trunkline.core.records import Instant, WorkerId
from trunkline.gateway.beginnings import Beginnings
from trunkline.gateway.contracts import InferenceRequest
from trunkline.gateway.families import LOOKUP_SECONDS
from trunkline.gateway.metrics import Histogram
from trunkline.gateway.tenant_counts import TenantCounts


@dataclass(slots=True, kw_only=True)
class Accounts:
    """What was promised and what came true, in tokens; plain counters since start."""

    prompt_tokens: int = 0
    predicted_tokens: int = 0
    reused_tokens: int = 0
    reported_prompts: int = 0
    """Answers whose usage told how much was reused; the three sums above are over these."""
    hit_prompts: int = 0
    false_hits: int = 0
    """Answers that reused KV though their salt was their own. Never, or engines are not fenced."""
    over_claims: int = 0
    """Answers that reused less than predicted, by a whole block or more."""
    over_claimed_tokens: int = 0
    recomputed_tokens: int = 0
    """Of `reused_tokens`: an engine had counted them, and computed them after all."""
    queued_ms: float = 0.0
    """Sum over decisions of the predicted queue at the chosen worker."""
    decisions: int = 0
    unread_prompts: int = 0
    """Requests routed by load alone, since nothing is known of their prompt."""
    approximate_prompts: dict[str, int] = field(default_factory=dict[str, int])
    """Requests whose keys are not quite those of workers, by why."""
    net_saved_ms: float = 0.0
    """Time that choices were predicted to spare requests: what they cost beside is not in it."""
    saved_prefill_ms: float = 0.0
    """What the same choices were predicted to spare of prefill alone."""
    selections: dict[WorkerId, int] = field(default_factory=dict[WorkerId, int])
    hits: dict[WorkerId, list[int]] = field(default_factory=dict[WorkerId, list[int]])
    """Of each worker that is here: prompt tokens and reused ones, as in the sums above."""
    beginnings: Beginnings = field(default_factory=Beginnings)
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    plans: dict[Plan, int] = field(default_factory=lambda: dict.fromkeys(Plan, 0))
    lookup: Histogram = field(default_factory=lambda: Histogram(LOOKUP_SECONDS))
    tenants: TenantCounts | None = None
    """None where everybody is one tenant."""

    def read(self, request: InferenceRequest) -> None:
        """A request is to be routed, by its prompt or without."""
        if not isinstance(request.prompt, array):
            self.unread_prompts += 1
        elif request.approximate:
            why = request.approximate.replace(" ", "-")
            self.approximate_prompts[why] = self.approximate_prompts.get(why, 0) + 1

    def remember(
        self, request: InferenceRequest, decision: Decision, keys: KeyChain | None, now: Instant
    ) -> None:
        """A choice was made, for a prompt of these blocks; None where nothing is known of it."""
        self.decisions += 1
        self.queued_ms += decision.candidates.queue_ms[decision.choice]
        self.net_saved_ms += decision.gain.time_ms
        self.saved_prefill_ms += decision.gain.saved_prefill_ms
        self.plans[decision.plan] += 1
        reason = decision.reason.value
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.selections[decision.worker] = self.selections.get(decision.worker, 0) + 1
        if keys is not None:
            self.beginnings.note(keys, decision.expected_tokens, now)
        if self.tenants is not None and not request.is_counted:
            request.is_counted = True
            self.tenants.sent(request.grant.principal.tenant, decision.prompt_tokens)

    def false_hit(self, decision: Decision, cached_tokens: int) -> None:
        """An answer reused what nothing was shared with."""
        self.false_hits += 1
        observe.log.error(
            "reuse.false_hit",
            request_id=decision.request_id,
            worker=decision.worker,
            tokens=cached_tokens,
            remedy="drain it; `trunkline doctor` tests its isolation",
        )

    def reported(
        self, tenant: str, decision: Decision, block_tokens: int, cached_tokens: int
    ) -> None:
        """An answer told how much was reused, of a prompt whose tokens we know."""
        predicted = decision.expected_tokens
        self.reported_prompts += 1
        self.prompt_tokens += decision.prompt_tokens
        self.predicted_tokens += predicted
        self.reused_tokens += cached_tokens
        self.hit_prompts += cached_tokens > 0
        if decision.worker in self.selections:  # else it has left
            hits = self.hits.setdefault(decision.worker, [0, 0])
            hits[0] += decision.prompt_tokens
            hits[1] += cached_tokens
        if self.tenants is not None:
            self.tenants.reported(tenant, decision.prompt_tokens, cached_tokens)
        if cached_tokens + block_tokens <= predicted:
            self.over_claims += 1
            self.over_claimed_tokens += predicted - cached_tokens

    def forget(self, worker: WorkerId) -> None:
        """It left: its series go with it."""
        self.selections.pop(worker, None)
        self.hits.pop(worker, None)
