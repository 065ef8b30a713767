"""OpenAI's Responses API as vLLM 0.32 serves it: a chat in items and numbered events.

Owns how a body becomes that of a chat, the shapes of events and answers, and the responses that can
be gone on with: a bounded table, the oldest of which is forgotten. Must never: know of tokens or of
the cache. Read `core/responses.py` for the items, `voices.py` for the words of chats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trunkline.core.chats import BadBody
from trunkline.core.responses import as_chat
from trunkline.worker.jobs import Failure
from trunkline.worker.requests import BadRequest
from trunkline.worker.voices import AnswerEnd, Said, error_body

MAX_KEPT = 1_024
_KEPT_FIELDS = (
    "model", "stream", "stop", "cache_salt", "cache_salt_regions", "kv_transfer_params",
)  # fmt: skip
_MAX_NAME_CHARACTERS = 256
_encode = msgspec.json.encode
Messages = list[dict[str, Any]]


@dataclass(slots=True)
class ResponseStore:
    """Responses by name: what was asked, and what was said to it."""

    _kept: dict[str, Messages] = field(default_factory=dict[str, Messages])

    def keep(self, name: str, messages: Messages, text: str) -> None:
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[name] = [*messages, {"role": "assistant", "content": text}]

    def before(self, name: str) -> Messages:
        """All but the instructions, which are those of one response. Raises BadRequest."""
        kept = self._kept.get(name)
        if kept is None:
            text = f"Response with id '{name[:_MAX_NAME_CHARACTERS]}' not found."
            raise BadRequest(text, "response_id", status=404)
        return [message for message in kept if message["role"] != "system"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request for a response."""

    body: Mapping[str, Any]
    messages: Messages
    chat: dict[str, Any]
    """The same request as a chat."""

    @property
    def name(self) -> str:
        given = self.body.get("request_id")
        is_good = isinstance(given, str) and 0 < len(given) <= _MAX_NAME_CHARACTERS
        return str(given) if is_good else ""


def asked_of(body: Mapping[str, Any], store: ResponseStore) -> Asked:
    """Raises BadRequest."""
    try:
        chat = as_chat(body)
    except BadBody as error:
        raise BadRequest(str(error), error.param) from error
    messages, previous = chat.messages, body.get("previous_response_id")
    if previous is not None:
        has_instructions = bool(messages) and messages[0]["role"] == "system"
        head = messages[:1] if has_instructions and body.get("instructions") else []
        messages = [*head, *store.before(str(previous)), *messages[len(head) :]]
    kept = {name: body[name] for name in _KEPT_FIELDS if name in body}
    options = dict(chat.options)
    kept["add_special_tokens"] = True  # the engine's request class does not say otherwise
    kept["chat_template_kwargs"] = {"calls_as_given": options.pop("calls_as_given")}
    kept |= {**options, "messages": messages, "tools": chat.tools}
    return Asked(
        body=body, messages=messages, chat={**kept, "max_tokens": body.get("max_output_tokens")}
    )


class ResponsesVoice:
    """See the module."""

    def __init__(self, said: Said, *, asked: Asked, store: ResponseStore) -> None:
        self._said = said
        self._asked = asked
        self._store = store
        self._number = 0
        self._item = f"msg_{said.id}"

    def opening(self) -> list[bytes]:
        response = self._response("in_progress", [])
        item = self._message("in_progress")
        item["content"] = []
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ]

    def piece(self, text: str, first: int, last: int) -> bytes:
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def closing(self, end: AnswerEnd) -> list[bytes]:
        done, item = self._finished(end), self._message("completed", end.text)
        place = self._place()
        return [
            self._event("response.output_text.done", **place, text=end.text, logprobs=[]),
            self._event("response.content_part.done", **place, part=_part(end.text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event("response.completed", response=done),  # whatever its status is
        ]

    def broken(self, failure: Failure) -> list[bytes]:
        return [b"data: " + self.failed(failure) + b"\n\n"]

    def done(self) -> bytes:
        return b""

    def whole(self, end: AnswerEnd) -> bytes:
        return _encode(self._finished(end))

    def failed(self, failure: Failure) -> bytes:
        return _encode(error_body(failure.status, failure.message))

    def _finished(self, end: AnswerEnd) -> dict[str, Any]:
        if self._asked.body.get("store") is not False:
            self._store.keep(self._said.id, self._asked.messages, end.text)
        status = "incomplete" if end.reason == "length" else "completed"
        response = self._response(status, [self._message("completed", end.text)])
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**response, "usage": self._usage(end.tokens)}

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        job = self._said.job
        cached = job.cached_tokens if self._said.tells_reuse else 0
        return {
            "input_tokens": len(job.prompt),
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": len(job.prompt) + output_tokens,
        }

    def _response(self, status: str, output: Messages) -> dict[str, Any]:
        body, said = self._asked.body, self._said
        return {
            "id": said.id,
            "created_at": said.created_s,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": said.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": body.get("temperature") or 1.0,
            "tool_choice": body.get("tool_choice") or ("auto" if body.get("tools") else "none"),
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p") or 1.0,
            "background": False,
            "max_output_tokens": said.request.wanted_tokens,
            "previous_response_id": body.get("previous_response_id"),
            "service_tier": "auto",
            "status": status,
            "truncation": "disabled",
            "usage": None,
        }

    def _message(self, status: str, text: str = "") -> dict[str, Any]:
        message = {"id": self._item, "type": "message", "role": "assistant", "status": status}
        return {**message, "content": [_part(text)]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **told: Any) -> bytes:  # JSON
        body = {"type": kind, "sequence_number": self._number, **told}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(body))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
