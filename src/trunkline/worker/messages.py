"""Anthropic's Messages API as vLLM 0.32 serves it: a chat in other words.

Owns how a body becomes that of a chat, and the shapes of events, answers and errors. Must never:
know of tokens or of the cache. Read `core/anthropic.py` for the messages, `voices.py` for the words
of chats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trunkline.core.anthropic import as_chat, fitted
from trunkline.core.chats import BadBody
from trunkline.ports.template import ChatTemplate
from trunkline.worker.jobs import Failure
from trunkline.worker.requests import BadRequest
from trunkline.worker.voices import AnswerEnd, Said

_KEPT = (
    "model", "max_tokens", "stream", "cache_salt", "cache_salt_regions", "kv_transfer_params",
)  # fmt: skip
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
_BLOCK = {"type": "text", "text": ""}
_encode = msgspec.json.encode


def chat_body(
    body: Mapping[str, Any], template: ChatTemplate, *, is_count: bool = False
) -> dict[str, Any]:
    """The same request as a chat. Raises BadRequest."""
    if not is_count and body.get("max_tokens") is None:
        raise BadRequest("max_tokens is missing", "max_tokens")
    try:
        chat = as_chat(body)
    except BadBody as error:
        raise BadRequest(str(error), error.param) from error
    messages, options = fitted(chat.messages, chat.options, template, chat.thinks_not)
    kept = {name: body[name] for name in _KEPT if name in body}
    stop = body.get("stop_sequences")
    return {**kept, **options, "messages": messages, "tools": chat.tools, "stop": stop}


class MessagesVoice:
    """See the module."""

    def __init__(self, said: Said) -> None:
        self._said = said

    def opening(self) -> list[bytes]:
        prompt_tokens = len(self._said.job.prompt)
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = {**self._message(), "stop_reason": None, "stop_sequence": None, "usage": usage}
        start = {"type": "content_block_start", "content_block": _BLOCK, "index": 0}
        return [_event({"type": "message_start", "message": message}), _event(start)]

    def piece(self, text: str, first: int, last: int) -> bytes:
        delta = {"type": "text_delta", "text": text}
        return _event({"type": "content_block_delta", "delta": delta, "index": 0})

    def closing(self, end: AnswerEnd) -> list[bytes]:
        usage = self._usage(end.tokens)
        delta = {"stop_reason": _stop_reason(end), "stop_sequence": end.stopped_by}
        return [
            _event({"type": "content_block_stop", "index": 0}),
            _event({"type": "message_delta", "delta": delta, "usage": usage}),
        ]

    def broken(self, failure: Failure) -> list[bytes]:
        error = {"type": "internal_error", "message": failure.message}
        return [_event({"type": "error", "error": error})]

    def done(self) -> bytes:
        return b"" if self._said.job.failure else _event({"type": "message_stop"})

    def whole(self, end: AnswerEnd) -> bytes:
        stop = {"stop_reason": _stop_reason(end)}
        if end.stopped_by is not None:
            stop["stop_sequence"] = end.stopped_by
        content = [{"type": "text", "text": end.text}]
        body = {**self._message(), "content": content, **stop, "usage": self._usage(end.tokens)}
        return _encode(body)

    def failed(self, failure: Failure) -> bytes:
        return error_body("InternalServerError", failure.message)

    def _message(self) -> dict[str, Any]:
        said = self._said
        answer: dict[str, Any] = {"id": said.id, "type": "message", "role": "assistant"}
        return {**answer, "content": [], "model": said.model}

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        """What was reused counts apart from the rest of the input."""
        job, told = self._said.job, self._said.tells_reuse
        fresh = len(job.prompt) - (job.cached_tokens if told else 0)
        usage = {"input_tokens": fresh, "output_tokens": completion_tokens}
        return {**usage, "cache_read_input_tokens": job.cached_tokens} if told else usage


def error_body(kind: str, message: str) -> bytes:
    """An error in the shape that Anthropic's clients read."""
    return _encode({"type": "error", "error": {"type": kind, "message": message}})


def _stop_reason(end: AnswerEnd) -> str:
    return "stop_sequence" if end.stopped_by is not None else _STOP_REASONS[end.reason]


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), _encode(data))
