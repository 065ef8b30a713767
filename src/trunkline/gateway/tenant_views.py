"""Organisations and tenants, as the admin port shows them.

Must never: hold anything of a key. Read `backend.py` for who asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trunkline.core.identity import ScopeKind
from trunkline.core.overload import Priority
from trunkline.gateway.tenant_counts import TenantCount


@dataclass(frozen=True, slots=True, kw_only=True)
class OrgView:
    """One organisation."""

    org: str
    id: str
    shared: bool
    state: Literal["active", "revoked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The whole policy of a tenant. None is no limit."""

    scope: ScopeKind = ScopeKind.TENANT
    shared: bool = False
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    cache_floor_bytes: int = 0
    cache_cap_bytes: int | None = None
    weight: float = 1.0
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantView:
    """One tenant. `effective_scope` is what its requests share by default, as both sides opted."""

    tenant: str
    id: str
    org: str
    state: Literal["active", "revoked"]
    effective_scope: ScopeKind
    policy: Policy
    usage: TenantCount | None
    """At this process since it started; None where it is counted among others."""
