"""A small server that behaves as it is told, well or badly, and replays against it."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from trunkline.adapters.clock import SystemClock
from trunkline.core import simkv
from trunkline.replay.run import ReplayOptions, ReplayResult, replay_trace
from trunkline.replay.traces import TraceRequest
from virtual_loop import LoopClock, SocketLoop

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
    probes: list[str] = field(default_factory=list)
    """Heads of the GETs, each answered with `probe_answer` and the end of the connection."""
    probe_answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
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
                if head.startswith(b"GET "):
                    server.probes.append(head.decode())
                    writer.write(server.probe_answer)
                    return
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
    answer: Answer,
    trace: list[TraceRequest],
    options: ReplayOptions | None = None,
) -> tuple[ReplayResult, Server]:
    """On virtual time: what is measured is what `answer` slept, to the millisecond."""

    async def run() -> tuple[ReplayResult, Server]:
        clock = LoopClock(asyncio.get_running_loop())
        async with serving(answer) as server:
            chosen = options or ReplayOptions()
            return await replay_trace(trace, [server.url], chosen, clock), server

    with asyncio.Runner(loop_factory=SocketLoop) as runner:
        return runner.run(run())
