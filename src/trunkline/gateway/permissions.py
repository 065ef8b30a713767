"""Who may do what at the admin port: one table of acts, roles and how far each role reaches.

Whatever is not in the table is denied. The operator (who has the admin key) may do all of it. How
far an act reaches is checked where the name in it is looked up: what lies outside looks as if it
did not exist. Must never: know a name, or be asked twice about one call. Read `admin.py` next.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum

from trunkline.core.principals import Role


class Act(Enum):
    """Everything that the admin port can be asked for, but its health and heartbeats."""

    DASHBOARD_READ = "dashboard.read"
    METRICS_READ = "metrics.read"
    CONFIG_READ = "config.read"
    CONFIG_RELOAD = "config.reload"
    WORKERS_READ = "workers.read"
    WORKERS_CHANGE = "workers.change"
    DECISIONS_READ = "decisions.read"
    ORGS_READ = "orgs.read"
    ORGS_ADD = "orgs.add"
    ORG_POLICY = "orgs.policy"
    TENANTS_READ = "tenants.read"
    TENANTS_ADD = "tenants.add"
    TENANT_POLICY = "tenants.policy"
    KEYS_READ = "keys.read"
    KEYS_CREATE = "keys.create"
    KEYS_REVOKE = "keys.revoke"
    REVOKE = "revoke"
    INVALIDATE = "invalidate"
    ENABLE = "enable"
    RECEIPTS_READ = "revocations.read"
    AUDIT_READ = "audit.read"
    AUDIT_VERIFY = "audit.verify"
    PUBLIC_READ = "public.read"
    PUBLIC_PROPOSE = "public.propose"
    PUBLIC_APPROVE = "public.approve"
    PUBLIC_WITHDRAW = "public.withdraw"


class Extent(IntEnum):
    """How far somebody's right reaches."""

    TENANT = 1
    """Their own tenant and its users."""
    ORG = 2
    """Their organisation and its tenants."""
    FLEET = 3


_TENANT_ADMIN = {Role.TENANT_ADMIN: Extent.TENANT}
_ORG_ADMIN = {Role.ORG_ADMIN: Extent.ORG}
_OPERATOR = {Role.FLEET_OPERATOR: Extent.FLEET}
_SCRAPER = {Role.FLEET_METRICS: Extent.FLEET}
_OFFICER = {Role.SECURITY_OFFICER: Extent.FLEET}
_AUDITOR = {Role.AUDITOR: Extent.FLEET}

PERMISSIONS: Mapping[Act, Mapping[Role, Extent]] = {
    # What of it they are shown, the other acts say.
    Act.DASHBOARD_READ: _TENANT_ADMIN | _ORG_ADMIN | _OPERATOR | _OFFICER | _AUDITOR,
    Act.METRICS_READ: _OPERATOR | _SCRAPER,
    Act.CONFIG_READ: _OPERATOR,
    Act.CONFIG_RELOAD: _OPERATOR,
    Act.WORKERS_READ: _OPERATOR,
    Act.WORKERS_CHANGE: _OPERATOR,
    Act.DECISIONS_READ: _OPERATOR,
    Act.ORGS_READ: _OFFICER,
    Act.TENANTS_READ: _TENANT_ADMIN | _ORG_ADMIN | _OFFICER,
    Act.KEYS_READ: _TENANT_ADMIN | _OFFICER,
    Act.KEYS_CREATE: _TENANT_ADMIN | _OFFICER,
    Act.KEYS_REVOKE: _TENANT_ADMIN | _OFFICER,
    Act.REVOKE: _ORG_ADMIN | _OFFICER,
    Act.INVALIDATE: _TENANT_ADMIN | _ORG_ADMIN | _OFFICER,
    # Not for whom an officer has shut out: who may revoke in an organisation may not undo it.
    Act.ENABLE: _OFFICER,
    Act.RECEIPTS_READ: _TENANT_ADMIN | _ORG_ADMIN | _OFFICER | _AUDITOR,
    Act.AUDIT_READ: _TENANT_ADMIN | _AUDITOR,
    Act.AUDIT_VERIFY: _AUDITOR,
    Act.PUBLIC_READ: _OFFICER,
    Act.PUBLIC_PROPOSE: _OFFICER,
    Act.PUBLIC_APPROVE: _OFFICER,
    Act.PUBLIC_WITHDRAW: _OFFICER,
}
"""What is missing (organisations, tenants, their policies) is for the operator alone."""

_GRANTABLE: Mapping[Role, frozenset[Role]] = {
    Role.TENANT_ADMIN: frozenset({Role.TENANT_USER, Role.TENANT_ADMIN}),
    # An officer who makes officers could approve a public prefix twice.
    Role.SECURITY_OFFICER: frozenset(Role) - {Role.SECURITY_OFFICER},
}


def extent_of(roles: frozenset[Role] | None, act: Act) -> Extent | None:
    """How far these roles reach in an act; None for not at all. `roles` None is the operator."""
    if roles is None:
        return Extent.FLEET
    allowed = PERMISSIONS.get(act, {})
    return max((allowed[role] for role in roles if role in allowed), default=None)


def grantable_roles(roles: frozenset[Role] | None) -> frozenset[Role]:
    """Which roles a key may have that somebody with these roles makes."""
    if roles is None:
        return frozenset(Role)
    return frozenset[Role]().union(*(_GRANTABLE.get(role, frozenset()) for role in roles))
