"""Retries, time-outs, leaving clients, stale connections, drain: the books hold throughout."""

from __future__ import annotations

import asyncio
import json
import random
import socket

import pytest
from scripted import (
    CHAT,
    END,
    SSE_HEAD,
    Client,
    FixedPicker,
    Running,
    Script,
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

from trunkline.config import RetryConfig, UpstreamConfig
from trunkline.core.breaker import Breaker
from trunkline.core.records import Instant, WorkerId
from trunkline.gateway.contracts import AttemptEnd, Endpoint, InferenceRequest, Pick

STREAM = {**CHAT, "stream": True}
GOOD = answering(SSE_HEAD + event("good") + END)
FAILED, COMPLETE, GONE = AttemptEnd.WORKER_FAILED, AttemptEnd.COMPLETE, AttemptEnd.CLIENT_GONE


async def refuses_503(served: Served) -> None:
    await served.request()
    await served.send(json_answer(b'{"error":"busy"}', "503 Service Unavailable"))
    await served.gone()


async def resets(served: Served) -> None:
    await served.request()
    served.reset()


async def closes(served: Served) -> None:
    await served.request()


async def closes_mid_head(served: Served) -> None:
    await served.request()
    await served.send(b"HTTP/1.1 200 OK\r\ncontent-")


async def babbles(served: Served) -> None:
    await served.request()
    await served.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    await served.gone()


BAD_STARTS = [refuses_503, resets, closes, closes_mid_head, babbles]


@pytest.mark.parametrize("script", BAD_STARTS, ids=lambda s: s.__name__)
def test_c68_a_worker_that_fails_before_its_first_byte_is_replaced(script: object) -> None:
    """C68: the client sees 200 only from the good one. C09: each worker is charged once."""

    @wire
    async def scenario() -> None:
        async with (
            worker(script, "bad") as bad,  # pyright: ignore[reportArgumentType]
            worker(GOOD, "good") as good,
            running(FixedPicker(bad, good)) as gateway,
        ):
            reply = await gateway.ask(post(STREAM))
            assert (reply.status, reply.is_whole) == (200, True)
            assert json.loads(reply.events[0])["choices"][0]["delta"]["content"] == "good"
            await gateway.settled()
            assert gateway.picker.ends == [(bad.name, FAILED, None), (good.name, COMPLETE, None)]
            assert gateway.picker.first_bytes == [good.name]
            assert gateway.front.counters.retries == 1
            assert gateway.log[0].attempts == 2

    scenario()


@wire
async def test_c70_a_retried_attempt_sends_the_very_body_of_the_first() -> None:
    """What the client wrote of stream, min_tokens and max_tokens reaches each worker unchanged."""
    seen: list[bytes] = []

    def noting(then: Script) -> Script:
        async def script(served: Served) -> None:
            request, read = served.request, []

            async def note() -> tuple[str, dict[str, str], bytes]:
                read.append(await request())
                seen.append(read[-1][2])
                return read[-1]

            served.request = note
            await then(served)

        return script

    for theirs in ({"stream": True, "min_tokens": 5}, {"stream": True, "max_tokens": 7}):
        seen.clear()
        async with (
            worker(noting(refuses_503), "a") as a,
            worker(noting(closes), "b") as b,
            worker(noting(GOOD), "c") as c,
            running(FixedPicker(a, b, c)) as gateway,
        ):
            assert (await gateway.ask(post({**CHAT, **theirs}))).status == 200
        assert len(seen) == 3
        assert set(seen) == {json.dumps({**CHAT, **theirs}).encode()}


@wire
async def test_a_worker_that_does_not_listen_is_replaced() -> None:
    async with worker(GOOD, "good") as good:
        async with worker(GOOD, "dead") as dead:
            nobody = (dead.name, dead.endpoint)
        async with running(FixedPicker(nobody, good)) as gateway:
            assert (await gateway.ask(post(STREAM))).status == 200
            assert gateway.picker.ends[0] == (dead.name, FAILED, None)


@wire
async def test_three_attempts_are_the_most_and_then_the_client_is_told() -> None:
    async with (
        worker(closes, "a") as a,
        worker(closes, "b") as b,
        worker(closes, "c") as c,
        worker(GOOD, "d") as d,
        running(FixedPicker(a, b, c, d)) as gateway,
    ):
        reply = await gateway.ask(post())
        assert reply.status == 502
        assert reply.error["type"] == "upstream_error"
        assert [end[0] for end in gateway.picker.ends] == ["a", "b", "c"]


@wire
async def test_the_only_workers_own_503_passes_unchanged() -> None:
    async with worker(refuses_503) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post())
        assert (reply.status, reply.json) == (503, {"error": "busy"})
        await gateway.settled()
        assert gateway.picker.ends == [(w.name, FAILED, None)]


