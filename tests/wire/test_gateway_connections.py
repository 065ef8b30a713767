"""Clients that leave, connections that died unseen, the bounds of the pool, drain."""

from __future__ import annotations

import asyncio
import json

import pytest
from scripted import (
    CHAT,
    COMPLETE,
    END,
    GONE,
    SSE_HEAD,
    STREAM,
    FixedPicker,
    Served,
    answering,
    event,
    get,
    in_two,
    json_answer,
    patient,
    post,
    running,
    staying,
    until,
    wire,
    worker,
)

PHASES = ["before the first byte", "in the middle of a stream", "without streaming"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("is_reset", [False, True])
def test_c71_a_client_that_leaves_frees_its_worker_at_once(phase: str, is_reset: bool) -> None:
    """C71."""

    @wire
    async def scenario() -> None:
        gone = asyncio.Event()
        first = SSE_HEAD + event("a") if phase == PHASES[1] else b""
        async with worker(staying(first, gone)) as w, running(FixedPicker(w)) as gateway:
            client = await gateway.client()
            await client.send(post(CHAT if phase == PHASES[2] else STREAM))
            if phase == PHASES[1]:
                await client.head()
            else:
                await gateway.picker.begun.wait()
                await until(lambda: len(w.seen) == 1)
            client.reset() if is_reset else client.close()
            await gone.wait()  # no other limit ends before the test's
            await gateway.settled()
            assert gateway.picker.ends == [(w.name, GONE, None)]
            assert gateway.log[0].status == 499
            assert gateway.front.counters.requests == {("chat", "client_gone"): 1}
            assert gateway.front.counters.worker_failures == 0

    scenario()


@wire
async def test_c73_connections_the_worker_closes_when_idle_never_cost_a_request() -> None:
    """C73, with 5 s scaled to 50 ms: half of the pauses fall on the worker's own deadline."""
    idle_s = 0.05

    async def impatient(served: Served) -> None:
        await served.request()  # a connection that is new is not idle
        while True:
            await served.send(json_answer())
            await asyncio.wait_for(served.request(), idle_s)

    async def script(served: Served) -> None:
        try:
            await impatient(served)
        except TimeoutError:
            return

    upstream = patient(keepalive_idle_ms=10_000)  # far too long, on purpose
    async with worker(script) as w, running(FixedPicker(w), upstream=upstream) as gateway:
        client = await gateway.client()
        for index in range(100):
            await client.send(post())
            assert (await client.reply()).status == 200, index
            await asyncio.sleep(idle_s + (index % 5 - 2) * 0.0005)  # the race itself
        client.close()
        assert gateway.front.counters.retries == 0
        assert w.connection_count > 10


@wire
async def test_c73_a_connection_that_died_unseen_is_replaced_without_a_retry() -> None:
    """C73: one safe second send to the same worker, when nothing was sent back."""
    count = [0]

    async def one_shot(served: Served) -> None:
        count[0] += 1
        await served.request()
        await served.send(json_answer())
        await served.request()  # takes the second request, and dies without a word
        served.reset()

    upstream = patient(keepalive_idle_ms=100_000)  # none is let go for its age
    async with worker(one_shot) as w, running(FixedPicker(w), upstream=upstream) as gateway:
        client = await gateway.client()
        for _ in range(4):
            await client.send(post())
            assert (await client.reply()).status == 200
        assert gateway.front.counters.stale_retries == 3
        assert gateway.front.counters.retries == 0
        assert [end for _, end, _ in gateway.picker.ends] == [COMPLETE] * 4
        client.close()


@wire
async def test_a_client_may_go_on_using_the_connection_of_a_stream_that_broke() -> None:
    """It saw the end of the message, and may have sent the next request before we could close."""

    async def dies_once(served: Served) -> None:
        await served.request()
        await served.send(SSE_HEAD + event("one") + event("two"))
        served.reset()

    async with (
        worker(dies_once, "bad") as bad,
        worker(answering(SSE_HEAD + event("good") + END), "good") as good,
        running(FixedPicker(bad, good)) as gateway,
    ):
        client = await gateway.client()
        await client.send(post(STREAM))
        broken = await client.reply()
        assert broken.is_whole
        assert json.loads(broken.events[-1])["error"]["type"] == "upstream_lost"
        gateway.picker.workers.reverse()
        await client.send(post(STREAM))
        assert (await client.reply()).events[-1] == "[DONE]"
        client.close()


@wire
async def test_idle_connections_to_workers_are_let_go_below_the_workers_own_limit() -> None:
    upstream = patient(keepalive_idle_ms=1_000)
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), upstream=upstream) as gateway,
    ):
        await gateway.ask(post())
        await until(lambda: gateway.front.pool.idle_count() == 1)
        await until(lambda: gateway.front.counters.open_upstreams == 0)
        assert gateway.front.pool.idle_count() == 0


@wire
async def test_the_pool_keeps_no_more_than_its_bound() -> None:
    upstream = patient(max_idle_connections=3)
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), upstream=upstream) as gateway,
    ):
        await asyncio.gather(*(gateway.ask(post()) for _ in range(20)))
        await gateway.settled()
        assert gateway.front.pool.idle_count() <= 3


@wire
async def test_draining_lets_streams_end_and_takes_nothing_new() -> None:
    go_on = asyncio.Event()
    async with (
        worker(in_two(SSE_HEAD + event("a"), go_on, END)) as w,
        running(FixedPicker(w)) as gateway,
    ):
        idle = await gateway.client()
        await idle.send(get("/health"))
        await idle.reply()
        client = await gateway.client()
        await client.send(post(STREAM))
        status, _ = await client.head()
        drained = asyncio.create_task(gateway.front.drain(grace_ms=5_000))
        assert await idle.is_closed()
        with pytest.raises(OSError):
            await gateway.client()
        go_on.set()
        assert status == 200
        assert await client.reader.readuntil(b"0\r\n\r\n")
        assert await client.is_closed()
        await drained
        assert gateway.picker.ends == [(w.name, COMPLETE, None)]


@wire
async def test_the_end_of_the_grace_ends_streams_with_an_error_event() -> None:
    async def script(served: Served) -> None:
        _, _, body = await served.request()
        if b'"stream"' in body:
            await served.send(SSE_HEAD + event("a"))
        await served.gone()

    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        client, waiting = await gateway.client(), await gateway.client()
        await client.send(post(STREAM))
        await client.head()
        await waiting.send(post())
        await until(lambda: len(w.seen) == 2)
        await gateway.front.drain(grace_ms=50)
        rest = await client.reader.read()
        assert b'"error"' in rest
        assert rest.endswith(b"0\r\n\r\n")
        assert (await waiting.reply()).status == 503
        assert [end for _, end, _ in gateway.picker.ends] == [GONE, GONE]
        assert gateway.front.counters.open_clients == 0
