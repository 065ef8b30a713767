"""Clients that send without reading, or all at once: held back, served in turns, never buffered."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Awaitable

import pytest
from scripted import (
    SSE_HEAD,
    STREAM,
    FixedPicker,
    Served,
    answering,
    chunk,
    get,
    json_answer,
    post,
    running,
    until,
    wire,
    worker,
)

from trunkline.adapters.clock import SystemClock
from trunkline.config import Config, LimitsConfig
from trunkline.core.principals import Principal
from trunkline.core.records import WorkerId
from trunkline.gateway.answers import Answer
from trunkline.gateway.client import MESSAGES_PER_TURN
from trunkline.gateway.contracts import InferenceRequest, Pick
from trunkline.gateway.head import RequestHead
from trunkline.gateway.routes import Local
from trunkline.wiring import build_core


@wire
async def test_a_client_that_sends_and_never_reads_is_held_back_and_dropped() -> None:
    limits = LimitsConfig(write_buffer_bytes=64 << 10, write_stall_ms=400)
    loop = asyncio.get_running_loop()
    async with running(FixedPicker(), limits=limits) as gateway:
        sock = socket.create_connection(("127.0.0.1", gateway.front.port))
        sock.setblocking(False)
        most_bytes = 0

        async def flood() -> None:
            while True:
                await loop.sock_sendall(sock, get("/health") * 500)

        task = asyncio.create_task(flood())
        await until(lambda: gateway.front.counters.open_clients == 1)
        [client] = gateway.connections()
        while gateway.front.counters.write_stalls == 0:
            most_bytes = max(most_bytes, client.transport.get_write_buffer_size())
            assert client._inbox.left <= 512 << 10
            await asyncio.sleep(0.005)  # a look now and then
        assert most_bytes <= (64 << 10) + MESSAGES_PER_TURN * 1_024
        with pytest.raises(ConnectionError):
            await task
        await until(lambda: gateway.front.counters.open_clients == 0)
        sock.close()


@wire
async def test_messages_sent_at_once_are_served_a_few_in_each_turn_of_the_loop() -> None:
    loop = asyncio.get_running_loop()
    async with running(FixedPicker()) as gateway:
        front, turn, served = gateway.front, [0], Counter[int]()
        answer = front.local_answer

        def count(local: Local, principal: Principal, head: RequestHead) -> Answer:
            served[turn[0]] += 1
            return answer(local, principal, head)

        def tick() -> None:
            turn[0] += 1
            loop.call_soon(tick)

        front.local_answer = count
        loop.call_soon(tick)
        client = await gateway.client()
        await client.send(get("/health") * 2_000)
        for _ in range(2_000):
            assert (await client.reply()).status == 200
        assert max(served.values()) <= 2 * MESSAGES_PER_TURN  # two reads may share a turn
        assert served.total() == 2_000
        client.close()


@wire
async def test_requests_behind_a_pause_are_served_when_the_client_reads_again() -> None:
    limits = LimitsConfig(write_buffer_bytes=16 << 10)
    count = 60_000
    async with running(FixedPicker(), limits=limits) as gateway:
        client = await gateway.client()
        client.pause()
        sending = asyncio.create_task(client.send(get("/health") * count + get("/nothing")))
        await until(lambda: gateway.front.counters.open_clients == 1)
        [served] = gateway.connections()
        await until(lambda: served.is_paused)
        client.resume()
        for _ in range(count):
            await client.head()
            await client.reader.readexactly(15)
        assert (await client.reply()).status == 404
        await sending


@wire
async def test_the_write_stall_counts_from_the_last_byte_fetched_though_more_arrives() -> None:
    """The worker goes on, so that what waits for the client grows and is never twice the same."""
    limits = LimitsConfig(write_buffer_bytes=64 << 20, write_stall_ms=300)
    gone, sent = asyncio.Event(), [0]

    async def script(served: Served) -> None:
        await served.request()
        await served.send(SSE_HEAD)
        try:
            while True:
                await served.send(chunk(b"data: " + b"x" * 65_536 + b"\n\n"))
                sent[0] += 1
                await asyncio.sleep(0.005)  # the worker's pace
        finally:
            gone.set()

    async with worker(script) as w, running(FixedPicker(w), limits=limits) as gateway:
        client = await gateway.client()
        await client.send(post(STREAM))
        client.pause()
        await gone.wait()
        assert gateway.front.counters.write_stalls == 1
        assert sent[0] < 500, "dropped only when the buffer was full"
        await gateway.settled()
        client.reset()


@wire
async def test_an_answer_that_is_still_being_fetched_does_not_idle() -> None:
    limits = LimitsConfig(write_buffer_bytes=64 << 20, idle_timeout_ms=1_000)
    body = b"z" * 24_000_000
    async with (
        worker(answering(json_answer(body))) as w,
        running(FixedPicker(w), limits=limits) as gateway,
    ):
        client = await gateway.client(64 << 10)
        await client.send(post())
        await client.head()
        await client.fetch_slowly(len(body), 0.02)
        client.close()


@wire
async def test_c105_long_prompts_leave_the_loop_to_the_others() -> None:
    """The real tokenizer and template, 16 prompts of some 100,000 tokens; /health all the while."""
    prompts = build_core(Config(), SystemClock()).prompts

    class Tokenising(FixedPicker):
        def pick(
            self, request: InferenceRequest, tried: frozenset[WorkerId]
        ) -> Pick | Awaitable[Pick]:
            assert prompts.tokens(request) is None
            return self._later(request, tried)

        async def _later(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick:
            lengths.append(len(await prompts.tokens_later(request)))
            choice = super().pick(request, tried)
            assert isinstance(choice, Pick)
            return choice

    lengths: list[int] = []
    dice = random.Random(7)
    words = "".join(dice.choice("abcdefghij ") for _ in range(130_000))
    long = {"model": "m", "messages": [{"role": "user", "content": words}]}
    answered_count = 0
    async with (
        worker(answering(json_answer())) as w,
        running(Tokenising(w), max_model_len=1 << 20) as gateway,
    ):
        asked = [asyncio.create_task(gateway.ask(post(long))) for _ in range(16)]
        while not all(task.done() for task in asked):
            assert (await gateway.ask(get("/health"))).status == 200
            answered_count += 1
        assert {task.result().status for task in asked} == {200}
    assert min(lengths) > 80_000
    assert answered_count > 24, "a loop that tokenises answers once for each of the 16 prompts"
    prompts.close()


@wire
async def test_a_head_in_single_bytes_is_read_as_one_piece_is() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        client.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post(extra="x: y\r\n" * 20) + get("/health"):
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.reply()).status == 200
        assert (await client.reply()).status == 200
        client.close()
