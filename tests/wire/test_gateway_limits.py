"""Clients that are slow, early or many: time-outs, bounds, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import resource

import pytest
from scripted import (
    CHAT,
    END,
    JSON,
    POST,
    SSE_HEAD,
    FixedPicker,
    Served,
    answering,
    chunked,
    event,
    get,
    in_two,
    json_answer,
    post,
    running,
    until,
    wire,
    worker,
)

from trunkline.config import LimitsConfig


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
    script = in_two(b"", go_on, json_answer())
    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        await client.send(post())
        await gateway.picker.begun.wait()
        await client.send(post() * 2_000)
        go_on.set()
        assert (await client.reply()).status == 200
        assert await client.is_closed()
        client.close()


TIMES = LimitsConfig(header_timeout_ms=1_000, body_timeout_ms=1_100, idle_timeout_ms=1_200)
"""Short, and long beside what a loaded machine may take from a message until it is read."""


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", None), (b"GET /hea", 408), (b"GET /health HTTP/1.1\r\nhost: h\r\n", 408),
        (f"{POST}{JSON}content-length: 10\r\n\r\n".encode(), 408), (chunked(b"5\r\nhel"), 408),
        (f"{POST}{JSON}content-length: 10\r\n\r\n123".encode(), 408),
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
            assert await client.is_closed()
            client.close()

    scenario()


@wire
async def test_a_head_that_drips_in_does_not_move_its_deadline() -> None:
    async with running(FixedPicker(), limits=TIMES) as gateway:
        client = await gateway.client()
        reply = asyncio.create_task(client.reply())
        for byte in b"GET /health HTTP/1.1\r\nx-slow: " + b"y" * 100:
            await client.send(bytes([byte]))
            await asyncio.sleep(0.02)  # the drip
            if reply.done():
                break
        else:
            pytest.fail("each byte moved the deadline")
        assert (await reply).status == 408
        client.close()


@wire
async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with running(FixedPicker(), limits=TIMES) as gateway:
        client = await gateway.client()
        await client.send(get("/health"))
        await client.reply()
        assert await client.is_closed()
        client.close()


@wire
async def test_the_bounds_on_requests_and_connections_are_told() -> None:
    go_on = asyncio.Event()
    script = in_two(b"", go_on, json_answer())
    limits = LimitsConfig(max_concurrent_requests=3, max_connections=5)
    async with worker(script) as w, running(FixedPicker(w), limits=limits) as gateway:
        clients = [await gateway.client() for _ in range(5)]
        for client in clients[:3]:
            await client.send(post())
        await until(lambda: gateway.front.counters.active_requests == 3)
        await clients[3].send(post())
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


def _resident_kib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() // 1024


@wire
async def test_c104_thousands_of_short_requests_leave_nothing_behind() -> None:
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