@wire
async def test_c84_a_4xx_is_never_tried_again_and_never_blamed_on_the_worker() -> None:
    """C84."""
    bad_request = answering(json_answer(b"{}", "400 Bad Request"))
    async with (
        worker(bad_request, "a") as a,
        worker(GOOD, "b") as b,
        running(FixedPicker(a, b)) as gateway,
    ):
        for _ in range(100):
            assert (await gateway.ask(post())).status == 400
        await gateway.settled()
        assert gateway.picker.ends == [(a.name, COMPLETE, None)] * 100


@wire
async def test_a_500_is_passed_on_and_charged() -> None:
    async with (
        worker(answering(json_answer(b"{}", "500 Oops"))) as w,
        worker(GOOD, "b") as b,
        running(FixedPicker(w, b)) as gateway,
    ):
        assert (await gateway.ask(post())).status == 500
        await gateway.settled()
        assert gateway.picker.ends == [(w.name, FAILED, None)]


@wire
async def test_the_budget_ends_a_retry_storm() -> None:
    """F9, I12."""
    retry = RetryConfig(
        retry_budget_floor_per_s=0.0, retry_initial_backoff_ms=0, retry_max_backoff_ms=0
    )
    async with (
        worker(closes, "a") as a,
        worker(closes, "b") as b,
        running(FixedPicker(a, b), retry=retry) as gateway,
    ):
        for _ in range(50):
            await gateway.ask(post())
        counters = gateway.front.counters
        assert counters.attempts <= 60
        assert counters.retries <= 10
        assert counters.retries_denied > 0


@wire
async def test_no_second_worker_is_asked_where_retries_are_off() -> None:
    retry = RetryConfig(disable_retries=True)
    async with (
        worker(closes, "a") as a,
        worker(GOOD, "b") as b,
        running(FixedPicker(a, b), retry=retry) as gateway,
    ):
        assert (await gateway.ask(post())).status == 502


@wire
async def test_c75_a_worker_that_accepts_and_never_answers_stalls_only_its_own() -> None:
    """C75, C77, F4."""
    upstream = UpstreamConfig(first_byte_timeout_ms=400)

    async def silent(served: Served) -> None:
        await served.request()
        await served.gone()

    async with (
        worker(silent, "w0") as w0,
        worker(answering(json_answer()), "w1") as w1,
        running(FixedPicker(w0), upstream=upstream) as gateway,
    ):
        stuck = [asyncio.create_task(gateway.ask(post())) for _ in range(20)]
        await gateway.picker.begun.wait()
        gateway.picker.workers = [(w1.name, w1.endpoint)]
        loop = asyncio.get_running_loop()
        for _ in range(20):
            began_s = loop.time()
            assert (await gateway.ask(post())).status == 200
            assert loop.time() - began_s < 0.3
        replies = await asyncio.gather(*stuck)
        late = [reply for reply in replies if reply.status != 200]
        assert late
        for reply in late:
            assert reply.status == 504
            assert reply.error["type"] == "timeout"
        await gateway.settled()
        assert gateway.picker.open_count == 0


