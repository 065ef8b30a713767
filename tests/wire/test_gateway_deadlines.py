"""Clients that say how long they wait and how often to try again, over real sockets."""

from __future__ import annotations

import asyncio

from scripted import (
    COMPLETE,
    END,
    GONE,
    SSE_HEAD,
    STREAM,
    FixedPicker,
    answering,
    event,
    in_two,
    json_answer,
    post,
    running,
    staying,
    until,
    wire,
    worker,
)

SHORT = "x-litellm-timeout: 0.2\r\n"
GOOD = answering(json_answer())


@wire
async def test_who_gave_a_time_out_is_answered_when_it_is_over_and_the_worker_let_go() -> None:
    gone = asyncio.Event()
    async with (
        worker(staying(gone=gone), "a") as a,
        worker(GOOD, "b") as b,
        running(FixedPicker(a, b)) as gateway,
    ):
        reply = await gateway.ask(post(extra=SHORT))

        assert reply.status == 504
        assert (reply.error["type"], reply.error["code"]) == ("timeout", "deadline_exceeded")
        await gone.wait()
        assert gateway.picker.ends == [(a.name, GONE, None)]  # nobody is to blame
        assert b.connection_count == 0


@wire
async def test_a_stream_that_has_begun_is_not_ended_by_its_time_out() -> None:
    go_on = asyncio.Event()
    script = in_two(SSE_HEAD + event("a"), go_on, event("b") + END)
    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        asked = asyncio.create_task(gateway.ask(post(STREAM, extra=SHORT)))
        await until(lambda: bool(gateway.picker.first_bytes))
        started = gateway.front.now_ms()
        await until(lambda: gateway.front.now_ms() > started + 400.0)

        go_on.set()

        assert len((await asked).events) == 3
        assert gateway.picker.ends == [(w.name, COMPLETE, None)]


@wire
async def test_keep_alive_comments_are_no_first_token() -> None:
    waiting = staying(SSE_HEAD + b"d\r\n: keep-alive\n\r\n")
    async with worker(waiting) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post(STREAM, extra=SHORT))

        assert "deadline_exceeded" in reply.events[-1]
        assert "[DONE]" not in reply.events
        assert gateway.picker.ends == [(w.name, GONE, None)]


@wire
async def test_a_client_may_wish_for_fewer_attempts_and_not_for_more() -> None:
    async with (
        worker(answering(json_answer(b"{}", "503 Service Unavailable")), "a") as a,
        worker(answering(json_answer(b"{}", "503 Service Unavailable")), "b") as b,
        worker(answering(json_answer(b"{}", "503 Service Unavailable")), "c") as c,
        worker(GOOD, "d") as d,
        running(FixedPicker(a, b, c, d)) as gateway,
    ):
        none = await gateway.ask(post(extra="x-litellm-num-retries: 0\r\n"))
        assert (none.status, gateway.front.counters.attempts) == (503, 1)

        many = await gateway.ask(post(extra="x-litellm-num-retries: 9\r\n"))
        assert (many.status, gateway.front.counters.attempts) == (503, 1 + 3)


@wire
async def test_a_time_out_that_is_no_number_is_refused_before_anything_is_begun() -> None:
    async with worker(GOOD) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post(extra="x-litellm-timeout: soon\r\n"))

        assert (reply.status, reply.error["param"]) == (400, "x-litellm-timeout")
        assert w.connection_count == 0


@wire
async def test_no_further_attempt_is_made_for_a_client_that_has_given_up() -> None:
    """Even where the sweep has not come by yet."""
    go_on = asyncio.Event()
    late = in_two(b"", go_on, json_answer(b"{}", "503 Service Unavailable"))
    async with (
        worker(late, "a") as a,
        worker(GOOD, "b") as b,
        running(FixedPicker(a, b), sweep_ms=600_000) as gateway,
    ):
        asked = asyncio.create_task(gateway.ask(post(extra=SHORT)))
        await gateway.picker.begun.wait()
        started = gateway.front.now_ms()
        await until(lambda: gateway.front.now_ms() > started + 400.0)

        go_on.set()

        assert (await asked).status == 503
        assert b.connection_count == 0
