"""Answers on the wire: one job's tokens as server-sent events or as one JSON object.

Each is an ASGI response that aborts its job when the client leaves. Read `engine.py` for where the
tokens come from, `voices.py` for the words they are put into.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from trunkline.kv.orders import NO_PULLS
from trunkline.worker.engine import Engine
from trunkline.worker.jobs import Failure, Job
from trunkline.worker.lifting import Lifts
from trunkline.worker.orders import ANSWER_HEADER
from trunkline.worker.pulls import Pulls
from trunkline.worker.requests import Generation
from trunkline.worker.voices import AnswerEnd, OpenAiVoice, Said, Voice


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
    voice_of: Callable[[Said], Voice] = OpenAiVoice
    """In whose words it is given."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._abort_when_gone(receive))
                await self.pull()
                await (self._stream(send) if self.request.is_stream else self._whole(send))
                watcher.cancel()
        finally:
            self.engine.abort(self.job)

    async def _abort_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.engine.abort(self.job)

    async def pull(self) -> None:
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

    def pulled(self) -> list[tuple[bytes, bytes]]:
        """The header that says what became of a pull, where one was asked for."""
        pulled = self.job.call.pulled if self.job.call else None
        return [(ANSWER_HEADER, pulled.told())] if pulled else []

    async def _stream(self, send: Send) -> None:
        # Headers go out before the first token, as the engine does it.
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        await send(start([kind, *self.pulled()]))
        voice = self.voice_of(self)
        async for chunk in self.chunks(voice):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        failure = self.job.failure
        if failure is not None:
            for told in voice.broken(failure):
                await send({"type": "http.response.body", "body": told, "more_body": True})
        if self.job.emitted or failure is not None:
            await send({"type": "http.response.body", "body": voice.done()})

    async def chunks(self, voice: Voice) -> AsyncIterator[bytes]:
        """The events of a stream, but for how it ends."""
        job, request = self.job, self.request
        await job.wait_beyond(0)
        if not job.emitted or job.failure is not None:
            return  # the client left while it waited, or the worker ended it
        self.on_started(request, job)
        end = find_end(self)
        for event in voice.opening():
            yield event
        sent = 0
        while sent < end.tokens:
            await job.wait_beyond(sent)
            if job.failure is not None:
                return  # nothing more leaves, also not what is there already
            upto = min(job.emitted, end.tokens)
            if upto == sent:
                return  # aborted in the middle
            yield voice.piece(end.text[end.starts[sent] : end.starts[upto]], sent, upto)
            sent = upto
        self.engine.abort(job)  # does nothing unless a stop text ended it early
        for event in voice.closing(end):
            yield event

    async def _whole(self, send: Send) -> None:
        end = await self.ending()
        if end is not None:
            await self.send(self.voice_of(self).whole(end), 200, send)
        elif self.job.failure is not None:
            await self.failed(self.job.failure, send)

    async def ending(self) -> AnswerEnd | None:
        """Where it ends, once it is there; None where it failed, or the client left."""
        job = self.job
        await job.wait_beyond(0)
        if job.failure is not None or not job.emitted:
            return None
        self.on_started(self.request, job)
        end = find_end(self)
        while job.emitted < end.tokens and not job.is_over:
            await job.wait_beyond(job.emitted)
        return None if job.failure is not None or job.emitted < end.tokens else end

    async def failed(self, failure: Failure, send: Send) -> None:
        await self.send(self.voice_of(self).failed(failure), failure.status, send)

    async def send(self, body: bytes, status: int, send: Send) -> None:
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send(start([*headers, *self.pulled()], status))
        await send({"type": "http.response.body", "body": body})


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
    return AnswerEnd(text=text[:at], starts=starts, tokens=tokens, reason="stop", stopped_by=stop)


def start(headers: list[tuple[bytes, bytes]], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}
