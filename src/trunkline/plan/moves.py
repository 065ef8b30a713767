"""Where pulling KV from another worker is cheaper than computing it, and how many workers a goal
for the first token needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trunkline.core.links import LinkProfile
from trunkline.plan.queueing import FIXED_MS, Chooser, FleetShape, QueueModel
from trunkline.plan.window import Stretch
from trunkline.replay.counters import percentile

GOAL_SHARE = 0.95
"""The goal is one for this share of the calls."""
MAX_GOAL_CALLS = 6_000
MAX_GOAL_WORKERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """What a pull over one kind of link must bring to pay."""

    tokens: float | None
    """From how many tokens on; None where computing is always faster."""
    calls: int
    """Calls of the stretch that would have won by a pull."""
    pulled_tokens: int
    saved_ms: float


def break_even(
    leads: Sequence[int], *, token_ms: float, kv_bytes_per_token: int, link: LinkProfile
) -> BreakEven:
    """`leads`: how many tokens more another worker held, for each call for which one did. What the
    queue hides of a pull is left out, so it is the least that pulls win.
    """
    gain_ms = token_ms - kv_bytes_per_token / link.bytes_per_ms
    if gain_ms <= 0.0:
        return BreakEven(tokens=None, calls=0, pulled_tokens=0, saved_ms=0.0)
    tokens = link.setup_ms / gain_ms
    won = [lead for lead in leads if lead > tokens]
    return BreakEven(
        tokens=tokens,
        calls=len(won),
        pulled_tokens=sum(won),
        saved_ms=sum(won) * gain_ms - len(won) * link.setup_ms,
    )


def first_calls(stretch: Stretch, count: int) -> Stretch:
    """The beginning of a stretch."""
    return replace(
        stretch,
        at_ms=stretch.at_ms[:count],
        tokens=stretch.tokens[:count],
        outputs=stretch.outputs[:count],
        blocks=stretch.blocks[:count],
    )


def workers_needed(
    stretch: Stretch,
    shape: FleetShape,
    goal_ms: float,
    make: Callable[[FleetShape, int], Chooser],
    *,
    at_least: int = 1,
) -> int | None:
    """The fewest workers that keep the goal; None where not even the most that are tried do."""
    calls = first_calls(stretch, MAX_GOAL_CALLS)
    alone_ms = _alone_ms(calls, shape.token_ms)
    if percentile(sorted(alone_ms), GOAL_SHARE) > goal_ms:
        return None
    # Fewer could not do the work in the time that it took.
    at_least = max(at_least, int(sum(alone_ms) / max(calls.span_ms + goal_ms, 1.0)))
    if at_least > MAX_GOAL_WORKERS:
        return None

    def keeps(workers: int) -> bool:
        tried = replace(shape, workers=workers)
        return QueueModel(tried, calls).run(make(tried, 0)).ttft(GOAL_SHARE) <= goal_ms

    low, high = at_least - 1, at_least  # `low` fails
    while not keeps(high):
        if high >= MAX_GOAL_WORKERS:
            return None
        low, high = high, min(2 * high, MAX_GOAL_WORKERS)
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high


def _alone_ms(stretch: Stretch, token_ms: float) -> list[float]:
    """Each call's own prefill where everything computed so far is everywhere."""
    seen: set[int] = set()
    times: list[float] = []
    for tokens, blocks in zip(stretch.tokens, stretch.blocks, strict=True):
        most = max(0, tokens - 1) // stretch.block_tokens
        hits = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        missed = tokens - min(hits, most) * stretch.block_tokens
        times.append(FIXED_MS + missed * token_ms)
    return times
