"""How much each tenant may ask for: requests a second, tokens a second, and its share in a line.

Requests are counted when they are admitted. A prompt's tokens are charged when they are known, and
may bring the tenant into debt; while it is in debt, nothing of it is admitted. So a tenant's rate
is true over time, and between any two moments it gets at most rate x time + one second's worth +
its largest prompt. Quotas are asked for each time: what a policy says counts from the next request
on. Must never: tell a tenant of anything but its own rates. Read `core/rates.py` for the buckets,
`fair_line.py` for whose turn it is.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Protocol

from trunkline.core.overload import Priority
from trunkline.core.rates import RateLimits, RateQuota, retry_after_s
from trunkline.errors import Busy
from trunkline.gateway.contracts import InferenceRequest
from trunkline.gateway.tenant_counts import TenantCounts
from trunkline.ports.clock import Clock

BURST_S = 1.0
"""How much of its rate a tenant may use at once: what it left unused for this long."""

MAX_QUOTAS = 1_024
"""Different pairs of rates that are kept; at the bound all are made anew."""


class Quota(Protocol):
    """What a tenant's policy says."""

    @property
    def requests_per_s(self) -> float | None: ...
    @property
    def tokens_per_s(self) -> float | None: ...
    @property
    def weight(self) -> float: ...
    @property
    def priority(self) -> Priority: ...


QuotaOf = Callable[[str], Quota]
"""Tenant -> its quota as of now. Does not raise, and knows a default for every tenant."""


class RateLimited(Busy):
    """The tenant is over its own rate, whatever the fleet has room for."""

    code = "rate_limit_exceeded"

    def __init__(self, text: str, wait_ms: float, headers: tuple[tuple[str, str], ...]) -> None:
        self.retry_after_s = retry_after_s(wait_ms)
        super().__init__(f"{text}; try again in {self.retry_after_s} s")
        self.headers = headers


