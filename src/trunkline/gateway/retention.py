"""How long a client asks that its prompt's beginning be kept: `cache_control` with a `ttl`.

It is a hint, and holds where nothing else tells what a worker has: without cache events, what was
sent there counts as being there for so long. Where events tell, they do: no engine of today takes
orders about what to keep. Bounded for each tenant, beyond which the ordinary time holds. Must
never: keep anything from being evicted, or let one tenant's hints push out another's. Read
`picker.py` for who asks.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from trunkline.gateway.fields import bad_value
from trunkline.gateway.strict_json import is_list, is_object

TTLS_MS = {"5m": 300_000.0, "1h": 3_600_000.0}
DEFAULT_MS = TTLS_MS["5m"]
"""As Anthropic has it where no `ttl` is said."""
MAX_KEPT = 256
"""Most prompts of one tenant that count as kept at a time."""
MAX_TENANTS = 4_096
"""Beyond it, the tenant that asked longest ago begins anew."""


def asked_ms(fields: dict[str, Any]) -> float:
    """The longest time that any part of a body asks for; 0 where none does. Raises ClientError
    where a `ttl` is none that we know.
    """
    longest_ms = _ttl_ms(fields)
    for name in ("system", "tools", "messages", "input"):
        listed = fields.get(name)
        if not is_list(listed):
            continue
        for holder in listed:
            longest_ms = max(longest_ms, _ttl_ms(holder))
            content = holder.get("content") if is_object(holder) else None
            if is_list(content):
                longest_ms = max((longest_ms, *map(_ttl_ms, content)))
    return longest_ms


def _ttl_ms(holder: Any) -> float:  # any decoded JSON value
    """What this one object asks for."""
    control = holder.get("cache_control") if is_object(holder) else None
    if control is None or not is_object(control):
        return 0.0
    ttl = control.get("ttl")
    if ttl is None:
        return DEFAULT_MS
    if type(ttl) is not str or ttl not in TTLS_MS:
        raise bad_value("cache_control.ttl", f"must be one of {', '.join(TTLS_MS)}")
    return TTLS_MS[ttl]


class Retention:
    """Who asked for how much, by tenant."""

    def __init__(self) -> None:
        self._until: dict[str, list[float]] = {}
        """When each of a tenant's prompts counts as kept no more: a heap, as longer wishes may have
        come first.
        """

    def granted_ms(self, tenant: str, wished_ms: float, now_ms: float) -> float:
        """What of a wish is granted: all of it, or nothing."""
        if wished_ms <= 0:
            return 0.0
        until = self._until.pop(tenant, None) or []
        if len(self._until) >= MAX_TENANTS:
            del self._until[next(iter(self._until))]
        self._until[tenant] = until
        while until and until[0] <= now_ms:
            heappop(until)
        if len(until) >= MAX_KEPT:
            return 0.0
        heappush(until, now_ms + wished_ms)
        return wished_ms
