"""Workers that fail before their first byte: replaced, charged once each, within the budget."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from scripted import (
    CHAT,
    COMPLETE,
    END,
    FAILED,
    SSE_HEAD,
    STREAM,
    FixedPicker,
    ScriptedWorker,
    Served,
    answering,
    event,
    json_answer,
    patient,
    post,
    running,
    staying,
    until,
    wire,
    worker,
)

from trunkline.config import RetryConfig
from trunkline.core.breaker import Breaker
from trunkline.core.records import Instant, WorkerId
from trunkline.gateway.contracts import AttemptEnd, Endpoint, Pick

GOOD = answering(SSE_HEAD + event("good") + END)


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
    for theirs in ({"stream": True, "min_tokens": 5}, {"stream": True, "max_tokens": 7}):
        async with (
            worker(refuses_503, "a") as a,
            worker(closes, "b") as b,
            worker(GOOD, "c") as c,
            running(FixedPicker(a, b, c)) as gateway,
        ):
            assert (await gateway.ask(post({**CHAT, **theirs}))).status == 200
        bodies = [body for w in (a, b, c) for _, _, body in w.seen]
        assert bodies == [json.dumps({**CHAT, **theirs}).encode()] * 3


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


@pytest.mark.parametrize("body_bytes", [2, 60_000])
def test_an_answer_cut_in_the_middle_is_asked_for_elsewhere_while_nothing_of_it_went_out(
    body_bytes: int,
) -> None:
    """Answers with a length up to 64 KiB go out whole or not at all."""

    @wire
    async def scenario() -> None:
        whole = json_answer(b"x" * body_bytes)

        async def dies(served: Served) -> None:
            await served.request()
            for cut in (whole[:40], whole[40:-2], whole[-2:-1]):
                await served.send(cut)
                await asyncio.sleep(0.01)
            served.reset()

        async with (
            worker(dies, "bad") as bad,
            worker(answering(whole), "good") as good,
            running(FixedPicker(bad, good)) as gateway,
        ):
            reply = await gateway.ask(post())
            assert (reply.status, reply.is_whole, reply.body) == (200, True, b"x" * body_bytes)
            await gateway.settled()
            assert gateway.picker.ends == [(bad.name, FAILED, None), (good.name, COMPLETE, None)]
            gateway.picker.workers = gateway.picker.workers[:1]
            alone = await gateway.ask(post())
            assert (alone.status, alone.error["code"]) == (502, "worker_lost")

    scenario()


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
    upstream = patient(first_byte_timeout_ms=5_000)
    async with (
        worker(staying(), "w0") as w0,
        worker(answering(json_answer()), "w1") as w1,
        running(FixedPicker(w0), upstream=upstream) as gateway,
    ):
        stuck = [asyncio.create_task(gateway.ask(post())) for _ in range(20)]
        await until(lambda: gateway.picker.in_flight[w0.name] == 20)
        gateway.picker.workers = [(w1.name, w1.endpoint)]
        for _ in range(20):
            assert (await gateway.ask(post())).status == 200
        assert not any(task.done() for task in stuck), "the others did not wait for them"
        for reply in await asyncio.gather(*stuck):
            assert reply.status == 504
            assert reply.error["type"] == "timeout"
        await gateway.settled()
        assert gateway.picker.open_count == 0


@wire
async def test_a_connection_that_does_not_come_up_in_time_is_given_up() -> None:
    upstream = patient(connect_timeout_ms=100)
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
            reply = await gateway.ask(post())
            assert reply.status == 502
    finally:
        for sock in (full, *fillers):
            sock.close()


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
        if end in (FAILED, AttemptEnd.WORKER_LATE):
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

    upstream = patient(first_byte_timeout_ms=1_500)
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