class Allowance:
    """All tenants' rates. One a gateway; belongs to its event loop."""

    def __init__(
        self,
        quota_of: QuotaOf,
        clock: Clock,
        *,
        default_tokens_per_s: float | None = None,
        max_tenants: int = 10_000,
    ) -> None:
        """`default_tokens_per_s` is for tenants whose quota says nothing of tokens."""
        assert default_tokens_per_s is None or default_tokens_per_s > 0.0, default_tokens_per_s
        self._quota_of = quota_of
        self._clock = clock
        self._default_tokens_per_s = default_tokens_per_s
        self._limits = RateLimits(max_tenants=max_tenants)
        self._quotas: dict[tuple[float | None, float | None], RateQuota] = {}
        """One for each pair of rates that was asked for: making one costs more than finding it."""
        self.refused_requests = 0
        """Over the rate of requests; a plain counter since start."""
        self.refused_tokens = 0
        self.counts = TenantCounts()
        """By tenant: what is refused here, and what `Accounts` knows of the others."""

    def __len__(self) -> int:
        """Tenants whose buckets are not full."""
        return len(self._limits)

    def weight(self, tenant: str) -> float:
        """Its share where several wait."""
        return self._quota_of(tenant).weight

    def priority(self, tenant: str) -> Priority:
        """Whether it is refused before others or after them where not all can be served."""
        return self._quota_of(tenant).priority

    def admit(self, tenant: str) -> None:
        """Count one request. Raises RateLimited, and then counts nothing."""
        quota = self._rates(tenant)
        if quota is _UNLIMITED and not self._limits:
            return  # nobody has been limited lately: no buckets to drop either
        now = self._clock.now()
        wait_ms = self._limits.admit(tenant, 0.0, quota, now)
        if wait_ms > 0.0:
            raise self._refusal(tenant, quota, self._limits.levels(tenant, quota, now), wait_ms)

    def charge(self, tenant: str, request: InferenceRequest) -> None:
        """Charge the prompt of an admitted request, now that its tokens are known. Raises
        RateLimited where others brought the tenant into debt since it was admitted.
        """
        quota = self._rates(tenant)
        if quota is _UNLIMITED:
            return
        now = self._clock.now()
        requests, tokens = self._limits.levels(tenant, quota, now)
        if quota.tokens_per_s is not None:
            tokens = quota.tokens_burst if tokens is None else tokens
            if tokens < 0.0:
                wait_ms = -tokens / quota.tokens_per_s * 1_000.0
                raise self._refusal(tenant, quota, (requests, tokens), wait_ms)
            charged = _prompt_tokens(request)
            self._limits.charge(tenant, charged, quota, now)
            tokens -= charged
        request.limit_headers = _headers(quota, requests, tokens)

    def take_default(self, tokens_per_s: float | None) -> None:
        """Another one, for tenants whose quota says nothing of tokens."""
        self._default_tokens_per_s = tokens_per_s

    def _rates(self, tenant: str) -> RateQuota:
        quota = self._quota_of(tenant)
        requests_per_s, tokens_per_s = quota.requests_per_s, quota.tokens_per_s
        if tokens_per_s is None:
            tokens_per_s = self._default_tokens_per_s
        if requests_per_s is None and tokens_per_s is None:
            return _UNLIMITED
        rates = self._quotas.get((requests_per_s, tokens_per_s))
        if rates is None:
            rates = RateQuota(
                requests_per_s=requests_per_s,
                requests_burst=_burst(requests_per_s),
                tokens_per_s=tokens_per_s,
                tokens_burst=_burst(tokens_per_s),
            )
            if len(self._quotas) >= MAX_QUOTAS:
                self._quotas.clear()
            self._quotas[requests_per_s, tokens_per_s] = rates
        return rates

    def _refusal(
        self,
        tenant: str,
        quota: RateQuota,
        levels: tuple[float | None, float | None],
        wait_ms: float,
    ) -> RateLimited:
        self.counts.limited(tenant)
        tokens = levels[1]
        if tokens is not None and tokens < 0.0:
            self.refused_tokens += 1
            text = f"over the limit of {quota.tokens_per_s:g} tokens per second"
        else:
            self.refused_requests += 1
            text = f"over the limit of {quota.requests_per_s:g} requests per second"
        return RateLimited(text, wait_ms, _headers(quota, *levels))


def _headers(
    quota: RateQuota, requests: float | None, tokens: float | None
) -> tuple[tuple[str, str], ...]:
    """What clients of OpenAI's API read, for the rates that are limited."""
    return (
        *_told("requests", quota.requests_per_s, quota.requests_burst, requests),
        *_told("tokens", quota.tokens_per_s, quota.tokens_burst, tokens),
    )


_UNLIMITED = RateQuota()


def _burst(per_s: float | None) -> float:
    return 1.0 if per_s is None else max(per_s * BURST_S, 1.0)


def _prompt_tokens(request: InferenceRequest) -> int:
    """By the size of its body for one with media, nothing for what is proxied unread."""
    prompt = request.prompt
    if prompt is None:
        return request.further_tokens
    return len(prompt) + request.further_tokens if isinstance(prompt, array) else 0


def _told(
    what: str, per_s: float | None, burst: float, left: float | None
) -> tuple[tuple[str, str], ...]:
    if per_s is None:
        return ()
    left = burst if left is None else left
    return (
        (f"x-ratelimit-limit-{what}", str(int(burst))),
        (f"x-ratelimit-remaining-{what}", str(max(int(left), 0))),
        (f"x-ratelimit-reset-{what}", _duration((burst - left) / per_s)),
    )


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `250ms`, `2s`, `1m30s`. Rounded up."""
    ms = math.ceil(seconds * 1_000.0 - 1e-6)
    if ms < 1_000:
        return f"{max(ms, 0)}ms"
    whole_s = math.ceil(ms / 1_000)
    minutes, rest_s = divmod(whole_s, 60)
    return f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"
