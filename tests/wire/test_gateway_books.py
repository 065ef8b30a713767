"""The books hold in whatever order things fail, and while a choice takes long."""

from __future__ import annotations

import asyncio
import json
import random

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
    Running,
    ScriptedWorker,
    Served,
    answering,
    event,
    get,
    json_answer,
    post,
    running,
    until,
    wire,
    worker,
)

from trunkline.config import RetryConfig
from trunkline.core.records import WorkerId
from trunkline.gateway.contracts import InferenceRequest, Pick


class LatePicker(FixedPicker):
    """Chooses only when told to, as where a long prompt is tokenised off the loop."""

    def __init__(self, *workers: ScriptedWorker) -> None:
        super().__init__(*workers)
        self.go_on = asyncio.Event()
        self.waiting = 0
        self.was_cancelled = 0

    async def pick(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: InferenceRequest, tried: frozenset[WorkerId]
    ) -> Pick:
        self.waiting += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.was_cancelled += 1
            raise
        finally:
            self.waiting -= 1
        choice = super().pick(request, tried)
        assert isinstance(choice, Pick)
        return choice


@wire
async def test_c105_a_choice_that_takes_long_holds_up_nobody_else() -> None:
    """C105."""
    async with worker(answering(json_answer())) as w, running(LatePicker(w)) as gateway:
        stuck = [asyncio.create_task(gateway.ask(post())) for _ in range(8)]
        await until(lambda: gateway.picker.waiting == 8)
        for _ in range(20):
            assert (await gateway.ask(get("/health"))).status == 200
        assert gateway.picker.waiting == 8
        gateway.picker.go_on.set()
        assert [reply.status for reply in await asyncio.gather(*stuck)] == [200] * 8


@wire
async def test_a_choice_is_not_made_any_more_for_a_client_that_left() -> None:
    async with worker(answering(json_answer())) as w, running(LatePicker(w)) as gateway:
        client = await gateway.client()
        await client.send(post())
        await until(lambda: gateway.picker.waiting == 1)
        client.reset()
        await gateway.settled()
        await until(lambda: gateway.front.counters.late_picks == 0)
        assert gateway.picker.was_cancelled == 1
        assert gateway.picker.ends == []
        assert w.connection_count == 0


class ChaosWorker:
    """Fails at a random point of each answer."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    async def __call__(self, served: Served) -> None:
        dice = self.dice
        while True:
            await served.request()
            point = dice.random()
            if point < 0.08:
                served.reset()
                return
            if point < 0.12:
                await served.send(json_answer(b"{}", "503 Busy"))
                continue
            if point < 0.15:
                await served.send(b"HTTP/1.1 200 OK\r\nconte")
                return
            await served.send(SSE_HEAD)
            for index in range(dice.randrange(4)):
                await served.send(event(str(index)))
                if dice.random() < 0.08:
                    await served.send(b"ff\r\nhalf")
                    return
            await served.send(END)


async def _chaotic_client(gateway: Running, dice: random.Random, rounds: int) -> None:
    client: Client | None = None
    for _ in range(rounds):
        client = client or await gateway.client()
        await client.send(post(STREAM))
        point = dice.random()
        if point < 0.1:
            client.reset()
            client = None
            continue
        try:
            if point < 0.2:
                await client.head()
                client.close()
                client = None
                continue
            reply = await client.reply()
            if reply.headers.get("connection") == "close" or not reply.is_whole:
                client = None
            elif reply.status == 200 and "[DONE]" not in reply.events[-1]:
                assert "error" in json.loads(reply.events[-1])
                client = None
        except (asyncio.IncompleteReadError, ConnectionError):
            client = None
    if client is not None:
        client.close()


@wire
async def test_the_books_are_right_whatever_order_things_fail_in() -> None:
    """C06, C07, C08, C09: FixedPicker asserts at each step; here nothing may be left over."""
    dice = random.Random(20_261_129)
    retry = RetryConfig(retry_initial_backoff_ms=1, retry_max_backoff_ms=3)
    async with (
        worker(ChaosWorker(random.Random(1)), "a") as a,
        worker(ChaosWorker(random.Random(2)), "b") as b,
        worker(ChaosWorker(random.Random(3)), "c") as c,
        running(FixedPicker(a, b, c), retry=retry) as gateway,
    ):
        await asyncio.gather(
            *(_chaotic_client(gateway, random.Random(dice.random()), 60) for _ in range(16))
        )
        await gateway.settled()
        counters = gateway.front.counters
        assert gateway.picker.open_count == 0
        assert not +gateway.picker.in_flight
        assert len(gateway.picker.ends) == counters.attempts
        assert len(gateway.log) == sum(counters.requests.values())
        kinds = {end for _, end, _ in gateway.picker.ends}
        assert kinds == {FAILED, COMPLETE, GONE}
        await until(lambda: counters.open_upstreams == gateway.front.pool.idle_count())
        assert counters.attempts - counters.retries <= len(gateway.log)


@wire
async def test_every_path_counts_its_work_in_flight() -> None:
    """C01, C02: the unread path too."""
    go_on = asyncio.Event()

    async def slow(served: Served) -> None:
        while True:
            await served.request()
            await go_on.wait()
            await served.send(json_answer())

    paths = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/unheard-of"]
    async with worker(slow) as w, running(FixedPicker(w)) as gateway:
        tasks: list[asyncio.Task[object]] = []
        for count, path in enumerate(paths, start=1):
            body = {**CHAT, "prompt": "x"} if "chat" not in path else CHAT
            tasks.append(asyncio.create_task(gateway.ask(post(body, path=path))))
            await until(lambda count=count: gateway.picker.in_flight[w.name] == count)
        go_on.set()
        await asyncio.gather(*tasks)
        await gateway.settled()
        assert gateway.picker.in_flight[w.name] == 0