@wire
async def test_a_connection_that_does_not_come_up_in_time_is_given_up() -> None:
    upstream = UpstreamConfig(connect_timeout_ms=100)
    # A listener with a full backlog accepts nobody.

    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    fillers = [socket.socket() for _ in range(3)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
    endpoint = Endpoint(host="127.0.0.1", port=full.getsockname()[1], host_header="h")
    try:
        async with running(FixedPicker((WorkerId("w"), endpoint)), upstream=upstream) as gateway:
            reply = await asyncio.wait_for(gateway.ask(post()), 5)
            assert reply.status == 502
    finally:
        for sock in (full, *fillers):
            sock.close()


PHASES = ["before the first byte", "in the middle of a stream", "without streaming"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("is_reset", [False, True])
def test_c71_a_client_that_leaves_frees_its_worker_at_once(phase: str, is_reset: bool) -> None:
    """C71."""

    @wire
    async def scenario() -> None:
        gone = asyncio.Event()

        async def script(served: Served) -> None:
            await served.request()
            if phase == PHASES[1]:
                await served.send(SSE_HEAD + event("a"))
            await served.gone()
            gone.set()

        async with worker(script) as w, running(FixedPicker(w)) as gateway:
            client = await gateway.client()
            await client.send(post(CHAT if phase == PHASES[2] else STREAM))
            if phase == PHASES[1]:
                await client.head()
            else:
                await gateway.picker.begun.wait()
                await until(lambda: w.connection_count == 1)
            client.reset() if is_reset else client.close()
            await asyncio.wait_for(gone.wait(), 1)
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
        while True:
            await asyncio.wait_for(served.request(), idle_s)
            await served.send(json_answer())

    async def script(served: Served) -> None:
        try:
            await impatient(served)
        except TimeoutError:
            return

    upstream = UpstreamConfig(keepalive_idle_ms=10_000)  # far too long, on purpose
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

    async with worker(one_shot) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        for _ in range(4):
            await client.send(post())
            assert (await client.reply()).status == 200
        assert gateway.front.counters.stale_retries == 3
        assert gateway.front.counters.retries == 0
        assert [end for _, end, _ in gateway.picker.ends] == [COMPLETE] * 4
        client.close()


@wire
async def test_idle_connections_to_workers_are_let_go_below_the_workers_own_limit() -> None:
    upstream = UpstreamConfig(keepalive_idle_ms=100)
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), upstream=upstream) as gateway,
    ):
        await gateway.ask(post())
        await gateway.settled()
        assert gateway.front.pool.idle_count() == 1
        await until(lambda: gateway.front.counters.open_upstreams == 0)
        assert gateway.front.pool.idle_count() == 0


@wire
async def test_the_pool_keeps_no_more_than_its_bound() -> None:
    upstream = UpstreamConfig(max_idle_connections=3)
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), upstream=upstream) as gateway,
    ):
        await asyncio.gather(*(gateway.ask(post()) for _ in range(20)))
        await gateway.settled()
        assert gateway.front.pool.idle_count() <= 3


class BreakingPicker(FixedPicker):
    """With one breaker for each worker, as the membership keeps them; its time is the test's."""

    def __init__(self, *workers: ScriptedWorker) -> None:
        super().__init__(*workers)
        self.now = Instant(0.0)
        self.breakers = {
            w.name: Breaker(failure_threshold=3, success_threshold=1, pause_ms=1_000)
            for w in workers
        }

    def is_usable(self, name: WorkerId) -> bool:
        return self.breakers[name].is_usable(self.now)

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        super().ended(pick, end, cached_tokens)
        breaker = self.breakers[pick.worker]
        if end is FAILED:
            breaker.failed(self.now)
        elif end is COMPLETE:
            breaker.succeeded()


@wire
async def test_c86_a_worker_that_recovers_serves_again() -> None:
    """C86; C84 for the other half: 4xx keep every breaker closed."""
    is_down = [True]

    async def script(served: Served) -> None:
        while True:
            _, _, body = await served.request()
            if b"too long" in body:
                await served.send(json_answer(b"{}", "400 Bad Request"))
            elif is_down[0]:
                await served.gone()
            else:
                await served.send(json_answer())

    upstream = UpstreamConfig(first_byte_timeout_ms=50)
    async with worker(script) as w, running(BreakingPicker(w), upstream=upstream) as gateway:
        too_long = post({"model": "m", "messages": [{"role": "user", "content": "too long"}]})
        for _ in range(100):
            assert (await gateway.ask(too_long)).status == 400
        statuses = [(await gateway.ask(post())).status for _ in range(6)]
        assert statuses == [504, 504, 504, 503, 503, 503]
        is_down[0] = False
        gateway.picker.now = Instant(1_000.0)
        assert (await gateway.ask(post())).status == 200
        assert (await gateway.ask(post())).status == 200


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
        loop = asyncio.get_running_loop()
        for _ in range(20):
            began_s = loop.time()
            assert (await gateway.ask(get("/health"))).status == 200
            assert loop.time() - began_s < 0.2
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


@wire
async def test_draining_lets_streams_end_and_takes_nothing_new() -> None:
    go_on = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(SSE_HEAD + event("a"))
        await go_on.wait()
        await served.send(END)

    async with worker(script) as w, running(FixedPicker(w)) as gateway:
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
        await until(lambda: w.connection_count == 2)
        await gateway.front.drain(grace_ms=50)
        rest = await client.reader.read()
        assert b'"error"' in rest
        assert rest.endswith(b"0\r\n\r\n")
        assert (await waiting.reply()).status == 503
        assert [end for _, end, _ in gateway.picker.ends] == [GONE, GONE]
        assert gateway.front.counters.open_clients == 0
