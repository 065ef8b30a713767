"""Streams of other dialects that break: they end as their own clients expect it, and are not taken
for chats that could go on elsewhere.
"""

from __future__ import annotations

import json

from scripted import (
    SSE_HEAD,
    FixedPicker,
    Reply,
    Script,
    Served,
    chunk,
    post,
    running,
    wire,
    worker,
)

MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}
RESPONSES = {"input": "hi", "stream": True}


def breaking(*events: str) -> Script:
    """A worker that says so much, and is gone."""

    async def script(served: Served) -> None:
        await served.request()
        framed = b"".join(chunk(f"event: {one}\ndata: {{}}\n\n".encode()) for one in events)
        await served.send(SSE_HEAD + framed)
        served.reset()

    return script


def last_event(reply: Reply) -> tuple[str, dict[str, object]]:
    name, data = reply.body.decode().strip().split("\n\n")[-1].split("\n")
    return name, json.loads(data.removeprefix("data: "))


@wire
async def test_c67_a_broken_stream_of_messages_ends_in_an_error_event_of_anthropic() -> None:
    script = breaking("message_start", "content_block_delta")
    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post(MESSAGES, path="/v1/messages"))
    name, told = last_event(reply)
    assert (reply.status, reply.is_whole, name) == (200, True, "event: error")
    assert told["type"] == "error"
    assert told["request_id"] == reply.headers["x-request-id"]
    error = told["error"]
    assert isinstance(error, dict)
    assert (error["type"], error["code"]) == ("api_error", "worker_lost")
    assert b"message_stop" not in reply.body
    assert b"[DONE]" not in reply.body
    assert len(w.seen) == 1, "nobody was asked to go on"


@wire
async def test_c67_a_broken_stream_of_a_response_ends_in_a_numbered_error_event() -> None:
    async with (
        worker(breaking("response.created", "response.in_progress", "x")) as w,
        running(FixedPicker(w)) as gateway,
    ):
        reply = await gateway.ask(post(RESPONSES, path="/v1/responses"))
    name, told = last_event(reply)
    assert (reply.status, reply.is_whole, name) == (200, True, "event: error")
    assert (told["type"], told["sequence_number"]) == ("error", 3)
    assert told["code"] == "worker_lost"
    error = told["error"]
    assert isinstance(error, dict)
    assert error["request_id"] == reply.headers["x-request-id"]
    assert len(w.seen) == 1, "nobody was asked to go on"


@wire
async def test_the_number_of_the_error_event_follows_the_last_that_was_delivered() -> None:
    said = ["response.created", "response.in_progress", "response.output_text.delta"]
    data = [{"response": {}}, {"response": {}}, {"delta": ', "sequence_number": 70, "'}]
    framed = b""
    for number, (kind, one) in enumerate(zip(said, data, strict=True), start=4):
        event = json.dumps({**one, "sequence_number": number, "type": kind})
        framed += f"event: {kind}\ndata: {event}\n\n".encode()

    async def script(served: Served) -> None:
        await served.request()
        # Several events in one chunk, and of one more the client sees nothing.
        await served.send(SSE_HEAD + chunk(framed) + b'40\r\ndata: {"sequence_number": 7')
        served.reset()

    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post(RESPONSES, path="/v1/responses"))
    name, told = last_event(reply)
    assert (name, told["type"], told["sequence_number"]) == ("event: error", "error", 7)
