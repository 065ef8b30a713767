"""The clients: what each asks, how it behaves, and what came of it, read from the bytes it got.

What is right is known without the gateway: the simulated model's answer to a prompt is a function
of its tokens. Read `setting.py` for what is drawn of a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httptools
from faults.gate import PORT
from faults.network import FaultyNet, FaultyPipe
from faults.setting import Call
from victim_words import _words, template, tokenizer

from trunkline.core import simkv

BLOCK = 16


# -- what is asked ---------------------------------------------------------------------------------


class Prompts:
    """The prompts of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tokens: dict[int, array[int]] = {}

    def body(self, call: Call) -> dict[str, Any]:
        body: dict[str, Any] = {"max_tokens": call.answer_tokens, "stream": call.is_stream}
        if call.is_stream:
            body["stream_options"] = {"include_usage": True}
        if call.wants_ids:
            body["return_token_ids"] = True
        if call.is_chat:
            return {**body, "messages": [{"role": "user", "content": "".join(self._said(call))}]}
        return {**body, "prompt": self._said(call)}

    def tokens(self, call: Call) -> array[int]:
        """As the engine reads them."""
        made = self._tokens.get(call.number)
        if made is None:
            if call.is_chat:
                text = template().render(self.body(call)["messages"], None, {})
                made = tokenizer().encode(text, add_special_tokens=False)
            else:
                made = array("I", self._said(call))
            self._tokens[call.number] = made
        return made

    def answer(self, call: Call, count: int) -> array[int]:
        return simkv.answer_tokens(self.tokens(call), count, tokenizer().vocab_size)

    def _said(self, call: Call) -> list[Any]:
        source: Any = _words() if call.is_chat else range(1_000, 4_000)
        family = random.Random(f"family {self._seed} {call.family} {call.is_chat}")
        shared = family.choices(source, k=8 * BLOCK)[: call.shared_blocks * BLOCK]
        own = random.Random(f"own {self._seed} {call.family} {call.own_tokens} {call.is_chat}")
        return [*shared, *own.choices(source, k=call.own_tokens)]


@cache
def piece(token: int) -> str:
    return tokenizer().decode(array("I", [token]))


# -- what came of it -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One call's end, as its client sees it."""

    kind: str
    """complete, refused, broken (an error event), worker-error, left, cut, open, unreached."""
    status: int = 0
    code: str = ""
    """Of the error, where there is one."""
    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    usage: dict[str, Any] | None = None
    resumed: int = 0
    problem: str = ""
    """Why its shape is none that an answer may have."""


class Caller(asyncio.Protocol):
    """One client's connection, for one call."""

    def __init__(self, net: FaultyNet, call: Call, gateways: tuple[str, ...]) -> None:
        """`gateways`: where the balancer in front of them tries, in this order."""
        self.net = net
        self.call = call
        self.gateway = ""
        """Whose it is; empty while it has none."""
        self._gateways = gateways
        self.chunks: list[tuple[float, bytes]] = []
        self.over = asyncio.Event()
        self.has_left = False
        self.is_unreached = False
        self.began_s = 0.0
        self.ended_s = 0.0
        self.outcome = Outcome(kind="open")
        self.on_written: Callable[[bytes], None] | None = None
        """Told of what the gateway writes to it."""
        self._transport: FaultyPipe | None = None
        self._has_paused = False

    async def ask(self, body: dict[str, Any]) -> None:
        call = self.call
        raw = json.dumps(body).encode()
        path = "/v1/chat/completions" if call.is_chat else "/v1/completions"
        wish = f"x-cache-scope: {call.wish}\r\n" if call.wish else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {call.tenant}/user{call.user}\r\n{wish}"
            f"x-correlation-id: {call.number}\r\nconnection: close\r\n"
            f"content-length: {len(raw)}\r\n\r\n"
        )
        self.began_s = self.net.time()
        if not await self._reach():
            self.is_unreached = True
            self.over.set()
        else:
            assert self._transport is not None
            self._transport.write(head.encode() + raw)
            if call.leaves_after_s is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(call.leaves_after_s):
                        await self.over.wait()
                if not self.over.is_set():
                    self.has_left = True
                    self._transport.abort()
            await self.over.wait()
        self.ended_s = self.net.time()

    async def _reach(self) -> bool:
        for gateway in self._gateways:
            self.gateway = gateway
            try:
                async with asyncio.timeout(5.0):
                    await self.net.create_connection(lambda: self, gateway, PORT)
            except (OSError, TimeoutError):
                continue
            return True
        return False

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, FaultyPipe)
        self._transport = transport
        transport.far.on_written = self.on_written

    @property
    def is_write_paused(self) -> bool:
        """Whether the gateway has more for it than it takes."""
        return self._transport is not None and self._transport.far.is_writer_paused

    def data_received(self, data: bytes) -> None:
        self.chunks.append((self.net.time(), data))
        if self.call.pauses_s and not self._has_paused and self._transport is not None:
            self._has_paused = True
            self._transport.pause_reading()
            self.net.call_later(self.call.pauses_s, self._transport.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.chunks)


