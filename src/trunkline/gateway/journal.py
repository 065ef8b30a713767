"""What a client already has of a stream that broke: read back from the buffers it was sent.

    forwarded buffers ──(chunk framing off)──► events ──► text, token ids, where it ended

While all is well nothing here runs: the relay keeps references to what it passed on, and they are
decoded once, when the worker has failed. Must never guess: what a stream does not say is None, and
what a continuation could not go on with has a word in `trouble`. Read `resumption.py` for what
is made of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trunkline.core.sse import EventSplitter, EventTooLong
from trunkline.gateway.framing import BrokenFraming, ChunkReader

DONE_MARK = b"[DONE]"
PARSED = "parsed output"
LOGPROBS = "log probabilities"


class Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing but text."""
        others = (
            self.reasoning, self.reasoning_content, self.refusal, self.tool_calls,
            self.function_call,
        )  # fmt: skip
        return not any(others)


class ChoiceEvent(msgspec.Struct):
    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None

    @property
    def said(self) -> str:
        """Its text."""
        if self.delta is not None:
            return self.delta.content or ""
        return self.text or ""


class StreamEvent(msgspec.Struct):
    """One event of an engine's stream, as far as anything here asks."""

    id: str = ""
    choices: list[ChoiceEvent] = []
    prompt_token_ids: list[int] | None = None
    usage: Any = None
    error: Any = None


_ENVELOPE_LESS = ("choices", "prompt_token_ids", "usage", "error")
_events = msgspec.json.Decoder(StreamEvent)


@dataclass(slots=True, kw_only=True)
class Delivered:
    """What the client has."""

    envelope: dict[str, Any] = field(default_factory=dict[str, Any])
    """What each event says of the answer as a whole, in the words of the first one; empty before
    it.
    """
    text: str = field(default="", repr=False)
    ids: array[int] | None = field(default_factory=lambda: array("I"), repr=False)
    """Of all tokens so far; None where any text came without."""
    prompt_ids: array[int] | None = field(default=None, repr=False)
    is_last_silent: bool = False
    """The last tokens came without text: some of it is still held back."""
    tokens: int = 0
    """Told by ids, else events with text: in a stream of an engine one token each."""
    finish_reason: str = ""
    has_usage: bool = False
    is_done: bool = False
    is_torn: bool = False
    """It ends inside an event, or holds what cannot be read."""
    trouble: str = ""
    """Why nothing can follow that would fit; empty where something can."""

    @property
    def has_begun(self) -> bool:
        """Whether any of the answer itself is there, beside what announces it."""
        return bool(self.text or self.ids or self.finish_reason or self.trouble)


def read_journal(forwarded: Sequence[bytes]) -> Delivered:
    """Of the chunks of a stream in the order in which they were passed on."""
    seen, texts = Delivered(), list[str]()
    reader = ChunkReader(takes_trailers=True, collects=True)
    splitter = EventSplitter()
    assert reader.pieces is not None, "a reader that does not collect"
    try:
        reader.feed(b"".join(forwarded))
        for event in splitter.feed(b"".join(reader.pieces)):
            _read(seen, texts, event)
    except (BrokenFraming, EventTooLong, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        seen.is_torn = True
    seen.text = "".join(texts)
    seen.is_torn = seen.is_torn or not splitter.is_between_events
    if seen.ids:
        seen.tokens = len(seen.ids)
    return seen


def _read(seen: Delivered, texts: list[str], raw: bytes) -> None:
    if raw == DONE_MARK:
        seen.is_done = True
        return
    event = _events.decode(raw)
    if not seen.envelope:
        whole: dict[str, Any] = msgspec.json.decode(raw)
        seen.envelope = {name: whole[name] for name in whole if name not in _ENVELOPE_LESS}
        if "usage" in whole:
            seen.envelope["usage"] = None  # in its place in each event, and told in the last
    if event.error is not None:
        seen.trouble = "an error was told"
    if event.usage is not None:
        seen.has_usage = True
    prompt_ids = event.prompt_token_ids
    for choice in event.choices:
        prompt_ids = prompt_ids or choice.prompt_token_ids
        _read_choice(seen, texts, choice)
    if prompt_ids and seen.prompt_ids is None:
        seen.prompt_ids = as_ids(prompt_ids)


def _read_choice(seen: Delivered, texts: list[str], choice: ChoiceEvent) -> None:
    if choice.index != 0:
        seen.trouble = "several choices"
    if choice.logprobs is not None:
        seen.trouble = seen.trouble or LOGPROBS
    if choice.delta is not None and not choice.delta.is_plain:
        seen.trouble = seen.trouble or PARSED
    text, ids = choice.said, choice.token_ids
    texts.append(text)
    seen.tokens += bool(text)
    if ids:
        seen.is_last_silent = not text
    if ids is None and text:
        seen.ids = None
    elif ids and seen.ids is not None:
        packed = as_ids(ids)
        if packed is None:
            seen.ids = None
        else:
            seen.ids += packed  # in place
    if choice.finish_reason:
        seen.finish_reason = choice.finish_reason


def as_ids(ids: list[int]) -> array[int] | None:
    """Packed; None where one is none."""
    try:
        return array("I", ids)
    except (OverflowError, TypeError):
        return None
