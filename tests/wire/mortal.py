"""Engines that die in the middle of a stream, where the test says, and a picker for them.

Their model is the simulated one: each token is a function of all before it, so that whoever goes on
from the right place says what the first one would have said, and nobody else does.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from fleet import own_tokenizer
from scripted import (
    SSE_HEAD,
    FixedPicker,
    Running,
    ScriptedWorker,
    Served,
    chunk,
    json_answer,
    post,
    running,
    worker,
)

from trunkline.config import RetryConfig
from trunkline.core import simkv
from trunkline.core.records import WorkerId
from trunkline.gateway.contracts import ChatPrompt, InferenceRequest, Pick, Route

TOKENIZER = own_tokenizer()
PROMPT = "a river under the bridge"
WANTED = 12
LAST = 1 << 30
"""More than any stream has events."""


def prompt_ids(body: dict[str, Any]) -> array[int]:
    """Of a chat: its only message, as it stands."""
    if "messages" in body:
        return TOKENIZER.encode(body["messages"][0]["content"], add_special_tokens=False)
    if isinstance(body["prompt"], str):
        return TOKENIZER.encode(body["prompt"], add_special_tokens=False)
    return array("I", body["prompt"])


def answer_ids(prompt: array[int], count: int) -> list[int]:
    return simkv.answer_tokens(prompt, count, TOKENIZER.vocab_size).tolist()


def text_of_ids(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(array("I", ids))


def expected(body: dict[str, Any]) -> list[int]:
    """The tokens of a whole answer."""
    return answer_ids(prompt_ids(body), body.get("max_tokens", WANTED))


@dataclass
class Mortal:
    """Streams, and breaks off before the event of that index in its n-th answer."""

    deaths: list[int] = field(default_factory=list[int])
    """By answer; later ones live."""
    is_silent: bool = False
    """It does not close where it breaks off, and says the rest when `go_on` is set."""
    name: str = "w"
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    paths: list[str] = field(default_factory=list[str])

    async def script(self, served: Served) -> None:
        while True:
            first, _, raw = await served.request()
            body = json.loads(raw)
            death = self.deaths[len(self.bodies)] if len(self.bodies) < len(self.deaths) else LAST
            self.bodies.append(body)
            self.paths.append(first.split(" ")[1])
            events = self.events(body)
            await served.send(SSE_HEAD)
            for event in events[:death]:
                await served.send(chunk(event))
            if death < LAST:
                await asyncio.sleep(0.01)  # a reset overtakes what was sent
                if self.is_silent:
                    await self.go_on.wait()
                    await served.send(b"".join(map(chunk, events[death:])) + b"0\r\n\r\n")
                    await served.gone()
                served.reset()
                return
            await served.send(b"0\r\n\r\n")

    def events(self, body: dict[str, Any]) -> list[bytes]:
        """All of a whole answer."""
        prompt, is_chat = prompt_ids(body), "messages" in body
        ids = answer_ids(prompt, body.get("max_tokens") or WANTED)
        has_ids = body.get("return_token_ids")
        made: list[dict[str, Any]] = []
        if is_chat:
            first: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            made.append({"choices": [first]})
            if has_ids:
                made[0]["prompt_token_ids"] = prompt.tolist()
        text, reason = "", "length"
        for index, token in enumerate(ids):
            piece = text_of_ids([token])
            stops = [stop for stop in stops_of(body) if stop in text + piece]
            text += piece
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
            choice |= {"delta": {"content": piece}} if is_chat else {"text": piece}
            if has_ids:
                choice["token_ids"] = [token]
                if index == 0 and not is_chat:
                    choice["prompt_token_ids"] = prompt.tolist()
            made.append({"choices": [choice]})
            if stops:
                reason = "stop"
                break
        last: dict[str, Any] = {"index": 0, "finish_reason": reason, "stop_reason": None}
        last |= {"delta": {}} if is_chat else {"text": ""}
        made.append({"choices": [last]})
        if (body.get("stream_options") or {}).get("include_usage"):
            made = [{**event, "usage": None} for event in made]
            made.append({"choices": [], "usage": usage(len(prompt), len(ids))})
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        envelope = {
            "id": f"{self.name}-{len(self.bodies)}",
            "object": kind,
            "created": 1_700_000_000 + len(self.bodies),
            "model": body.get("model", "m"),
            "system_fingerprint": self.name,
        }
        told = [b"data: " + json.dumps({**envelope, **event}).encode() + b"\n\n" for event in made]
        return [*told, b"data: [DONE]\n\n"]


def stops_of(body: dict[str, Any]) -> list[str]:
    stops = body.get("stop") or []
    return [stops] if isinstance(stops, str) else stops


def usage(prompt: int, generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


class TokenPicker(FixedPicker):
    """Reads prompts as the engines do, and says with what."""

    def __init__(self, *workers: ScriptedWorker, has_tokenizer: bool = True) -> None:
        super().__init__(*workers)
        self._tokenizer = TOKENIZER if has_tokenizer else None

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick | Awaitable[Pick]:
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            content = prompt.messages[0]["content"]
            request.prompt = TOKENIZER.encode(content, add_special_tokens=False)
        elif isinstance(prompt, str):
            assert request.route is Route.COMPLETION
            request.prompt = TOKENIZER.encode(prompt, add_special_tokens=False)
        pick = super().pick(request, tried)
        assert isinstance(pick, Pick)
        return replace(pick, tokenizer=self._tokenizer)


def chat(**more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "stream": True}
    return {**body, "max_tokens": WANTED, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": PROMPT, "stream": True, "max_tokens": WANTED, **more}


@dataclass(frozen=True)
class Heard:
    """What a client made of a stream."""

    text: str
    ids: list[int]
    envelopes: set[tuple[str, ...]]
    roles: int
    reasons: list[str]
    usages: list[dict[str, Any]]
    error: dict[str, Any] | None
    is_done: bool
    comments: list[str]


def heard(body: bytes) -> Heard:
    """Read as a client reads; raises for anything that one could not."""
    seen = Heard("", [], set(), 0, [], [], None, False, [])
    text, roles, error, is_done = "", 0, None, False
    for block in body.decode().split("\n\n"):
        if block.startswith(":"):
            seen.comments.append(block)
            continue
        if not block:
            continue
        assert not is_done, f"something follows the end: {block}"
        assert error is None, f"something follows an error: {block}"
        data = block.removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            continue
        names = ("id", "object", "created", "model", "system_fingerprint")
        seen.envelopes.add(tuple(str(event[name]) for name in names))
        if event.get("usage"):
            seen.usages.append(event["usage"])
        for choice in event["choices"]:
            assert not seen.reasons, "something follows the last of its tokens"
            delta = choice.get("delta", {})
            roles += "role" in delta
            text += delta.get("content", "") + choice.get("text", "")
            seen.ids.extend(choice.get("token_ids", []))
            if choice.get("finish_reason"):
                seen.reasons.append(choice["finish_reason"])
    return replace(seen, text=text, roles=roles, error=error, is_done=is_done)


QUICK = RetryConfig(retry_initial_backoff_ms=1, retry_max_backoff_ms=2)
USAGE = {"stream_options": {"include_usage": True}}
IDS = {"return_token_ids": True}


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def told(gateway: Running, body: dict[str, Any]) -> Heard:
    """What a client is told; the HTTP message ends as it should in any case."""
    reply = await gateway.ask(post(body, path=path_of(body)))
    assert (reply.status, reply.is_whole) == (200, True)
    await gateway.settled()
    assert gateway.picker.open_count == 0
    return heard(reply.body)


async def through(
    *mortals: Mortal,
    body: dict[str, Any],
    retry: RetryConfig = QUICK,
    has_tokenizer: bool = True,
) -> tuple[Heard, Running]:
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker(one.script, f"w{index}"))
            for index, one in enumerate(mortals)
        ]
        picker = TokenPicker(*workers, has_tokenizer=has_tokenizer)
        gateway = await stack.enter_async_context(running(picker, retry=retry))
        return await told(gateway, body), gateway


REFUSES = json_answer(b'{"error":{"message":"no"}}', "400 Bad Request")
