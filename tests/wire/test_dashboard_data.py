"""What the dashboard is made of, over the wire: its page for everybody, its data for who may."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from admin_port import KEY, AdminPort, code_of, serving
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from tenant_port import serving_tenants

from trunkline.config import ListenConfig
from trunkline.gateway.lasting import lasting_of
from trunkline.gateway.listener import bind_admin, serve_admin
from trunkline.gateway.live import MAX_WATCHERS
from trunkline.gateway.overview import DecisionFilter
from trunkline.gateway.pages import Pages


@pytest.fixture(name="port", scope="module")
def a_port() -> Iterator[AdminPort]:
    with serving(KEY) as port:
        yield port


def looks(stream: httpx.Response, count: int) -> list[tuple[str, Any]]:
    """So many events of a stream."""
    seen: list[tuple[str, Any]] = []
    name = ""
    for line in stream.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            seen.append((name, json.loads(line[6:])))
            if len(seen) == count:
                break
    return seen


# --- the page ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", Pages(wants_key=True).paths())
def test_the_page_and_its_parts_are_open_and_kept_to_themselves(path: str, port: AdminPort) -> None:
    answer = httpx.get(port.url + path)
    assert answer.status_code == {"/": 307, "/dashboard/": 308}.get(path, 200)
    if path == "/dashboard/door":
        assert answer.json() == {"key": True}
        return
    policy = answer.headers["content-security-policy"]
    for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
        assert part in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "marked" not in answer.text


def test_the_page_has_no_script_or_style_inside_and_asks_nobody_else(port: AdminPort) -> None:
    page = httpx.get(f"{port.url}/dashboard").text
    assert "<style" not in page
    assert "style=" not in page
    assert page.count("<script") == page.count('<script type="module" src="dashboard/')
    parts = [httpx.get(port.url + path).text for path in Pages(wants_key=True).paths()]
    assert not [part for part in parts if "innerHTML" in part or "insertAdjacentHTML" in part]
    urls = [part.replace("http://www.w3.org/2000/svg", "") for part in parts]
    assert not [part for part in urls if "https://" in part]


def test_a_page_with_a_slash_behind_it_leads_to_the_page(port: AdminPort) -> None:
    answer = httpx.get(f"{port.url}/dashboard/", follow_redirects=True)
    assert str(answer.url) == f"{port.url}/dashboard"
    assert answer.status_code == 200


def test_the_bare_address_of_the_port_leads_to_the_page(port: AdminPort) -> None:
    """It is what people type; a key is asked for by the page."""
    answer = httpx.get(port.url, follow_redirects=True)
    assert str(answer.url) == f"{port.url}/dashboard"
    assert answer.status_code == 200
    assert httpx.post(port.url).status_code in (401, 405), "for those who look at it alone"


def test_other_paths_below_the_page_are_not_open(port: AdminPort) -> None:
    for path in (
        "/dashboard/index.html",
        "/dashboard/../config",
        "/dashboard/app.py",
        "/dashboards",
    ):
        assert httpx.get(port.url + path).status_code == 401


def test_a_keyless_port_shows_the_page_to_loopback_names_only() -> None:
    with serving() as open_port:
        assert httpx.get(f"{open_port.url}/dashboard/door").json() == {"key": False}
        answer = httpx.get(f"{open_port.url}/dashboard", headers={"host": "evil.example"})
        assert code_of(answer) == (403, "forbidden")


# --- the data ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["events", "snapshot", "decisions"])
def test_without_a_key_there_is_no_data(path: str, port: AdminPort) -> None:
    assert code_of(httpx.get(f"{port.url}/dashboard/{path}")) == (401, "unauthorized")
    assert httpx.get(f"{port.url}/dashboard/{path}?key={KEY}").status_code == 401


def test_an_operator_sees_the_fleet_each_second_and_it_is_made_once_for_all(
    port: AdminPort,
) -> None:
    with (
        port.client.stream("GET", "/dashboard/events") as one,
        port.client.stream("GET", "/dashboard/events") as other,
    ):
        assert one.headers["content-type"].startswith("text/event-stream")
        seen = looks(one, 3)
        looks(other, 3)
    assert [name for name, _ in seen] == ["look"] * 3
    told = seen[0][1]
    assert (told["actor"], told["has_tenants"]) == ("operator", False)
    assert told["may"] == ["workers.read", "decisions.read", "metrics.read"]
    assert [row["worker"] for row in told["look"]["workers"]] == ["w1", "w2"]
    assert len(port.overview.ticks) == len(set(port.overview.ticks))


def test_a_snapshot_is_what_the_stream_says(port: AdminPort) -> None:
    told = port.client.get("/dashboard/snapshot").json()
    assert told["look"]["traffic"]["hit_tokens"] == 190
    assert code_of(port.client.get("/dashboard/snapshot?x=1")) == (400, "bad_request")


def test_decisions_are_looked_for_by_what_is_asked(port: AdminPort) -> None:
    query = {"text": "w1", "reason": "cache-hit", "end": "complete", "limit": "7"}
    found = port.client.get("/dashboard/decisions", params=query).json()["decisions"]
    assert [row["request"] for row in found] == ["r1"]
    assert port.overview.wanted[-1] == DecisionFilter(
        text="w1", reason="cache-hit", end="complete", limit=7
    )
    for wrong in ({"limit": "201"}, {"text": "x" * 257}, {"worker": "w1"}):
        answer = port.client.get("/dashboard/decisions", params=wrong)
        assert code_of(answer) == (400, "bad_request")


def test_one_watcher_more_than_there_are_places_for_is_told_to_wait() -> None:
    with serving(KEY) as port, httpx.Client(timeout=60) as client:
        url, headers = f"{port.url}/dashboard/events", {"authorization": f"Bearer {KEY}"}
        opened = [
            client.send(client.build_request("GET", url, headers=headers), stream=True)
            for _ in range(MAX_WATCHERS)
        ]
        assert {answer.status_code for answer in opened} == {200}
        assert code_of(client.get(url, headers=headers)) == (503, "too_many_watchers")
        for answer in opened:
            answer.close()


def test_an_answer_that_is_cut_ends_its_connection_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        lasting_of(Request(scope)).cut()

    async def scenario() -> None:
        bound, stop = bind_admin(ListenConfig(admin_port=0)), asyncio.Event()
        port = bound.getsockname()[1]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(serve_admin(app, bound, stop))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            assert reader.at_eof() or reader.exception() is not None
            writer.close()
            stop.set()

    asyncio.run(scenario())


def test_a_port_closes_while_somebody_watches() -> None:
    with serving(KEY) as port, port.client.stream("GET", "/dashboard/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: look"
        port.loop.call_soon_threadsafe(port.stop.set)
        assert "event: over" not in list(lines), "it ends, in order, and whoever comes again may"


# --- roles ------------------------------------------------------------------------------------

TENANCY = ["tenants.read", "revocations.read", "audit.read"]
FLEET = ["workers.read", "decisions.read", "metrics.read"]


@pytest.mark.parametrize(
    ("role", "may", "sees_fleet"),
    [
        ("fleet.operator", FLEET, True),
        ("security.officer", TENANCY[:2], False),
        ("auditor", TENANCY[1:], False),
        ("tenant.admin", TENANCY, False),
        ("org.admin", TENANCY[:2], False),
    ],
)
def test_each_role_is_given_what_it_may_read(
    role: str, may: list[str], sees_fleet: bool, tmp_path: Path
) -> None:
    with serving_tenants(tmp_path) as port:
        key = port.key("acme", role)
        told = port.client(key).get("/dashboard/snapshot").json()
        assert (told["may"], told["look"] is not None) == (may, sees_fleet)
        assert told["actor"] == key.split("_")[1]
        whole = port.operator.get("/dashboard/snapshot").json()
        assert whole["may"] == [*FLEET, *TENANCY]


def test_a_key_that_is_revoked_sees_nothing_from_the_next_second_on(tmp_path: Path) -> None:
    with serving_tenants(tmp_path) as port:
        key = port.key("acme", "fleet.operator")
        with port.client(key).stream("GET", "/dashboard/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: look"
            port.operator.delete(f"/keys/{key.split('_')[1]}")
            assert "event: over" in list(lines), "and the stream ends"
