"""The admin port on real sockets: who comes in, what is shown, what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from trunkline.config import Config, ListenConfig
from trunkline.core.records import WorkerId
from trunkline.errors import Busy, ConfigError
from trunkline.gateway import listener
from trunkline.gateway.admin import admin_app
from trunkline.gateway.backend import (
    Heartbeat,
    Refused,
    WorkerJob,
    WorkerOrder,
    WorkerView,
)
from trunkline.gateway.listener import MAX_BODY_BYTES, bind_admin, serve_admin
from trunkline.gateway.metrics import Exposition, Sample, WorkerRow
from trunkline.settings import redacted

KEY = "marked-operator-key"
WORKER_KEY = "marked-worker-key"


class FakeBackend:
    """Workers in a dict, decisions in a list."""

    def __init__(self) -> None:
        self.orders: dict[str, WorkerOrder] = {}
        self.states: dict[str, str] = {}
        self.beats: list[Heartbeat] = []
        self.log = [
            {"request_id": f"r{i}", "worker": "w1" if i % 2 else "w2", "net_gain_ms": float("inf")}
            for i in range(200)
        ]

    def samples(self) -> Iterator[Sample]:
        for name in self.orders:
            yield from WorkerRow(worker=name, is_healthy=True).samples()

    def _view(self, name: str) -> WorkerView:
        order = self.orders[name]
        return WorkerView(
            worker=WorkerId(name),
            url=order.url,
            state="draining" if self.states[name] == "draining" else "ready",
            mode="digest",
            model_id=order.model_id,
            labels=order.labels,
        )

    async def workers(self) -> Sequence[WorkerView]:
        return [self._view(name) for name in self.orders]

    async def worker(self, worker: WorkerId) -> WorkerView | None:
        return self._view(worker) if worker in self.orders else None

    async def add_worker(self, order: WorkerOrder) -> WorkerJob | Refused:
        if order.url == "http://bug:1":
            raise AssertionError("marked insides")
        if order.url == "http://busy:1":
            raise Busy("too many workers join at once")
        name = order.url.removeprefix("http://")
        if name in self.orders:
            return Refused(status=409, code="worker_exists", message=f"{name} is here already")
        self.orders[name] = order
        self.states[name] = "joining"
        return WorkerJob(worker=WorkerId(name), state="joining")

    async def remove_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        name = worker.removeprefix("http://")
        if self.orders.pop(name, None) is None:
            return None
        return WorkerJob(worker=WorkerId(name), state="removed")

    async def drain_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        if worker not in self.orders:
            return None
        self.states[worker] = "draining"
        return WorkerJob(worker=worker, state="draining")

    async def decisions(
        self, *, limit: int, worker: WorkerId | None
    ) -> Sequence[Mapping[str, Any]]:
        rows = [row for row in reversed(self.log) if worker in (None, row["worker"])]
        return rows[:limit]

    async def decision(self, request_id: str) -> Mapping[str, Any] | None:
        return next((row for row in self.log if row["request_id"] == request_id), None)

    async def heartbeat_key(self, worker: WorkerId) -> str | None:
        order = self.orders.get(worker)
        return None if order is None else order.api_key

    async def heartbeat(self, beat: Heartbeat) -> str | None:
        last = self.beats[-1].counter if self.beats else -1
        if beat.counter <= last:
            return f"{beat.worker}: heartbeat {beat.counter} does not follow {last}"
        self.beats.append(beat)
        return None


class AdminPort:
    """An admin port in a thread with its own loop, as a client sees it."""

    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop

    def __init__(self, key: str = "") -> None:
        listen = ListenConfig(admin_port=0, admin_api_key=key, api_key="marked-client-key")
        self.backend = FakeBackend()
        self.listener = bind_admin(listen)
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = admin_app(
            self.backend,
            Exposition([self.backend], version="1", native="pure"),
            settings=redacted(Config(listen=listen)),
            key=key,
        )
        started = threading.Event()

        async def run() -> None:
            self.stop = asyncio.Event()
            self.loop = asyncio.get_running_loop()
            started.set()
            await serve_admin(app, self.listener, self.stop)

        self.thread = threading.Thread(target=asyncio.run, args=(run(),))
        self.thread.start()
        assert started.wait(5)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=10)

    def close(self) -> None:
        self.client.close()
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)
        assert not self.thread.is_alive()

    def say(self, request: bytes) -> bytes:
        """One request as raw bytes; the whole answer, to the end of the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(request)
            answer = b""
            while chunk := connection.recv(65_536):
                answer += chunk
        return answer


@pytest.fixture(scope="module")
def _ports() -> Iterator[dict[str, AdminPort]]:
    ports = {"": AdminPort(), KEY: AdminPort(KEY)}
    yield ports
    for port in ports.values():
        port.close()


