"""Whether the fleet would carry the loss of one more worker, caches included.

A fleet that lives by its caches loses more than a worker's time with a worker: what it held is
computed anew by those that are left. With N workers and hit rate h their prefill grows by

    N / (N - 1) * (1 - h + h / N) / (1 - h)

and they carry that up to a utilisation of 1 over it. What is in use is the predicted prefill of
what was sent lately. Pure: time is an argument. Read `fleet.py` for who owns one.
"""

from __future__ import annotations

import math

from trunkline.core.records import Instant

HALF_LIFE_MS = 60_000.0
_HIT_MOST = 0.999
"""A hit rate of 1 has no miss share that could grow."""


def loss_factor(workers: int, hit_ratio: float) -> float:
    """How much more prefill each one left has after the loss of one; infinite for the only one."""
    if workers < 2:
        return math.inf
    hit = min(max(hit_ratio, 0.0), _HIT_MOST)
    return workers / (workers - 1) * (1 - hit + hit / workers) / (1 - hit)


class Headroom:
    """The recent load of one fleet, as sums that fade."""

    __slots__ = ("_at", "_hit_tokens", "_prefill_ms", "_seen_ms", "_tokens")

    def __init__(self, now: Instant) -> None:
        self._at = now
        self._prefill_ms = 0.0
        self._tokens = 0.0
        self._hit_tokens = 0.0
        self._seen_ms = 0.0
        """Time looked at, faded as the sums are."""

    def add(self, prefill_ms: float, tokens: int, hit_tokens: int, now: Instant) -> None:
        """A request was sent: its predicted prefill, its prompt, and what of it was held."""
        self._fade(now)
        self._prefill_ms += prefill_ms
        self._tokens += tokens
        self._hit_tokens += hit_tokens

    def left(self, workers: int, now: Instant) -> float | None:
        """The share of the workers' time that stays free when one of them goes; below 0 it is
        missing, and requests will be shed. None while nothing was seen.
        """
        self._fade(now)
        if workers < 1 or self._seen_ms <= 0.0:
            return None
        hit = self._hit_tokens / self._tokens if self._tokens else 0.0
        return 1.0 / loss_factor(workers, hit) - self._prefill_ms / self._seen_ms / workers

    def _fade(self, now: Instant) -> None:
        passed_ms = now - self._at
        if passed_ms <= 0.0:
            return
        self._at = now
        kept = 0.5 ** (passed_ms / HALF_LIFE_MS)
        self._prefill_ms *= kept
        self._tokens *= kept
        self._hit_tokens *= kept
        # A unit of time that went by u ago counts 0.5 ** (u / half-life).
        self._seen_ms = self._seen_ms * kept + (1.0 - kept) * HALF_LIFE_MS / math.log(2.0)
