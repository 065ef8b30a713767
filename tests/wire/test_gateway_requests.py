"""What clients may send: the tables of bad and good messages over real sockets, of any size."""

from __future__ import annotations

import asyncio
import json

import pytest
from scripted import (
    CHAT,
    JSON,
    POST,
    FixedPicker,
    answering,
    chunked,
    get,
    json_answer,
    post,
    running,
    wire,
    worker,
)

from trunkline.config import LimitsConfig

BODY = json.dumps(CHAT).encode()
WHOLE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)

# name, bytes, status, code, whether the connection must be closed
TABLE: list[tuple[str, bytes, int, str, bool]] = [
    ("empty body", post(b""), 400, "invalid_json", False),
    ("no body", f"{POST}{JSON}\r\n".encode(), 400, "invalid_json", False),
    ("malformed", post(b"{"), 400, "invalid_json", False),
    ("array body", post(b"[]"), 400, "invalid_json", False),
    ("null messages", post({"model": "m", "messages": None}), 400, "invalid_value", False),
    ("twins", post(b'{"model":"a","model":"b"}'), 400, "duplicate_key", False),
    ("deep", post(b"[" * 100_000), 400, "too_deep", False),
    ("surrogate", post(b'{"messages":"\\ud800"}'), 400, "invalid_utf8", False),
    ("forbidden nested", post({"messages": [{"role": "user", "content": "x", "cache_salt": 1}]}),
     400, "forbidden_field", False),
    ("template", post({**CHAT, "chat_template": "x"}), 400, "forbidden_field", False),
    ("too large by length", f"{POST}{JSON}content-length: 99999999\r\n\r\n".encode(), 413,
     "body_too_large", True),
    ("too large by chunks", chunked((b"10000\r\n" + b"x" * 65_536 + b"\r\n") * 20), 413,
     "body_too_large", True),
    ("text", f"{POST}content-type: text/plain\r\ncontent-length: 2\r\n\r\n{{}}".encode(), 415,
     "content_type", True),
    ("no type", f"{POST}content-length: 2\r\n\r\n{{}}".encode(), 415, "content_type", True),
    ("form", f"{POST}content-type: application/x-www-form-urlencoded\r\ncontent-length: 2\r\n\r\n"
     "{}".encode(), 415, "content_type", True),
    ("charset", f"{POST}content-type: application/json; charset=utf-16\r\ncontent-length: 2\r\n\r\n"
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
    limits = LimitsConfig(max_payload_size=70 << 20)
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), limits=limits, max_model_len=1 << 30) as gateway,
    ):
        for kib in (1, 30, 128, 129, 1_024, 10_240, 65_536):
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * (kib << 10)}]}
            reply = await gateway.ask(post(body))
            assert (reply.status, reply.body) == (200, b'{"ok":true}')
            assert len(w.seen[-1][2]) == len(json.dumps(body))


@wire
async def test_c74_too_large_a_body_is_refused_before_it_is_read() -> None:
    """C74."""
    async with running(FixedPicker()) as gateway:
        client = await gateway.client()
        await client.send(f"{POST}{JSON}content-length: 8388609\r\n\r\n".encode())
        assert (await client.reply()).status == 413
        client.close()
        # The refusal arrives although the client keeps on sending.
        client = await gateway.client()
        await client.send(f"{POST}{JSON}content-length: 67108864\r\n\r\n".encode())
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
            f"{POST}{JSON}expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n".encode()
        )
        assert (await client.head())[0] == 413
        client.close()


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
