"""Traces of real requests: what workers are told, and what a real collector gets over OTLP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from collector import Collector, Seen, collecting
from fleet import Answer, Gateway, Processes, processes, text_of, until, user
from scripted import (
    STREAM,
    FixedPicker,
    answering,
    get,
    json_answer,
    post,
    running,
    wire,
    worker,
)
from tenants import tenants

from traced import ended

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, CLIENT = 2, 3
"""Kinds, as OTLP numbers them."""


def parent(trace_id: str = TRACE, flags: str = "01") -> str:
    return f"00-{trace_id}-{SPAN}-{flags}"


# -- without the SDK -------------------------------------------------------------------------------


@wire
async def test_a_good_traceparent_goes_through_and_a_bad_one_does_not() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        for told, goes_on in (
            (parent(), True),
            (parent(flags="00"), True),
            (parent().upper(), False),
            (parent("0" * 32), False),
            ("secret-sk-123", False),
        ):
            extra = f"traceparent: {told}\r\ntracestate: v=1\r\n"
            assert (await gateway.ask(post(extra=extra))).status == 200
            _, headers, _ = w.seen[-1]
            assert headers.get("traceparent") == (told if goes_on else None)
            assert headers.get("tracestate") == ("v=1" if goes_on else None)
            assert gateway.log[-1].trace_id == (TRACE if goes_on else "")
        twice = f"traceparent: {parent()}\r\ntraceparent: {parent()}\r\n"
        assert (await gateway.ask(post(extra=twice))).status == 200
        assert "traceparent" not in w.seen[-1][1]
        assert (await gateway.ask(post(extra="tracestate: v=1\r\n"))).status == 200
        assert "tracestate" not in w.seen[-1][1]


@wire
async def test_a_refused_request_has_its_trace_in_the_log_too() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post(b"{", extra=f"traceparent: {parent()}\r\n"))
        assert reply.status == 400
        assert gateway.log[-1].trace_id == TRACE
        await gateway.ask(get("/v1/models", f"traceparent: {parent()}\r\n"))
        assert gateway.log[-1].trace_id == "", "what we answer ourselves has no trace"


def test_a_trace_is_begun_where_the_settings_say_so(started: Processes) -> None:
    """Here and at the worker, which shows what it got: a log line has the same id."""
    plain = started.worker("--profile", "tiny")
    made = started.gateway(
        [plain.url], "--make-traceparent", "--log-level", "debug", "--log-format", "json"
    )
    assert made.chat("hi").status == 200
    found = until(
        lambda: re.search(r'"request.finished".*"trace_id": "([0-9a-f]{32})"', made.process.log()),
        "the request is in the log",
    )
    assert found[1] != "0" * 32
    assert made.metric("trace_spans_total") == 0


# -- with a collector ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def gateway(started: Processes, collector: Collector) -> Gateway:
    workers = started.workers(2, "--profile", "tiny")
    urls = [one.url for one in workers]
    return started.gateway(urls, "--profile", "tiny", "--otlp-endpoint", collector.url)


def spans_of(collector: Collector, trace_id: str, least: int = 2) -> list[Seen]:
    until(lambda: len(collector.of(trace_id)) >= least, "the spans have arrived")
    return collector.of(trace_id)


def split(spans: list[Seen]) -> tuple[Seen, list[Seen]]:
    """The request's own span, and those of its attempts."""
    [root] = [span for span in spans if span.kind == SERVER]
    return root, [span for span in spans if span.kind == CLIENT]


