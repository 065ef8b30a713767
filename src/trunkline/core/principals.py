"""Who is asking: the authenticated principal, its roles, and the scopes it may narrow to.

A principal is made by an authenticator from a credential that it has checked, never from what a
client says of itself. Ids of organisations and tenants are random and never used again; a user's
name means something inside its tenant only. Must never: widen. Read `epochs.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from trunkline.core.identity import Scope, ScopeKind


class Role(Enum):
    """What a credential may do."""

    TENANT_USER = "tenant.user"
    """Asks for inference, and nothing else."""
    TENANT_ADMIN = "tenant.admin"
    """Invalidates and reads the audit of its own tenant."""
    ORG_ADMIN = "org.admin"
    """Revokes inside its organisation."""
    FLEET_OPERATOR = "fleet.operator"
    """Workers, drains, weights."""
    FLEET_METRICS = "fleet.metrics"
    """Reads metrics, and nothing else: for what scrapes them."""
    SECURITY_OFFICER = "security.officer"
    """Revokes anything, registers public prefixes, makes keys."""
    AUDITOR = "auditor"
    """Reads and verifies the audit log."""


INFERENCE_ROLES = frozenset(
    {Role.TENANT_USER, Role.TENANT_ADMIN, Role.ORG_ADMIN, Role.FLEET_OPERATOR}
)
"""Who may ask for inference: whoever runs a part of what is served. Officers, auditors and
scrapers watch over it; they use what they watch only with one of these roles beside their own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """One authenticated caller. Hashable: caches are keyed by it."""

    org: str
    """Id of the organisation, 32 hex digits."""
    tenant: str
    """Id of the tenant, 32 hex digits."""
    user: str = ""
    """Name of the user inside the tenant; empty where the credential is the tenant's own."""
    actor: str
    """Key id, or the `sub` of a token: what the audit log calls it. Never a secret."""
    auth_method: str
    """`key`, `jwt`, `operator` or `off`."""
    roles: frozenset[Role] = field(default=frozenset({Role.TENANT_USER}))
    models: frozenset[str] | None = None
    """Names of models it may use; None for all."""
    adapters: frozenset[str] | None = None
    key_class: str = ""
    """The class of its key, which can be invalidated as a whole."""
    default_scope: ScopeKind = ScopeKind.TENANT
    """By its tenant's policy; ORG only where both the tenant and its organisation opted in."""

    def __hash__(self) -> int:
        # Of two fields: callers are looked up for each request, and hashing all costs 2 us.
        return (self.tenant, self.actor).__hash__()

    def may_infer(self) -> bool:
        return not self.roles.isdisjoint(INFERENCE_ROLES)

    def may_use_model(self, name: str) -> bool:
        return self.models is None or name in self.models

    def may_use_adapter(self, name: str) -> bool:
        return not name or self.adapters is None or name in self.adapters


class ScopeTooWide(PermissionError):
    """A request may narrow the scope that its tenant's policy gives, and no more."""


WIDTHS = (ScopeKind.ORG, ScopeKind.TENANT, ScopeKind.USER, ScopeKind.SESSION, ScopeKind.NONE)
"""Scopes from wide to narrow: a request can only go to the right. `PUBLIC` is beside them."""


def narrowed(principal: Principal, wish: ScopeKind | None, session: str) -> Scope | None:
    """The scope of one request: the tenant's default, or the narrower one that was wished for.

    None is scope `none`: nothing may be reused and nothing kept. `session` is the id that the
    gateway gave the session. Raises ScopeTooWide for a wider scope than the default, ValueError
    for one that this principal has no part for (a user, a session).
    """
    kind = principal.default_scope if wish is None else wish
    if kind is ScopeKind.PUBLIC or WIDTHS.index(kind) < WIDTHS.index(principal.default_scope):
        raise ScopeTooWide(f"scope {kind.value} is wider than {principal.default_scope.value}")
    if kind is ScopeKind.NONE:
        return None
    if kind is ScopeKind.ORG:
        return Scope(kind=kind, org=principal.org)
    if kind is ScopeKind.TENANT:
        return Scope(kind=kind, org=principal.org, tenant=principal.tenant)
    if not principal.user:
        raise ValueError(f"scope {kind.value} needs a credential of a user")
    if kind is ScopeKind.USER:
        return Scope(kind=kind, org=principal.org, tenant=principal.tenant, user=principal.user)
    if not session:
        raise ValueError("scope session needs a session that the gateway began")
    return Scope(
        kind=kind, org=principal.org, tenant=principal.tenant, user=principal.user, session=session
    )
