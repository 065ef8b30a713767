"""An engine in a few lines, which says a given text byte by byte, and a client of its streams.

Its tokens are the bytes of UTF-8, so that any seam may lie inside a character. It holds back what
is no whole character yet, and as many characters as may still become a stop text, as vLLM does; in
front of a prompt that ends in the middle of its text it goes on from there, and knows nothing of
what is in front.
"""

from __future__ import annotations

import codecs
import json
from array import array
from dataclasses import dataclass, field
from typing import Any

PROMPT = b"say it:"


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    digest = "bytes"
    vocab_size = 256

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        return array("I", list(text.encode()))

    def decode(self, token_ids: array[int]) -> str:
        return bytes(token_ids.tolist()).decode("utf-8", "replace")


BYTES = _Bytes()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a stream said, in the end."""

    text: str
    ids: bytes
    reason: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Says `text`, then ends."""

    text: str
    name: str

    def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of the answer to a chat or a completion, without their envelopes."""
        is_chat = "messages" in body
        prompt = PROMPT if is_chat or isinstance(body["prompt"], str) else bytes(body["prompt"])
        assert prompt.startswith(PROMPT), "not what the client asked"
        said = prompt[len(PROMPT) :]
        whole = self.text.encode()
        assert whole.startswith(said), "not what was said"
        left = body["max_tokens"]
        is_end = len(whole) - len(said) <= left
        told = _Told(body=body, is_chat=is_chat)
        if is_chat:
            told.add("", None, role=True)
        told.run(whole[len(said) : len(said) + left], "stop" if is_end else "length")
        if (body.get("stream_options") or {}).get("include_usage"):
            counts = {"prompt_tokens": len(prompt), "completion_tokens": told.tokens}
            told.events.append({"choices": [], "usage": counts})
        return told.events

    def stream(self, body: dict[str, Any]) -> bytes:
        """The same as bytes of a chunked HTTP body."""
        envelope = {"id": self.name, "created": len(self.name), "model": "m"}
        events = [json.dumps({**envelope, **event}).encode() for event in self.events(body)]
        framed = [b"data: %b\n\n" % event for event in [*events, b"[DONE]"]]
        return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in framed) + b"0\r\n\r\n"

    def answer(self, body: dict[str, Any]) -> Answer:
        """Of a stream that nothing happens to."""
        return heard(b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in self.events(body)))


@dataclass(kw_only=True)
class _Told:
    body: dict[str, Any]
    is_chat: bool
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tokens: int = 0

    def add(self, text: str, token: int | None, *, role: bool = False, reason: str = "") -> None:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason or None}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        if role:
            choice["delta"]["role"] = "assistant"
        if self.body.get("return_token_ids") and token is not None:
            choice["token_ids"] = [token]
        event: dict[str, Any] = {"choices": [choice]}
        if self.body.get("return_token_ids") and not self.tokens:
            event["prompt_token_ids"] = list(PROMPT)
        self.events.append(event)

    def run(self, rest: bytes, end: str) -> None:
        """Token by token, until a stop text or the end."""
        stops, is_included = self.body.get("stop", []), self.body.get("include_stop_str_in_output")
        held = 0 if is_included else max(map(len, stops), default=1) - 1
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text, shown = "", 0
        for index, token in enumerate(rest):
            before, text = len(text), text + decoder.decode(bytes([token]))
            self.tokens += 1
            stop = next((s for s in stops if len(text) > before and text.endswith(s)), None)
            is_last = index == len(rest) - 1
            if stop is not None and not is_included:
                text = text[: -len(stop)]
            upto = len(text) if stop is not None or is_last else max(shown, len(text) - held)
            reason = "stop" if stop is not None else end if is_last else ""
            self.tokens -= 1
            self.add(text[shown:upto], token, reason=reason)
            self.tokens += 1
            shown = max(shown, upto)
            if reason:
                return
        self.add("", None, reason=end)


def heard(body: bytes) -> Answer:
    """What a client makes of the events; nothing may follow the end."""
    text, ids, reason, tokens = "", b"", "", 0
    for block in body.decode().split("\n\n"):
        if not block.startswith("data: {"):
            continue
        event = json.loads(block[6:])
        assert "error" not in event, event
        for choice in event["choices"]:
            assert not reason, "something follows the end"
            text += choice.get("text", "") + choice.get("delta", {}).get("content", "")
            ids += bytes(choice.get("token_ids") or [])
            reason = choice["finish_reason"] or reason
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    return Answer(text=text, ids=ids, reason=reason, tokens=tokens)
