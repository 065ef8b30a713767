"""Workers that die, come back, stall, fill up and fail, under a real gateway."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fleet import (
    WAIT_S,
    Gateway,
    Process,
    Processes,
    at_once,
    engine_script,
    free_port,
    processes,
    text_of,
    until,
    url_of,
    user,
)
from scripted import (
    json_answer,
    wire,
    worker,
)

TINY = ("--profile", "tiny")
STEADY = ("--profile", "fifo:10,0.01,4")
FAILED = json_answer(b'{"error":{"message":"busy"}}', "503 Service Unavailable")


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


# -- kill -9 ---------------------------------------------------------------------------------------


@dataclass
class Load:
    """Clients that ask one after the other until they are told to stop."""

    gateway: Gateway
    statuses: list[int] = field(default_factory=list[int])
    """Of each answer that was no stream."""
    cut_streams: int = 0
    whole_streams: int = 0
    is_over: bool = False

    async def run(self, clients: int, during: Callable[[], Any]) -> None:
        """Run the clients while `during` runs in a thread, and until they have ended."""
        limits = httpx.Limits(max_connections=None)
        url = self.gateway.url
        async with (
            httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(clients):
                group.create_task(self._ask(client, number, is_stream=number % 3 == 0))
            try:
                await asyncio.to_thread(during)
            finally:
                self.is_over = True

    async def _ask(self, client: httpx.AsyncClient, number: int, *, is_stream: bool) -> None:
        turn = 0
        while not self.is_over:
            turn += 1
            text = f"{text_of(60, number % 7)} {text_of(30, (number, turn))}"
            if is_stream:
                await self._stream(client, user(text, stream=True, max_tokens=12))
                continue
            reply = await client.post("/v1/chat/completions", json=user(text, max_tokens=4))
            self.statuses.append(reply.status_code)

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200, "a stream that had not begun is never lost"
            text = (await reply.aread()).decode()
        if text.rstrip().endswith("data: [DONE]"):
            self.whole_streams += 1
        else:
            self.cut_streams += 1
            last = text.rstrip().rpartition("data: ")[2]
            assert json.loads(last)["error"]["message"], "a cut stream ends in an error event"


def test_a_killed_worker_loses_no_request_that_had_not_begun_and_comes_back_empty(
    started: Processes,
) -> None:
    workers = started.workers(3, *STEADY)
    gateway = started.gateway([w.url for w in workers], *STEADY)
    victim = workers[1]
    load = Load(gateway)

    def chosen() -> float:
        """How often a decision took the victim."""
        return gateway.metric("worker_selection_total", worker=victim.name)

    def kill_and_restart() -> None:
        until(lambda: gateway.rank(victim)["held_blocks"] > 50, "the victim holds something")
        before = gateway.rank(victim)["incarnation"]
        victim.kill()
        until(lambda: gateway.worker(victim)["state"] == "unhealthy", "its health failed")
        chosen_before, answered = chosen(), len(load.statuses)
        until(lambda: len(load.statuses) > answered + 50, "load without it")
        assert chosen() == chosen_before
        started.worker(*STEADY, "--port", str(victim.port))
        until(lambda: gateway.worker(victim)["state"] == "ready", "it is back")
        assert gateway.rank(victim)["incarnation"] > before
        assert gateway.worker(victim)["breaker"] == "closed"
        chosen_before = chosen()
        until(lambda: chosen() > chosen_before + 5, "it gets work again")
        until(lambda: load.whole_streams > 50, "streams, too")

    asyncio.run(load.run(24, kill_and_restart))
    assert set(load.statuses) == {200}, "nothing was lost"
    assert gateway.metric("retries_total") > 0
    gateway.wait_quiet()


def test_a_fleet_of_one_whose_worker_was_killed_says_so_with_the_first_request(
    started: Processes,
) -> None:
    """Not a probe's turn later: those are a minute away."""
    only = started.worker(*TINY)
    slow = ("--health-check-interval-secs", "60", "--load-interval-secs", "60")
    gateway = started.gateway([only.url], *TINY, *slow)
    assert gateway.chat("hello").status == 200
    only.kill()
    assert gateway.chat("hello").status in (502, 503)
    until(lambda: gateway.worker(only)["state"] == "unhealthy", "it was probed at once")
    assert "ConnectionRefusedError" in gateway.worker(only)["reason"]
    assert gateway.metric("worker_health", worker=only.name) == 0
    ready = gateway.client.get("/readiness")
    assert (ready.status_code, ready.json()["status"]) == (503, "no_workers")
    refused = gateway.chat("hello")
    assert (refused.status, refused.error["code"]) == (503, "no_worker")
    again = gateway.admin("/workers", "POST", json={"url": only.url})
    assert again.json()["state"] == "unhealthy", "it is known, and not ready"
    started.worker(*TINY, "--port", str(only.port))
    until(lambda: gateway.worker(only)["state"] == "ready", "it is back")
    assert gateway.client.get("/readiness").json()["status"] == "ready"
    assert "worker.reached" in gateway.process.log()