def test_a_request_is_a_server_span_below_its_caller_with_one_below_it_for_the_attempt(
    gateway: Gateway, collector: Collector
) -> None:
    prompt, numbers = text_of(200, "trace"), itertools.count(100)

    def asked() -> tuple[str, Answer] | None:
        trace_id = f"{next(numbers):032x}"
        answer = gateway.chat(prompt, {"traceparent": parent(trace_id)}, model="trunkline-sim")
        return (trace_id, answer) if answer.cached else None

    trace_id, answer = until(asked, "some of it is reused")
    root, [attempt] = split(spans_of(collector, trace_id))
    assert root.parent_id == SPAN
    assert attempt.parent_id == root.span_id
    assert root.name == "chat trunkline-sim"
    assert root.resource["service.name"] == "trunkline"
    told = root.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "trunkline-sim"
    assert told["gen_ai.request.max_tokens"] == 2
    assert told["gen_ai.usage.input_tokens"] == answer.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == 2
    assert told["gen_ai.usage.cache_read.input_tokens"] == answer.cached > 0
    assert told["http.response.status_code"] == 200
    assert told["trunkline.request_id"] == answer.response.headers["x-request-id"]
    assert told["trunkline.worker"] == attempt.attributes["trunkline.worker"] == answer.worker
    assert root.began_ns <= attempt.began_ns <= attempt.ended_ns <= root.ended_ns
    assert not root.is_error
    until(lambda: gateway.metric("trace_spans_total") >= 2, "they are counted")


def test_streams_tell_their_usage_and_when_they_began(
    gateway: Gateway, collector: Collector
) -> None:
    trace_id = f"{2:032x}"
    more = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5}
    gateway.chat("a stream", {"traceparent": parent(trace_id)}, **more)
    root, _ = split(spans_of(collector, trace_id))
    assert root.attributes["gen_ai.request.stream"] is True
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    first_s = root.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0.0 < first_s <= (root.ended_ns - root.began_ns) / 1e9


def test_what_the_caller_does_not_want_sampled_is_not_and_goes_on_as_it_came(
    gateway: Gateway, collector: Collector
) -> None:
    unwanted, wanted = f"{3:032x}", f"{4:032x}"
    gateway.chat("x", {"traceparent": parent(unwanted, "00")})
    gateway.chat("x", {"traceparent": parent(wanted)})
    spans_of(collector, wanted)
    assert not collector.of(unwanted)


def test_a_refusal_is_a_span_without_attempts(gateway: Gateway, collector: Collector) -> None:
    trace_id = f"{5:032x}"
    answer = gateway.post(
        "/v1/chat/completions", user("x", temperature=99), {"traceparent": parent(trace_id)}
    )
    assert answer.status == 400
    root, attempts = split(spans_of(collector, trace_id, least=1))
    assert attempts == []
    assert root.attributes["error.type"] == answer.error["code"]
    assert not root.is_error, "the client's mistake, and no error of the server"


def test_each_attempt_is_a_span_and_a_failed_one_says_so(
    started: Processes, collector: Collector
) -> None:
    bad = started.worker("--profile", "tiny", "--fault", "http-503")
    good = started.worker("--profile", "tiny")
    flags = ("--profile", "tiny", "--policy", "round_robin", "--otlp-endpoint", collector.url)
    both = started.gateway([bad.url, good.url], *flags)
    for number in range(2):
        assert both.chat("x", {"traceparent": parent(f"{16 + number:032x}")}).status == 200
    found = [split(spans_of(collector, f"{16 + number:032x}")) for number in range(2)]
    root, attempts = max(found, key=lambda pair: len(pair[1]))
    assert [a.attributes["http.response.status_code"] for a in attempts] == [503, 200]
    assert [a.is_error for a in attempts] == [True, False]
    assert {a.parent_id for a in attempts} == {root.span_id}
    assert root.attributes["trunkline.attempts"] == 2


def test_a_stream_that_goes_on_elsewhere_is_two_attempts_and_one_usage(
    started: Processes, collector: Collector
) -> None:
    slow = {one.name: one for one in started.workers(2, "--profile", "tiny", "--time-scale", "20")}
    both = started.gateway(
        [one.url for one in slow.values()], "--profile", "tiny", "--otlp-endpoint", collector.url
    )
    trace_id, count = f"{7:032x}", 200  # four seconds
    body = {"prompt": "go on", "max_tokens": count, "stream": True, "model": "trunkline-sim"}
    headers = {"traceparent": parent(trace_id)}
    with both.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        rows = both.workers()
        slow[next(name for name in slow if rows[name]["requests_active"])].kill()
        assert "data: [DONE]" in list(lines)
    root, attempts = split(spans_of(collector, trace_id, least=3))
    assert [attempt.is_error for attempt in attempts] == [True, False]
    assert root.attributes["trunkline.attempts"] == 2
    assert root.attributes["gen_ai.usage.output_tokens"] == count
    assert root.name == "text_completion trunkline-sim"


