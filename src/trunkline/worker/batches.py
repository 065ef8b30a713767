"""A completion of several prompts: one answer with a choice for each.

Each prompt is a job of its own, under the same salt; what a ticket says of a public beginning is
said of the first alone. Must never: put another prompt under the salt of a public beginning. Read
`answers.py` for one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Receive, Scope, Send

from trunkline.worker.answers import Answer, find_end, start
from trunkline.worker.blocks import Terms
from trunkline.worker.requests import Generation
from trunkline.worker.voices import AnswerEnd, OpenAiVoice, usage


def terms_of_another(terms: Terms) -> Terms:
    """Of the first prompt's terms those that hold for any other, too."""
    ticket = terms.ticket
    return replace(terms, ticket=ticket and replace(ticket, regions=()), regions=())


def part_of(generation: Generation) -> Generation:
    """As a part of a batch: what was used is told once, by the batch."""
    return replace(generation, includes_usage=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """What one request with several prompts gets; an ASGI application for that one request."""

    parts: Sequence[Answer]
    """In the order of the prompts, at least one."""
    includes_usage: bool
    """At the end of a stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.parts, "a batch has a prompt"
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._abort_when_gone(receive))
                for part in self.parts:
                    await part.pull()
                is_stream = self.parts[0].request.is_stream
                await (self._stream(send) if is_stream else self._whole(send))
                watcher.cancel()
        finally:
            self._abort()

    async def _abort_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort()

    def _abort(self) -> None:
        for part in self.parts:
            part.engine.abort(part.job)

    async def _whole(self, send: Send) -> None:
        voices = [OpenAiVoice(part, index) for index, part in enumerate(self.parts)]
        ends: list[AnswerEnd] = []
        for part in self.parts:
            end = await part.ending()
            if end is None:
                if part.job.failure is not None:
                    await part.failed(part.job.failure, send)
                return
            ends.append(end)
        choices = [voice.choice(end) for voice, end in zip(voices, ends, strict=True)]
        used = self._used([end.tokens for end in ends])
        await self.parts[0].send(voices[0].whole_of(choices, used), 200, send)

    async def _stream(self, send: Send) -> None:
        """One choice after another: all are computed meanwhile."""
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        await send(start([kind, *self.parts[0].pulled()]))
        counts: list[int] = []
        for index, part in enumerate(self.parts):
            voice = OpenAiVoice(part, index)
            async for chunk in part.chunks(voice):
                await _more(chunk, send)
            if (failure := part.job.failure) is not None:
                for told in voice.broken(failure):
                    await _more(told, send)
                break
            if not part.job.emitted:
                return  # the client left
            counts.append(find_end(part).tokens)
        voice = OpenAiVoice(self.parts[0])
        if self.includes_usage and len(counts) == len(self.parts):
            await _more(voice.counted(self._used(counts)), send)
        await send({"type": "http.response.body", "body": voice.done()})

    def _used(self, counts: Sequence[int]) -> dict[str, Any]:
        """By all parts together, of so many tokens each."""
        told = [usage(part, count) for part, count in zip(self.parts, counts, strict=True)]
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        used: dict[str, Any] = {name: sum(one[name] for one in told) for name in names}
        cached = sum(part.job.cached_tokens for part in self.parts)
        details = {"cached_tokens": cached} if self.parts[0].tells_reuse else None
        return {**used, "prompt_tokens_details": details}


async def _more(body: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