@pytest.mark.parametrize("feed", ["exact", "approximate"])
def test_a_worker_that_restarts_at_once_is_not_credited_with_what_it_held(
    started: Processes, feed: str
) -> None:
    """Faster than three failed probes, so that its health never fails."""
    first = started.worker(*TINY, "--feed", feed)
    gateway = started.gateway([first.url], *TINY, "--health-failure-threshold", "1000")
    prompt = text_of(200, "restart")
    gateway.chat(prompt)
    assert gateway.chat(prompt).predicted > 400
    before = gateway.rank(first)["incarnation"]
    first.kill()
    started.worker(*TINY, "--feed", feed, "--port", str(first.port))
    until(lambda: gateway.rank(first)["incarnation"] > before, "the new life was noticed")
    gateway.wait_ready(1)
    again = gateway.chat(prompt)
    assert (again.predicted, again.cached) == (0, 0)
    warm = gateway.chat(prompt)
    assert warm.predicted == warm.cached > 400
    gateway.wait_held(first, 1 if feed == "exact" else 0)


# -- breaker ---------------------------------------------------------------------------------------


def closed(gateway: Gateway) -> bool:
    """Whether no breaker is open any more; asks, as only answers close one."""
    return gateway.chat("hi").status == 200 and gateway.metric("worker_cb_state") == 0


def test_c86_a_worker_that_heals_is_used_again_within_two_probe_intervals() -> None:
    @wire
    async def scenario() -> None:
        is_failing = True
        posts = 0

        async def answer(path: str, headers: dict[str, str], body: bytes) -> bytes:
            nonlocal posts
            posts += 1
            return FAILED if is_failing else json_answer()

        with processes() as started:
            async with worker(engine_script(answer)) as w:
                gateway = await asyncio.to_thread(
                    started.gateway,
                    [url_of(w)],
                    *("--cb-failure-threshold", "5", "--cb-success-threshold", "1"),
                    *("--cb-timeout-duration-secs", "4"),
                )
                flood = await at_once(gateway, [user("hi")] * 20)
                assert {reply.status for reply in flood} == {503}
                [row] = gateway.workers().values()
                assert row["breaker"] == "open"
                assert row["state"] == "ready", "it is all there is: a panic lets it be tried"
                assert gateway.metric("panic_routing") == 1
                before = posts
                [refused] = await at_once(gateway, [user("hi")])
                assert refused.error["message"] == "busy", "the worker's own word, and no other"
                assert posts > before
                is_failing = False
                await asyncio.to_thread(
                    until, lambda: gateway.chat("hi").status == 200, "it serves again"
                )
                await asyncio.to_thread(until, lambda: closed(gateway), "the breaker is closed")
                assert gateway.metric("panic_routing") == 0

    scenario()


def test_one_failing_worker_is_left_alone_and_the_other_serves_all(started: Processes) -> None:
    failing = started.worker(*TINY, "--fault", "http-503")
    working = started.worker(*TINY)
    gateway = started.gateway([failing.url, working.url], *TINY, "--cb-failure-threshold", "3")
    for number in range(30):
        answer = gateway.chat(text_of(20, number))
        assert (answer.status, answer.worker) == (200, working.name)
    assert gateway.worker(failing)["breaker"] == "open"
    assert gateway.metric("retries_total") == 3
    assert gateway.rank(failing)["predicted_blocks"] == 0


def test_c77_a_hanging_worker_is_a_timeout_until_its_breaker_opens(started: Processes) -> None:
    """What may be computing is not sent twice: a time-out is told to the client, as what it is."""
    hanging = started.worker(*TINY, "--fault", "hang")
    working = started.worker(*TINY)
    gateway = started.gateway(
        [hanging.url, working.url],
        *(*TINY, "--first-byte-timeout-ms", "3000", "--cb-failure-threshold", "2"),
    )
    answers = [gateway.chat(text_of(20, number)) for number in range(20)]
    late = [answer for answer in answers if answer.status != 200]
    assert [(answer.status, answer.error["type"]) for answer in late] == [(504, "timeout")] * 2
    assert {answer.worker for answer in answers if answer.status == 200} == {working.name}
    assert gateway.worker(hanging)["breaker"] == "open"
    gateway.wait_quiet()


