"""The replay client against a small server that behaves as it is told, well or badly."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from trunkline.adapters.clock import SystemClock
from trunkline.core import simkv
from trunkline.errors import ConfigError
from trunkline.replay import command
from trunkline.replay.client import Client, ClientOptions, Target
from trunkline.replay.counters import FleetCounters
from trunkline.replay.plan import Fleet, FleetPlan
from trunkline.replay.prompts import PromptOptions
from trunkline.replay.records import Reply, Verdict
from trunkline.replay.run import Decode, ReplayOptions, ReplayResult, replay_trace
from trunkline.replay.traces import TraceRequest

VOCAB = 4_096
CLOCK = SystemClock()


@dataclass
class Call:
    """One request that the server got, and what to answer it with."""

    body: dict[str, Any]
    headers: dict[str, str]
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def head(self, extra: str = "") -> None:
        self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n" + extra.encode() + b"\r\n"
        )

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        self.send(b"0\r\n\r\n")

    @property
    def right_answer(self) -> list[int]:
        prompt = array("I", self.body["prompt"])
        return simkv.answer_tokens(prompt, self.body["max_tokens"], VOCAB).tolist()


Answer = Callable[[Call], Awaitable[None]]


@dataclass
class Server:
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    connections: int = 0
    open_now: int = 0
    most_open: int = 0


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    """A keep-alive HTTP server that hands each request to `answer`."""
    server = Server()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().split("\r\n")[1:-2]
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                call = Call(json.loads(body), headers, writer)
                server.calls.append(call)
                server.open_now += 1
                server.most_open = max(server.most_open, server.open_now)
                try:
                    await answer(call)
                finally:
                    server.open_now -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await listener.wait_closed()


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def usage(call: Call, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": len(call.body["prompt"]),
        "completion_tokens": call.body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def events(call: Call, tokens: Sequence[int], cached: int = 0) -> list[bytes]:
    last = len(tokens) - 1
    frames = [
        event(
            {
                "choices": [
                    {
                        "index": 0,
                        "text": f" w{token}",
                        "token_ids": [token],
                        "finish_reason": "length" if index == last else None,
                    }
                ],
                "usage": None,
            }
        )
        for index, token in enumerate(tokens)
    ]
    return [*frames, event({"choices": [], "usage": usage(call, cached)}), b"data: [DONE]\n\n"]


async def answer_well(call: Call) -> None:
    call.head("x-trunkline-decision: worker=w1; matched=16/40; queue_ms=2.5\r\n")
    for frame in events(call, call.right_answer, cached=16):
        call.chunk(frame)
    call.end()


def requests(count: int, gap_ms: float = 1.0, **changes: Any) -> list[TraceRequest]:
    base = TraceRequest(
        arrival_ms=0.0,
        input_tokens=40,
        output_tokens=5,
        block_ids=(1, 2, 3),
        block_tokens=16,
        session="s",
    )
    return [replace(base, arrival_ms=500.0 + index * gap_ms, **changes) for index in range(count)]


def replayed(
    answer: Answer, trace: list[TraceRequest], options: ReplayOptions | None = None
) -> tuple[ReplayResult, Server]:
    async def run() -> tuple[ReplayResult, Server]:
        async with serving(answer) as server:
            chosen = options or ReplayOptions()
            result = await replay_trace(trace, [server.url], chosen, CLOCK)
            return result, server

    return asyncio.run(asyncio.wait_for(run(), timeout=20.0))


def lost_reason(answer: Answer, options: ReplayOptions | None = None) -> str:
    """How the one request of a replay was lost; it must be lost, and the replay go on."""
    result, _ = replayed(answer, requests(1), options)
    (record,) = result.records
    assert record.is_lost
    return record.lost_reason


def test_a_good_answer_is_measured_and_found_right() -> None:
    result, server = replayed(answer_well, requests(3))
    assert [record.lost_reason for record in result.records] == ["", "", ""]
    first = result.records[0]
    assert first.verdict is Verdict.RIGHT
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (40, 16, 5)
    assert (first.worker, first.matched_tokens, first.queue_ms) == ("w1", 16, 2.5)
    assert first.ttft_ms is not None
    assert first.client_late_ms < first.ttft_ms <= first.client_late_ms + first.duration_ms
    assert not result.warnings
    sent = server.calls[0]
    assert sent.body["stream"] is True
    assert sent.body["temperature"] == 0
    assert sent.body["max_tokens"] == 5
    assert sent.body["stream_options"] == {"include_usage": True}
    assert sent.headers["x-session-id"] == "s"
    assert sent.headers["x-request-id"] == "replay-0"


def test_it_runs_on_uvloop_as_well() -> None:
    async def run() -> ReplayResult:
        async with serving(answer_well) as server:
            return await replay_trace(requests(3), [server.url], ReplayOptions(), CLOCK)

    assert {record.verdict for record in uvloop.run(run()).records} == {Verdict.RIGHT}


def test_connections_are_kept_and_used_again() -> None:
    async def run() -> Server:
        async with serving(answer_well) as server:
            client = Client(Target.parse(server.url))
            body = json.dumps({"prompt": [1] * 20, "max_tokens": 2}).encode()
            for _ in range(5):
                reply = await client.send("/v1/completions", body)
                assert reply.lost_reason == ""
            client.close()
            return server

    assert asyncio.run(run()).connections == 1


def test_a_connection_that_was_idle_for_long_is_not_used_again() -> None:
    async def run() -> Server:
        async with serving(answer_well) as server:
            options = ClientOptions(keepalive_idle_ms=20.0)
            client = Client(Target.parse(server.url), options)
            body = json.dumps({"prompt": [1] * 20, "max_tokens": 2}).encode()
            for _ in range(2):
                assert (await client.send("/v1/completions", body)).lost_reason == ""
                await asyncio.sleep(0.03)
            client.close()
            return server

    assert asyncio.run(run()).connections == 2


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_answers_may_come_in_any_pieces_with_any_line_ends(size: int, line_end: bytes) -> None:
    async def answer(call: Call) -> None:
        call.head()
        stream = b"".join(events(call, call.right_answer, cached=16))
        stream = stream.replace(b"\n", line_end)
        for start in range(0, len(stream), size):
            call.chunk(stream[start : start + size])
        call.end()

    result, _ = replayed(answer, requests(1))
    (record,) = result.records
    assert (record.lost_reason, record.verdict) == ("", Verdict.RIGHT)
    assert record.cached_tokens == 16


def test_ttft_is_the_first_token_and_not_the_head() -> None:
    async def answer(call: Call) -> None:
        call.head()
        call.chunk(event({"choices": [{"text": "", "finish_reason": None}]}))
        await call.writer.drain()
        await asyncio.sleep(0.05)
        frames = events(call, call.right_answer)
        call.chunk(frames[0])
        await asyncio.sleep(0.05)
        for frame in frames[1:]:
            call.chunk(frame)
        call.end()

    result, _ = replayed(answer, requests(1))
    (record,) = result.records
    assert record.ttft_ms is not None
    assert 49.0 <= record.ttft_ms <= record.duration_ms - 49.0


def test_a_wrong_token_is_a_false_hit() -> None:
    async def answer(call: Call) -> None:
        call.head()
        tokens = call.right_answer
        for frame in events(call, [*tokens[:-1], tokens[-1] ^ 1]):
            call.chunk(frame)
        call.end()

    result, _ = replayed(answer, requests(1))
    assert result.records[0].verdict is Verdict.WRONG
    assert not result.records[0].is_lost


def test_text_alone_is_compared_where_it_can_be_decoded() -> None:
    def decode(tokens: array[int]) -> str:
        return "".join(f" w{token}" for token in tokens)

    def answer(offset: int) -> Answer:
        async def answer_text(call: Call) -> None:
            call.head()
            for frame in events(call, [token + offset for token in call.right_answer]):
                call.chunk(frame.replace(b'"token_ids"', b'"other"'))
            call.end()

        return answer_text

    options = ReplayOptions(decode=decode)
    assert replayed(answer(0), requests(1), options)[0].records[0].verdict is Verdict.RIGHT
    assert replayed(answer(1), requests(1), options)[0].records[0].verdict is Verdict.WRONG
    result, _ = replayed(answer(1), requests(1))
    assert result.records[0].verdict is Verdict.UNCHECKED
    assert "1 answers could not be checked" in result.warnings[0]


def test_a_short_answer_is_lost_although_its_beginning_is_right() -> None:
    async def answer(call: Call) -> None:
        call.head()
        for frame in events(call, call.right_answer[:3]):
            call.chunk(frame)
        call.end()

    assert lost_reason(answer) == "answer of 3 tokens, asked for 5"


async def close_abruptly(call: Call) -> None:
    call.head()
    call.chunk(events(call, call.right_answer)[0])
    await call.writer.drain()
    call.writer.transport.abort()


async def close_before_the_head(call: Call) -> None:
    call.writer.close()


async def send_an_error_frame(call: Call) -> None:
    call.head()
    call.chunk(events(call, call.right_answer)[0])
    call.chunk(event({"error": {"message": "my secret prompt", "code": "worker_lost"}}))
    call.end()


async def refuse(call: Call) -> None:
    body = json.dumps({"error": {"message": "secret", "type": "t", "code": "busy"}}).encode()
    call.send(b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


async def refuse_in_html(call: Call) -> None:
    call.send(b"HTTP/1.1 502 No\r\ncontent-length: 6\r\n\r\n<html>")


async def speak_no_http(call: Call) -> None:
    call.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


async def stop_without_done(call: Call) -> None:
    call.head()
    for frame in events(call, call.right_answer)[:-1]:
        call.chunk(frame)
    call.end()


async def stop_without_finish_reason(call: Call) -> None:
    call.head()
    call.chunk(events(call, call.right_answer)[0])
    call.chunk(b"data: [DONE]\n\n")
    call.end()


async def send_nonsense(call: Call) -> None:
    call.head()
    call.chunk(b"data: {not json}\n\n")
    for frame in events(call, call.right_answer):
        call.chunk(frame)
    call.end()


async def send_an_endless_event(call: Call) -> None:
    call.head()
    for _ in range(80):
        call.chunk(b"x" * 65_536)
        await call.writer.drain()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (close_abruptly, "connection closed in mid-answer|connection reset"),
        (close_before_the_head, "connection closed in mid-answer|connection reset"),
        (send_an_error_frame, "error frame: worker_lost"),
        (refuse, "status 429: busy"),
        (refuse_in_html, "status 502: no JSON error"),
        (speak_no_http, "not HTTP: "),
        (stop_without_done, r"the stream ended without \[DONE\]"),
        (stop_without_finish_reason, "the stream ended without a finish reason"),
        (send_nonsense, "an event that is no completion chunk"),
        (send_an_endless_event, "an event is longer than 4194304 bytes"),
    ],
)
def test_what_goes_wrong_is_lost_with_its_reason(answer: Answer, reason: str) -> None:
    found = lost_reason(answer)
    assert re.match(reason, found), found
    assert "secret" not in found


def test_a_silent_server_is_given_up_after_the_idle_limit() -> None:
    async def answer(call: Call) -> None:
        call.head()
        call.chunk(events(call, call.right_answer)[0])
        await call.writer.drain()
        await asyncio.sleep(1.0)

    options = ReplayOptions(client=ClientOptions(idle_timeout_ms=60.0))
    result, _ = replayed(answer, requests(1), options)
    (record,) = result.records
    assert record.lost_reason == "no byte for 60 ms"
    assert result.wall_ms < 900.0


def test_nobody_listening_is_a_loss_and_no_crash() -> None:
    async def run() -> ReplayResult:
        async with serving(answer_well) as server:
            url = server.url
        return await replay_trace(requests(2), [url], ReplayOptions(), CLOCK)

    reasons = {record.lost_reason for record in asyncio.run(run()).records}
    assert reasons == {"cannot connect: ConnectionRefusedError"}


def test_the_loop_is_open_slow_answers_do_not_hold_up_the_next_request() -> None:
    released = asyncio.Event()
    seen = 0

    async def answer(call: Call) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            released.set()
        await released.wait()
        await answer_well(call)

    result, server = replayed(answer, requests(5, gap_ms=5.0))
    assert not any(record.is_lost for record in result.records)
    assert server.most_open == 5


def test_requests_leave_at_trace_times_stretched_by_speed_and_scale() -> None:
    options = ReplayOptions(speed=2.0, time_scale=4.0)
    result, _ = replayed(answer_well, requests(4, gap_ms=20.0), options)
    arrivals = [record.arrival_ms for record in result.records]
    assert arrivals == pytest.approx([0.0, 40.0, 80.0, 120.0])
    assert result.wall_ms >= 120.0
    assert all(record.client_late_ms < 40.0 for record in result.records)


def test_at_the_bound_requests_wait_and_the_wait_is_counted_and_warned_of() -> None:
    async def answer(call: Call) -> None:
        await asyncio.sleep(0.08)
        await answer_well(call)

    result, server = replayed(answer, requests(4, gap_ms=0.0), ReplayOptions(max_in_flight=1))
    late = [record.client_late_ms for record in result.records]
    assert server.most_open == 1
    assert late[1] >= 75.0
    assert late[3] >= 225.0
    for record in result.records:
        assert record.ttft_ms is not None
        assert record.ttft_ms > record.client_late_ms, "what waits here counts, too"
    assert "the client itself fell behind" in result.warnings[0]


def test_closed_sessions_send_a_turn_only_after_the_one_before() -> None:
    async def answer(call: Call) -> None:
        await asyncio.sleep(0.03)
        await answer_well(call)

    trace = requests(4, gap_ms=1.0)
    trace = [replace(one, session=f"s{index % 2}") for index, one in enumerate(trace)]
    result, server = replayed(answer, trace, ReplayOptions(is_closed_loop=True))
    assert server.most_open == 2, "two sessions run side by side"
    assert not any(record.is_lost for record in result.records)
    assert max(record.client_late_ms for record in result.records) < 25.0
    _, server = replayed(answer, trace, ReplayOptions())
    assert server.most_open == 4


def test_bodies_of_openai_logs_are_sent_as_they_are_but_streamed() -> None:
    async def answer(call: Call) -> None:
        call.head()
        call.chunk(event({"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}))
        call.chunk(b"data: [DONE]\n\n")
        call.end()

    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0.5}
    trace = requests(1, block_ids=None, body=body)
    options = ReplayOptions(model="other", is_verified=False)
    result, server = replayed(answer, trace, options)
    assert not result.records[0].is_lost
    assert result.records[0].verdict is Verdict.UNCHECKED
    assert server.calls[0].body == {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "model": "other",
    }
    assert "did not say how many prompt tokens were cached" in result.warnings[0]


def test_an_answer_without_length_ends_with_its_connection() -> None:
    async def answer(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for frame in events(call, call.right_answer):
            call.send(frame)
        await call.writer.drain()
        call.writer.close()

    result, _ = replayed(answer, requests(1))
    assert (result.records[0].lost_reason, result.records[0].verdict) == ("", Verdict.RIGHT)


def test_cancelling_a_request_closes_its_connection() -> None:
    async def run() -> None:
        arrived, gone = asyncio.Event(), asyncio.Event()

        async def answer(call: Call) -> None:
            arrived.set()
            while not call.writer.is_closing():
                call.head()
                try:
                    await call.writer.drain()
                except ConnectionError:
                    break
                await asyncio.sleep(0.005)
            gone.set()

        async with serving(answer) as server:
            client = Client(Target.parse(server.url))
            body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
            task: asyncio.Task[Reply] = asyncio.create_task(client.send("/v1/completions", body))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(gone.wait(), timeout=5.0)

    asyncio.run(run())


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"address|[Pp]ort"):
        Target.parse(url)


def test_addresses_with_path_and_v1_are_understood() -> None:
    target = Target.parse("https://gate.example/llm/v1/")
    assert (target.host, target.port, target.base_path) == ("gate.example", 443, "/llm")
    assert Target.parse("127.0.0.1:8000").port == 8_000


class ServedFleet:
    """A `Fleet` whose gateway is the small server."""

    def __init__(self, url: str) -> None:
        self.target_urls: Sequence[str] = [url]
        self.api_key = "key"
        self.model = "m"
        self.vocab_size = VOCAB
        self.decode: Decode | None = None
        self.is_stopped = False

    async def counters(self) -> FleetCounters:
        return FleetCounters(transfer_bytes=0, worker_work={"w1": 3.0, "w2": 1.0})

    async def stop(self) -> None:
        self.is_stopped = True


def commanded(*words: str, answer: Answer = answer_well) -> tuple[int, str, list[ServedFleet]]:
    """Run the whole command; the answer is exit code, report and the fleets it started."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    fleets: list[ServedFleet] = []
    out = io.StringIO()

    async def run() -> int:
        async with serving(answer) as server:

            async def start(plan: FleetPlan) -> Fleet:
                assert plan.workers == 16
                fleets.append(ServedFleet(server.url))
                return fleets[-1]

            words_with_target = [word.replace("TARGET", server.url) for word in words]
            return await command.run(
                parser.parse_args(words_with_target),
                clock=CLOCK,
                start_fleet=start,
                traces_dir=Path(__file__).parents[2] / "traces",
                out=out,
                err=io.StringIO(),
            )

    return asyncio.run(asyncio.wait_for(run(), timeout=30.0)), out.getvalue(), fleets


