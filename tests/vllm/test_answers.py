"""The openai package through the gateway and straight to the engine: the answers are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from fleet import WAIT_S, Gateway
from vllm_engines import MODEL, Engine

MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Tell me of the river, café Größe 你好 🚀, and of the bridge."},
]
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a thing by its key; says «nothing» where there is none.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "enum": ["a", "b"]}},
            "required": ["key"],
            "additionalProperties": False,
        },
    },
}
CALLED: list[dict[str, Any]] = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"key": "a"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a river"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", " and two")]}]

CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": MESSAGES},
    "three-samples-of-one-seed": {"messages": MESSAGES, "n": 3, "temperature": 1.0, "seed": 7},
    "logprobs": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3},
    "a-stop": {"messages": MESSAGES, "stop": ["e"]},
    "max_completion_tokens": {"messages": MESSAGES, "max_completion_tokens": 5},
    "a-named-tool": {
        "messages": MESSAGES,
        "tools": [LOOK_UP],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "max_tokens": 40,
    },
    "a-required-tool": {
        "messages": MESSAGES,
        "tools": [LOOK_UP],
        "tool_choice": "required",
        "max_tokens": 60,
    },
    "tools-to-choose-from": {"messages": MESSAGES, "tools": [LOOK_UP]},
    "after-a-tool": {"messages": CALLED, "tools": [LOOK_UP], "tool_choice": "none"},
    "json": {
        "messages": MESSAGES,
        "response_format": {"type": "json_object"},
        "max_tokens": 24,
    },
    "text-in-parts": {"messages": PARTS},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "The river and the bridge"},
    "token-ids": {"prompt": [10, 600, 700, 800, 900]},
    "two-prompts": {"prompt": ["The river", "A bridge"]},
    "logprobs": {"prompt": "The river", "logprobs": 2},
    "echo": {"prompt": "The river", "echo": True},
    "two-samples-of-one-seed": {"prompt": "The river", "n": 2, "temperature": 1.0, "seed": 3},
}
MISTAKES: dict[str, dict[str, Any]] = {
    "too-hot": {"prompt": "The river", "temperature": 9},
    "an-unknown-model": {"prompt": "The river", "model": "nobody"},
    "a-prompt-beyond-the-context": {"prompt": [600] * 9_000},
    "an-answer-beyond-the-context": {"prompt": "The river", "max_tokens": 9_000},
}
OWN = frozenset({"id", "created", "system_fingerprint", "prompt_tokens_details"})
"""What differs between any two answers: names, times, and how much was in the cache."""


@pytest.fixture(scope="module")
def through(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def straight(engines: list[Engine]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engines[0].url}/v1", api_key="none", timeout=WAIT_S) as client:
        yield client


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
def test_a_chat_is_answered_as_by_the_engine_itself(
    through: openai.OpenAI, straight: openai.OpenAI, body: dict[str, Any]
) -> None:
    assert _whole(_chat(through), body) == _whole(_chat(straight), body)


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
def test_a_streamed_chat_says_what_the_engine_says(
    through: openai.OpenAI, straight: openai.OpenAI, body: dict[str, Any]
) -> None:
    assert _streamed(_chat(through), body) == _streamed(_chat(straight), body)


@pytest.mark.parametrize("body", COMPLETIONS.values(), ids=COMPLETIONS)
def test_a_completion_is_answered_as_by_the_engine_itself(
    through: openai.OpenAI, straight: openai.OpenAI, body: dict[str, Any]
) -> None:
    assert _whole(_completion(through), body) == _whole(_completion(straight), body)


@pytest.mark.parametrize("body", COMPLETIONS.values(), ids=COMPLETIONS)
def test_a_streamed_completion_says_what_the_engine_says(
    through: openai.OpenAI, straight: openai.OpenAI, body: dict[str, Any]
) -> None:
    assert _streamed(_completion(through), body) == _streamed(_completion(straight), body)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("body", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_raises_the_same_error_in_the_client(
    through: openai.OpenAI, straight: openai.OpenAI, body: dict[str, Any], is_stream: bool
) -> None:
    kinds = []
    for client in (through, straight):
        with pytest.raises(openai.APIStatusError) as raised:
            _completion(client)(**{"model": MODEL, "stream": is_stream, **body})
        kinds.append((type(raised.value), raised.value.status_code))
    assert kinds[0] == kinds[1]


def test_the_models_are_listed_with_the_context_that_the_engines_have(
    through: openai.OpenAI, straight: openai.OpenAI
) -> None:
    told = [[(m.id, m.model_extra) for m in client.models.list()] for client in (through, straight)]
    assert [name for name, _ in told[0]] == [name for name, _ in told[1]] == [MODEL]
    lengths = [(extra or {})["max_model_len"] for ((_, extra),) in told]
    assert lengths[0] == lengths[1]


# -- how an answer is asked for and compared -------------------------------------------------------

Ask = Callable[..., Any]  # the package's own overloads are its business


def _chat(client: openai.OpenAI) -> Ask:
    return client.chat.completions.create


def _completion(client: openai.OpenAI) -> Ask:
    return client.completions.create


def _asked(body: dict[str, Any]) -> dict[str, Any]:
    bound = {} if "max_completion_tokens" in body else {"max_tokens": 12}
    return {"model": MODEL, "temperature": 0, **bound, **body}


def _whole(ask: Ask, body: dict[str, Any]) -> Any:
    return _compared(ask(**_asked(body)).model_dump())


def _streamed(ask: Ask, body: dict[str, Any]) -> Any:
    """The stream put together by choice: how many tokens come in one event is a matter of time."""
    choices: dict[int, dict[str, Any]] = {}
    usage: Any = None
    for event in ask(**_asked(body), stream=True, stream_options={"include_usage": True}):
        told = event.model_dump()
        usage = told["usage"] or usage
        for choice in told["choices"]:
            _add(choices.setdefault(choice["index"], {}), choice)
    return _compared({"choices": choices, "usage": usage})


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Text and lists grow, objects are added field by field, anything else takes the last value."""
    for name, value in part.items():
        held = whole.get(name)
        if value is None or name in ("index", "id", "role", "type"):
            whole.setdefault(name, value)
        elif isinstance(value, dict):
            if not isinstance(held, dict):
                whole[name] = held = {}
            _add(held, value)
        elif name == "tool_calls":
            calls = whole[name] = held or {}
            for call in value:
                _add(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, str | list) and held is not None:
            whole[name] = held + value
        else:
            whole[name] = value


def _compared(told: Any) -> Any:
    """Without what differs between any two answers of one engine."""
    if isinstance(told, dict):
        return {name: _compared(value) for name, value in told.items() if name not in OWN}
    if isinstance(told, list):
        return [_compared(item) for item in told]
    return told