def test_a_worker_is_told_of_the_span_of_its_own_attempt() -> None:
    """Of a retry too, and tracestate with it."""
    import random

    from trunkline.adapters.clock import SystemClock
    from trunkline.gateway.tracing import Trace, Tracer, spans_of

    over: list[Trace] = []
    clock = SystemClock()
    tracer = Tracer(dice=random.Random(3), now_ms=clock.now, wall=clock.wall, sink=over.append)

    @wire
    async def play() -> None:
        failing = answering(json_answer(status="503 Service Unavailable"))
        async with (
            worker(failing, "w0") as w0,
            worker(answering(json_answer()), "w1") as w1,
            running(FixedPicker(w0, w1), tracer=tracer) as gateway,
        ):
            extra = f"traceparent: {parent()}\r\ntracestate: v=1\r\n"
            assert (await gateway.ask(post(STREAM, extra=extra))).status == 200
            told = [w.seen[-1][1] for w in (w0, w1)]
        [trace] = over
        _, *attempts = spans_of(trace)
        assert [headers["traceparent"] for headers in told] == [
            f"00-{TRACE}-{attempt.span_id}-01" for attempt in attempts
        ]
        assert {headers["tracestate"] for headers in told} == {"v=1"}

    play()


def test_tenants_are_told_by_a_hash_unless_the_settings_say_otherwise(
    started: Processes, collector: Collector, tmp_path: Path
) -> None:
    one = started.worker("--profile", "tiny")
    fleet = tenants(
        started, [one.url], tmp_path, "--profile", "tiny", "--otlp-endpoint", collector.url
    )
    caller, trace_id = fleet.caller("acme-corporation"), f"{6:032x}"
    headers = {**caller.headers(), "traceparent": parent(trace_id)}
    assert fleet.gateway.complete("a prompt", headers).status == 200
    root, _ = split(spans_of(collector, trace_id))
    assert re.fullmatch(r"[0-9a-f]{16}", root.attributes["trunkline.tenant"])
    assert not [body for body in collector.raw if b"acme-corporation" in body]


def test_a_collector_that_is_away_costs_no_request_and_is_counted(started: Processes) -> None:
    with collecting() as gone:
        pass
    one = started.worker("--profile", "tiny")
    made = started.gateway([one.url], "--profile", "tiny", "--otlp-endpoint", gone.url)
    for _ in range(3):
        assert made.chat("x").status == 200
    until(lambda: made.metric("traces_dropped_total") == 3, "they are counted as lost")
    assert made.metric("trace_spans_total") == 0
    assert "traces.dropped" in made.process.log()
    assert made.process.stop() == 0


def test_an_endpoint_that_is_none_is_refused_at_start(started: Processes) -> None:
    process = started.begin("serve", "--otlp-endpoint", "collector:4318")
    assert process.child.wait(60) == 2
    assert "otlp_endpoint" in process.log()


def test_a_collector_that_drips_its_answer_holds_nothing_that_comes_after() -> None:
    from trunkline.adapters.otlp import OtlpExport
    from trunkline.gateway.span_queue import SpanQueue
    from trunkline.observe import log

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
        with contextlib.suppress(ConnectionError):
            while not over.is_set():
                writer.write(b"z")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    async def play() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        export = OtlpExport(f"http://127.0.0.1:{port}", version="1", timeout_s=2.0)
        queue = SpanQueue(export, log, pause_s=0.001, batch_s=0.3)
        task = asyncio.create_task(queue.run())
        for number in (1, 2):
            queue.put(ended())
            while queue.failed < number:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        assert queue.held == 2, "its own time-out begins anew with each byte"
        over.set()
        while queue.held:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()

    over = asyncio.Event()
    asyncio.run(asyncio.wait_for(play(), 60))
