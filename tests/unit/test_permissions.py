"""Who may do what at the admin port: every act with every role, and what a key may be given."""

from __future__ import annotations

import pytest

from trunkline.core.principals import Role
from trunkline.gateway.permissions import PERMISSIONS, Act, Extent, extent_of, grantable_roles

# Written out apart from the table, a column a role; "." is denied.
#                      user admin org  fleet officer auditor metrics
EXPECTED = """
dashboard.read         .    T     O    F     F       F       .
metrics.read           .    .     .    F     .       .       F
config.read            .    .     .    F     .       .       .
config.reload          .    .     .    F     .       .       .
workers.read           .    .     .    F     .       .       .
workers.change         .    .     .    F     .       .       .
decisions.read         .    .     .    F     .       .       .
orgs.read              .    .     .    .     F       .       .
orgs.add               .    .     .    .     .       .       .
orgs.policy            .    .     .    .     .       .       .
tenants.read           .    T     O    .     F       .       .
tenants.add            .    .     .    .     .       .       .
tenants.policy         .    .     .    .     .       .       .
keys.read              .    T     .    .     F       .       .
keys.create            .    T     .    .     F       .       .
keys.revoke            .    T     .    .     F       .       .
revoke                 .    .     O    .     F       .       .
invalidate             .    T     O    .     F       .       .
enable                 .    .     .    .     F       .       .
revocations.read       .    T     O    .     F       F       .
audit.read             .    T     .    .     .       F       .
audit.verify           .    .     .    .     .       F       .
public.read            .    .     .    .     F       .       .
public.propose         .    .     .    .     F       .       .
public.approve         .    .     .    .     F       .       .
public.withdraw        .    .     .    .     F       .       .
"""
ROLES = (
    Role.TENANT_USER,
    Role.TENANT_ADMIN,
    Role.ORG_ADMIN,
    Role.FLEET_OPERATOR,
    Role.SECURITY_OFFICER,
    Role.AUDITOR,
    Role.FLEET_METRICS,
)
LETTERS = {".": None, "T": Extent.TENANT, "O": Extent.ORG, "F": Extent.FLEET}
ROWS = {
    (Act(words[0]), role): LETTERS[letter]
    for words in (line.split() for line in EXPECTED.strip().splitlines())
    for role, letter in zip(ROLES, words[1:], strict=True)
}


def test_every_act_and_role_is_written_out_here() -> None:
    assert set(ROWS) == {(act, role) for act in Act for role in Role}


@pytest.mark.parametrize(("act", "role"), ROWS, ids=lambda part: part.value)
def test_a_role_reaches_as_far_as_it_should(act: Act, role: Role) -> None:
    assert extent_of(frozenset({role}), act) is ROWS[act, role]


@pytest.mark.parametrize("act", Act, ids=lambda act: act.value)
def test_the_operator_may_do_everything_and_nobody_without_a_role_anything(act: Act) -> None:
    assert extent_of(None, act) is Extent.FLEET
    assert extent_of(frozenset(), act) is None


def test_several_roles_reach_as_far_as_the_farthest() -> None:
    both = frozenset({Role.TENANT_ADMIN, Role.ORG_ADMIN})
    assert extent_of(both, Act.INVALIDATE) is Extent.ORG
    assert extent_of(both, Act.KEYS_READ) is Extent.TENANT


def test_an_act_that_nobody_was_given_is_the_operators_alone() -> None:
    assert Act.TENANTS_ADD not in PERMISSIONS
    assert extent_of(frozenset(Role), Act.TENANTS_ADD) is None


def test_nobody_but_the_operator_makes_officers() -> None:
    assert Role.SECURITY_OFFICER in grantable_roles(None)
    for role in Role:
        assert Role.SECURITY_OFFICER not in grantable_roles(frozenset({role}))


def test_a_tenants_admin_makes_keys_for_the_tenant_alone() -> None:
    given = grantable_roles(frozenset({Role.TENANT_ADMIN}))
    assert given == {Role.TENANT_USER, Role.TENANT_ADMIN}
    assert grantable_roles(frozenset({Role.TENANT_USER, Role.AUDITOR})) == frozenset()
