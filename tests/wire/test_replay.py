"""The replay client against a server that answers well: what is sent, measured and judged."""

from __future__ import annotations

import asyncio
import json
from array import array

import pytest
import uvloop
from answering import (
    CLOCK,
    Answer,
    Call,
    Server,
    answer_well,
    event,
    events,
    replayed,
    requests,
    serving,
)

from trunkline.replay.client import Client, ClientOptions, Target
from trunkline.replay.prompts import PromptOptions
from trunkline.replay.records import Reply, Verdict
from trunkline.replay.run import ReplayOptions, ReplayResult, replay_trace


def test_a_good_answer_is_measured_and_found_right() -> None:
    result, server = replayed(answer_well, requests(3))
    assert [record.lost_reason for record in result.records] == ["", "", ""]
    first = result.records[0]
    assert first.verdict is Verdict.RIGHT
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (40, 16, 5)
    assert (first.worker, first.matched_tokens, first.queue_ms) == ("w1", 16, 2.5)
    assert first.ttft_ms is not None
    assert first.client_late_ms <= first.ttft_ms <= first.client_late_ms + first.duration_ms
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
    assert record.ttft_ms == pytest.approx(50.0, abs=1.0)
    assert record.duration_ms == pytest.approx(100.0, abs=1.0)


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
            await asyncio.wait_for(gone.wait(), timeout=60.0)

    asyncio.run(run())


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"address|[Pp]ort"):
        Target.parse(url)


def test_addresses_with_path_and_v1_are_understood() -> None:
    target = Target.parse("https://gate.example/llm/v1/")
    assert (target.host, target.port, target.base_path) == ("gate.example", 443, "/llm")
    assert Target.parse("127.0.0.1:8000").port == 8_000


def test_prompt_options_reach_the_wire() -> None:
    options = ReplayOptions(prompt=PromptOptions(tokens_per_block=32, max_output_tokens=2))
    _, server = replayed(answer_well, requests(1), options)
    assert len(server.calls[0].body["prompt"]) == 32 * 2 + 16
    assert server.calls[0].body["max_tokens"] == 2