class _Parsed:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False
        self.is_stream = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type" and b"event-stream" in value:
            self.is_stream = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


def outcome_of(caller: Caller) -> Outcome:
    """Read what a client got."""
    if caller.is_unreached:
        return Outcome(kind="unreached")
    if not caller.over.is_set():
        return Outcome(kind="open")
    parsed, raw = _Parsed(), caller.raw
    parser = httptools.HttpResponseParser(parsed)
    status = 0
    try:
        parser.feed_data(raw)
        status = parser.get_status_code() if raw else 0
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        return Outcome(kind="cut", problem=f"no HTTP: {error!r}")
    if parsed.is_stream:
        made = _read_stream(bytes(parsed.body))
    else:
        made = _read_whole(bytes(parsed.body), status, is_complete=parsed.is_complete)
    made.status = status
    if not parsed.is_complete and made.kind in ("complete", "refused"):
        made.problem = "its message has no end"
    if caller.has_left and made.kind != "complete":
        made.kind = "left"
    return made


def _read_whole(body: bytes, status: int, *, is_complete: bool) -> Outcome:
    if not is_complete:
        return Outcome(kind="cut")
    try:
        told = json.loads(body)
    except ValueError:
        return Outcome(kind="cut", problem=f"no JSON: {body[:80]!r}")
    if "error" in told:
        code = str(told["error"].get("code"))
        made = Outcome(kind="refused", code=code)
        if status < 400:
            made.problem = f"an error with status {status}"
        return made
    choice = told["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    ids = choice.get("token_ids") or []
    return Outcome(kind="complete", text=text, ids=ids, usage=told.get("usage"))


def _read_stream(body: bytes) -> Outcome:
    made = Outcome(kind="cut")
    has_finished = has_error = has_done = False
    *events, rest = body.split(b"\n\n")
    for event in events:
        data = b""
        for line in event.split(b"\n"):
            if line.startswith(b": resumed"):
                made.resumed += 1
            elif line.startswith(b"data: "):
                data = line[6:]
        if not data:
            continue
        if has_done or (has_error and data != b"[DONE]"):
            made.problem = f"more after its end: {data[:60]!r}"
        if data == b"[DONE]":
            has_done = True
            continue
        told = json.loads(data)
        if "error" in told:
            has_error, made.code = True, str(told["error"].get("code"))
            continue
        made.usage = told.get("usage") or made.usage
        for choice in told.get("choices", ()):
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            if text and has_finished:
                made.problem = "a token after its finish"
            made.text += text or ""
            made.ids += choice.get("token_ids") or []
            has_finished = has_finished or bool(choice.get("finish_reason"))
    if has_error:
        made.kind = "worker-error" if has_done else "broken"
    elif has_done:
        made.kind = "complete"
        if not has_finished:
            made.problem = "[DONE] without a finish"
    if rest and made.kind == "complete":
        made.problem = f"half an event at its end: {rest[:60]!r}"
    return made
