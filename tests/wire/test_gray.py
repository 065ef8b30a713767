"""Gray workers: those whose health says yes and whose users say no. F2, F4, C75."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fleet import WAIT_S, Gateway, Process, Processes, processes, text_of, until, user
from scripted import (
    COMPLETE,
    END,
    SSE_HEAD,
    STREAM,
    FixedPicker,
    Served,
    answering,
    chunk,
    event,
    in_two,
    post,
    running,
    staying,
    wire,
    worker,
)

from trunkline.core.pace import HISTORY_GAPS, Pace, Standing
from trunkline.core.records import Instant, WorkerId
from trunkline.gateway.contracts import AttemptEnd, Endpoint, InferenceRequest, Pick

LATE = AttemptEnd.WORKER_LATE
GOOD = answering(SSE_HEAD + event("good") + END)
STREAMED = post(STREAM)


class PacedPicker(FixedPicker):
    """Its workers have a history: a token each 5 ms, the first within 150 ms."""

    def __init__(self, *workers: Any, gap_ms: float = 5.0) -> None:
        super().__init__(*workers)
        self.paces: dict[WorkerId, Pace] = {}
        for name, _ in self.workers:
            self.paces[name] = pace = Pace(gap_floor_ms=150.0)
            for number in range(HISTORY_GAPS):
                pace.moved(1, gap_ms, Instant(number))

    def picked(self, request: InferenceRequest, name: WorkerId, endpoint: Endpoint) -> Pick:
        pick = super().picked(request, name, endpoint)
        pick.pace = self.paces[name]
        pick.first_token_ms = 150.0 if request.is_stream else None
        return pick


async def only_comments(served: Served) -> None:
    """One token, and then nothing but signs of life."""
    await served.request()
    await served.send(SSE_HEAD + event("one"))
    while True:
        await served.send(chunk(b": keep-alive\n\n"))
        await asyncio.sleep(0.01)


@wire
async def test_a_stream_whose_worker_keeps_silent_before_any_answer_goes_elsewhere() -> None:
    async with (
        worker(staying(), "gray") as gray,
        worker(GOOD, "good") as good,
        running(PacedPicker(gray, good)) as gateway,
    ):
        reply = await gateway.ask(STREAMED)
        assert (reply.status, reply.events[-1]) == (200, "[DONE]")
        await gateway.settled()
        assert gateway.picker.ends == [(gray.name, LATE, None), (good.name, COMPLETE, None)]


@wire
async def test_keep_alive_comments_are_no_tokens() -> None:
    async with worker(only_comments, "gray") as gray, running(PacedPicker(gray)) as gateway:
        reply = await gateway.ask(STREAMED)
        assert json.loads(reply.events[-1])["error"]["code"] == "worker_late"
        assert "[DONE]" not in reply.events
        await gateway.settled()
        assert gateway.picker.ends == [(gray.name, LATE, None)]


@wire
async def test_an_answer_that_is_no_stream_has_the_settings_time() -> None:
    """How long it takes is up to its length, which nobody knows."""
    go_on = asyncio.Event()
    body = b'{"ok":true}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n"
    async with (
        worker(in_two(head + body[:4], go_on, body[4:]), "w") as slow,
        running(PacedPicker(slow)) as gateway,
    ):
        asked = asyncio.create_task(gateway.ask(post()))
        await asyncio.sleep(0.4)  # well beyond the limits of a stream
        go_on.set()
        assert (await asked).body == body


@pytest.mark.parametrize("gap_ms", [None, 60_000.0], ids=["no history", "a slow pool"])
def test_a_slow_stream_of_a_slow_pool_survives(gap_ms: float | None) -> None:
    @wire
    async def run() -> None:
        go_on = asyncio.Event()
        first, then = SSE_HEAD + event("one"), event("two") + END
        async with worker(in_two(first, go_on, then), "w") as slow:
            picker = PacedPicker(slow, gap_ms=gap_ms or 5.0)
            if gap_ms is None:
                picker.paces[slow.name] = Pace(gap_floor_ms=150.0)
            async with running(picker) as gateway:
                asked = asyncio.create_task(gateway.ask(STREAMED))
                await asyncio.sleep(0.4)
                go_on.set()
                assert (await asked).events[-1] == "[DONE]"

    run()


@wire
async def test_what_streams_give_is_told_to_the_pace_of_their_worker() -> None:
    async def steady(served: Served) -> None:
        await served.request()
        await served.send(SSE_HEAD)
        for _ in range(60):
            await served.send(event("more"))
            await asyncio.sleep(0.005)
        await served.send(END)

    async with worker(steady, "w") as w, running(PacedPicker(w)) as gateway:
        pace = gateway.picker.paces[w.name]
        before = pace.tokens
        assert (await gateway.ask(STREAMED)).events[-1] == "[DONE]"
        assert 30 < pace.tokens - before <= 61
        assert pace.standing(Instant(0.0)) is Standing.GOOD


# -- processes -------------------------------------------------------------------------------------

GRAY = (
    *("--profile", "tiny", "--no-disable-gray-detection", "--stream-gap-floor-ms", "1500"),
    *("--health-failure-threshold", "1000"),
)


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


def state(gateway: Gateway, process: Process) -> str:
    return gateway.worker(process)["state"]


def test_f2_a_stopped_worker_gets_no_new_work_and_comes_back_when_it_goes_on(
    started: Processes,
) -> None:
    """Its health probe would take far longer: here it would never take it out."""
    workers = started.workers(3, "--profile", "tiny")
    gateway = started.gateway([one.url for one in workers], *GRAY)
    stopped = workers[0]
    stopped.send(signal.SIGSTOP)
    until(lambda: state(gateway, stopped) == "silent", "the stopped worker is left out")
    assert "gray.silent" in gateway.process.log()
    for number in range(12):
        answer = gateway.chat(text_of(20, number))
        assert (answer.status, answer.worker != stopped.name) == (200, True)
    assert gateway.metric("worker_health", worker=stopped.name) == 0
    assert gateway.metric("panic_routing") == 0
    stopped.send(signal.SIGCONT)
    until(lambda: state(gateway, stopped) == "ready", "it is back")


def test_f2_when_more_than_half_of_the_fleet_is_silent_all_of_it_is_routed_to(
    started: Processes,
) -> None:
    workers = started.workers(3, "--profile", "tiny")
    gateway = started.gateway([one.url for one in workers], *GRAY)
    for one in workers[:2]:
        one.send(signal.SIGSTOP)
    until(lambda: gateway.metric("panic_routing") == 1, "a panic")
    assert gateway.client.get("/readiness").status_code == 200
    until(lambda: "panic.routing" in gateway.process.log(), "a line in the log")
    for one in workers[:2]:
        one.send(signal.SIGCONT)
    until(lambda: gateway.metric("panic_routing") == 0, "its end")
    assert gateway.metric("panics_total") >= 1


def test_f2_streams_at_a_stopped_worker_end_by_the_deadline_between_tokens(
    started: Processes,
) -> None:
    """With an error that says so, where there is no other worker; also when it goes on later."""
    [worker_] = started.workers(1, "--profile", "fifo:5,0.01,20")
    gateway = started.gateway([worker_.url], *GRAY)
    assert gateway.chat("history", stream=True, max_tokens=64).status == 200
    more = {"stream": True, "max_tokens": 400}
    until(lambda: gateway.chat("more", **more).status == 200, "it has a history")
    url, body = f"{gateway.url}/v1/chat/completions", user("x", stream=True, max_tokens=3_000)
    lines: list[str] = []
    with httpx.Client(timeout=WAIT_S) as client, client.stream("POST", url, json=body) as reply:
        for line in reply.iter_lines():
            lines += [line] if line else []
            if len(lines) == 5:
                worker_.send(signal.SIGSTOP)
    worker_.send(signal.SIGCONT)
    assert lines[-1].startswith("data: {"), lines[-1]
    assert json.loads(lines[-1][6:])["error"]["code"] == "worker_late"
    assert len(lines) < 1_000
    gateway.wait_quiet()
