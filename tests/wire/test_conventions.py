"""What users of other gateways have in their scripts: errors by their codes, headers that count or
do not, and that nothing of a client grows what operators see.

The tables are those of the reference on conventions, a request for each row.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet import Gateway, Processes, processes
from fleet import until as until_true
from scripted import (
    CHAT,
    FixedPicker,
    Reply,
    Running,
    answering,
    get,
    json_answer,
    patient,
    post,
    running,
    staying,
    until,
    wire,
    worker,
)
from tenants import tenants

from trunkline.cli import build_parser
from trunkline.config import LimitsConfig, RetryConfig
from trunkline.core.records import WorkerId
from trunkline.gateway.authenticate import StaticKey
from trunkline.gateway.contracts import EVERYBODY, Endpoint, InferenceRequest, Pick
from trunkline.gateway.fair_line import LineFull
from trunkline.gateway.tenancy import Tenancy
from trunkline.leaf import leaves
from trunkline.settings import resolve, to_toml

QUICK = LimitsConfig(
    max_payload_size=2_048, max_headers=20, max_header_bytes=1_024, body_timeout_ms=100
)
MANY_HEADERS = "".join(f"x-h{number}: v\r\n" for number in range(20))


def keyed() -> Tenancy:
    return Tenancy(
        authenticate=StaticKey("sk-right", EVERYBODY).principal,
        has_lease=lambda: True,
        session_key=bytes(32),
        draw=bytes,
    )


class Full(FixedPicker):
    """A pool that lives, and in whose line there is no place."""

    def pick(self, request: InferenceRequest, tried: frozenset[Any]) -> Any:
        raise LineFull("no worker had room", 500.0)


Given = Callable[[], Any]


@asynccontextmanager
async def before(script: Any, picker: type[FixedPicker], **parts: Any) -> AsyncIterator[Running]:
    async with worker(script) as w, running(picker(w), **parts) as gateway:
        yield gateway


OK = answering(json_answer())


async def _cut(served: Any) -> None:
    await served.request()


ERRORS: list[tuple[int, str, bytes, Any, type[FixedPicker], dict[str, Any]]] = [
    (400, "invalid_json", post(b"{"), OK, FixedPicker, {}),
    (400, "invalid_value", post({**CHAT, "messages": 5}), OK, FixedPicker, {}),
    (401, "invalid_api_key", post(), OK, FixedPicker, {"tenancy": keyed}),
    (403, "scope_widening", post(extra="x-cache-scope: org\r\n"), OK, FixedPicker, {}),
    (404, "not_found", get("/metrics"), OK, FixedPicker, {}),
    (404, "not_found", get("/v2/anything"), OK, FixedPicker, {}),
    (
        *(404, "model_not_found", post(), OK, FixedPicker),
        {"knows_model": lambda: lambda _name: False},
    ),
    (405, "method_not_allowed", get("/v1/chat/completions"), OK, FixedPicker, {}),
    (408, "request_timeout", post()[:-3], OK, FixedPicker, {}),
    (413, "body_too_large", post(b" " * 4_000), OK, FixedPicker, {}),
    (415, "content_encoding", post(extra="content-encoding: gzip\r\n"), OK, FixedPicker, {}),
    (
        *(415, "content_type"),
        post().replace(b"application/json", b"text/plain"),
        *(OK, FixedPicker, {}),
    ),
    (431, "too_many_headers", post(extra=MANY_HEADERS), OK, FixedPicker, {}),
    (431, "header_too_large", post(extra=f"x-h: {'v' * 2_000}\r\n"), OK, FixedPicker, {}),
    (429, "busy", post(), OK, Full, {}),
    (502, "worker_lost", post(), _cut, FixedPicker, {}),
    (503, "no_worker", post(), OK, lambda _worker: FixedPicker(), {}),  # type: ignore[list-item]
    (504, "worker_timeout", post(), staying(), FixedPicker, {"upstream": lambda: SOON}),
]
SOON = patient(first_byte_timeout_ms=50)


@pytest.mark.parametrize(
    ("status", "code", "raw", "script", "picker", "parts"),
    ERRORS,
    ids=[f"{row[0]}-{row[1]}-{number}" for number, row in enumerate(ERRORS)],
)
def test_each_error_has_its_status_its_code_and_the_one_shape(
    status: int,
    code: str,
    raw: bytes,
    script: Any,
    picker: type[FixedPicker],
    parts: dict[str, Given],
) -> None:
    @wire
    async def scenario() -> None:
        given = {name: make() for name, make in parts.items()}
        retry = RetryConfig(disable_retries=True)
        async with before(script, picker, limits=QUICK, retry=retry, **given) as gateway:
            reply: Reply = await gateway.ask(raw)
        assert (reply.status, reply.error["code"]) == (status, code)
        assert set(reply.error) == {"message", "type", "param", "code", "request_id"}
        assert reply.headers["x-request-id"] == reply.error["request_id"]
        assert reply.headers["x-router-error-code"] == code
        assert ("retry-after" in reply.headers) is (status in (429, 503))
        if status == 504:
            assert reply.error["type"] == "timeout"

    scenario()


@wire
async def test_a_client_that_leaves_is_499_in_the_log_and_no_fault_of_the_worker() -> None:
    async with worker(staying()) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        await client.send(post())
        await gateway.picker.begun.wait()
        client.close()
        await gateway.settled()
        await until(lambda: bool(gateway.log))
        assert gateway.log[-1].status == 499
        assert gateway.front.counters.worker_failures == 0


@wire
async def test_an_admin_path_an_unknown_one_and_one_of_an_engine_are_one_shape() -> None:
    async with worker(OK) as w, running(FixedPicker(w)) as gateway:
        shapes = set[str]()
        for path in ("/metrics", "/workers", "/get_loads", "/flush_cache", "/nothing", "/sleep"):
            for method in ("GET", "POST"):
                extra = "content-length: 0\r\n" if method == "POST" else ""
                reply = await gateway.ask(get(path, extra, method=method))
                reply.error.pop("request_id")
                told = json.dumps([reply.status, {**reply.error, "request_id": ""}])
                shapes.add(told.replace(f"`{path}`", "the path"))
        assert len(shapes) == 1
        assert not w.seen


@wire
async def test_c110_the_session_a_client_names_is_the_one_the_policy_sees() -> None:
    ordered = [
        ("x-session-id", "first"),
        ("x-user-id", "second"),
        ("x-claude-code-session-id", "third"),
        ("session-id", "fourth"),
        ("x-dynamo-session-id", "fifth"),
        ("x-session-affinity", "sixth"),
    ]
    async with worker(OK) as w, running(FixedPicker(w)) as gateway:
        for start in range(len(ordered)):
            extra = "".join(f"{name}: {value}\r\n" for name, value in reversed(ordered[start:]))
            await gateway.ask(post(extra=f"x-request-id: r{start}\r\n{extra}"))
            assert gateway.picker.requests[-1].session == ordered[start][1]
        value = "a b;c=\t\"'%20/\\ü"
        extra = f"X-Session-ID:  {value} \r\nx-correlation-id: c\r\n"
        await gateway.ask(post({**CHAT, "user": "not this"}, extra=extra))
        assert gateway.picker.requests[-1].session == value
        assert w.seen[-1][1]["x-session-id"] == value, "and the engine sees the same"
        await gateway.ask(post(extra="session-id: s\r\nthread-id: t\r\n"))
        assert gateway.picker.requests[-1].session == "s/t"
        await gateway.ask(post(extra="x-request-id: per-request\r\n"))
        assert gateway.picker.requests[-1].session is None


OF_OPERATORS = {
    "x-tenant-id": "globex", "x-smg-routing-key": "k", "x-smg-target-worker": "0",
    "x-smg-priority": "high", "x-smg-tenant-id": "globex", "x-llm-d-slo-ttft-ms": "1",
    "x-llm-d-inference-fairness-id": "f", "x-llm-d-inference-objective": "o",
    "x-kv-cache-source-host-port": "10.0.0.9:1", "x-prefiller-host-port": "10.0.0.9:1",
    "x-data-parallel-rank": "3", "routing-strategy": "random", "external-filter": "a",
    "user": "globex", "x-label-selector": "a=b", "x-gateway-destination-endpoint": "10.0.0.9:1",
    "x-trunkline-tenant": "globex", "x-trunkline-salt": "s", "x-trunkline-parent": "token",
    "x-forwarded-for": "10.0.0.9",
}  # fmt: skip


@wire
async def test_c99_headers_of_identity_and_destination_reach_no_worker_and_choose_none() -> None:
    async with worker(OK, "w0") as first, worker(OK, "w1") as second:
        async with running(FixedPicker(first, second)) as gateway:
            aimed = {**OF_OPERATORS, "x-smg-target-worker": second.endpoint.host_header,
                     "x-gateway-destination-endpoint": second.endpoint.host_header}  # fmt: skip
            extra = "".join(f"{name}: {value}\r\n" for name, value in aimed.items())
            assert (await gateway.ask(post(extra=extra))).status == 200
            plain = await gateway.ask(post())
            assert plain.status == 200
        assert (len(first.seen), len(second.seen)) == (2, 0)
        with_them, without = (set(headers) for _, headers, _ in first.seen)
        assert with_them == without


@pytest.fixture
def started() -> Any:
    with processes() as made:
        yield made


def test_c99_who_calls_itself_another_tenant_finds_nothing_of_it(
    started: Processes, tmp_path: Path
) -> None:
    urls = [process.url for process in started.workers(1, "--profile", "tiny")]
    made = tenants(started, urls, tmp_path, "--profile", "tiny")
    prompt = "what only globex has asked for so far, at some length " * 8

    def play(attempt: int) -> tuple[int, int, int]:
        own = made.caller(f"globex-{attempt}")
        other = made.caller(f"acme-{attempt}")
        headers = OF_OPERATORS | {"x-tenant-id": f"globex-{attempt}", "user": f"globex-{attempt}"}
        own.answer(prompt)
        again = own.answer(prompt).cached
        answer = made.gateway.complete(prompt, {**headers, **other.headers()})
        return again, answer.cached, answer.status

    again, stolen, status = made.while_leased(play)
    assert (again > 0, stolen, status) == (True, 0, 200)


def test_asking_for_a_wider_scope_is_403_and_on_record_and_hides_no_other_refusal(
    started: Processes, tmp_path: Path
) -> None:
    urls = [process.url for process in started.workers(1, "--profile", "tiny")]
    made = tenants(started, urls, tmp_path, "--profile", "tiny")
    caller = made.caller("acme", scope="user", user="eve")
    for _ in range(60):
        answer = made.gateway.complete("hello", caller.headers("org"))
        assert (answer.status, answer.error["code"]) == (403, "scope_widening")
    # Somebody else, at the other port, is told no as well.
    refused = made.gateway.admin("/keys", headers=made.caller("globex").headers())
    assert refused.status_code == 403

    def actions() -> list[str]:
        page = made.gateway.admin("/audit?limit=1000&kind=REFUSED").json()
        return [record["action"] for record in page["records"]]

    until_true(lambda: "keys.read" in actions(), "the refusal is on record")
    found = actions()
    assert 1 <= found.count("scope.widen") < 60, "sampled"


class Telling(FixedPicker):
    """Says what it chose."""

    def picked(self, request: InferenceRequest, name: WorkerId, endpoint: Endpoint) -> Pick:
        return replace(super().picked(request, name, endpoint), decision_header=f"worker={name}")


@wire
async def test_an_explanation_says_how_many_attempts_it_took_and_what_the_gateway_took() -> None:
    async with (
        worker(_cut, "w0") as broken,
        worker(OK, "w1") as good,
        running(Telling(broken, good)) as gateway,
    ):
        told = (await gateway.ask(post())).headers["x-trunkline-decision"].split("; ")
    assert told[:2] == ["worker=w1", "attempts=2"]
    name, _, overhead_ms = told[2].partition("=")
    assert name == "overhead_ms"
    assert float(overhead_ms) >= 0.0


def test_an_ordinary_tenant_is_told_none_of_it(started: Processes, tmp_path: Path) -> None:
    urls = [process.url for process in started.workers(1, "--profile", "tiny")]
    made = tenants(started, urls, tmp_path, "--profile", "tiny")
    answer = made.caller("acme").answer("hello")
    told = answer.response.headers["x-trunkline-decision"]
    assert re.fullmatch(r"[0-9a-f]{24}", told), "a name that means something to operators alone"
    assert urls[0].removeprefix("http://") not in str(answer.response.headers)


CREDENTIAL_PATHS = [
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/completions", {"model": "m", "prompt": "hello"}),
    ("POST", "/v1/embeddings", {"model": "m", "input": "hello"}),
    ("POST", "/v1/anything/else", {"model": "m"}),
    ("GET", "/v1/anything/else", None),
]


@pytest.mark.parametrize("worker_key", ["", "the-workers-own"])
def test_c100_every_route_gives_the_worker_its_own_key_and_never_the_clients(
    worker_key: str,
) -> None:
    @wire
    async def scenario() -> None:
        async with worker(OK) as w:
            endpoint = replace(w.endpoint, api_key=worker_key)
            async with running(FixedPicker((w.name, endpoint))) as gateway:
                for method, path, body in CREDENTIAL_PATHS:
                    secret = "authorization: Bearer CLIENTS\r\nx-api-key: CLIENTS\r\n"
                    raw = (
                        get(path, secret, method=method)
                        if body is None
                        else post(body, path=path, extra=secret)
                    )
                    assert (await gateway.ask(raw)).status == 200
                    _, headers, _ = w.seen[-1]
                    wanted = f"Bearer {worker_key}" if worker_key else None
                    assert headers.get("authorization") == wanted
                    assert "CLIENTS" not in str(headers)
        assert len(w.seen) == len(CREDENTIAL_PATHS)

    scenario()


def series(gateway: Gateway) -> set[str]:
    page = gateway.admin("/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in page if not line.startswith("#")}


def test_c94_what_clients_make_up_grows_no_series(started: Processes) -> None:
    gateway = started.gateway([started.worker("--profile", "tiny").url], "--profile", "tiny")
    dice = random.Random(94)

    def ask() -> None:
        word = f"w{dice.getrandbits(64):x}"
        headers = {"x-tenant-id": word, "x-session-id": word, "user": word}
        gateway.complete("hello", headers, model=word)
        gateway.complete("hello", headers, **{word: 1, "user": word, "metadata": {"a": word}})
        gateway.client.get(f"/{word}")
        gateway.client.post(f"/v1/{word}", json={"model": word})
        gateway.client.request(f"X{dice.randrange(10)}", "/v1/models")

    for _ in range(10):
        ask()
    before = series(gateway)
    for _ in range(150):
        ask()
    assert series(gateway) == before
    assert gateway.metric("dropped_fields_total", field="unknown") == 160


def test_c108_what_the_printed_settings_say_is_taken_by_file_environment_and_flags(
    tmp_path: Path,
) -> None:
    """One parser for all: each spelling of each setting gives the same tree."""
    given = resolve({"config": None}, {})
    file = tmp_path / "trunkline.toml"
    file.write_text(to_toml(given), encoding="utf-8")
    by_file = resolve({"config": str(file)}, {}).config
    environ: dict[str, str] = {}
    words: list[str] = []
    for leaf in leaves():
        value = leaf.value_in(given.config)
        if leaf.kind is tuple:
            environ[leaf.variable] = ",".join(value)
            words += [leaf.flag, *value]
        elif leaf.kind is bool:
            environ[leaf.variable] = str(value).lower()
            words.append(leaf.flag if value else leaf.flag.replace("--", "--no-", 1))
        else:
            environ[leaf.variable] = str(value)
            words.append(f"{leaf.flag}={value}")
    by_environment = resolve({}, environ).config
    by_flags = resolve(vars(build_parser("serve").read(words)), {}).config
    assert by_file == by_environment == by_flags == given.config