# -- leases and watermarks -------------------------------------------------------------------------


def digest_fleet(
    started: Processes, words: tuple[str, ...], *flags: str, count: int = 1
) -> tuple[Gateway, list[Process]]:
    """Workers that beat ten times a second, and a gateway that believes a beat for 5 s."""
    admin_port = str(free_port())
    beats = (
        *("--feed", "digest", "--heartbeat-interval-ms", "100"),
        *("--heartbeat-url", f"http://127.0.0.1:{admin_port}/heartbeat"),
    )
    begun = started.workers(count, *beats, *words)
    gateway = started.gateway(
        [process.url for process in begun],
        *(*TINY, "--admin-port", admin_port, "--heartbeat-ttl-ms", "5000", *flags),
    )
    modes = lambda: {row["mode"] for row in gateway.workers().values()}  # noqa: E731
    until(lambda: modes() == {"digest"}, "all have sent heartbeats")
    return gateway, begun


def test_a_worker_whose_heartbeats_stop_is_excluded_until_they_go_on(started: Processes) -> None:
    gateway, (stopped, other) = digest_fleet(
        started, TINY, "--health-failure-threshold", "1000", count=2
    )
    assert usable(gateway) == 2
    stopped.send(signal.SIGSTOP)
    until(lambda: usable(gateway) == 1, "the lease ran out")
    for number in range(10):
        assert gateway.chat(text_of(30, number)).worker == other.name
    [latest] = gateway.admin("/decisions", params={"limit": "1"}).json()["decisions"]
    assert latest["excluded"] == {stopped.name: "lease-expired"}
    stopped.send(signal.SIGCONT)
    until(lambda: usable(gateway) == 2, "the lease was renewed")


def usable(gateway: Gateway) -> int:
    """How many workers a decision could choose, leases included."""
    return int(gateway.client.get("/readiness").json()["detail"].partition(" ")[0])


@pytest.mark.parametrize("feed", ["exact", "digest"])
def test_a_worker_above_the_memory_watermark_gets_no_new_prefix(
    started: Processes, feed: str
) -> None:
    small = ("--profile", "fifo:2,0.001,40", "--blocks", "200")
    if feed == "digest":
        gateway, [full] = digest_fleet(started, small, "--memory-watermark", "0.4")
    else:
        full = started.worker(*small)
        gateway = started.gateway([full.url], *TINY, "--memory-watermark", "0.4")
    prompt = text_of(550, "watermark")
    assert gateway.chat(prompt).worker == full.name
    other = started.worker(*TINY)
    assert gateway.admin("/workers", "POST", json={"url": other.url}).status_code == 202
    gateway.wait_ready(2)
    body = user(prompt, stream=True, max_tokens=1_000)  # 40 s, if nobody ended it
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert full.name in stream.headers["x-trunkline-decision"], "it holds the prefix"
        until(lambda: decided(gateway, "over").get(full.name) == "watermark", "it is full")
        for number in range(10):
            assert gateway.chat(text_of(30, ("new", number))).worker == other.name
        assert next(line for line in lines if line).startswith("data: {"), "what runs goes on"
    until(lambda: full.name not in decided(gateway, "under"), "the client left, and room is")


def decided(gateway: Gateway, seed: str) -> dict[str, str]:
    """Who was excluded, and why, from a decision made now about a new prefix."""
    request_id = gateway.chat(text_of(20, (seed, time.monotonic()))).response.headers[
        "x-request-id"
    ]
    return gateway.admin(f"/decisions/{request_id}").json()["excluded"]


def test_a_worker_whose_events_cannot_be_heard_is_shown_so_until_they_can(
    started: Processes,
) -> None:
    """Stopped, it closes no connection: its silence is noticed all the same."""
    stopped = started.worker(*TINY)
    gateway = started.gateway([stopped.url])
    prompt = text_of(100, "silent")
    assert gateway.complete(prompt).status == 200
    until(lambda: gateway.rank(stopped)["held_blocks"], "it told what it holds")
    held = gateway.rank(stopped)["held_blocks"]

    stopped.send(signal.SIGSTOP)
    try:
        until(lambda: gateway.rank(stopped)["feed_state"] == "silent", "nothing is heard")
        assert gateway.metric("kv_event_stream_silent", worker=stopped.name) == 1
        assert gateway.rank(stopped)["held_blocks"] == held
    finally:
        stopped.send(signal.SIGCONT)

    until(lambda: gateway.rank(stopped)["feed_state"] == "live", "it is heard again")
    gateway.wait_ready(1)
    until(lambda: gateway.rank(stopped)["held_blocks"] == held, "nothing was lost")
