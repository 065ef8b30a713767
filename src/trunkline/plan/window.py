"""The busiest stretch of a log, of bounded size: what routing is tried on.

The log is cut into stretches of so many calls, and the one with most prompt tokens a second is
kept; caches begin empty in it. Must never: hold more than two stretches. Read `queueing.py` next.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from trunkline.plan.calls import Call

MAX_CALLS = 20_000
MAX_USES = 4_000_000
"""Blocks of all calls of a stretch: 32 MB."""
MAX_ROUTED_USES = 1_500_000
"""Above this several blocks are taken together for routing."""
MIN_TICK_MS = 500.0
TICK_SHARE = 0.95
"""Of the steps between arrivals, those that are whole ticks. Some follow a clock that drifts."""
TICK_SLACK = 0.005
TICK_SEED = 7


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Calls as routing needs them; blocks are numbered from 0."""

    at_ms: list[float]
    tokens: list[int]
    outputs: list[int]
    blocks: list[list[int]]
    block_tokens: int
    names: int
    """How many different blocks there are."""
    tick_ms: float = 0.0
    """Arrivals were rounded to this, and have been spread; 0 where they were not."""

    @property
    def span_ms(self) -> float:
        return self.at_ms[-1] - self.at_ms[0] if self.at_ms else 0.0

    def __len__(self) -> int:
        return len(self.at_ms)


class BusiestWindow:
    """Takes in calls in order of time."""

    def __init__(self, *, max_calls: int = MAX_CALLS, max_uses: int = MAX_USES) -> None:
        self._max_calls = max_calls
        self._max_uses = max_uses
        self._now: list[Call] = []
        self._uses = 0
        self._best: list[Call] = []
        self._best_rate = -1.0
        self.stretches = 0

    def add(self, call: Call) -> None:
        self._now.append(call)
        self._uses += len(call.blocks)
        if len(self._now) >= self._max_calls or self._uses >= self._max_uses:
            self._end_stretch()

    def calls(self) -> list[Call]:
        """Those of the busiest stretch; of a short log all."""
        if not self._best:
            self._end_stretch()
        return self._best

    def _end_stretch(self) -> None:
        if not self._now:
            return
        self.stretches += 1
        span_ms = (self._now[-1].at_ms or 0.0) - (self._now[0].at_ms or 0.0)
        rate = sum(call.tokens for call in self._now) / max(span_ms, 1.0)
        if rate > self._best_rate:
            self._best, self._best_rate = self._now, rate
        self._now, self._uses = [], 0


def stretch_of(calls: list[Call], *, per_second: float, max_uses: int = MAX_ROUTED_USES) -> Stretch:
    """Calls made ready. `per_second` is the pace of a log without times."""
    is_timed = all(call.at_ms is not None for call in calls)
    if is_timed:
        times = [call.at_ms or 0.0 for call in calls]
    else:
        times = [index * 1e3 / per_second for index in range(len(calls))]
    tick_ms = _tick_ms(times) if is_timed else 0.0
    if tick_ms:
        draw = random.Random(TICK_SEED)
        times = [at_ms + draw.uniform(0.0, tick_ms) for at_ms in times]
    order = sorted(range(len(calls)), key=times.__getitem__)
    uses = sum(len(call.blocks) for call in calls)
    step = max(1, -(-uses // max_uses))
    numbers: dict[int, int] = {}
    start_ms = times[order[0]] if order else 0.0
    blocks = [
        [numbers.setdefault(name, len(numbers)) for name in calls[at].blocks[step - 1 :: step]]
        for at in order
    ]
    return Stretch(
        at_ms=[times[at] - start_ms for at in order],
        tokens=[calls[at].tokens for at in order],
        outputs=[calls[at].output_tokens for at in order],
        blocks=blocks,
        block_tokens=step * (calls[0].block_tokens if calls else 1),
        names=len(numbers),
        tick_ms=tick_ms,
    )


def _tick_ms(times: list[float]) -> float:
    """To what arrivals were rounded; 0 where they were not, or where it hides no queue."""
    distinct = sorted(set(times))
    if len(times) < 2 * len(distinct) or len(distinct) < 3:
        return 0.0
    steps = Counter(round(after - before) for before, after in pairwise(distinct))
    tick = steps.most_common(1)[0][0]
    if tick < MIN_TICK_MS:
        return 0.0
    slack = TICK_SLACK * tick
    whole = sum(
        count for step, count in steps.items() if abs(step - round(step / tick) * tick) <= slack
    )
    return float(tick) if whole >= TICK_SHARE * steps.total() else 0.0