@pytest.fixture
def open_port(_ports: dict[str, AdminPort]) -> Iterator[AdminPort]:
    """On loopback, without a key."""
    yield from fresh(_ports[""])


@pytest.fixture
def port(_ports: dict[str, AdminPort]) -> Iterator[AdminPort]:
    """With a key, and a client that has it."""
    yield from fresh(_ports[KEY])


def fresh(port: AdminPort) -> Iterator[AdminPort]:
    port.backend.__init__()
    yield port


def code_of(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["code"]


def order(**fields: Any) -> dict[str, Any]:
    return {"url": "http://10.0.0.1:8000", "api_key": WORKER_KEY, **fields}


def beat(**fields: Any) -> dict[str, Any]:
    return {
        "worker": "10.0.0.1:8000",
        "boot_nonce": "b1",
        "counter": 1,
        "checkpoints": [base64.b64encode(bytes(32)).decode()],
        "complete": True,
        "memory": 0.5,
        "load": 1.5,
        "block_size": 16,
    } | fields


# --- workers ----------------------------------------------------------------------------------


def test_a_worker_is_added_shown_drained_and_removed(port: AdminPort) -> None:
    client = port.client
    added = client.post("/workers", json=order(model_id="m", labels={"zone": "a"}))
    assert added.status_code == 202
    assert added.json() == {"worker": "10.0.0.1:8000", "state": "joining", "reason": ""}
    shown = client.get("/workers/10.0.0.1:8000").json()
    assert (shown["model_id"], shown["labels"], shown["mode"]) == ("m", {"zone": "a"}, "digest")
    assert client.get("/workers").json() == {"workers": [shown], "total": 1}
    assert client.post("/workers/10.0.0.1:8000/drain").status_code == 202
    assert client.get("/workers/10.0.0.1:8000").json()["state"] == "draining"
    assert client.delete("/workers/10.0.0.1:8000").json()["state"] == "removed"
    assert code_of(client.get("/workers/10.0.0.1:8000")) == (404, "not_found")


def test_the_older_paths_do_the_same(port: AdminPort) -> None:
    client = port.client
    url = "http://10.0.0.1:8000"
    assert client.post("/add_worker", params={"url": url}).status_code == 202
    assert client.get("/list_workers").json() == {"urls": [url]}
    assert client.post("/remove_worker", params={"url": url}).status_code == 202
    assert client.get("/list_workers").json() == {"urls": []}


def test_a_refusal_of_the_backend_keeps_its_status(port: AdminPort) -> None:
    port.client.post("/workers", json=order())
    assert code_of(port.client.post("/workers", json=order())) == (409, "worker_exists")
    busy = port.client.post("/workers", json=order(url="http://busy:1"))
    assert code_of(busy) == (429, "busy")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"url": 5}',
        b'{"url": "http://a:1"',
        b'{"url": "http://a:1"} x',
        b'{"url": "http://a:1", "cost": 3}',
        b'{"url": "http://a:1", "worker_type": "prefill"}',
        b'{"url": "http://a:1", "labels": {"a": 1}}',
        b'{"url": "http://a:1", "model_id": "' + b"m" * 300 + b'"}',
        b'{"url": "a:1"}',
        b'{"url": "http://user:pass@a:1"}',
        b'{"url": "file:///etc/passwd"}',
        b'{"url": "\xff"}',
        b'{"url": ' + b"[" * 100_000,
        b'{"zzz": ' + b"[" * 100_000,
    ],
    ids=lambda body: body[:40].decode("latin-1"),
)
def test_a_bad_order_is_400_and_changes_nothing(body: bytes, port: AdminPort) -> None:
    assert code_of(port.client.post("/workers", content=body)) == (400, "bad_request")
    assert port.backend.orders == {}


@pytest.mark.parametrize("query", ["", "?url=", "?url=a:1", "?url=http://a:1&url=http://b:1"])
def test_a_bad_address_in_the_query_is_400(query: str, port: AdminPort) -> None:
    assert code_of(port.client.post(f"/add_worker{query}")) == (400, "bad_request")


def test_too_many_labels_are_refused_at_the_bound(port: AdminPort) -> None:
    many = {f"k{i}": "v" for i in range(65)}
    assert code_of(port.client.post("/workers", json=order(labels=many)))[0] == 400
    many.popitem()
    assert port.client.post("/workers", json=order(labels=many)).status_code == 202


# --- bodies and paths -------------------------------------------------------------------------


