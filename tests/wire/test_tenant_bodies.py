"""Bad input on the admin port's paths about tenants: each row is 400, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from admin_port import code_of
from tenant_port import TenantPort, serving_tenants

from trunkline.core.principals import Role

LONG = "n" * 65


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantPort]:
    with serving_tenants(tmp_path_factory.mktemp("bodies")) as served:
        served.operator.post("/tenants", json={"name": "acme"})
        yield served


NAMES = [None, 5, "", "A", "a b", "a/b", "../a", "a\n", "a\x00", "é", ".a", "-a", LONG, ["a"]]
ROWS: list[tuple[str, str, Any]] = [
    *(("POST", "/orgs", {"name": name}) for name in NAMES),
    *(("POST", "/tenants", {"name": name}) for name in NAMES),
    *(("POST", "/tenants", {"name": "t", "org": name}) for name in (5, "A", "a b", LONG)),
    ("POST", "/tenants", {"name": "t", "create_org": "yes"}),
    ("POST", "/tenants", {"name": "t", "reason": "r" * 501}),
    ("POST", "/tenants", {"name": "t", "reason": "two\nlines"}),
    ("POST", "/tenants", {"name": "t", "surplus": 1}),
    *(("PUT", "/orgs/acme/policy", body) for body in ({}, {"shared": 1}, {"shared": None})),
    *(("PUT", "/tenants/acme/policy", {"scope": s}) for s in ("public", "all", 1, None, "")),
    *(("PUT", "/tenants/acme/policy", {"weight": w}) for w in (0, -1, 1_001, "1", None)),
    *(("PUT", "/tenants/acme/policy", {"priority": p}) for p in ("", "urgent", 1, None)),
    *(("PUT", "/tenants/acme/policy", {"requests_per_s": r}) for r in (0, -1, 1e13, "5")),
    *(("PUT", "/tenants/acme/policy", {"tokens_per_s": r}) for r in (0, -0.1, True)),
    *(("PUT", "/tenants/acme/policy", {"cache_cap_bytes": b}) for b in (-1, 1.5, 2**54)),
    ("PUT", "/tenants/acme/policy", {"cache_floor_bytes": None}),
    ("PUT", "/tenants/acme/policy", {"quota": 1}),
    *(("POST", "/keys", {"tenant": name}) for name in NAMES),
    *(("POST", "/keys", {"tenant": "acme", "roles": r}) for r in ([], ["root"], "auditor", [5])),
    ("POST", "/keys", {"tenant": "acme", "roles": ["auditor"] * (len(Role) + 1)}),
    *(("POST", "/keys", {"tenant": "acme", "expires_in_s": s}) for s in (0, -1, 1.5, 2**60, "30d")),
    *(("POST", "/keys", {"tenant": "acme", "not_before_ms": s}) for s in (-1, 2**54, None)),
    *(("POST", "/keys", {"tenant": "acme", "scope": s}) for s in ("public", "org", "tenant", 1)),
    *(("POST", "/keys", {"tenant": "acme", "models": m}) for m in ("m", [""], [1], ["m"] * 257)),
    ("POST", "/keys", {"tenant": "acme", "user": "u" * 257}),
    ("POST", "/keys", {"tenant": "acme", "key_class": "c" * 257}),
    ("POST", "/keys", {"tenant": "acme", "create_tenant": 1}),
    ("POST", "/keys", {"tenant": "acme", "key_id": "0" * 16}),
    ("POST", "/keys", {"tenant": "acme", "secret_hash": "x"}),
    ("POST", "/keys", {"tenant": "acme", "org_id": "0" * 32}),
    *(("POST", "/revoke", {"subject": s, "reason": "r"}) for s in (None, 5, "", "s" * 601)),
    ("POST", "/revoke", {"subject": "tenant/acme"}),
    ("POST", "/revoke", {"subject": "tenant/acme", "reason": ""}),
    ("POST", "/revoke", {"subject": "tenant/acme", "reason": "\x1b[2J"}),
    ("POST", "/revoke", {"subject": "tenant/acme", "reason": "r", "epoch": 7}),
    ("POST", "/revoke", {"subject": "tenant/acme", "reason": "r", "rev": 7}),
    ("POST", "/invalidate", {"subject": ["tenant/acme"]}),
    ("POST", "/enable", {}),
    ("DELETE", "/keys/0123456789abcdef", {"why": "x"}),
    ("DELETE", "/keys/0123456789abcdef", []),
    *(("GET", f"/keys?{query}", None) for query in ("limit=0", "limit=1001", "limit=x", "user=a")),
    *(("GET", f"/tenants?{query}", None) for query in ("limit=-1", "limit=1&limit=2", "x=1")),
    *(("GET", f"/audit?{q}", None) for q in ("kind=NONE", "kind=key", "after=-1", "after=x")),
    *(
        ("GET", f"/audit?{q}", None)
        for q in ("limit=1001", "from_ms=1e3", "to_ms=99999999999999999")
    ),
    ("GET", "/revocations?limit=0", None),
    ("GET", "/audit/verify?from=1", None),
]
PUBLIC: dict[str, Any] = {
    "name": "p",
    "owner": "acme",
    "model": "m",
    "tokens": [1] * 16,
    "block_tokens": 16,
    "audience": "all",
    "expires_in_s": 60,
    "reason": "r",
}
PUBLIC_CHANGES: list[dict[str, Any]] = [
    {"tokens": []},
    {"tokens": [-1] * 16},
    {"tokens": [2**32] * 16},
    {"tokens": [1.5] * 16},
    {"tokens": ["1"] * 16},
    {"tokens": "AAAA"},
    {"text": "the prompt itself"},
    {"block_tokens": 0},
    {"block_tokens": 65_537},
    {"model": ""},
    {"audience": []},
    {"audience": None},
    {"audience": "acme"},
    {"audience": ["*"]},
    {"expires_in_s": 90 * 86_400 + 1},
    {"expires_in_s": 0},
    {"reason": ""},
    {"approvers": ["a", "b"]},
    {"public_id": "0" * 32},
]
ROWS += [("POST", "/public", PUBLIC | change) for change in PUBLIC_CHANGES]
ROWS += [("POST", "/public", {k: v for k, v in PUBLIC.items() if k != name}) for name in PUBLIC]


@pytest.mark.parametrize(("method", "path", "body"), ROWS, ids=lambda part: json.dumps(part)[:60])
def test_a_bad_row_is_400_and_changes_nothing(
    method: str, path: str, body: Any, port: TenantPort
) -> None:
    rev = port.registry.rev
    answer = port.operator.request(method, path, json=body if method != "GET" else None)
    assert code_of(answer) == (400, "bad_request")
    assert port.registry.rev == rev


RAW = [
    b"",
    b"[]",
    b"null",
    b"{",
    b'{"name": "x"} {}',
    b'{"name": "\xff"}',
    b"{" + b'"a":' * 5,
    b"[" * 100_000,
    b'{"zzz": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("raw", RAW, ids=lambda raw: raw[:20].decode("latin-1"))
@pytest.mark.parametrize(
    "path", ["/orgs", "/tenants", "/keys", "/revoke", "/invalidate", "/enable", "/public"]
)
def test_what_is_no_body_is_400(path: str, raw: bytes, port: TenantPort) -> None:
    assert code_of(port.operator.post(path, content=raw)) == (400, "bad_request")


def test_good_rows_beside_the_bad_ones_are_taken(port: TenantPort) -> None:
    """Else the rows above would prove nothing."""
    client = port.operator
    assert client.post("/orgs", json={"name": "a.b_c-9"}).status_code == 201
    assert client.post("/keys", json={"tenant": "acme", "roles": ["auditor"]}).status_code == 201
    assert client.post("/public", json=PUBLIC).status_code == 201
    assert client.put("/tenants/acme/policy", json={"scope": "user"}).status_code == 200


@pytest.mark.parametrize("key_id", ["x", "%2e%2e", "0" * 16, "'; drop table keys; --", "a" * 300])
def test_a_key_id_that_is_none_is_the_same_404(key_id: str, port: TenantPort) -> None:
    answer = port.operator.delete(f"/keys/{key_id}")
    assert code_of(answer) == (404, "not_found")
