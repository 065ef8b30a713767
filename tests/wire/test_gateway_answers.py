"""How a worker's answer reaches the client: headers, framing, encodings, broken streams."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import pytest
from scripted import (
    CHAT,
    COMPLETE,
    END,
    FAILED,
    GONE,
    SSE_HEAD,
    STREAM,
    Client,
    FixedPicker,
    Reply,
    Served,
    answering,
    chunk,
    event,
    get,
    in_two,
    json_answer,
    patient,
    post,
    running,
    staying,
    wire,
    worker,
)

from trunkline.config import LimitsConfig
from trunkline.gateway.contracts import AttemptEnd

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def through(answer: bytes, request: bytes = post(), *, closes: bool = False) -> Reply:
    """What a client gets when the worker answers with exactly these bytes."""

    async def script(served: Served) -> None:
        while True:
            await served.request()
            await served.send(answer)
            if closes:
                return

    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(request)
        await gateway.settled()
        assert gateway.picker.open_count == 0
        return reply


@wire
async def test_c60_a_compressed_answer_keeps_its_bytes_and_its_label() -> None:
    """C60, C63."""
    packed = gzip.compress(b'{"choices":[]}')
    for status in ("200 OK", "400 Bad Request"):
        reply = await through(json_answer(packed, status, "content-encoding: gzip\r\n"))
        assert reply.headers["content-encoding"] == "gzip"
        assert gzip.decompress(reply.body) == b'{"choices":[]}'


@wire
async def test_c65_a_compressed_stream_flushed_per_event_arrives_whole() -> None:
    """C60, C65."""
    packer = zlib.compressobj(wbits=31)
    head = SSE_HEAD[:-2] + b"content-encoding: gzip\r\n\r\n"
    parts = [chunk(packer.compress(b"data: %d\n\n" % i) + packer.flush(2)) for i in range(20)]
    tail = chunk(packer.flush()) + b"0\r\n\r\n"

    reply = await through(head + b"".join(parts) + tail, post(STREAM))

    assert reply.headers["content-encoding"] == "gzip"
    assert gzip.decompress(reply.body) == b"".join(b"data: %d\n\n" % i for i in range(20))


@wire
async def test_c63_an_empty_body_with_an_encoding_is_a_good_answer() -> None:
    """C63."""
    no_content = b"HTTP/1.1 204 No Content\r\ncontent-encoding: gzip\r\n\r\n"
    assert (await through(no_content)).status == 204
    reply = await through(json_answer(b"", extra="content-encoding: gzip\r\n"))
    assert (reply.status, reply.body) == (200, b"")


@wire
async def test_c61_headers_arrive_once_and_those_of_the_connection_not_at_all() -> None:
    """C61."""
    answer = (
        b"HTTP/1.1 200 OK\r\nServer: a\r\nserver: b\r\nDate: x\r\ndate: y\r\n"
        b"Content-Type: audio/wav\r\n"
        b"content-type: text/plain\r\nContent-Length: 3\r\nConnection: keep-alive, x-private\r\n"
        b"Keep-Alive: timeout=5\r\nx-private: 1\r\nX-Request-Id: theirs\r\n"
        b"x-trunkline-decision: z\r\n"
        b"Set-Cookie: a\r\nset-cookie: b\r\nproxy-authenticate: x\r\nx-kept: v\r\n\r\nabc"
    )

    reply = await through(answer, post(extra="x-request-id: mine-1\r\n"))

    assert sorted(reply.fields) == sorted([
        ("server", "a"), ("date", "x"), ("content-type", "audio/wav"), ("content-length", "3"),
        ("x-request-id", "mine-1"), ("set-cookie", "a"), ("set-cookie", "b"), ("x-kept", "v"),
    ])  # fmt: skip
    assert reply.body == b"abc"


@wire
async def test_c62_the_worker_sees_its_own_host_and_nothing_that_is_not_for_it() -> None:
    """C62, C99."""
    kept = {"accept": "text/event-stream", "accept-encoding": "gzip", "traceparent": TRACEPARENT,
            "x-session-id": "s1", "x-correlation-id": "c"}  # fmt: skip
    dropped = {
        "authorization": "Bearer SECRET", "x-tenant-id": "t", "x-smg-target-worker": "w9",
        "x-data-parallel-rank": "3", "x-kv-cache-source-host-port": "h:1", "cookie": "c",
        "x-prefiller-host-port": "h:1", "x-llm-d-slo-ttft-ms": "1", "x-forwarded-for": "1.2.3.4",
        "connection": "keep-alive, x-session-id", "te": "trailers", "upgrade": "h2c",
        "x-invented-tomorrow": "1", "x-user-id": "u", "user": "u", "x-label-selector": "a=b",
    }  # fmt: skip
    extra = "".join(f"{name}: {value}\r\n" for name, value in {**kept, **dropped}.items())
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        assert (await gateway.ask(post(path="/v1/chat/completions?a=b", extra=extra))).status == 200

    first, headers, body = w.seen[0]
    assert first == "POST /v1/chat/completions?a=b HTTP/1.1"
    assert headers.pop("host") == w.endpoint.host_header
    assert headers.pop("x-request-id")
    assert headers.pop("content-length") == str(len(body))
    assert headers.pop("content-type") == "application/json"
    assert headers == kept
    assert json.loads(body) == CHAT


ODD_STREAMS = [
    b"data:{}\n\ndata: {}\n\n",
    b"data: a\r\n\r\ndata: b\r\n\r\n",
    b"data: a\r\rdata: b\r\r",
    b": ping\n\nevent: x\nid: 1\ndata: a\ndata: b\n\n",
    b"\xef\xbb\xbfdata: a\n\n",
    "data: \U0001f600\u4e2de\u0301\n\n".encode(),
]


@wire
async def test_c64_event_lines_of_every_spelling_pass_byte_for_byte() -> None:
    """C64."""
    for stream in ODD_STREAMS:
        for size in (1, 7, len(stream)):
            parts = [chunk(stream[i : i + size]) for i in range(0, len(stream), size)]
            reply = await through(SSE_HEAD + b"".join(parts) + b"0\r\n\r\n", post(STREAM))
            assert reply.body == stream
            assert reply.is_whole


@wire
async def test_a_stream_cut_into_single_bytes_on_the_wire_arrives_the_same() -> None:
    answer = SSE_HEAD + event("a") + event("b") + END

    async def script(served: Served) -> None:
        await served.request()
        for i in range(len(answer)):
            await served.send(answer[i : i + 1])
            await asyncio.sleep(0)

    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post(STREAM))

    assert reply.is_whole
    assert len(reply.events) == 3


@wire
async def test_c66_pings_reach_the_client_at_once_and_are_no_first_token() -> None:
    """C66, C82."""
    go_on = asyncio.Event()
    script = in_two(SSE_HEAD + chunk(b": ping\n\n"), go_on, event("a") + END)
    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        await client.send(post(STREAM))
        await client.head()
        assert await client.reader.readuntil(b"ping\n\n\r\n")
        assert gateway.picker.first_bytes == []
        go_on.set()
        await client.reader.readuntil(b"0\r\n\r\n")
        assert gateway.picker.first_bytes == [w.name]


@wire
async def test_interim_answers_of_a_worker_are_skipped() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nx: y\r\n\r\n"

    reply = await through(interim + json_answer())

    assert (reply.status, reply.body) == (200, b'{"ok":true}')


@wire
async def test_an_answer_that_ends_by_closing_is_made_chunked() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n" + b"x" * 1_000

    reply = await through(answer, closes=True)

    assert reply.headers["transfer-encoding"] == "chunked"
    assert reply.body == b"x" * 1_000
    assert reply.is_whole


@wire
async def test_an_old_client_gets_no_chunks() -> None:
    old = post(STREAM, version="1.0")
    chunked = await through(SSE_HEAD + event("a") + END, old)
    counted = await through(json_answer(), post(version="1.0", extra="connection: keep-alive\r\n"))
    bare = await through(b"HTTP/1.0 200 OK\r\n\r\nabc", old, closes=True)

    assert "transfer-encoding" not in chunked.headers
    assert chunked.headers["connection"] == "close"
    assert len(chunked.events) == 2
    assert counted.headers["content-length"] == "11"
    assert "connection" not in counted.headers
    assert bare.body == b"abc"


@wire
async def test_a_workers_own_error_passes_unchanged() -> None:
    """C81."""
    body = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'

    reply = await through(json_answer(body, "400 Bad Request"))

    assert (reply.status, reply.body) == (400, body)


@wire
async def test_a_refusal_of_ours_is_not_translated_again() -> None:
    """C81."""
    async with running(FixedPicker()) as gateway:
        reply = await gateway.ask(post({**CHAT, "temperature": 9}))
        assert (reply.status, reply.error["param"]) == (400, "temperature")
        assert reply.error["request_id"] == reply.headers["x-request-id"]


DEATHS = {
    "between two chunks": b"",
    "inside a size line": b"4",
    "inside a chunk": b'40\r\ndata: {"par',
    "before the last CRLF": b"0\r\n",
}


@pytest.mark.parametrize("rest", DEATHS.values(), ids=DEATHS.keys())
@pytest.mark.parametrize("is_reset", [False, True])
def test_c67_a_stream_whose_worker_dies_ends_in_a_valid_error_event(
    rest: bytes, is_reset: bool
) -> None:
    """C67."""

    @wire
    async def scenario() -> None:
        has_read = asyncio.Event()

        async def script(served: Served) -> None:
            await served.request()
            await served.send(SSE_HEAD + event("a"))
            await served.send(event("b") + event("c"))
            await has_read.wait()
            await served.send(rest)
            await asyncio.sleep(0.02)  # a reset would overtake it
            served.reset() if is_reset else served.close()

        async with worker(script) as w, running(FixedPicker(w)) as gateway:
            client = await gateway.client()
            await client.send(post(STREAM, extra="connection: close\r\n"))
            await client.head()
            first = await client.reader.readuntil(b'"b"}}]}\n\n\r\n')
            has_read.set()
            raw = first + await client.reader.read()

            reply = await _decoded(raw)
            assert reply.is_whole
            *answered, last = reply.events
            assert len(answered) == 3
            error = json.loads(last)["error"]
            assert error["code"] == "worker_lost"
            assert error["type"] == "upstream_lost"
            assert error["retryable"] is True
            assert error["request_id"]
            assert error["tokens_delivered"] == 3
            assert b"[DONE]" not in raw
            assert gateway.picker.ends == [(w.name, FAILED, None)]
            assert gateway.log[0].code == "worker_lost"

    scenario()


async def _decoded(raw: bytes) -> Reply:
    reader = asyncio.StreamReader()
    reader.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + raw)
    reader.feed_eof()
    reply = await Client(reader, None).reply()  # pyright: ignore[reportArgumentType]
    assert not await reader.read(), "a second answer was appended"
    return reply


@wire
async def test_a_broken_answer_that_is_no_stream_is_cut_and_never_completed() -> None:
    start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    long = b"content-length: 100000\r\n\r\n"
    for framing in (long, b"transfer-encoding: chunked\r\n\r\n64\r\n"):
        reply = await through(start + framing + b'{"half":', closes=True)
        assert reply.status == 200
        assert not reply.is_whole


@wire
async def test_bytes_behind_the_end_of_an_answer_reach_nobody() -> None:
    sneaky = json_answer() + json_answer(b'{"second":1}')
    async with worker(answering(sneaky)) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post())
        assert reply.status == 502
        assert reply.error["code"] == "worker_lost"
        assert gateway.front.pool.idle_count() == 0


@wire
async def test_a_chunk_far_longer_than_what_is_held_back_still_arrives() -> None:
    big = b"data: " + b"x" * 3_000_000 + b"\n\n"

    reply = await through(SSE_HEAD + chunk(big) + END, post(STREAM))

    assert reply.body == big + b"data: [DONE]\n\n"


@wire
async def test_a_slow_client_pauses_the_worker_and_a_stalled_one_is_dropped() -> None:
    limits = LimitsConfig(write_buffer_bytes=64 << 10, write_stall_ms=300)
    sent = [0]
    gone = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(SSE_HEAD)
        watch = asyncio.ensure_future(served.gone())
        watch.add_done_callback(lambda _: gone.set())
        try:
            while not gone.is_set():
                await served.send(chunk(b"data: " + b"x" * 65_536 + b"\n\n"))
                sent[0] += 1
        finally:
            watch.cancel()

    async with worker(script) as w, running(FixedPicker(w), limits=limits) as gateway:
        client = await gateway.client()
        await client.send(post(STREAM))
        client.pause()
        await gone.wait()
        await gateway.settled()
        assert sent[0] < 2_000, "the worker was never held back"
        assert gateway.front.counters.write_stalls == 1
        assert gateway.picker.ends == [(w.name, GONE, None)]
        assert gateway.log[0].status == 499
        client.reset()


@wire
async def test_a_slow_client_that_reads_on_gets_everything() -> None:
    limits = LimitsConfig(write_buffer_bytes=16 << 10, write_stall_ms=1_000)
    body = b"z" * 20_000_000
    async with (
        worker(answering(json_answer(body))) as w,
        running(FixedPicker(w), limits=limits) as gateway,
    ):
        client = await gateway.client(64 << 10)
        await client.send(post())
        await client.head()
        await client.fetch_slowly(len(body), 0.02)
        await gateway.settled()
        assert gateway.picker.ends[0][1] is COMPLETE
        client.close()


@wire
async def test_c77_silence_inside_an_answer_ends_it_as_a_time_out() -> None:
    """C76, C77."""
    upstream = patient(stream_idle_timeout_ms=200)
    script = staying(SSE_HEAD + event("a"))
    async with worker(script) as w, running(FixedPicker(w), upstream=upstream) as gateway:
        reply = await gateway.ask(post(STREAM))
        assert reply.is_whole
        assert json.loads(reply.events[-1])["error"]["type"] == "timeout"
        assert gateway.picker.ends == [(w.name, AttemptEnd.WORKER_LATE, None)]


@wire
async def test_c76_a_stream_longer_than_any_limit_survives_while_it_moves() -> None:
    """C76."""
    upstream = patient(stream_idle_timeout_ms=2_000, first_byte_timeout_ms=2_000)

    async def script(served: Served) -> None:
        await served.request()
        await served.send(SSE_HEAD)
        for i in range(12):
            await asyncio.sleep(0.2)  # the pace of a slow engine
            await served.send(event(str(i)))
        await served.send(END)

    async with worker(script) as w, running(FixedPicker(w), upstream=upstream) as gateway:
        reply = await gateway.ask(post(STREAM))
        assert len(reply.events) == 13
        assert gateway.picker.ends[0][1] is COMPLETE


@wire
async def test_c69_a_stream_of_five_thousand_chunks_arrives_whole() -> None:
    words = [f"w{index}" for index in range(5_000)]

    async def script(served: Served) -> None:
        await served.request()
        await served.send(SSE_HEAD)
        for word in words:
            await served.send(event(word))
        await served.send(END)

    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post(STREAM))
        assert reply.is_whole
        assert reply.events[-1] == "[DONE]"
        got = [json.loads(one)["choices"][0]["delta"]["content"] for one in reply.events[:-1]]
        assert got == words
        await gateway.settled()
        assert gateway.picker.ends == [(w.name, COMPLETE, None)]


@wire
async def test_reused_tokens_are_read_from_the_end_of_every_kind_of_answer() -> None:
    usage = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":7}}}'
    stream = SSE_HEAD + event('"cached_tokens":1') + chunk(b"data: " + usage + b"\n\n") + END
    plain = json_answer(b'{"pad":"' + b"x" * 100_000 + b'",' + usage[1:])
    for answer, body in ((stream, STREAM), (plain, CHAT)):
        async with worker(answering(answer)) as w, running(FixedPicker(w)) as gateway:
            await gateway.ask(post(body))
            await gateway.settled()
            assert gateway.picker.ends == [(w.name, COMPLETE, 7)]


@wire
async def test_c78_malformed_usage_does_no_harm() -> None:
    """C78."""
    for usage in (b'"x"', b"null", b'{"cached_tokens":"x"}', b'{"cached_tokens":-1}', b"[]"):
        async with (
            worker(answering(json_answer(b'{"usage":' + usage + b"}"))) as w,
            running(FixedPicker(w)) as gateway,
        ):
            assert (await gateway.ask(post())).status == 200
            await gateway.settled()
            assert gateway.picker.ends == [(w.name, COMPLETE, None)]


@wire
async def test_a_get_on_an_unread_path_is_forwarded_without_a_body() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        assert (await gateway.ask(get("/v1/files/m"))).status == 200
    assert w.seen[0][0] == "GET /v1/files/m HTTP/1.1"
    assert "content-length" not in w.seen[0][1]
