"""Workers that are added, drained and removed where tenants are: on record, or not at all."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_port import code_of, serving
from tenant_port import TenantPort, serving_tenants

from trunkline.core.audit import Kind

URL = "http://worker.example:8000"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[TenantPort]:
    with serving_tenants(tmp_path) as served:
        yield served


def of_workers(port: TenantPort) -> list[dict[str, Any]]:
    port.settled()
    return [record for record in port.records() if "workers." in record["action"]]


def test_who_adds_drains_and_removes_a_worker_is_on_record_before_and_after(
    port: TenantPort,
) -> None:
    text = port.key("acme", "fleet.operator")
    operator = port.client(text)
    name = URL.removeprefix("http://")
    assert operator.post("/workers", json={"url": URL}).status_code == 202
    assert operator.post(f"/workers/{name}/drain").status_code == 202
    assert operator.post("/workers", json={"url": URL}).status_code == 409
    assert operator.delete(f"/workers/{name}").status_code == 202
    assert operator.delete(f"/workers/{name}").status_code == 404
    found = of_workers(port)
    assert [(r["kind"], r["action"], r["result"], r["reason"]) for r in found] == [
        ("INTENT", "wanted.workers.add", "", ""),
        ("OUTCOME", "workers.add", "done", ""),
        ("INTENT", "wanted.workers.drain", "", ""),
        ("OUTCOME", "workers.drain", "done", ""),
        ("INTENT", "wanted.workers.add", "", ""),
        ("OUTCOME", "workers.add", "refused", "worker_exists"),
        ("INTENT", "wanted.workers.remove", "", ""),
        ("OUTCOME", "workers.remove", "done", ""),
        ("INTENT", "wanted.workers.remove", "", ""),
        ("OUTCOME", "workers.remove", "refused", "unknown"),
    ]
    assert {record["actor"] for record in found} == {text.split("_")[1]}
    assert len({record["scope_path_hmac"] for record in found}) == 2, "by its URL, by its name"
    assert "worker.example" not in json.dumps(found)


@pytest.mark.parametrize("path", ["/workers", "/add_worker"])
def test_without_a_sink_no_worker_comes_or_goes(path: str, port: TenantPort) -> None:
    how: dict[str, Any] = {"json": {"url": URL}} if path == "/workers" else {"params": {"url": URL}}
    assert port.operator.post("/workers", json={"url": "http://here:1"}).status_code == 202
    port.unplug()
    assert code_of(port.operator.post(path, **how)) == (503, "audit_down")
    for method, path_of in (
        ("POST", "/workers/here:1/drain"),
        ("DELETE", "/workers/here:1"),
        ("POST", "/remove_worker?url=http://here:1"),
    ):
        assert code_of(port.operator.request(method, path_of)) == (503, "audit_down")
    workers = port.operator.get("/workers").json()["workers"]
    assert [(row["worker"], row["state"]) for row in workers] == [("here:1", "ready")]


def test_an_operator_whose_key_ended_while_its_order_came_adds_no_worker(port: TenantPort) -> None:
    text = port.key("acme", "fleet.operator")
    host, _, number = port.url.removeprefix("http://").rpartition(":")
    body = json.dumps({"url": URL}).encode()
    head = (
        f"POST /workers HTTP/1.1\r\nhost: {host}:{number}\r\nauthorization: Bearer {text}\r\n"
        f"content-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
    )
    with contextlib.closing(socket.create_connection((host, int(number)), timeout=60)) as link:
        link.sendall(head.encode())
        assert b" 100 " in link.recv(65_536)
        assert port.operator.delete("/keys/" + text.split("_")[1]).status_code == 200
        link.sendall(body)
        assert b" 401 " in link.recv(65_536).partition(b"\r\n")[0]
    assert port.operator.get("/workers").json()["total"] == 0
    assert of_workers(port)[-1]["kind"] == Kind.OUTCOME.value
    assert of_workers(port)[-1]["reason"] == "unauthorized"


def test_a_gateway_of_one_tenant_adds_workers_as_ever() -> None:
    with serving("marked-key") as single:
        assert single.client.post("/workers", json={"url": URL}).status_code == 202
