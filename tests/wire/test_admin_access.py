"""Who may use the admin port, and the socket it listens on."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from admin_port import KEY, AdminPort, FakeBackend, code_of, order

from trunkline.config import ListenConfig
from trunkline.errors import ConfigError
from trunkline.gateway.admin import admin_app
from trunkline.gateway.backend import WorkerView
from trunkline.gateway.listener import bind_admin, serve_admin
from trunkline.gateway.metrics import Exposition

pytest_plugins = ["admin_fixtures"]


# --- who comes in -----------------------------------------------------------------------------

PATHS = ["/metrics", "/workers", "/workers/w1", "/config", "/decisions", "/nothing", "/heartbeat"]


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer wrong",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Basic {KEY}",
        KEY,
        "Bearer \xe9",
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_without_the_key_every_path_is_the_same_401(path: str, given: str, port: AdminPort) -> None:
    method = "POST" if path == "/heartbeat" else "GET"
    headers = [(b"authorization", given.encode("latin-1"))] if given else []
    with httpx.Client(base_url=port.url) as stranger:
        answer = stranger.request(method, path, headers=headers)
    assert code_of(answer) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_health_needs_no_key(port: AdminPort) -> None:
    assert httpx.get(f"{port.url}/health").json() == {"status": "ok"}


def test_the_scheme_may_be_written_in_any_case(port: AdminPort) -> None:
    answer = httpx.get(f"{port.url}/workers", headers={"authorization": f"bearer {KEY}"})
    assert answer.status_code == 200


def test_without_a_key_loopback_is_open(open_port: AdminPort) -> None:
    assert open_port.client.post("/workers", json=order()).status_code == 202


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_without_a_key_another_name_for_loopback_is_403(host: str, open_port: AdminPort) -> None:
    answer = open_port.client.get("/workers", headers={"host": host})
    assert code_of(answer) == (403, "forbidden")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "[::1]:80", "[::1]"])
def test_without_a_key_a_loopback_name_is_good(host: str, open_port: AdminPort) -> None:
    assert open_port.client.get("/workers", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://["]
)
def test_a_request_from_another_web_page_is_403(origin: str, open_port: AdminPort) -> None:
    answer = open_port.client.post(
        "/add_worker?url=http://a:1", headers={"origin": origin, "content-type": "text/plain"}
    )
    assert code_of(answer) == (403, "forbidden")
    assert open_port.backend.orders == {}


def test_a_request_from_our_own_page_is_good(open_port: AdminPort) -> None:
    answer = open_port.client.get("/workers", headers={"origin": open_port.url})
    assert answer.status_code == 200


# --- the socket -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_it_does_not_bind_without_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="admin-api-key"):
        bind_admin(ListenConfig(admin_host=host, admin_port=0))


def test_a_name_is_judged_by_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

    # The resolver is the machine's: standing in for it is the only way to have a lying hosts file.
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ConfigError, match="reachable from other machines"):
        bind_admin(ListenConfig(admin_host="localhost", admin_port=0))


def test_a_taken_port_and_an_unknown_name_are_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{number}: Address already in use"):
            bind_admin(ListenConfig(admin_port=number))
    with pytest.raises(ConfigError, match=r"admin listener nowhere\.invalid"):
        bind_admin(ListenConfig(admin_host="nowhere.invalid", admin_port=0))


def test_small_answers_do_not_wait_for_an_acknowledgement() -> None:
    with bind_admin(ListenConfig(admin_port=0)) as bound:
        assert bound.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY on such sockets only"


def test_it_steals_no_signals_and_lets_an_open_request_end_when_stopped() -> None:
    backend = FakeBackend()
    is_inside, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow_workers() -> Sequence[WorkerView]:
        is_inside.set()
        await may_go_on.wait()
        return []

    backend.workers = slow_workers

    async def scenario() -> int:
        bound = bind_admin(ListenConfig(admin_port=0))
        port = bound.getsockname()[1]
        exposition = Exposition([], version="1", native="pure")
        app = admin_app(backend, exposition, settings={}, key="")
        stop = asyncio.Event()
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            serving = asyncio.create_task(serve_admin(app, bound, stop))
            asking = asyncio.create_task(client.get(f"http://127.0.0.1:{port}/workers"))
            await is_inside.wait()
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
            stop.set()
            may_go_on.set()
            answer = await asking
            await serving
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{port}/health")
        return answer.status_code

    assert asyncio.run(scenario()) == 200


def test_cancelled_it_closes_its_socket_and_its_connections() -> None:
    async def scenario() -> None:
        bound = bind_admin(ListenConfig(admin_port=0))
        port = bound.getsockname()[1]
        app = admin_app(
            FakeBackend(), Exposition([], version="1", native="pure"), settings={}, key=""
        )
        async with asyncio.timeout(60):
            serving = asyncio.create_task(serve_admin(app, bound, asyncio.Event()))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            await reader.readuntil(b'"ok"}')
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
            assert await reader.read() == b""
            writer.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(scenario())
