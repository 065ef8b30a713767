"""How fast tenants may change things at the admin port: their changes cost everybody something.

Each invalidation is told to all workers, and each change is a durable write that others wait
behind. Who sees the whole fleet is never held off. Must never: count what came to nothing, which
would tell a foreign name from a made-up one. Read `administration.py` for who asks.
"""

from __future__ import annotations

from trunkline.core.rates import RateLimits, RateQuota, retry_after_s
from trunkline.errors import Busy
from trunkline.gateway.backend import Call
from trunkline.gateway.permissions import Extent
from trunkline.ports.clock import Clock

RAISES = RateQuota(requests_per_s=1.0, requests_burst=20.0)
"""Revocations and invalidations of one tenant's, or one organisation's, own administrators."""

KEY_CHANGES = RateQuota(requests_per_s=5.0, requests_burst=100.0)
"""Keys that they make and revoke."""

MAX_PACED = 4_096
"""Tenants and organisations whose pace is kept; at the bound the longest unused is forgotten."""


class TenantPace:
    """One kind of change. Belongs to the event loop."""

    def __init__(self, quota: RateQuota, clock: Clock) -> None:
        self._quota = quota
        self._clock = clock
        self._limits = RateLimits(max_tenants=MAX_PACED)

    def __len__(self) -> int:
        return len(self._limits)

    def charge(self, call: Call) -> None:
        """Count one change of this caller's tenant, whatever key it is made with. Raises Busy."""
        who = party_of(call)
        if not who:
            return
        wait_ms = self._limits.admit(who, 0.0, self._quota, self._clock.now())
        if wait_ms > 0.0:
            error = Busy(
                f"your administrators have made {self._quota.requests_burst:g} such changes at"
                f" once, {self._quota.requests_per_s:g} a second are taken"
            )
            error.retry_after_s = retry_after_s(wait_ms)
            raise error


def party_of(call: Call) -> str:
    """The tenant or organisation that a call is made for; empty for those who see the fleet."""
    caller = call.caller.principal
    if call.extent is Extent.FLEET or caller is None:
        return ""
    return caller.tenant if call.extent is Extent.TENANT else caller.org
