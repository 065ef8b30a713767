"""One streamed completion as it arrives: tokens, usage, and whether it is whole.

Reads the chunks of `/v1/completions` and `/v1/chat/completions`. Owns what counts as complete: a
finish reason and `[DONE]`, with no error frame. Must never repeat text of an error. Read
`client.py` next.
"""

from __future__ import annotations

from array import array

import msgspec

from trunkline.replay.records import Reply

MAX_ERROR_BYTES = 64 << 10
MAX_ANSWER_TOKENS = 1 << 20


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Answer:
    """One answer as it arrives."""

    def __init__(self, sent_at_ms: float) -> None:
        self.sent_at_ms = sent_at_ms
        self.first_token_at_ms: float | None = None
        self.status = 0
        self.decision = ""
        self.problem = ""
        self.token_ids: array[int] = array("I")
        self.texts: list[str] = []
        self.usage: _Usage | None = None
        self.is_finished = False
        self.is_done = False
        self.error_body = b""

    def event(self, data: bytes, at_ms: float) -> None:
        """Take the data of one event that arrived at this time."""
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            event = _decode_event(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.problem = self.problem or "an event that is no completion chunk"
            return
        if event.error is not None:
            self.problem = self.problem or "error frame: " + _error_code(data)
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            self._choice(choice, at_ms)

    def _choice(self, choice: _Choice, at_ms: float) -> None:
        text = choice.text or (choice.delta.content if choice.delta is not None else None) or ""
        if (text or choice.token_ids) and self.first_token_at_ms is None:
            self.first_token_at_ms = at_ms
        if text:
            self.texts.append(text)
        if choice.token_ids and len(self.token_ids) < MAX_ANSWER_TOKENS:
            try:
                self.token_ids.extend(choice.token_ids)
            except OverflowError:
                self.problem = self.problem or "a token id outside 0..4294967295"
        if choice.finish_reason is not None:
            self.is_finished = True

    def add_error_body(self, body: bytes) -> None:
        """Keep the beginning of a refusal, for its code."""
        self.error_body = (self.error_body + body)[:MAX_ERROR_BYTES]

    def reply(self, ended_at_ms: float, problem: str = "") -> Reply:
        """What there is to say at the end; a `problem` of the connection goes before our own."""
        usage = self.usage or _Usage()
        details = usage.prompt_tokens_details or _Details()
        return Reply(
            sent_at_ms=self.sent_at_ms,
            first_token_at_ms=self.first_token_at_ms,
            ended_at_ms=ended_at_ms,
            status=self.status,
            lost_reason=problem or self._incomplete(),
            token_ids=self.token_ids,
            text="".join(self.texts),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens,
            completion_tokens=usage.completion_tokens,
            decision=self.decision,
        )

    def _incomplete(self) -> str:
        if self.status != 200:
            return f"status {self.status}: {_error_code(self.error_body)}"
        if self.problem:
            return self.problem
        if not self.is_finished:
            return "the stream ended without a finish reason"
        if not self.is_done:
            return "the stream ended without [DONE]"
        return ""


def _error_code(body: bytes) -> str:
    """The code or type of an OpenAI error; messages are not repeated, as they may hold prompt
    text.
    """
    try:
        decoded = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        error = msgspec.json.decode(decoded.get("error", b"{}"), type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "no JSON error"
    code = error.get("code")  # engines repeat the status there; their type says more
    return str((code if isinstance(code, str) else "") or error.get("type") or "no code")[:60]
