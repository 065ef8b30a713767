"""What goes wrong with an answer is a loss with a reason, never an exception."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from answering import CLOCK, Answer, Call, answer_well, event, events, replayed, requests, serving

from trunkline.replay.client import ClientOptions
from trunkline.replay.run import ReplayOptions, ReplayResult, replay_trace


def lost_reason(answer: Answer, options: ReplayOptions | None = None) -> str:
    """How the one request of a replay was lost; it must be lost, and the replay go on."""
    result, _ = replayed(answer, requests(1), options)
    (record,) = result.records
    assert record.is_lost
    return record.lost_reason


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
    assert result.wall_ms == pytest.approx(60.0, abs=1.0)


def test_nobody_listening_is_a_loss_and_no_crash() -> None:
    async def run() -> ReplayResult:
        async with serving(answer_well) as server:
            url = server.url
        return await replay_trace(requests(2), [url], ReplayOptions(), CLOCK)

    reasons = {record.lost_reason for record in asyncio.run(run()).records}
    assert reasons == {"cannot connect: ConnectionRefusedError"}
