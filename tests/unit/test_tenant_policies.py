"""What a tenant's policy does to who asks: the narrower of the two holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trunkline.control.book import Book, Org, Quota, Tenant
from trunkline.core.claims import TokenClaims, granted
from trunkline.core.credentials import Credential
from trunkline.core.identity import ScopeKind
from trunkline.core.principals import Principal, Role
from trunkline.tenant_policies import Policies

ORG, TENANT = "0" * 31 + "1", "0" * 31 + "2"
ALICE = Principal(org=ORG, tenant=TENANT, user="alice", actor="k", auth_method="key")
SHARED = Org(org=ORG, name="acme", is_shared=True)
OPEN = Tenant(tenant=TENANT, org=ORG, name="shop", default_scope=ScopeKind.ORG, is_shared=True)


def book(org: Org = SHARED, tenant: Tenant = OPEN) -> Book:
    names = {"org/acme": ORG, "tenant/shop": TENANT}
    return Book(orgs={ORG: org}, tenants={TENANT: tenant}, names=names)


@pytest.mark.parametrize(
    ("own", "org", "tenant", "scope"),
    [
        (ScopeKind.TENANT, SHARED, OPEN, ScopeKind.ORG),
        (ScopeKind.TENANT, replace(SHARED, is_shared=False), OPEN, ScopeKind.TENANT),
        (ScopeKind.TENANT, SHARED, replace(OPEN, is_shared=False), ScopeKind.TENANT),
        (ScopeKind.USER, SHARED, OPEN, ScopeKind.USER),
        (ScopeKind.USER, SHARED, replace(OPEN, default_scope=ScopeKind.NONE), ScopeKind.NONE),
        (ScopeKind.NONE, SHARED, replace(OPEN, default_scope=ScopeKind.USER), ScopeKind.NONE),
        (ScopeKind.TENANT, SHARED, replace(OPEN, default_scope=ScopeKind.USER), ScopeKind.USER),
    ],
)
def test_the_narrower_of_credential_and_policy_is_the_default(
    own: ScopeKind, org: Org, tenant: Tenant, scope: ScopeKind
) -> None:
    policies = Policies(book(org, tenant))

    assert policies.applied(replace(ALICE, default_scope=own)).default_scope is scope


def bearer(policies: Policies, cache: ScopeKind | None) -> Principal:
    """Whoever has a token that asks for this scope of reuse, under the policies as they are."""
    claims = TokenClaims(
        subject="alice", org="acme", tenant="shop", roles=frozenset({Role.TENANT_USER}),
        models=None, adapters=None, cache=cache, key_epoch=0, not_before_ms=0.0, not_after_ms=1e18,
    )  # fmt: skip
    credential = granted(claims, policies.of_token(claims.org, claims.tenant))
    assert isinstance(credential, Credential)
    return policies.applied(credential.principal)


@pytest.mark.parametrize(
    ("asked", "scope"),
    [(None, ScopeKind.ORG), *((kind, kind) for kind in (
        ScopeKind.ORG, ScopeKind.TENANT, ScopeKind.USER, ScopeKind.SESSION, ScopeKind.NONE
    ))],
)  # fmt: skip
def test_a_token_that_asks_for_less_than_its_organisation_gets_less(
    asked: ScopeKind | None, scope: ScopeKind
) -> None:
    assert bearer(Policies(book()), asked).default_scope is scope


def test_a_token_that_was_measured_by_a_wider_policy_is_narrowed_with_the_policy() -> None:
    policies = Policies(book())
    before = bearer(policies, None)

    policies.swap(book(replace(SHARED, is_shared=False)))

    assert before.default_scope is ScopeKind.ORG
    assert policies.applied(before).default_scope is ScopeKind.TENANT


def test_a_caller_is_the_same_object_until_the_book_changes() -> None:
    policies = Policies(book())
    first = policies.applied(ALICE)

    assert policies.applied(replace(ALICE)) is first
    policies.swap(book(replace(SHARED, is_shared=False)))
    assert policies.applied(ALICE).default_scope is ScopeKind.TENANT


def test_a_token_names_a_tenant_of_its_own_organisation_or_nothing() -> None:
    policies = Policies(book())

    for org, tenant in [("acme", "shop"), (ORG, TENANT), ("acme", TENANT)]:
        found = policies.of_token(org, tenant)
        assert found is not None
        assert (found.org, found.tenant) == (ORG, TENANT)
        assert policies.of_token(org, tenant) is found
    for org, tenant in [("acme", "other"), ("other", "shop"), ("", ""), (TENANT, ORG)]:
        assert policies.of_token(org, tenant) is None


def test_quotas_are_those_of_the_book_and_nobody_unknown_is_limited() -> None:
    quota = Quota(requests_per_s=2.0)
    policies = Policies(book(tenant=replace(OPEN, quota=quota)))

    assert policies.quota_of(TENANT) is quota
    assert policies.allowance_of(TENANT) is quota
    assert policies.quota_of("nobody") is None
    assert policies.allowance_of("nobody").requests_per_s is None
