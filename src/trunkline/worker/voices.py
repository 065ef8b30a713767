"""What an answer is in the words of each API: events of its stream, and the whole.

A voice lays out one answer. Chunks are laid out once a stream, and only the text is put in for each
token. Must never: wait, or look at the cache. Read `answers.py` for who speaks, `messages.py` for
another voice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from trunkline.worker.jobs import Failure, Job
from trunkline.worker.requests import Generation

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """Where an answer ends, known as soon as its prompt is computed."""

    text: str
    starts: list[int]
    """`text[starts[i]:starts[j]]` belongs to tokens i to j."""
    tokens: int
    reason: str
    stopped_by: str | None = None
    """The stop text that ended it."""


class Said(Protocol):
    """What a voice must know of an answer."""

    @property
    def request(self) -> Generation: ...
    @property
    def job(self) -> Job: ...
    @property
    def id(self) -> str: ...
    @property
    def created_s(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def tells_reuse(self) -> bool: ...


class Voice(Protocol):
    """One answer in the words of an API. Each event of a stream is sent by itself."""

    def opening(self) -> list[bytes]:
        """Events before the first token."""
        ...

    def piece(self, text: str, first: int, last: int) -> bytes:
        """The event of the tokens from `first` up to `last`."""
        ...

    def closing(self, end: AnswerEnd) -> list[bytes]:
        """Events behind the last token."""
        ...

    def broken(self, failure: Failure) -> list[bytes]:
        """Events that end a stream which failed."""
        ...

    def done(self) -> bytes:
        """The last event of all, of a stream that began."""
        ...

    def whole(self, end: AnswerEnd) -> bytes:
        """The body of an answer that is no stream."""
        ...

    def failed(self, failure: Failure) -> bytes:
        """The body where nothing can be answered."""
        ...


class OpenAiVoice:
    """Chats and completions."""

    def __init__(self, said: Said, index: int = 0) -> None:
        self._said = said
        self._index = index
        self._before, self._after = self._chunk_frame()

    def opening(self) -> list[bytes]:
        return [self._first_chunk()] if self._said.request.is_chat else []

    def piece(self, text: str, first: int, last: int) -> bytes:
        ids = b""
        if self._said.request.returns_ids:
            ids = b',"token_ids":' + _encode(self._said.job.answer[first:last].tolist())
        return self._before + _encode(text) + self._after + ids + b"}]}\n\n"

    def closing(self, end: AnswerEnd) -> list[bytes]:
        told = [self._last_chunk(end.reason)]
        if self._said.request.includes_usage:
            told.append(self.counted(usage(self._said, end.tokens)))
        return told

    def counted(self, used: dict[str, Any]) -> bytes:
        """The event that tells what was used."""
        return b"data: " + _encode(self._envelope() | {"choices": [], "usage": used}) + b"\n\n"

    def broken(self, failure: Failure) -> list[bytes]:
        return [b"data: " + self.failed(failure) + b"\n\n"]

    def done(self) -> bytes:
        return b"data: [DONE]\n\n"

    def failed(self, failure: Failure) -> bytes:
        return _encode(error_body(failure.status, failure.message))

    def whole(self, end: AnswerEnd) -> bytes:
        return self.whole_of([self.choice(end)], usage(self._said, end.tokens))

    def choice(self, end: AnswerEnd) -> dict[str, Any]:
        """What it says, as a part of a whole."""
        said, job = self._said, self._said.job
        choice: dict[str, Any] = {
            "index": self._index,
            "logprobs": None,
            "finish_reason": end.reason,
        }
        if said.request.is_chat:
            choice["message"] = {"role": "assistant", "content": end.text, "tool_calls": []}
        else:
            choice["text"] = end.text
        if said.request.returns_ids:
            choice["token_ids"] = job.answer[: end.tokens].tolist()
            choice["prompt_token_ids"] = job.prompt.tolist()
        return choice

    def whole_of(self, choices: list[dict[str, Any]], used: dict[str, Any]) -> bytes:
        """The body that has all of them."""
        kind = "chat.completion" if self._said.request.is_chat else "text_completion"
        return _encode({**self._envelope(kind), "choices": choices, "usage": used})

    def _envelope(self, kind: str = "") -> dict[str, Any]:
        streamed = "chat.completion.chunk" if self._said.request.is_chat else "text_completion"
        return {
            "id": self._said.id,
            "object": kind or streamed,
            "created": self._said.created_s,
            "model": self._said.model,
        }

    def _first_chunk(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
        more: dict[str, Any] = {}
        if self._said.request.returns_ids:
            more["prompt_token_ids"] = self._said.job.prompt.tolist()
        return b"data: " + _encode({**self._envelope(), "choices": [choice], **more}) + b"\n\n"

    def _last_chunk(self, reason: str) -> bytes:
        choice: dict[str, Any] = {
            "index": self._index,
            "finish_reason": reason,
            "stop_reason": None,
        }
        choice |= {"delta": {}} if self._said.request.is_chat else {"text": ""}
        return b"data: " + _encode({**self._envelope(), "choices": [choice]}) + b"\n\n"

    def _chunk_frame(self) -> tuple[bytes, bytes]:
        """What stands before and after the text of a chunk, up to the end of its choice."""
        head = (
            b"data: " + _encode(self._envelope())[:-1] + b',"choices":[{"index":%d,' % self._index
        )
        if self._said.request.is_chat:
            return head + b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null'
        return head + b'"text":', b',"logprobs":null,"finish_reason":null'


def usage(said: Said, completion_tokens: int) -> dict[str, Any]:
    """The token counts that end an answer."""
    job = said.job
    return {
        "prompt_tokens": len(job.prompt),
        "completion_tokens": completion_tokens,
        "total_tokens": len(job.prompt) + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens} if said.tells_reuse else None,
    }


def error_body(
    status: int, message: str, kind: str = "InternalServerError", param: str | None = None
) -> dict[str, Any]:
    """An error in the shape that OpenAI's clients read."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
