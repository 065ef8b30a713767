"""Claims of a verified token: complete, for us, of now, and never more than the tenant's record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.claims import PinnedClaims, TenantPolicy, TokenClaims, granted, read_claims
from trunkline.core.credentials import Credential, CredentialProblem
from trunkline.core.identity import ScopeKind
from trunkline.core.principals import Principal, Role

PINNED = PinnedClaims(issuer="https://issuer.example", audience="trunkline")
NOW_S = 1_700_000_000
POLICY = TenantPolicy(
    org="0a" * 16,
    tenant="1b" * 16,
    roles=frozenset({Role.TENANT_USER, Role.TENANT_ADMIN}),
    models=frozenset({"small", "large"}),
    adapters=frozenset({"legal"}),
)


def claims(**changes: Any) -> dict[str, Any]:  # Any: decoded JSON
    """Good claims, with changes; None takes one away."""
    base = {
        "iss": PINNED.issuer,
        "aud": PINNED.audience,
        "sub": "ann",
        "jti": "t-1",
        "org_id": "acme",
        "tenant_id": "research",
        "iat": NOW_S,
        "exp": NOW_S + 600,
    }
    return {name: value for name, value in (base | changes).items() if value is not None}


def read(now_s: float = NOW_S, **changes: Any) -> TokenClaims | CredentialProblem:  # Any: JSON
    return read_claims(claims(**changes), PINNED, now_s * 1_000.0)


def principal(policy: TenantPolicy = POLICY, **changes: Any) -> Principal:  # Any: JSON
    found = read(**changes)
    assert isinstance(found, TokenClaims), found
    credential = granted(found, policy)
    assert isinstance(credential, Credential), credential
    return credential.principal


def test_good_claims_are_a_principal_of_the_tenants_record() -> None:
    found = principal()
    assert (found.org, found.tenant, found.user) == (POLICY.org, POLICY.tenant, "ann")
    assert (found.actor, found.auth_method) == ("ann", "jwt")
    assert found.roles == {Role.TENANT_USER}
    assert (found.models, found.adapters) == (POLICY.models, POLICY.adapters)
    assert found.key_class == ""
    assert found.default_scope is ScopeKind.TENANT


REFUSED: list[tuple[dict[str, Any], CredentialProblem]] = [  # Any: decoded JSON
    ({"iss": None}, CredentialProblem.ISSUER),
    ({"iss": "https://issuer.example/"}, CredentialProblem.ISSUER),
    ({"iss": [PINNED.issuer]}, CredentialProblem.ISSUER),
    ({"aud": None}, CredentialProblem.AUDIENCE),
    ({"aud": "another"}, CredentialProblem.AUDIENCE),
    ({"aud": "trunkline2"}, CredentialProblem.AUDIENCE),
    ({"aud": []}, CredentialProblem.AUDIENCE),
    ({"aud": [["trunkline"]]}, CredentialProblem.AUDIENCE),
    ({"aud": {"trunkline": 1}}, CredentialProblem.AUDIENCE),
    ({"tenant_id": None}, CredentialProblem.TENANT),
    ({"tenant_id": ""}, CredentialProblem.TENANT),
    ({"org_id": None}, CredentialProblem.TENANT),
    ({"tenant_id": ["research"]}, CredentialProblem.CLAIMS),
    ({"tenant_id": 7}, CredentialProblem.CLAIMS),
    ({"org_id": "a\nb"}, CredentialProblem.CLAIMS),
    ({"sub": None}, CredentialProblem.CLAIMS),
    ({"sub": ""}, CredentialProblem.CLAIMS),
    ({"sub": "\ud800"}, CredentialProblem.CLAIMS),
    ({"sub": "x" * 257}, CredentialProblem.CLAIMS),
    ({"sub": {"a": 1}}, CredentialProblem.CLAIMS),
    ({"jti": None}, CredentialProblem.CLAIMS),
    ({"jti": 5}, CredentialProblem.CLAIMS),
    ({"iat": None}, CredentialProblem.CLAIMS),
    ({"exp": None}, CredentialProblem.CLAIMS),
    ({"exp": True}, CredentialProblem.CLAIMS),
    ({"iat": 0, "exp": True}, CredentialProblem.CLAIMS),
    ({"nbf": True}, CredentialProblem.CLAIMS),
    ({"exp": str(NOW_S + 60)}, CredentialProblem.CLAIMS),
    ({"exp": float("inf")}, CredentialProblem.CLAIMS),
    ({"exp": float("nan")}, CredentialProblem.CLAIMS),
    ({"exp": 10**400}, CredentialProblem.CLAIMS),
    ({"iat": -5}, CredentialProblem.CLAIMS),
    ({"nbf": "soon"}, CredentialProblem.CLAIMS),
    ({"exp": NOW_S + 901}, CredentialProblem.CLAIMS),
    ({"exp": NOW_S}, CredentialProblem.CLAIMS),
    ({"exp": NOW_S - 60}, CredentialProblem.CLAIMS),
    ({"scope": ["tenant.user"]}, CredentialProblem.CLAIMS),
    ({"scope": "x" * 2_049}, CredentialProblem.CLAIMS),
    ({"scope": "cache:everything"}, CredentialProblem.CLAIMS),
    ({"scope": "cache:public"}, CredentialProblem.CLAIMS),
    ({"scope": "cache:"}, CredentialProblem.CLAIMS),
    ({"scope": "model:"}, CredentialProblem.CLAIMS),
    ({"key_epoch": "0"}, CredentialProblem.CLAIMS),
    ({"key_epoch": False}, CredentialProblem.CLAIMS),
    ({"key_epoch": -1}, CredentialProblem.CLAIMS),
    ({"key_epoch": 0.0}, CredentialProblem.CLAIMS),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED, ids=[str(c)[:40] for c, _ in REFUSED])
def test_claims_that_are_missing_foreign_or_out_of_shape_are_refused(
    changes: dict[str, Any],  # Any: decoded JSON
    problem: CredentialProblem,
) -> None:
    assert read(**changes) is problem


@pytest.mark.parametrize(
    ("now_s", "is_good"),
    [
        (NOW_S - 30.1, False),
        (NOW_S - 30, True),
        (NOW_S + 900 + 29.9, True),
        (NOW_S + 900 + 30, False),
    ],
)
def test_a_token_lives_for_a_quarter_of_an_hour_and_half_a_minute_around_it(
    now_s: float, is_good: bool
) -> None:
    assert isinstance(read(now_s, exp=NOW_S + 900), TokenClaims) is is_good


def test_a_token_is_not_good_before_its_nbf() -> None:
    assert read(nbf=NOW_S + 31) is CredentialProblem.EARLY
    assert isinstance(read(nbf=NOW_S + 30), TokenClaims)


def test_one_of_several_audiences_is_enough() -> None:
    assert isinstance(read(aud=["another", "trunkline"]), TokenClaims)


def test_a_tenant_that_is_not_there_is_refused_and_never_a_default_one() -> None:
    found = read()
    assert isinstance(found, TokenClaims)
    assert granted(found, None) is CredentialProblem.TENANT


@pytest.mark.parametrize(("claimed", "is_good"), [(None, False), (2, False), (3, True), (4, False)])
def test_only_tokens_of_the_records_key_epoch_are_good(claimed: int | None, is_good: bool) -> None:
    policy = TenantPolicy(org=POLICY.org, tenant=POLICY.tenant, key_epoch=3)
    found = read(key_epoch=claimed)
    assert isinstance(found, TokenClaims)
    outcome = granted(found, policy)
    assert isinstance(outcome, Credential) is is_good
    assert is_good or outcome is CredentialProblem.REVOKED


@pytest.mark.parametrize(
    ("scope", "roles"),
    [
        ("", {Role.TENANT_USER}),
        ("openid email", {Role.TENANT_USER}),
        ("tenant.admin", {Role.TENANT_ADMIN}),
        ("tenant.user tenant.admin", {Role.TENANT_USER, Role.TENANT_ADMIN}),
        ("security.officer", set[Role]()),
        ("tenant.user fleet.operator org.admin auditor", {Role.TENANT_USER}),
    ],
)
def test_roles_are_those_asked_for_that_the_record_allows(scope: str, roles: set[Role]) -> None:
    assert principal(scope=scope).roles == roles


def test_models_and_adapters_are_those_named_that_the_record_allows() -> None:
    assert principal(scope="model:small model:huge").models == {"small"}
    assert principal(scope="model:huge").models == frozenset()
    assert principal(scope="adapter:legal").adapters == {"legal"}
    free = TenantPolicy(org=POLICY.org, tenant=POLICY.tenant)
    assert principal(free, scope="model:huge").models == {"huge"}
    assert principal(free).models is None


WIDTH = [ScopeKind.ORG, ScopeKind.TENANT, ScopeKind.USER, ScopeKind.SESSION, ScopeKind.NONE]


@pytest.mark.parametrize("allowed", WIDTH)
@pytest.mark.parametrize("asked", WIDTH)
def test_the_scope_of_reuse_is_the_narrower_of_both(allowed: ScopeKind, asked: ScopeKind) -> None:
    policy = TenantPolicy(org=POLICY.org, tenant=POLICY.tenant, default_scope=allowed)
    found = principal(policy, scope=f"cache:{asked.value}")
    assert WIDTH.index(found.default_scope) == max(WIDTH.index(allowed), WIDTH.index(asked))
    both = principal(policy, scope=f"cache:{asked.value} cache:org")
    assert both.default_scope is found.default_scope


def test_no_tenant_is_public() -> None:
    with pytest.raises(ValueError, match="public"):
        TenantPolicy(org=POLICY.org, tenant=POLICY.tenant, default_scope=ScopeKind.PUBLIC)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("iss", "aud", "sub", "jti", "org_id", "tenant_id"),
                *("iat", "exp", "nbf", "scope", "key_epoch"),
            ]
        ),
        JSON,
    )
)
def test_whatever_the_claims_are_none_gets_more_than_the_record(changes: dict[str, Any]) -> None:
    found = read_claims(claims() | changes, PINNED, NOW_S * 1_000.0)
    if isinstance(found, CredentialProblem):
        return
    credential = granted(found, POLICY)
    if isinstance(credential, CredentialProblem):
        return
    got = credential.principal
    assert POLICY.models is not None
    assert POLICY.adapters is not None
    assert got.models is not None
    assert got.adapters is not None
    assert (got.org, got.tenant) == (POLICY.org, POLICY.tenant)
    assert got.roles <= POLICY.roles
    assert got.models <= POLICY.models
    assert got.adapters <= POLICY.adapters
    assert WIDTH.index(got.default_scope) >= WIDTH.index(POLICY.default_scope)
    assert credential.not_after_ms <= (NOW_S + 31 * 60) * 1_000.0
