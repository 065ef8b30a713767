"""What each tenant asked for, and how much of it was reused: plain counters since start.

They are shown to those who may see the tenant, and are in no metric: more people read those. A
tenant is kept from its first request on; at the bound those that are new are counted together, as
others, so that nothing is lost. Must never: hold anything of a request but its size. Read
`accounts.py` and `allowance.py` for who counts, `administration.py` for who shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_COUNTED = 10_000
"""Tenants with counts of their own: 0.2 kB each."""


@dataclass(slots=True, kw_only=True)
class TenantCount:
    """That of one tenant, or of several together."""

    requests: int = 0
    """Those for which a worker was chosen, each once, however many attempts it takes."""
    limited: int = 0
    """Refused because the tenant was over its own rate."""
    prompt_tokens: int = 0
    """Of `requests`."""
    reported_tokens: int = 0
    """Prompt tokens of answers that told how much was reused."""
    hit_tokens: int = 0
    """Of these, reused."""


class TenantCounts:
    """Those of all tenants, by id. One for a process; belongs to its event loop."""

    def __init__(self) -> None:
        self._kept: dict[str, TenantCount] = {}
        self._others = TenantCount()
        self._has_overflowed = False

    def __len__(self) -> int:
        """Tenants with counts of their own."""
        return len(self._kept)

    def sent(self, tenant: str, prompt_tokens: int) -> None:
        """A worker was chosen for a request, for the first time."""
        count = self._kept.get(tenant) or self._new(tenant)
        count.requests += 1
        count.prompt_tokens += prompt_tokens

    def limited(self, tenant: str) -> None:
        """A request was refused: its tenant is over its rate."""
        count = self._kept.get(tenant) or self._new(tenant)
        count.limited += 1

    def reported(self, tenant: str, prompt_tokens: int, cached_tokens: int) -> None:
        """An answer told how much of its prompt was reused. It may come when its tenant is gone."""
        count = self._kept.get(tenant) or self._others
        count.reported_tokens += prompt_tokens
        count.hit_tokens += cached_tokens

    def forget(self, tenant: str) -> None:
        """It was removed."""
        self._kept.pop(tenant, None)

    # -- for who shows them ----------------------------------------------------------------------

    def of(self, tenant: str) -> TenantCount | None:
        """As it is now; None where it may be among the others."""
        count = self._kept.get(tenant)
        if count is None:
            return None if self._has_overflowed else TenantCount()
        return replace(count)

    def others(self) -> TenantCount:
        """Of all that have no count of their own."""
        return replace(self._others)

    def _new(self, tenant: str) -> TenantCount:
        if len(self._kept) >= MAX_COUNTED:
            self._has_overflowed = True
            return self._others
        count = self._kept[tenant] = TenantCount()
        return count
