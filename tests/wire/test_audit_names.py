"""Whom audit records are about: names for those who reach the fleet, and records by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tenant_port import TenantPort, serving_tenants

from trunkline import administration_audit


@pytest.fixture
def port(tmp_path: Path) -> Iterator[TenantPort]:
    with serving_tenants(tmp_path) as port:
        yield port


def shown(client: httpx.Client, **query: Any) -> list[tuple[str, str]]:
    answer = client.get("/audit", params={"wanted": "no", **query})
    assert answer.status_code == 200, answer.text
    return [(r["action"], r.get("subject", "-")) for r in answer.json()["records"]]


def busy(port: TenantPort) -> str:
    """Something of each kind has happened; the id of alice's key."""
    key = port.key("acme", user="alice", models=["m"])
    port.key("globex", "auditor")
    key_id = key.split("_")[1]
    for subject in ("user/acme/alice", "model/m", "adapter/unheard", "fleet"):
        body = {"subject": subject, "reason": "r"}
        assert port.operator.post("/invalidate", json=body).status_code == 200
    port.operator.delete(f"/keys/{key_id}")
    port.settled()
    return key_id


def test_records_name_what_they_are_about(port: TenantPort) -> None:
    key_id = busy(port)
    found = shown(port.operator)
    assert found[:3] == [
        ("registry.org-added", "org/acme"),
        ("registry.tenant-added", "tenant/acme"),
        ("registry.key-added", "tenant/acme"),
    ]
    raised = [subject for action, subject in found if action == "registry.epoch-raised"]
    assert raised == ["user/acme/alice", "model/m", "adapter/unheard", "fleet"]
    assert found[-1] == ("registry.key-revoked", f"key/{key_id}")


def test_an_auditor_is_told_names_and_a_tenant_only_what_is_its_own(port: TenantPort) -> None:
    busy(port)
    auditor = port.client(port.key("globex", "auditor"))
    assert ("registry.tenant-added", "tenant/acme") in shown(auditor)
    admin = port.client(port.key("acme", "tenant.admin"))
    assert {subject for _, subject in shown(admin)} == {"-"}
    foreign = admin.get("/audit", params={"subject": "tenant/globex"})
    absent = admin.get("/audit", params={"subject": "tenant/nobody"})
    assert (foreign.status_code, foreign.content) == (404, absent.content)
    assert len(shown(admin, subject="user/acme/alice")) >= 1


def test_records_are_found_by_subject(port: TenantPort) -> None:
    key_id = busy(port)
    of_acme = {subject for _, subject in shown(port.operator, subject="tenant/acme")}
    assert of_acme == {"tenant/acme", "user/acme/alice", f"key/{key_id}"}, "its keys and users too"
    only = shown(port.operator, subject=f"key/{key_id}")
    assert only == [("registry.key-revoked", f"key/{key_id}")]
    assert {subject for _, subject in shown(port.operator, subject="fleet")} == {"fleet"}
    unknown = port.operator.get("/audit", params={"subject": "tenant/acmee"})
    assert (unknown.status_code, "acmee" in unknown.text) == (404, True)


def test_what_was_only_wanted_is_left_out_where_that_is_asked_for(port: TenantPort) -> None:
    port.key("acme")
    every = [action for action, _ in shown(port.operator, wanted="yes")]
    assert "wanted.key-added" in every
    assert [a for a in every if not a.startswith("wanted.")] == [
        action for action, _ in shown(port.operator)
    ]
    port.operator.post("/invalidate", json={"subject": "fleet", "reason": "r"})
    assert ("registry.epoch-raised", "fleet") in shown(port.operator, kind="INTENT")
    assert port.operator.get("/audit", params={"wanted": "maybe"}).status_code == 400


def test_beyond_the_bound_subjects_are_shown_without_a_name(
    port: TenantPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(administration_audit, "MAX_NAMED", 2)
    port.key("acme")
    found = dict(shown(port.operator))
    assert found == {
        "registry.org-added": "org/acme",
        "registry.tenant-added": "",
        "registry.key-added": "",
    }
    desk = port.administration._desk
    assert len(desk._named) == len(desk._known) == 2
