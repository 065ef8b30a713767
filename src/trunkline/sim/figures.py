"""What a run of the fleet model counted -> the figures that reports print and bars compare.

The names are those of `replay/results.py`, so that one bar reads the same on the model and on
sockets.
"""

from __future__ import annotations

from typing import Any

from trunkline.core.decision import Plan
from trunkline.replay.counters import percentile
from trunkline.replay.results import Spread
from trunkline.sim.outcome import Outcome


def figures(workload: str, policy: str, outcome: Outcome) -> dict[str, Any]:
    """All figures of one run, ready for JSON; times in ms unless the name says otherwise."""
    spread = Spread.of(outcome.ttft_ms) or Spread(mean=0.0, p50=0.0, p95=0.0, p99=0.0)
    answered = len(outcome.ttft_ms)
    work = list(outcome.work_ms.values())
    mean_work = sum(work) / len(work) if work else 0.0
    lookups = sorted(outcome.lookup_us) or [0.0]
    return {
        "workload": workload,
        "policy": policy,
        "requests": answered + outcome.lost,
        "lost": outcome.lost,
        "hit_tokens_ratio": round(outcome.hit_tokens / max(1, outcome.input_tokens), 6),
        "hit_requests_ratio": round(outcome.hit_requests / max(1, answered), 6),
        "avoided_prefill_tokens": outcome.hit_tokens,
        "prefill_tokens": outcome.input_tokens - outcome.hit_tokens,
        "ttft_ms": {
            "mean": round(spread.mean, 3),
            "p50": round(spread.p50, 3),
            "p95": round(spread.p95, 3),
            "p99": round(spread.p99, 3),
        },
        "router_queue_ms": {"mean": round(outcome.queue_ms / max(1, answered), 3)},
        "busiest_over_mean_work": round(max(work) / mean_work, 6) if mean_work else None,
        "transfer_bytes": outcome.transfer_bytes,
        "pulls": {
            "count": outcome.pulls,
            "failed": outcome.failed_pulls,
            "tokens": outcome.pulled_tokens,
            "ms_mean": round(outcome.transfer_ms / max(1, outcome.pulls), 3),
        },
        "host_tokens": outcome.host_tokens,
        "plans": {plan.value: outcome.plans[plan.value] for plan in Plan},
        "hot_copies": {"most": outcome.hot_copies_most, "end": outcome.hot_copies_end},
        "over_claims": outcome.over_claims,
        "false_hits": outcome.false_hits,
        "retried": outcome.retried,
        "used_after_lease": outcome.used_after_lease,
        "directory_lookup_us": {
            "p50": round(percentile(lookups, 0.50), 3),
            "p99": round(percentile(lookups, 0.99), 3),
        },
        "directory_blocks": outcome.directory_blocks,
        "directory_bytes": outcome.directory_bytes,
        "directory_agrees": int(outcome.directory_agrees),
        "feed_gaps": outcome.feed_gaps,
        "feed_replays": outcome.feed_replays,
        "hot_prefix_holders": outcome.hot_prefix_holders,
    }