LIGHT = ("W1-smoke", "--requests", "20", "--speed", "200", "--tokens-per-block", "16")


def test_the_command_runs_each_policy_on_a_fresh_fleet_and_writes_its_files(tmp_path: Path) -> None:
    code, text, fleets = commanded(
        *LIGHT,
        "--policies",
        "cache_aware,least_queue",
        "--bar",
        "lost<=0,busiest_over_mean_work<=1.6,ttft_ms.p50<=9*baselines.least_queue.ttft_ms.p50",
        "--json",
        str(tmp_path / "out.json"),
        "--html",
        str(tmp_path / "report.html"),
    )
    assert code == command.PASSED, text
    assert len(fleets) == 2
    assert all(fleet.is_stopped for fleet in fleets)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert (figures["workload"], figures["requests"], figures["false_hits"]) == ("W1-smoke", 20, 0)
    assert figures["baselines"]["least_queue"]["requests"] == 20
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert "20 answers compared" not in text
    assert "40 answers compared token by token" in text


def test_a_missed_bar_or_a_true_fail_if_makes_the_exit_code_one() -> None:
    for words in (("--bar", "hit_tokens_ratio>=0.99"), ("--fail-if", "requests>=20")):
        code, text, _ = commanded(*LIGHT, "--policies", "cache_aware", *words)
        assert code == command.FAILED
        assert "FAIL" in text


def test_a_false_hit_makes_the_exit_code_one() -> None:
    async def answer(call: Call) -> None:
        call.head()
        for frame in events(call, [token ^ 1 for token in call.right_answer]):
            call.chunk(frame)
        call.end()

    code, text, _ = commanded(*LIGHT, "--policies", "cache_aware", answer=answer)
    assert code == command.FAILED
    assert "FALSE HITS   20" in text


def test_a_running_gateway_is_replayed_against_without_starting_a_fleet() -> None:
    code, text, fleets = commanded(*LIGHT, "--target", "TARGET")
    assert code == command.PASSED, text
    assert not fleets
    assert "target" in text


def test_mistakes_are_refused_before_a_fleet_is_started() -> None:
    for words in (("--bar", "nonsense"), ("--policies", "a,a"), ("--load", "0")):
        with pytest.raises(ConfigError):
            commanded(*LIGHT, *words)


def test_prompt_options_reach_the_wire() -> None:
    options = ReplayOptions(prompt=PromptOptions(tokens_per_block=32, max_output_tokens=2))
    _, server = replayed(answer_well, requests(1), options)
    assert len(server.calls[0].body["prompt"]) == 32 * 2 + 16
    assert server.calls[0].body["max_tokens"] == 2
