"""How much each tenant may ask for per second: requests, and tokens.

`RateLimits` says how long to wait until a request is within its tenant's rates, for a 429 with
`Retry-After`. Time is an argument. Must never: know what a request is, or keep the buckets of a
tenant whose buckets are full. Read `fairness.py` for whose turn it is when all are within them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from trunkline.core.records import Instant

_ROUNDING_MS = 0.001
"""Who waited as long as was said is let in, whatever the last digits of a float say."""


class TokenBucket:
    """A rate with a burst. Full at first; may go into debt, which then has to be waited off.

    More than the burst at once is let through when the bucket is full, as it would never be
    otherwise; the debt keeps the rate true over time: between any two moments, what was let through
    is at most rate x time + the larger of the burst and the largest single amount.
    """

    __slots__ = ("_at", "_burst", "_level", "_per_ms")

    def __init__(self, per_s: float, burst: float, now: Instant) -> None:
        """Raises ValueError unless both are above 0 and finite."""
        if not (0.0 < per_s < math.inf and 0.0 < burst < math.inf):
            raise ValueError(f"a bucket of {per_s} per s with a burst of {burst}")
        self._per_ms = per_s / 1_000.0
        self._burst = burst
        self._level = burst
        self._at = now

    def wait_ms(self, amount: float, now: Instant) -> float:
        """How long until so much may be taken; 0 where it may be now. Takes nothing."""
        self._fill(now)
        wait_ms = (min(amount, self._burst) - self._level) / self._per_ms
        return wait_ms if wait_ms > _ROUNDING_MS else 0.0

    def charge(self, amount: float, now: Instant) -> None:
        """Take so much, into debt if need be."""
        assert amount >= 0.0, amount
        self._fill(now)
        self._level -= amount

    def level(self, now: Instant) -> float:
        """What is in it; below 0 while it is in debt."""
        self._fill(now)
        return self._level

    def is_full(self, now: Instant) -> bool:
        """Whether it is as a new one: forgetting it changes nothing."""
        self._fill(now)
        return self._level >= self._burst

    def _fill(self, now: Instant) -> None:
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._per_ms)
            self._at = now


@dataclass(frozen=True, slots=True, kw_only=True)
class RateQuota:
    """What one tenant may per second. None is no limit."""

    requests_per_s: float | None = None
    requests_burst: float = 1.0
    tokens_per_s: float | None = None
    """Uncached prompt tokens and those to be generated, as the caller counts them."""
    tokens_burst: float = 1.0


class RateLimits:
    """The buckets of all tenants. Bounded: at `max_tenants` the longest unused is forgotten.

    A forgotten tenant begins with full buckets, so `max_tenants` should not be less than the
    tenants there are; those whose buckets are full again cost nothing to forget, and go first.
    """

    def __init__(self, *, max_tenants: int = 10_000) -> None:
        assert max_tenants >= 1, max_tenants
        self._max_tenants = max_tenants
        self._tenants: OrderedDict[str, _Buckets] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def admit(self, tenant: str, tokens: float, quota: RateQuota, now: Instant) -> float:
        """0 where the request is within both rates, and then both are charged; else the
        milliseconds until it would be, and nothing is charged.
        """
        if quota.requests_per_s is None and quota.tokens_per_s is None:
            self._tenants.pop(tenant, None)
            return 0.0
        buckets = self._latest(tenant, quota, now)
        wait_ms = buckets.admit(tokens, now)
        self._forget(now)
        return wait_ms

    def charge(self, tenant: str, tokens: float, quota: RateQuota, now: Instant) -> None:
        """Tokens of an admitted request that were not known before, such as generated ones."""
        if quota.tokens_per_s is None:
            return
        buckets = self._latest(tenant, quota, now)
        assert buckets.tokens is not None, "a rate of tokens without a bucket"
        buckets.tokens.charge(tokens, now)
        self._forget(now)

    def levels(
        self, tenant: str, quota: RateQuota, now: Instant
    ) -> tuple[float | None, float | None]:
        """What is in its buckets of requests and of tokens; None for one that is full or has no
        limit.
        """
        buckets = self._tenants.get(tenant)
        if buckets is None or not buckets.is_for(quota):
            return None, None
        requests, tokens = buckets.requests, buckets.tokens
        return (
            None if requests is None else requests.level(now),
            None if tokens is None else tokens.level(now),
        )

    def _latest(self, tenant: str, quota: RateQuota, now: Instant) -> _Buckets:
        """Its buckets under this quota, as those used last; full ones where none are kept."""
        buckets = self._tenants.pop(tenant, None)
        if buckets is None or not buckets.is_for(quota):
            buckets = _Buckets(quota, now)
        self._tenants[tenant] = buckets
        return buckets

    def _forget(self, now: Instant) -> None:
        """At most two a call, so that none pays for all."""
        for _ in range(2):
            tenant, oldest = next(iter(self._tenants.items()))
            if len(self._tenants) <= self._max_tenants and not oldest.is_full(now):
                return
            del self._tenants[tenant]
            if not self._tenants:
                return


class _Buckets:
    """Both buckets of one tenant."""

    __slots__ = ("quota", "requests", "tokens")

    def __init__(self, quota: RateQuota, now: Instant) -> None:
        self.quota = quota
        self.requests = _bucket(quota.requests_per_s, quota.requests_burst, now)
        self.tokens = _bucket(quota.tokens_per_s, quota.tokens_burst, now)

    def admit(self, tokens: float, now: Instant) -> float:
        wanted = [(b, n) for b, n in ((self.requests, 1.0), (self.tokens, tokens)) if b is not None]
        wait_ms = max(bucket.wait_ms(amount, now) for bucket, amount in wanted)
        if wait_ms == 0.0:
            for bucket, amount in wanted:
                bucket.charge(amount, now)
        return wait_ms

    def is_for(self, quota: RateQuota) -> bool:
        return self.quota is quota or self.quota == quota

    def is_full(self, now: Instant) -> bool:
        return all(b is None or b.is_full(now) for b in (self.requests, self.tokens))


def retry_after_s(wait_ms: float) -> int:
    """What to say in `Retry-After`: whole seconds, at least one, at most an hour."""
    return min(max(math.ceil(wait_ms / 1_000.0), 1), 3_600)


def _bucket(per_s: float | None, burst: float, now: Instant) -> TokenBucket | None:
    return None if per_s is None else TokenBucket(per_s, burst, now)