def test_a_body_above_the_bound_is_413_whether_it_tells_its_length_or_not(port: AdminPort) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 65_536 + 1):
            yield b" " * 65_536

    for content in (b" " * (MAX_BODY_BYTES + 1), chunks()):
        refused = port.client.post("/workers", content=content)
        assert code_of(refused) == (413, "payload_too_large")


def test_a_body_at_the_bound_is_read(port: AdminPort) -> None:
    raw = json.dumps(order()).encode()
    body = raw + b" " * (MAX_BODY_BYTES - len(raw))
    assert port.client.post("/workers", content=body).status_code == 202


def test_a_body_that_does_not_come_is_408(port: AdminPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BODY_TIMEOUT_S", 0.05)
    answer = port.say(
        b"POST /workers HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n"
        b"authorization: Bearer " + KEY.encode() + b"\r\n\r\n{"
    )
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


def test_what_nobody_knows_is_one_shape(port: AdminPort) -> None:
    answers = [
        port.client.request(method, path)
        for method, path in (
            ("GET", "/nothing"),
            ("GET", "/workers/"),
            ("GET", "/workers/w9"),
            ("DELETE", "/workers/w9"),
            ("POST", "/workers/w9/drain"),
            ("POST", "/remove_worker?url=http://w9:1"),
            ("GET", "/decisions/r9999"),
            ("GET", "/health/"),
            ("POST", "/v1/chat/completions"),
        )
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.content for answer in answers}) == 1


def test_a_wrong_method_is_405_and_told_which_is_right(port: AdminPort) -> None:
    answer = port.client.put("/heartbeat")
    assert code_of(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


def test_a_bug_is_500_and_shows_nothing_of_our_insides(port: AdminPort) -> None:
    answer = port.client.post("/workers", json=order(url="http://bug:1"))
    assert code_of(answer) == (500, "internal_error")
    assert "marked" not in answer.text
    assert answer.headers["connection"] == "close", "the server closes it: nobody may reuse it"


# --- what is shown ----------------------------------------------------------------------------


def test_decisions_come_latest_first_bounded_and_by_worker(port: AdminPort) -> None:
    rows = port.client.get("/decisions").json()["decisions"]
    assert len(rows) == 100
    assert rows[0] == {"request_id": "r199", "worker": "w1", "net_gain_ms": None}
    rows = port.client.get("/decisions?limit=2&worker=w2").json()["decisions"]
    assert [row["request_id"] for row in rows] == ["r198", "r196"]
    assert port.client.get("/decisions/r7").json()["request_id"] == "r7"


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=-1", "limit=x", "limit=", "limit=10001", "limit=1e3", "limit=٣"),
        *("limit=" + "9" * 5_000, "limit=1&limit=2", "tenant=a"),
    ],
    ids=lambda query: query[:20],
)
def test_a_wrong_parameter_is_400(query: str, port: AdminPort) -> None:
    assert code_of(port.client.get(f"/decisions?{query}")) == (400, "bad_request")


def test_metrics_show_each_worker_until_it_is_removed(port: AdminPort) -> None:
    port.client.post("/workers", json=order())
    page = port.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'trunkline_worker_health{worker="10.0.0.1:8000"} 1.0' in page.text
    port.client.delete("/workers/10.0.0.1:8000")
    assert "10.0.0.1" not in port.client.get("/metrics").text


def test_no_page_shows_a_key(port: AdminPort) -> None:
    pages = [port.client.post("/workers", json=order()).text]
    for path in ("/config", "/workers", "/workers/10.0.0.1:8000", "/metrics", "/list_workers"):
        answer = port.client.get(path)
        assert answer.status_code == 200
        pages.append(answer.text)
    pages.append(port.client.post("/workers", json=order(api_key=5)).text)
    assert "marked" not in "".join(pages)
    assert port.client.get("/config").json()["listen"]["admin_api_key"] == "***"


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


# --- heartbeats -------------------------------------------------------------------------------


@pytest.fixture
def worker(port: AdminPort) -> Callable[..., httpx.Response]:
    """Sends heartbeats of a joined worker, with the worker's own key."""
    port.client.post("/workers", json=order())

    def send(content: bytes | None = None, key: str = WORKER_KEY, **fields: Any) -> httpx.Response:
        raw = json.dumps(beat(**fields)).encode() if content is None else content
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.post(f"{port.url}/heartbeat", content=raw, headers=headers)

    return send


def test_a_heartbeat_with_the_workers_key_is_taken(
    worker: Callable[..., httpx.Response], port: AdminPort
) -> None:
    answer = worker()
    assert answer.json() == {"worker": "10.0.0.1:8000", "counter": 1}
    (taken,) = port.backend.beats
    assert taken.checkpoints == (bytes(32),)
    assert (taken.memory, taken.load, taken.block_tokens, taken.is_complete) == (0.5, 1.5, 16, True)


