"""Answers on the wire: one job's tokens as server-sent events or as one JSON object.

Each is an ASGI response that aborts its job when the client leaves. Chunks are laid out once a
stream, and only the text is put in for each token. Read `engine.py` for where the tokens come
from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from trunkline.kv.orders import NO_PULLS
from trunkline.worker.engine import Engine
from trunkline.worker.jobs import Failure, Job
from trunkline.worker.lifting import Lifts
from trunkline.worker.orders import ANSWER_HEADER
from trunkline.worker.pulls import Pulls
from trunkline.worker.requests import Generation

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request gets; an ASGI application for that one request."""

    request: Generation
    engine: Engine
    job: Job
    id: str
    created_s: int
    model: str
    piece_of: Callable[[int], str] = field(repr=False)
    """Token id -> its text."""
    on_started: Callable[[Generation, Job], None] = field(repr=False)
    """Told once, when the prompt is computed."""
    pulls: Pulls | None = None
    """Who carries out the job's call, where it has one."""
    lifts: Lifts | None = None
    tells_reuse: bool = True
    """Whether its usage says how much was reused."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._abort_when_gone(receive))
                await self._pull()
                await (self._stream(send) if self.request.is_stream else self._whole(send))
                watcher.cancel()
        finally:
            self.engine.abort(self.job)

    async def _abort_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.engine.abort(self.job)

    async def _pull(self) -> None:
        """What the job waits for before it is scheduled."""
        job = self.job
        call, cache = job.call, self.engine.cache
        if call is None:
            return
        if call.order is None and self.pulls is not None:
            await self.pulls.follow(call, cache, job.prompt, job.salt, job.terms)
        if self.lifts is not None:
            await self.lifts.lift(call, cache, job.prompt, job.salt, job.terms)
        if call.order is not None:
            if self.pulls is None:
                call.pulled = NO_PULLS
            else:
                call.turn_ms = lambda: self.engine.turn_ms(job)
                await self.pulls.fetch(call, cache, job.prompt, job.salt, job.terms)
        self.engine.pulled(job)

    def _pulled(self) -> list[tuple[bytes, bytes]]:
        """The header that says what became of a pull, where one was asked for."""
        pulled = self.job.call.pulled if self.job.call else None
        return [(ANSWER_HEADER, pulled.told())] if pulled else []

    async def _stream(self, send: Send) -> None:
        # Headers go out before the first token, as the engine does it.
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        await send(_start([kind, *self._pulled()]))
        async for chunk in self._chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        failure = self.job.failure
        if failure is not None:
            told = b"data: " + _encode(error_body(failure.status, failure.message)) + b"\n\n"
            await send({"type": "http.response.body", "body": told, "more_body": True})
        if self.job.emitted or failure is not None:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _chunks(self) -> AsyncIterator[bytes]:
        job, request = self.job, self.request
        await job.wait_beyond(0)
        if not job.emitted or job.failure is not None:
            return  # the client left while it waited, or the worker ended it
        self.on_started(request, job)
        end = find_end(self)
        before, after = self._chunk_frame()
        if request.is_chat:
            yield self._first_chunk()
        sent = 0
        while sent < end.tokens:
            await job.wait_beyond(sent)
            if job.failure is not None:
                return  # nothing more leaves, also not what is there already
            upto = min(job.emitted, end.tokens)
            if upto == sent:
                return  # aborted in the middle
            text = end.text[end.starts[sent] : end.starts[upto]]
            ids = b""
            if request.returns_ids:
                ids = b',"token_ids":' + _encode(job.answer[sent:upto].tolist())
            yield before + _encode(text) + after + ids + b"}]}\n\n"
            sent = upto
        self.engine.abort(job)  # does nothing unless a stop text ended it early
        yield self._last_chunk(end.reason)
        if request.includes_usage:
            yield b"data: " + _encode(
                {**self._envelope(), "choices": [], "usage": self._usage(sent)}
            )
            yield b"\n\n"

    async def _whole(self, send: Send) -> None:
        job, request = self.job, self.request
        await job.wait_beyond(0)
        if job.failure is not None:
            await self._failed(job.failure, send)
            return
        if not job.emitted:
            return
        self.on_started(request, job)
        end = find_end(self)
        while job.emitted < end.tokens and not job.is_over:
            await job.wait_beyond(job.emitted)
        if job.failure is not None:
            await self._failed(job.failure, send)
            return
        if job.emitted < end.tokens:
            return
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": end.reason}
        if request.is_chat:
            choice["message"] = {"role": "assistant", "content": end.text, "tool_calls": []}
        else:
            choice["text"] = end.text
        if request.returns_ids:
            choice["token_ids"] = job.answer[: end.tokens].tolist()
            choice["prompt_token_ids"] = job.prompt.tolist()
        kind = "chat.completion" if request.is_chat else "text_completion"
        body = _encode(
            {
                **self._envelope(kind),
                "choices": [choice],
                "usage": self._usage(end.tokens),
            }
        )
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send(_start([*headers, *self._pulled()]))
        await send({"type": "http.response.body", "body": body})

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        told = usage(self.job, completion_tokens)
        return told if self.tells_reuse else {**told, "prompt_tokens_details": None}

    async def _failed(self, failure: Failure, send: Send) -> None:
        body = _encode(error_body(failure.status, failure.message))
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send(_start([*headers, *self._pulled()], failure.status))
        await send({"type": "http.response.body", "body": body})

    def _envelope(self, kind: str = "") -> dict[str, Any]:
        streamed = "chat.completion.chunk" if self.request.is_chat else "text_completion"
        return {
            "id": self.id,
            "object": kind or streamed,
            "created": self.created_s,
            "model": self.model,
        }

    def _first_chunk(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
        more: dict[str, Any] = {}
        if self.request.returns_ids:
            more["prompt_token_ids"] = self.job.prompt.tolist()
        return b"data: " + _encode({**self._envelope(), "choices": [choice], **more}) + b"\n\n"

    def _last_chunk(self, reason: str) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "stop_reason": None}
        choice |= {"delta": {}} if self.request.is_chat else {"text": ""}
        return b"data: " + _encode({**self._envelope(), "choices": [choice]}) + b"\n\n"

    def _chunk_frame(self) -> tuple[bytes, bytes]:
        """What stands before and after the text of a chunk, up to the end of its choice."""
        head = b"data: " + _encode(self._envelope())[:-1] + b',"choices":[{"index":0,'
        if self.request.is_chat:
            return head + b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null'
        return head + b'"text":', b',"logprobs":null,"finish_reason":null'


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """Where an answer ends, known as soon as its prompt is computed."""

    text: str
    starts: list[int]
    """`text[starts[i]:starts[j]]` belongs to tokens i to j."""
    tokens: int
    reason: str


def find_end(answer: Answer) -> AnswerEnd:
    """Look for the first stop text; without one all wanted tokens are given."""
    job, request = answer.job, answer.request
    pieces = [answer.piece_of(token) for token in job.answer]
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    text = "".join(pieces)
    found = [(text.find(stop), stop) for stop in request.stops]
    found = [(at, stop) for at, stop in found if at >= 0]
    if not found:
        reason = "stop" if request.has_own_end else "length"
        return AnswerEnd(text=text, starts=starts, tokens=len(pieces), reason=reason)
    at, stop = min(found, key=lambda hit: hit[0] + len(hit[1]))
    tokens = next(i for i, start in enumerate(starts) if start >= at + len(stop))
    starts = [min(start, at) for start in starts]
    return AnswerEnd(text=text[:at], starts=starts, tokens=tokens, reason="stop")


def usage(job: Job, completion_tokens: int) -> dict[str, Any]:
    """The token counts that end an answer."""
    return {
        "prompt_tokens": len(job.prompt),
        "completion_tokens": completion_tokens,
        "total_tokens": len(job.prompt) + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }


def error_body(
    status: int, message: str, kind: str = "InternalServerError", param: str | None = None
) -> dict[str, Any]:
    """An error in the shape that OpenAI's clients read."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _start(headers: list[tuple[bytes, bytes]], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}
