"""Whether another attempt may be made, and after which pause.

Owns the retry budget: further attempts are at most a share of the requests of the last ten seconds,
plus a floor, so that a fleet in trouble is not asked twice for everything. Pure: time is an
argument. Read `exchange.py` for what counts as retryable.
"""

from __future__ import annotations

import random
from collections import deque

from trunkline.config import RetryConfig

WINDOW_S = 10


class RetryBudget:
    """Requests and retries of a sliding window, in slots of one second."""

    def __init__(self, config: RetryConfig) -> None:
        self.take(config)
        self._slots: deque[list[int]] = deque()
        """[second, requests, retries], oldest first; at most WINDOW_S of them."""
        self._requests = 0
        self._retries = 0

    def take(self, config: RetryConfig) -> None:
        """Another budget from here on; what was spent counts."""
        self._ratio = config.retry_budget_ratio
        self._floor = config.retry_budget_floor_per_s * WINDOW_S

    def count_request(self, now_s: float) -> None:
        self._slot(now_s)[1] += 1
        self._requests += 1

    def try_spend(self, now_s: float) -> bool:
        """Take one retry out of the budget; False where it is used up."""
        slot = self._slot(now_s)
        if self._retries + 1 > self._ratio * self._requests + self._floor:
            return False
        slot[2] += 1
        self._retries += 1
        return True

    def _slot(self, now_s: float) -> list[int]:
        second = int(now_s)
        slots = self._slots
        if slots and slots[-1][0] >= second:  # a clock that steps back stays in the newest slot
            return slots[-1]
        while slots and slots[0][0] <= second - WINDOW_S:
            _, requests, retries = slots.popleft()
            self._requests -= requests
            self._retries -= retries
        slots.append([second, 0, 0])
        return slots[-1]


def backoff_ms(config: RetryConfig, retry_index: int, dice: random.Random) -> float:
    """Pause before retry 0, 1, ...: doubling, capped, jittered over its upper half."""
    ceiling_ms = min(
        config.retry_max_backoff_ms, config.retry_initial_backoff_ms * 2 ** min(retry_index, 16)
    )
    return ceiling_ms * dice.uniform(0.5, 1.0)