def test_a_workers_key_opens_nothing_else(port: AdminPort) -> None:
    port.client.post("/workers", json=order())
    answer = httpx.get(f"{port.url}/workers", headers={"authorization": f"Bearer {WORKER_KEY}"})
    assert answer.status_code == 401


def test_a_workers_key_does_not_speak_for_another_worker(
    worker: Callable[..., httpx.Response], port: AdminPort
) -> None:
    port.client.post("/workers", json=order(url="http://10.0.0.2:8000", api_key="other-key"))
    assert worker(worker="10.0.0.2:8000").status_code == 401
    assert port.backend.beats == []


def test_strangers_cannot_tell_known_workers_from_unknown_ones_nor_good_beats_from_bad(
    worker: Callable[..., httpx.Response],
) -> None:
    answers = [
        worker(key="wrong"),
        worker(key=""),
        worker(key="wrong", worker="nobody"),
        worker(key="wrong", memory=-1),
        worker(key="wrong", content=b"{"),
    ]
    assert {(answer.status_code, answer.content) for answer in answers} == {
        (401, answers[0].content)
    }


def test_the_operators_key_may_send_any_heartbeat_and_learns_of_unknown_workers(
    worker: Callable[..., httpx.Response],
) -> None:
    assert worker(key=KEY).status_code == 200
    assert code_of(worker(key=KEY, worker="nobody")) == (404, "not_found")


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(beat(counter=2, memory=float("nan"))),
        json.dumps(beat(counter=2, load=float("inf"))),
        json.dumps(beat(counter=2, memory=-0.1)),
        json.dumps(beat(counter=2, memory=1e18)),
        json.dumps(beat(counter=2, load=1e18)),
        json.dumps(beat(counter=2, load=-1)),
        json.dumps(beat(counter=2, load="1")),
        json.dumps(beat(counter=-1)),
        json.dumps(beat(counter=2**53)),
        json.dumps(beat(counter=10**400)),
        json.dumps(beat(counter=2.5)),
        json.dumps(beat(counter=True)),
        json.dumps(beat(counter=2, boot_nonce="")),
        json.dumps(beat(counter=2, block_size=0)),
        json.dumps(beat(counter=2, complete=1)),
        json.dumps(beat(counter=2, checkpoints=["AA=="])),
        json.dumps(beat(counter=2, checkpoints=["!"])),
        json.dumps(beat(counter=2, checkpoints=[5])),
        json.dumps(beat(counter=2, checkpoints=None)),
        json.dumps(beat(counter=2, tenant="a")),
        *(
            json.dumps({name: value for name, value in beat(counter=2).items() if name != left})
            for left in beat()
            if left != "worker"
        ),
        "",
        "[]",
        "{",
    ],
)
def test_a_bad_heartbeat_is_400_and_the_last_good_one_is_kept(
    content: str, worker: Callable[..., httpx.Response], port: AdminPort
) -> None:
    assert worker().status_code == 200
    assert code_of(worker(key=KEY, content=content.encode())) == (400, "bad_request")
    assert [taken.counter for taken in port.backend.beats] == [1]


@pytest.mark.parametrize("counter", [5, 4, 0])
def test_a_replayed_or_late_heartbeat_is_400_and_the_last_good_one_is_kept(
    counter: int, worker: Callable[..., httpx.Response], port: AdminPort
) -> None:
    assert worker(counter=5).status_code == 200
    assert code_of(worker(counter=counter)) == (400, "heartbeat_refused")
    assert [taken.counter for taken in port.backend.beats] == [5]


def test_too_many_checkpoints_are_refused_at_the_bound(
    worker: Callable[..., httpx.Response],
) -> None:
    key = base64.b64encode(bytes(32)).decode()
    assert worker(checkpoints=[key] * 4_097).status_code == 401, "a bad beat proves nobody"
    assert code_of(worker(key=KEY, checkpoints=[key] * 4_097)) == (400, "bad_request")
    assert worker(checkpoints=[key] * 4_096).status_code == 200


def test_on_a_keyless_port_a_worker_with_a_key_must_still_use_it(open_port: AdminPort) -> None:
    open_port.client.post("/workers", json=order())
    assert open_port.client.post("/heartbeat", json=beat()).status_code == 401
    open_port.client.post("/workers", json=order(url="http://10.0.0.2:8000", api_key=""))
    answer = open_port.client.post("/heartbeat", json=beat(worker="10.0.0.2:8000"))
    assert answer.status_code == 200
    assert open_port.client.post("/heartbeat", json=beat(worker="w9")).status_code == 404


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
        async with asyncio.timeout(10), httpx.AsyncClient() as client:
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
        async with asyncio.timeout(10):
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
