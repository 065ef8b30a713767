"""What the gateway promised of its workers' caches, and what came true: plain counters.

Owns no decision. Read `picker.py` for who counts, `operations.py` for who shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.core.decision import Decision, Plan
from trunkline.core.records import WorkerId
from trunkline.gateway.metrics import LOOKUP_SECONDS, Histogram


@dataclass(slots=True, kw_only=True)
class Accounts:
    """What was promised and what came true, in tokens; plain counters since start."""

    prompt_tokens: int = 0
    predicted_tokens: int = 0
    reused_tokens: int = 0
    reported_prompts: int = 0
    """Answers whose usage told how much was reused; the three sums above are over these."""
    hit_prompts: int = 0
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
    net_gain_ms: float = 0.0
    selections: dict[WorkerId, int] = field(default_factory=dict[WorkerId, int])
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    plans: dict[Plan, int] = field(default_factory=lambda: dict.fromkeys(Plan, 0))
    lookup: Histogram = field(default_factory=lambda: Histogram(LOOKUP_SECONDS))

    def remember(self, decision: Decision) -> None:
        """A choice was made."""
        self.decisions += 1
        self.queued_ms += decision.candidates.queue_ms[decision.choice]
        self.net_gain_ms += decision.gain.net_ms
        self.plans[decision.plan] += 1
        reason = decision.reason.value
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.selections[decision.worker] = self.selections.get(decision.worker, 0) + 1

    def reported(self, decision: Decision, block_tokens: int, cached_tokens: int) -> None:
        """An answer told how much was reused, of a prompt whose tokens we know."""
        predicted = decision.expected_tokens
        self.reported_prompts += 1
        self.prompt_tokens += decision.prompt_tokens
        self.predicted_tokens += predicted
        self.reused_tokens += cached_tokens
        self.hit_prompts += cached_tokens > 0
        if cached_tokens + block_tokens <= predicted:
            self.over_claims += 1
            self.over_claimed_tokens += predicted - cached_tokens
