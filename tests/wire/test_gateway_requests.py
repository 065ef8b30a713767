"""What clients may send: the bad-input table over real sockets, limits, time-outs, odd habits."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import time

import pytest
from scripted import (
    CHAT,
    END,
    SSE_HEAD,
    FixedPicker,
    Served,
    answering,
    event,
    get,
    json_answer,
    post,
    running,
    wire,
    worker,
)

from trunkline.config import LimitsConfig
from trunkline.gateway.front import Readiness, api_key_check

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"
JSON = "content-type: application/json\r\n"


def chunked(body: bytes, extra: str = "") -> bytes:
    return f"{HEAD}{JSON}{extra}transfer-encoding: chunked\r\n\r\n".encode() + body


BODY = json.dumps(CHAT).encode()
WHOLE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)

# name, bytes, status, code, whether the connection must be closed
TABLE: list[tuple[str, bytes, int, str, bool]] = [
    ("empty body", post(b""), 400, "invalid_json", False),
    ("no body", f"{HEAD}{JSON}\r\n".encode(), 400, "invalid_json", False),
    ("malformed", post(b"{"), 400, "invalid_json", False),
    ("array body", post(b"[]"), 400, "invalid_json", False),
    ("null messages", post({"model": "m", "messages": None}), 400, "invalid_value", False),
    ("twins", post(b'{"model":"a","model":"b"}'), 400, "duplicate_key", False),
    ("deep", post(b"[" * 100_000), 400, "too_deep", False),
    ("surrogate", post(b'{"messages":"\\ud800"}'), 400, "invalid_utf8", False),
    ("forbidden nested", post({"messages": [{"role": "user", "content": "x", "cache_salt": 1}]}),
     400, "forbidden_field", False),
    ("template", post({**CHAT, "chat_template": "x"}), 400, "forbidden_field", False),
    ("too large by length", f"{HEAD}{JSON}content-length: 99999999\r\n\r\n".encode(), 413,
     "body_too_large", True),
    ("too large by chunks", chunked((b"10000\r\n" + b"x" * 65_536 + b"\r\n") * 20), 413,
     "body_too_large", True),
    ("text", f"{HEAD}content-type: text/plain\r\ncontent-length: 2\r\n\r\n{{}}".encode(), 415,
     "content_type", True),
    ("no type", f"{HEAD}content-length: 2\r\n\r\n{{}}".encode(), 415, "content_type", True),
    ("form", f"{HEAD}content-type: application/x-www-form-urlencoded\r\ncontent-length: 2\r\n\r\n"
     "{}".encode(), 415, "content_type", True),
    ("charset", f"{HEAD}content-type: application/json; charset=utf-16\r\ncontent-length: 2\r\n\r\n"
     "{}".encode(), 415, "content_type", True),
    ("gzip", post(b"x", extra="content-encoding: gzip\r\n"), 415, "content_encoding", True),
    ("two codings", post(b"x", extra="content-encoding: gzip, br\r\n"), 415, "content_encoding",
     True),
    ("length and chunks", chunked(WHOLE, "content-length: 5\r\n"), 400, "invalid_framing", True),
    ("two lengths", post(extra="content-length: 5\r\n"), 400, "duplicate_header", True),
    ("xchunked", post(extra="transfer-encoding: xchunked\r\n"), 400, "invalid_framing", True),
    ("folded", get("/health", "x-a: b\r\n c\r\n"), 400, "folded_header", True),
    ("bare LF", get("/health", "x-a: b\nx-b: c\r\n"), 400, "bare_cr_or_lf", True),
    ("only LFs", b"GET /health HTTP/1.1\nhost: h\n\n", 400, "bare_cr_or_lf", True),
    ("bare CR", get("/health", "x-a: b\rx\r\n"), 400, "bare_cr_or_lf", True),
    ("blank before colon", get("/health", "x-a : b\r\n"), 400, "invalid_header", True),
    ("NUL in header", get("/health", "x-a: \0\r\n"), 400, "invalid_header", True),
    ("long extension", chunked(b"5;" + b"x" * 300 + b"\r\nhello\r\n"), 400, "invalid_framing",
     True),
    ("bad chunk end", chunked(b"5\r\nhelloXX"), 400, "invalid_framing", True),
    ("trailers", chunked(WHOLE[:-2] + b"x-a: b\r\n\r\n"), 400, "invalid_framing", True),
    ("many headers", get("/health", "x-a: b\r\n" * 200), 431, "too_many_headers", True),
    ("long header", get("/health", f"x-a: {'b' * 9_000}\r\n"), 431, "header_too_large", True),
    ("long head", get("/health", f"x-a: {'b' * 40_000}\r\n"), 431, "head_too_large", True),
    ("endless head", b"GET /health HTTP/1.1\r\nx-a: " + b"b" * 100_000, 431, "head_too_large",
     True),
    ("host with path", b"GET /health HTTP/1.1\r\nhost: h/x\r\n\r\n", 400, "invalid_host", True),
    ("no host", b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_host", True),
    ("absolute target", get("http://h/health"), 400, "invalid_target", True),
    ("authority target", get("h:80", method="CONNECT"), 400, "invalid_target", True),
    ("star target", get("*", method="OPTIONS"), 400, "invalid_target", True),
    ("double slash", get("//health"), 400, "invalid_target", True),
    ("dots", get("/v1/%2e%2e/metrics"), 400, "invalid_target", True),
    ("NUL in path", get("/v1/x%00"), 400, "invalid_target", True),
    ("semicolon", get("/v1/x;y"), 400, "invalid_target", True),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version", True),
    ("websocket", get("/v1/realtime", "upgrade: websocket\r\n"), 400, "no_upgrade", True),
    ("expectation", post(extra="expect: a miracle\r\n"), 417, "unknown_expectation", True),
    ("unknown path", get("/nothing"), 404, "not_found", True),
    ("admin path", get("/metrics"), 404, "not_found", True),
    ("admin post", post(path="/workers"), 404, "not_found", True),
    ("engine admin", post(path="/v1/load_lora_adapter"), 404, "not_found", True),
    ("GET on chat", get("/v1/chat/completions"), 405, "method_not_allowed", True),
    ("DELETE", get("/v1/models", method="DELETE"), 405, "method_not_allowed", True),
    ("PUT on unread", get("/v1/files", method="PUT"), 405, "method_not_allowed", True),
    ("POST on health", post(path="/health"), 405, "method_not_allowed", True),
    ("part of a method", get("/v1/models", method="GE"), 405, "method_not_allowed", True),
    ("GET with a body", get("/health", "content-length: 2\r\n") + b"{}", 400, "unexpected_body",
     True),
    ("wider scope", post(extra="x-cache-scope: org\r\n"), 403, "scope_widening", False),
    ("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400,
     "invalid_request_line", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "status", "code", "must_close"), [c[1:] for c in TABLE], ids=[c[0] for c in TABLE]
)
def test_c78_a_bad_message_is_refused_in_our_one_shape(
    raw: bytes, status: int, code: str, must_close: bool
) -> None:
    """C78, reliability 7.1: refused, named, counted; the gateway goes on."""

    @wire
    async def scenario() -> None:
        limits = LimitsConfig(max_payload_size=1 << 20)
        async with (
            worker(answering(json_answer())) as w,
            running(FixedPicker(w), limits=limits) as gateway,
        ):
            client = await gateway.client()
            await client.send(raw)
            reply = await client.reply()
            assert (reply.status, reply.error["code"]) == (status, code)
            assert set(reply.error) == {"message", "type", "param", "code", "request_id"}
            assert reply.error["request_id"] == reply.headers["x-request-id"]
            assert len(reply.error["message"]) < 200
            assert gateway.front.counters.refusals == {code: 1}
            assert ("allow" in reply.headers) == (status == 405)
            if must_close:
                assert reply.headers["connection"] == "close"
                assert await client.is_closed()
            else:
                await client.send(post())
                assert (await client.reply()).status == 200
            assert gateway.picker.open_count == 0
            assert w.connection_count == (0 if must_close else 1)
            assert (await gateway.ask(get("/health"))).status == 200
            client.close()

    scenario()


GOOD: list[tuple[str, bytes]] = [
    ("plain", post()),
    ("chunked", chunked(WHOLE)),
    ("chunked with an extension", chunked(b"%x;a=b\r\n%b\r\n0;c\r\n\r\n" % (len(BODY), BODY))),
    ("chunked in single bytes", chunked(b"".join(b"1\r\n%c\r\n" % b for b in BODY) + b"0\r\n\r\n")),
    ("charset", post().replace(b"application/json", b'Application/JSON; Charset="UTF-8"')),
    ("identity", post(extra="content-encoding: identity\r\n")),
    ("h2c offered", post(extra="connection: upgrade, http2-settings\r\nupgrade: h2c\r\n")),
    ("odd authorization", post(extra="authorization: bearer\r\n")),
    ("latin-1 header", post(extra="x-name: \xe9\r\n")),
    ("HTTP/1.0", post(version="1.0")),
    ("query", post(path="/v1/chat/completions?api-version=1")),
    ("unicode", post({**CHAT, "user": "\U0001f468\u200d\U0001f469 e\u0301 \u4e2d"})),
]  # fmt: skip


@pytest.mark.parametrize("raw", [c[1] for c in GOOD], ids=[c[0] for c in GOOD])
@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_a_good_message_is_served_however_it_arrives(raw: bytes, size: int) -> None:
    @wire
    async def scenario() -> None:
        async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
            client = await gateway.client()
            for at in range(0, len(raw), size):
                await client.send(raw[at : at + size])
                if size < 100:
                    await asyncio.sleep(0)
            assert (await client.reply()).status == 200
            body = gateway.picker.requests[0].body
            assert json.loads(body)["messages"] == CHAT["messages"]
            client.close()

    scenario()


@wire
async def test_c74_bodies_of_every_size_get_the_same_answer() -> None:
    """C74."""
    seen: list[int] = []

    def note(first: str, headers: dict[str, str], body: bytes) -> bytes:
        seen.append(len(body))
        return json_answer()

    limits = LimitsConfig(max_payload_size=70 << 20)
    async with (
        worker(answering(note)) as w,
        running(FixedPicker(w), limits=limits, max_model_len=1 << 30) as gateway,
    ):
        for kib in (1, 30, 128, 129, 1_024, 10_240, 65_536):
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * (kib << 10)}]}
            reply = await gateway.ask(post(body))
            assert (reply.status, reply.body) == (200, b'{"ok":true}')
            assert seen[-1] == len(json.dumps(body))


@wire
async def test_c74_too_large_a_body_is_refused_before_it_is_read() -> None:
    """C74."""
    async with running(FixedPicker()) as gateway:
        client = await gateway.client()
        await client.send(f"{HEAD}{JSON}content-length: 8388609\r\n\r\n".encode())
        assert (await client.reply()).status == 413
        client.close()
        # The refusal arrives although the client keeps on sending.
        client = await gateway.client()
        await client.send(f"{HEAD}{JSON}content-length: 67108864\r\n\r\n".encode())
        sending = asyncio.create_task(client.send(b"x" * (16 << 20)))
        assert (await client.reply()).status == 413
        client.reset()
        await sending


@wire
async def test_a_client_that_asks_first_is_told_to_go_on_or_not_to() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        head, _, body = post(extra="expect: 100-Continue \r\n").partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert (await client.head())[0] == 100
        await client.send(body)
        assert (await client.reply()).status == 200
        await client.send(
            f"{HEAD}{JSON}expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n".encode()
        )
        assert (await client.head())[0] == 413
        client.close()


@wire
async def test_requests_sent_ahead_are_served_in_turn() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        last = get("/version") + post() + get("/nothing")
        await client.send(get("/health") * 200 + post() + last)
        statuses = [(await client.reply()).status for _ in range(204)]
        assert statuses == [200] * 203 + [404]
        assert await client.is_closed()
        client.close()


@wire
async def test_a_client_that_sends_too_far_ahead_is_answered_once_and_let_go() -> None:
    go_on = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await go_on.wait()
        await served.send(json_answer())

    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        await client.send(post())
        await gateway.picker.begun.wait()
        await client.send(post() * 2_000)
        go_on.set()
        assert (await client.reply()).status == 200
        assert await client.is_closed()
        client.close()


TIMES = LimitsConfig(header_timeout_ms=200, body_timeout_ms=250, idle_timeout_ms=300)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", None), (b"GET /hea", 408), (b"GET /health HTTP/1.1\r\nhost: h\r\n", 408),
        (f"{HEAD}{JSON}content-length: 10\r\n\r\n".encode(), 408), (chunked(b"5\r\nhel"), 408),
        (f"{HEAD}{JSON}content-length: 10\r\n\r\n123".encode(), 408),
    ],
)  # fmt: skip
def test_a_client_that_is_too_slow_is_let_go(raw: bytes, status: int | None) -> None:
    @wire
    async def scenario() -> None:
        async with running(FixedPicker(), limits=TIMES) as gateway:
            client = await gateway.client()
            await client.send(raw)
            if status is not None:
                assert (await client.reply()).status == status
            assert await asyncio.wait_for(client.is_closed(), 2)
            client.close()

    scenario()


@wire
async def test_a_head_that_drips_in_does_not_move_its_deadline() -> None:
    async with running(FixedPicker(), limits=TIMES) as gateway:
        client = await gateway.client()
        began_s = time.monotonic()
        reply = asyncio.create_task(client.reply())
        for byte in b"GET /health HTTP/1.1\r\nx-slow: " + b"y" * 100:
            await client.send(bytes([byte]))
            await asyncio.sleep(0.02)  # the drip
            if reply.done():
                break
        assert (await reply).status == 408
        assert time.monotonic() - began_s < 2
        client.close()


@wire
async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with running(FixedPicker(), limits=TIMES) as gateway:
        client = await gateway.client()
        await client.send(get("/health"))
        await client.reply()
        assert await asyncio.wait_for(client.is_closed(), 2)
        client.close()


@wire
async def test_keys_are_asked_for_on_the_api_and_nowhere_else() -> None:
    check = api_key_check("sk-right")
    wrong = ["", "Bearer", "bearer", "Bearer ", "Bearer sk-wrong", "Basic sk-right", "sk-right",
             "Bearer sk-right ' OR 1=1", "Bearer %s%n", "Bearer sk-righ", "Bearer sk-rightx",
             "Bearer \xff"]  # fmt: skip
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), authenticate=check) as gateway,
    ):
        shapes: set[tuple[str, ...]] = set()
        for key in wrong:
            extra = f"authorization: {key}\r\n" if key else ""
            for raw in (post(extra=extra), get("/v1/models", extra), get("/v1/files", extra)):
                reply = await gateway.ask(raw)
                assert reply.status == 401
                assert reply.headers["www-authenticate"] == "Bearer"
                error = {**reply.error, "request_id": ""}
                shapes.add(tuple(sorted(map(str, error.items()))))
        assert len(shapes) == 1
        for name in ("bearer", "BEARER", "Bearer "):
            loose = f"authorization: {name} sk-right \t\r\n"
            assert (await gateway.ask(post(extra=loose))).status == 200
        right = "authorization: Bearer sk-right\r\n"
        assert (await gateway.ask(post(extra=right))).status == 200
        assert (await gateway.ask(get("/v1/models", right))).status == 200
        assert (await gateway.ask(get("/health"))).status == 200
        assert (await gateway.ask(get("/nothing"))).status == 404


@wire
async def test_a_model_that_no_worker_serves_is_not_found_in_the_shape_of_the_api() -> None:
    served: set[str] = set()
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), knows_model=lambda name: not served or name in served) as gateway,
    ):
        assert (await gateway.ask(post({**CHAT, "model": "other"}))).status == 200  # unknown yet
        served.add("m")
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            assert (await gateway.ask(post(path=path))).status == 200
            reply = await gateway.ask(post({**CHAT, "model": "x" * 200}, path=path))
            assert reply.status == 404
            assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")
            assert "x" * 50 in reply.error["message"]
            assert "x" * 65 not in reply.error["message"]
        nameless = {"messages": CHAT["messages"]}
        assert (await gateway.ask(post(nameless))).status == 200
        assert gateway.front.counters.refusals == {"model_not_found": 2}


@wire
async def test_the_local_answers() -> None:
    ready = [False]
    async with running(
        FixedPicker(), readiness=lambda: Readiness(is_ready=ready[0], is_reuse_on=True)
    ) as gateway:
        for path in ("/health", "/liveness", "/live", "/healthz"):
            assert (await gateway.ask(get(path))).status == 200
        assert (await gateway.ask(get("/readiness"))).status == 503
        ready[0] = True
        assert (await gateway.ask(get("/readyz"))).json["reuse"] == "on"
        assert (await gateway.ask(get("/version"))).json == {"version": "0.0.0-test"}
        assert (await gateway.ask(get("/v1/models"))).json["object"] == "list"
        client = await gateway.client()
        await client.send(get("/health", method="HEAD") + get("/health"))
        head = await client.reply(has_body=False)
        assert (head.status, head.headers["content-length"]) == (200, "15")
        assert (await client.reply()).body == b'{"status":"ok"}'
        client.close()


@wire
async def test_the_bounds_on_requests_and_connections_are_told() -> None:
    go_on = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await go_on.wait()
        await served.send(json_answer())

    limits = LimitsConfig(max_concurrent_requests=3, max_connections=5)
    async with worker(script) as w, running(FixedPicker(w), limits=limits) as gateway:
        clients = [await gateway.client() for _ in range(5)]
        for client in clients[:4]:
            await client.send(post())
        refused = await clients[3].reply()
        assert (refused.status, refused.error["code"]) == (429, "busy")
        assert int(refused.headers["retry-after"]) >= 1
        over = await gateway.client()
        assert (await over.reply()).status == 503
        assert await over.is_closed()
        go_on.set()
        for client in clients[:3]:
            assert (await client.reply()).status == 200
        for client in clients:
            client.close()


@wire
async def test_an_empty_pool_is_503_with_a_time_to_come_back() -> None:
    async with running(FixedPicker()) as gateway:
        reply = await gateway.ask(post())
        assert (reply.status, reply.error["code"]) == (503, "no_worker")
        assert "retry-after" in reply.headers


@wire
async def test_request_ids_are_kept_where_they_are_sound_and_replaced_where_not() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        kept = await gateway.ask(post(extra="x-request-id: a-B_1.2:3\r\n"))
        assert kept.headers["x-request-id"] == "a-B_1.2:3"
        kept = await gateway.ask(post(extra="x-request-id:  a-B \t \r\n"))
        assert kept.headers["x-request-id"] == "a-B"
        for bad in ("x" * 65, "a b", "\xff\xfe", "a\tb", '"><script>'):
            reply = await gateway.ask(post(extra=f"x-request-id: {bad}\r\n"))
            assert len(reply.headers["x-request-id"]) == 32
            record = gateway.log[-1]
            assert record.client_request_id
            assert len(record.client_request_id) <= 64
            assert record.client_request_id.isascii()
            assert record.client_request_id.isprintable()


@wire
async def test_c98_secrets_and_prompts_reach_no_log_and_no_counter() -> None:
    """C98."""
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(self.format(record))

    handler = Keep(level=logging.DEBUG)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        check = api_key_check("sk-MARKED")
        async with (
            worker(answering(json_answer())) as w,
            running(FixedPicker(w), authenticate=check) as gateway,
        ):
            body = {**CHAT, "messages": [{"role": "user", "content": "MARKED prompt"}]}
            for raw in (
                post(body, extra="authorization: Bearer sk-MARKED\r\n"),
                post(body, extra="authorization: Bearer sk-MARKED-wrong\r\n"),
                post(b'{"MARKED', extra="authorization: Bearer sk-MARKED\r\n"),
                post(body, path="/v1/chat/completions?key=MARKED",
                     extra="authorization: Bearer sk-MARKED\r\n"),
                get("/v1/models", "cookie: MARKED\r\nauthorization: Bearer sk-MARKED\r\n"),
            ):  # fmt: skip
                await gateway.ask(raw)
            seen = repr((records, gateway.log, gateway.front.counters, gateway.picker.requests))
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    kept = seen.replace("path='/v1/chat/completions?key=MARKED'", "")  # the request itself
    assert "MARKED" not in kept
    assert len(gateway.log) == 5


def _resident_kib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() // 1024


@wire
async def test_thousands_of_short_requests_leave_nothing_behind() -> None:
    """C104; the 100,000 of the benchmark in small."""

    async def some(count: int) -> None:
        client = await gateway.client()
        for _ in range(count):
            await client.send(post())
            await client.reply()
        client.close()

    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        await some(500)
        gateway.log.clear()
        gateway.picker.ends.clear()
        gateway.picker.requests.clear()
        gc.collect()
        objects, tasks, kib = len(gc.get_objects()), len(asyncio.all_tasks()), _resident_kib()
        await some(5_000)
        await gateway.settled()
        gateway.log.clear()
        gateway.picker.ends.clear()
        gateway.picker.first_bytes.clear()
        gateway.picker.requests.clear()
        gc.collect()
        assert len(asyncio.all_tasks()) <= tasks
        assert len(gc.get_objects()) < objects + 500
        assert _resident_kib() < kib + 8_192


@wire
async def test_c106_two_thousand_streams_at_once_all_come_to_their_end() -> None:
    """C106."""
    streams, events = 2_000, 5
    all_there = asyncio.Event()
    started = [0]

    async def script(served: Served) -> None:
        while True:
            await served.request()
            await served.send(SSE_HEAD + event("0"))
            started[0] += 1
            if started[0] == streams:
                all_there.set()
            await all_there.wait()
            for index in range(1, events):
                await served.send(event(str(index)))
            await served.send(END)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    try:
        async with worker(script) as w, running(FixedPicker(w), sweep_ms=250) as gateway:
            before_kib = _resident_kib()
            replies = await asyncio.gather(
                *(gateway.ask(post({**CHAT, "stream": True})) for _ in range(streams))
            )
            assert all(len(reply.events) == events + 1 for reply in replies)
            assert gateway.picker.open_count == 0
            assert _resident_kib() - before_kib < 1_000_000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


TEXTS = ["\U0001f600" * 50, "\u4e2d\u6587" * 50, "e\u0301" * 50, "\U0001f468\u200d\U0001f469"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_c107_text_of_every_script_passes_whole_however_it_is_spelled(text: str) -> None:
    """C107."""

    @wire
    async def scenario() -> None:
        async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            for is_ascii in (True, False):
                raw = json.dumps(body, ensure_ascii=is_ascii).encode()
                assert (await gateway.ask(post(raw))).status == 200
                request = gateway.picker.requests[-1]
                assert request.body == raw
                assert request.prompt.messages[0]["content"] == text
            halves = json.dumps({"model": "m", "messages": [{"role": "user", "content": "\ud83d"}]})
            assert (await gateway.ask(post(halves.encode()))).error["code"] == "invalid_utf8"

    scenario()
