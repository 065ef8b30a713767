"""Tenants, keys, revocations, audit and public prefixes on the admin port, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from admin_port import code_of, serving
from tenant_port import TenantPort, serving_tenants

from trunkline.control import changes
from trunkline.core.audit import read_record
from trunkline.gateway.admin_tenancy import _ROUTES, MAX_PUBLIC_TOKENS


@pytest.fixture
def port(tmp_path: Path) -> Iterator[TenantPort]:
    with serving_tenants(tmp_path) as served:
        yield served


def public(**fields: Any) -> dict[str, Any]:
    return {
        "name": "support",
        "owner": "acme",
        "model": "m",
        "tokens": list(range(32)),
        "block_tokens": 16,
        "audience": "all",
        "expires_in_s": 3_600,
        "reason": "the support prompt",
    } | fields


def officers(port: TenantPort, *users: str) -> list[httpx.Client]:
    return [port.client(port.key("sec", "security.officer", user=user)) for user in users]


# --- single tenant ------------------------------------------------------------------------------


def test_a_gateway_of_one_tenant_says_how_to_have_more() -> None:
    with serving("marked-key") as single:
        for method, path, _, _ in _ROUTES:
            answer = single.client.request(method, path.format(name="a", key_id="b", rev="1"))
            assert code_of(answer) == (409, "tenancy_off")
            assert "--auth keys" in answer.json()["error"]["message"]
        assert httpx.get(f"{single.url}/keys").status_code == 401


# --- organisations and tenants ------------------------------------------------------------------


def test_a_tenant_without_an_organisation_gets_one_of_its_own(port: TenantPort) -> None:
    done = port.operator.post("/tenants", json={"name": "acme"})
    assert done.status_code == 201
    assert (done.json()["what"], done.json()["audit"]) == ("tenant/acme", "recorded")
    assert [o["org"] for o in port.operator.get("/orgs").json()["orgs"]] == ["acme"]
    (tenant,) = port.operator.get("/tenants").json()["tenants"]
    assert (tenant["org"], tenant["state"], tenant["policy"]["scope"]) == (
        "acme",
        "active",
        "tenant",
    )


def test_a_named_organisation_must_exist_or_be_wanted(port: TenantPort) -> None:
    body = {"name": "acme", "org": "o1"}
    assert code_of(port.operator.post("/tenants", json=body)) == (404, "unknown_name")
    made = port.operator.post("/tenants", json={**body, "create_org": True})
    assert made.status_code == 201
    assert code_of(port.operator.post("/tenants", json=body)) == (409, "change_refused")


def test_sharing_in_an_organisation_needs_both_sides(port: TenantPort) -> None:
    port.operator.post("/tenants", json={"name": "acme"})
    policy = {"scope": "org", "shared": True}
    assert port.operator.put("/tenants/acme/policy", json=policy).status_code == 200
    assert port.operator.get("/tenants").json()["tenants"][0]["effective_scope"] == "tenant"
    assert port.operator.put("/orgs/acme/policy", json={"shared": True}).status_code == 200
    assert port.operator.get("/tenants").json()["tenants"][0]["effective_scope"] == "org"


def test_a_policy_is_set_as_a_whole(port: TenantPort) -> None:
    port.operator.post("/tenants", json={"name": "acme"})
    limits = {"requests_per_s": 5.0, "cache_floor_bytes": 10, "cache_cap_bytes": 20, "weight": 2.0}
    limits |= {"priority": "high"}
    port.operator.put("/tenants/acme/policy", json=limits)
    policy = port.operator.get("/tenants").json()["tenants"][0]["policy"]
    assert {name: policy[name] for name in limits} == limits
    port.operator.put("/tenants/acme/policy", json={})
    policy = port.operator.get("/tenants").json()["tenants"][0]["policy"]
    assert (policy["requests_per_s"], policy["cache_cap_bytes"]) == (None, None)
    assert policy["priority"] == "normal"
    wrong = port.operator.put(
        "/tenants/acme/policy", json={"cache_floor_bytes": 2, "cache_cap_bytes": 1}
    )
    assert code_of(wrong) == (409, "change_refused")
    assert port.operator.put("/tenants/nobody/policy", json={}).status_code == 404


def test_lists_come_in_pages_that_end(port: TenantPort) -> None:
    for number in range(5):
        port.operator.post("/tenants", json={"name": f"t{number}"})
    seen: list[str] = []
    after, pages = "", 0
    while after is not None:
        page = port.operator.get("/tenants", params={"limit": 2, "after": after}).json()
        seen += [row["tenant"] for row in page["tenants"]]
        after, pages = page["next"], pages + 1
    assert (seen, pages) == ([f"t{n}" for n in range(5)], 3)
    assert port.operator.get("/tenants", params={"after": "nobody"}).status_code == 404


# --- keys ---------------------------------------------------------------------------------------


def test_the_secret_is_in_the_answer_once_and_nowhere_else(port: TenantPort) -> None:
    port.operator.post("/tenants", json={"name": "acme"})
    made = port.operator.post("/keys", json={"tenant": "acme", "roles": ["auditor"]}).json()
    text = made["key"]
    secret = text.split("_", 2)[2]
    secret_hash = port.registry.book.key(made["view"]["key_id"]).secret_hash  # type: ignore[union-attr]
    pages = [port.operator.get(path).text for path in ("/keys", "/audit?limit=1000", "/tenants")]
    pages += [port.client(text).get("/audit").text, json.dumps(made["view"])]
    pages += [repr(port.store.records), *(f.read_text() for f in (port.folder / "audit").glob("*"))]
    assert secret not in "".join(pages)
    assert secret_hash.hex() not in "".join(pages[:5])
    assert port.client(text).get("/audit").status_code == 200


def test_a_key_shows_whose_it_is_what_it_may_and_how_it_stands(port: TenantPort) -> None:
    port.key(
        *("acme", "tenant.user", "tenant.admin"),
        user="alice",
        models=["m2", "m1"],
        expires_in_s=60,
        key_class="ci",
        scope="user",
    )
    (row,) = port.operator.get("/keys").json()["keys"]
    assert (row["tenant"], row["org"], row["user"]) == ("acme", "acme", "alice")
    assert (row["roles"], row["models"]) == (["tenant.admin", "tenant.user"], ["m1", "m2"])
    assert (row["key_class"], row["scope"], row["state"]) == ("ci", "user", "live")
    port.clock.ahead_s = 61.0
    assert port.operator.get("/keys").json()["keys"][0]["state"] == "expired"
    port.operator.delete(f"/keys/{row['key_id']}")
    assert port.operator.get("/keys").json()["keys"][0]["state"] == "revoked"


def test_a_tenant_is_made_with_its_key_only_when_that_is_said(port: TenantPort) -> None:
    refused = port.operator.post("/keys", json={"tenant": "acme"})
    assert code_of(refused) == (404, "unknown_name")
    assert "create_tenant" in refused.json()["error"]["message"]
    assert port.operator.get("/tenants").json()["tenants"] == []
    bad = {"tenant": "acme", "create_tenant": True, "scope": "user"}
    assert code_of(port.operator.post("/keys", json=bad)) == (409, "change_refused")
    assert port.operator.get("/tenants").json()["tenants"] == [], "and not for a wrong key"
    assert port.operator.post("/keys", json={"tenant": "acme", "create_tenant": True}).is_success
    elsewhere = port.operator.post("/keys", json={"tenant": "acme", "org": "other"})
    assert code_of(elsewhere) == (409, "change_refused")


# --- revocations --------------------------------------------------------------------------------


def test_a_revocation_answers_with_its_receipt(port: TenantPort) -> None:
    port.operator.post("/tenants", json={"name": "acme"})
    body = {"subject": "tenant/acme", "reason": "contract ended"}
    receipt = port.operator.post("/revoke", json=body).json()
    assert (receipt["subject"], receipt["verb"], receipt["epoch"]) == ("tenant/acme", "revoke", 1)
    assert (receipt["state"], receipt["audit"]) == ("effective", "recorded")
    assert (receipt["acked"], receipt["fenced"]) == (["gateway"], [])
    assert (receipt["fence"], receipt["erase"]) == ("gateway", "namespace")
    assert (receipt["condemned_blocks"], receipt["condemned_bytes"]) == (2, {"device": 64})
    assert [str(order.verb.value) for order in port.orders] == ["revoke"]
    assert port.operator.get(f"/revocations/{receipt['rev']}").json() == receipt
    assert port.operator.get("/revocations").json() == {"revocations": [receipt]}
    assert port.operator.get("/tenants").json()["tenants"][0]["state"] == "revoked"
    enabled = port.operator.post("/enable", json={"subject": "tenant/acme"}).json()
    assert (enabled["what"], enabled["rev"]) == ("tenant/acme", receipt["rev"] + 1)
    again = port.operator.post("/enable", json={"subject": "tenant/acme"}).json()
    assert again["rev"] is None
    assert port.operator.get("/tenants").json()["tenants"][0]["state"] == "active"


def test_who_revoked_and_why_is_in_the_registry_and_in_the_audit_log(port: TenantPort) -> None:
    (officer,) = officers(port, "bob")
    port.operator.post("/tenants", json={"name": "acme"})
    body = {"subject": "tenant/acme", "reason": "leak"}
    rev = officer.post("/revoke", json=body, headers={"x-request-id": "req-1"}).json()["rev"]
    port.settled()
    told = [r for r in port.records() if r["rev"] == rev]
    assert [r["kind"] for r in told] == ["INTENT", "OUTCOME"]
    actor = port.operator.get("/keys").json()["keys"][0]["key_id"]
    for record in told:
        assert (record["actor"], record["auth_method"]) == (actor, "key")
        assert (record["request_id"], record["source"]) == ("req-1", "127.0.0.1")
    assert told[0]["reason"] == "leak"
    assert {record["subject"] for record in told} == {"tenant/acme"}, "who sees the fleet is told"
    kept = b"".join(path.read_bytes() for path in (port.folder / "audit").glob("audit-*"))
    assert b"acme" not in kept, "ids stand under the audit key alone"


def test_a_revoked_fleet_lets_nobody_in_but_the_operator(port: TenantPort) -> None:
    auditor = port.client(port.key("acme", "auditor"))
    assert port.operator.post("/invalidate", json={"subject": "fleet"}).status_code == 200
    assert auditor.get("/audit").status_code == 200
    port.operator.post("/revoke", json={"subject": "fleet", "reason": "r"})
    assert auditor.get("/audit").status_code == 401
    assert port.operator.post("/enable", json={"subject": "fleet"}).status_code == 200
    assert auditor.get("/audit").status_code == 200


# --- audit --------------------------------------------------------------------------------------


def test_without_a_sink_what_grants_is_503_and_what_takes_away_goes_on(port: TenantPort) -> None:
    text = port.key("acme", "auditor")
    port.operator.post("/revoke", json={"subject": "tenant/acme", "reason": "r"})
    port.unplug()
    granting = (
        ("POST", "/orgs", {"name": "o"}),
        ("POST", "/tenants", {"name": "t"}),
        ("POST", "/keys", {"tenant": "acme"}),
        ("PUT", "/tenants/acme/policy", {}),
        ("PUT", "/orgs/acme/policy", {"shared": True}),
        ("POST", "/enable", {"subject": "tenant/acme"}),
        ("POST", "/public", public()),
    )
    rev = port.registry.rev
    for method, path, body in granting:
        answer = port.operator.request(method, path, json=body)
        assert code_of(answer) == (503, "audit_down"), path
    assert port.registry.rev == rev
    receipt = port.operator.post("/revoke", json={"subject": "model/m", "reason": "r"}).json()
    assert (receipt["state"], receipt["audit"]) == ("effective", "pending")
    key_id = text.split("_")[1]
    gone = port.operator.delete(f"/keys/{key_id}").json()
    assert (gone["rev"], gone["audit"]) == (rev + 2, "pending")
    assert port.client(text).get("/audit").status_code == 401


def test_what_was_revoked_without_a_sink_is_in_the_log_when_one_is_back(port: TenantPort) -> None:
    port.unplug()
    rev = port.operator.post("/revoke", json={"subject": "model/m", "reason": "r"}).json()["rev"]
    port.sink.is_broken = False
    port.settled()
    assert [r["kind"] for r in port.records() if r["rev"] == rev] == ["INTENT", "OUTCOME"]
    assert port.operator.get(f"/revocations/{rev}").json()["audit"] == "recorded"


def test_the_audit_log_is_shown_by_position_kind_and_time(port: TenantPort) -> None:
    for number in range(4):
        port.operator.post("/orgs", json={"name": f"o{number}"})
    whole = port.operator.get("/audit").json()
    seqs = [record["seq"] for record in whole["records"]]
    assert (seqs, whole["next_after"], whole["scanned_from"]) == (list(range(1, 9)), None, 1)
    newest = port.operator.get("/audit", params={"limit": 3}).json()["records"]
    assert [record["seq"] for record in newest] == [6, 7, 8]
    page = port.operator.get("/audit", params={"limit": 3, "after": 1}).json()
    assert ([r["seq"] for r in page["records"]], page["next_after"]) == ([2, 3, 4], 4)
    kinds = port.operator.get("/audit", params={"kind": "POLICY"}).json()["records"]
    assert [record["seq"] for record in kinds] == [2, 4, 6, 8]
    after_all = whole["records"][-1]["ts_wall"] + 1
    assert port.operator.get("/audit", params={"from_ms": after_all}).json()["records"] == []
    assert len(port.operator.get("/audit", params={"to_ms": after_all}).json()["records"]) == 8


def test_verification_finds_what_was_changed_and_where(port: TenantPort) -> None:
    for number in range(4):
        port.operator.post("/orgs", json={"name": f"o{number}"})
    good = port.operator.get("/audit/verify").json()
    assert (good["sound"], good["first_seq"], good["last_seq"]) == (True, 1, 8)
    (segment,) = (port.folder / "audit").glob("audit-*.jsonl")
    lines = segment.read_bytes().split(b"\n")[:-1]

    def found(changed: list[bytes]) -> tuple[bool, int]:
        segment.write_bytes(b"".join(line + b"\n" for line in changed))
        answer = port.operator.get("/audit/verify").json()
        return answer["sound"], answer["fault_seq"]

    flipped = lines[4].replace(b'"result":"', b'"result":"x', 1)
    assert flipped != lines[4]
    assert found([*lines[:4], flipped, *lines[5:]]) == (False, 5)
    assert found([*lines[:3], *lines[4:]]) == (False, 4)
    assert found([*lines[:2], lines[3], lines[2], *lines[4:]])[0] is False
    assert found(lines[:6]) == (False, 7), "cut off"
    assert found([*lines[:5], b"nonsense", *lines[6:]]) == (False, 6)
    assert found(lines) == (True, None)


def test_verification_is_held_against_a_given_checkpoint(port: TenantPort) -> None:
    port.operator.post("/orgs", json={"name": "o"})
    line = json.dumps(
        {"hash": "00" * 32, "key": "k", "rev": "0", "seq": "1", "signature": "", "wall_ms": "0"}
    )
    forged = port.operator.get("/audit/verify", params={"checkpoint": line}).json()
    assert (forged["sound"], forged["fault"]) == (False, "a kept checkpoint is forged")
    for wrong in ("{}", "[]", "x", '{"seq": 1}', line.replace('"seq": "1"', '"seq": "x"')):
        answer = port.operator.get("/audit/verify", params={"checkpoint": wrong})
        assert code_of(answer) == (400, "bad_request")


def test_a_checkpoint_of_this_log_is_met(tmp_path: Path) -> None:
    with serving_tenants(tmp_path) as port:
        port.operator.post("/orgs", json={"name": "o"})
    line = (tmp_path / "checkpoints.jsonl").read_text().splitlines()[-1]
    assert read_record(line.encode())["seq"] == "3"
    # The registry was in memory: the next life has a new one, and a log that it does not fit.
    with serving_tenants(tmp_path) as port:
        found = port.operator.get("/audit/verify", params={"checkpoint": line}).json()
    assert (found["sound"], found["last_seq"]) == (True, 3)
    assert found["checkpoints"] >= 2


# --- public prefixes ----------------------------------------------------------------------------


def test_a_prefix_is_shared_after_two_others_approved(port: TenantPort) -> None:
    port.operator.post("/orgs", json={"name": "acme"})
    proposer, second, third = officers(port, "ann", "bob", "cyd")
    proposed = proposer.post("/public", json=public())
    assert (proposed.status_code, proposed.json()["state"]) == (201, "proposed")
    assert "tokens" not in proposed.json()
    assert code_of(proposer.post("/public/support/approve")) == (409, "change_refused")
    assert second.post("/public/support/approve").json()["state"] == "proposed"
    assert code_of(second.post("/public/support/approve")) == (409, "change_refused")
    live = third.post(f"/public/{proposed.json()['public_id']}/approve").json()
    assert (live["state"], len(live["approvers"])) == ("live", 2)
    assert code_of(port.operator.post("/public/support/approve")) == (409, "change_refused")
    assert port.operator.get("/public").json()["public"] == [live]


def test_two_keys_of_one_user_are_one_approver(port: TenantPort) -> None:
    port.operator.post("/orgs", json={"name": "acme"})
    first, again, other = officers(port, "bob", "bob", "cyd")
    other.post("/public", json=public())
    assert first.post("/public/support/approve").status_code == 200
    assert code_of(again.post("/public/support/approve")) == (409, "change_refused")


def test_two_keys_of_one_user_that_approve_at_once_are_one_approver(port: TenantPort) -> None:
    port.operator.post("/orgs", json={"name": "acme"})
    first, again, other = officers(port, "ann", "ann", "bob")
    other.post("/public", json=public())

    async def both() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=port.url, timeout=60) as client:
            keys = [officer.headers["authorization"] for officer in (first, again)]
            calls = [
                client.post("/public/support/approve", headers={"authorization": key})
                for key in keys
            ]
            return await asyncio.gather(*calls)

    answers = asyncio.run(both())
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    assert port.operator.get("/public").json()["public"][0]["state"] == "proposed"


def test_a_second_key_of_the_proposer_does_not_approve(port: TenantPort) -> None:
    port.operator.post("/orgs", json={"name": "acme"})
    first, again = officers(port, "bob", "bob")
    first.post("/public", json=public())
    assert code_of(again.post("/public/support/approve")) == (409, "change_refused")


def test_a_withdrawn_prefix_is_made_unreachable(port: TenantPort) -> None:
    port.operator.post("/orgs", json={"name": "acme"})
    prefix = port.operator.post("/public", json=public(audience=["acme"])).json()
    assert prefix["audience"] == ["acme"]
    receipt = port.operator.request("DELETE", "/public/support", json={"reason": "old"}).json()
    assert (receipt["subject"], receipt["verb"]) == ("public/support", "invalidate")
    assert [order.subject.path for order in port.orders] == [prefix["public_id"]]
    assert port.operator.get("/public").json()["public"][0]["state"] == "withdrawn"
    late = port.operator.post(f"/public/{prefix['public_id']}/approve")
    assert code_of(late) == (409, "change_refused")
    assert port.operator.delete("/public/nobody").status_code == 404


def test_withdrawing_goes_on_without_a_sink(port: TenantPort) -> None:
    port.operator.post("/orgs", json={"name": "acme"})
    port.operator.post("/public", json=public())
    port.unplug()
    receipt = port.operator.delete("/public/support").json()
    assert (receipt["state"], receipt["audit"]) == ("effective", "pending")


def test_the_longest_prefix_fits_into_a_body_and_one_more_token_does_not(port: TenantPort) -> None:
    assert MAX_PUBLIC_TOKENS == changes.MAX_PUBLIC_TOKENS
    port.operator.post("/orgs", json={"name": "acme"})
    body = public(tokens=[128_255] * MAX_PUBLIC_TOKENS)

    def sent(tokens: list[int]) -> httpx.Response:
        raw = json.dumps({**body, "tokens": tokens}, separators=(",", ":"))
        return port.operator.post("/public", content=raw)

    assert code_of(sent([*body["tokens"], 1])) == (400, "bad_request")
    assert sent(body["tokens"]).json()["tokens_count"] == MAX_PUBLIC_TOKENS


def test_a_public_prefix_is_refused_where_it_does_not_fit(port: TenantPort) -> None:
    port.operator.post("/orgs", json={"name": "acme"})
    rows: list[dict[str, Any]] = [
        public(tokens=[1, 2, 3]),
        public(owner="nobody"),
        public(audience=["acme", "nobody"]),
    ]
    answers = [port.operator.post("/public", json=row).status_code for row in rows]
    assert answers == [409, 404, 404]
    assert port.operator.post("/public", json=public()).status_code == 201
    assert code_of(port.operator.post("/public", json=public())) == (409, "change_refused")
