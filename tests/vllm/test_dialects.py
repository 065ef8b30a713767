"""Anthropic's messages and OpenAI's responses before a real engine: what the gateway expects of
them is what the engine reuses, and a chat's cache is found by messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Answer, Gateway, processes, text_of, until
from tenants import Caller, tenants
from vllm_engines import MODEL, Engine

from conftest import Figures, Lab

WORDS = 150
LOOK = {"at": "\u00e9 \u4f60", "n": [1, 2.5, None]}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
Turns = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine(lab: Lab) -> Engine:
    """One that keeps responses, so that they can be gone on with."""
    made = lab.engine("dialects", environment={"VLLM_ENABLE_RESPONSES_API_STORE": "1"})
    lab.start(made)
    return made


@pytest.fixture(scope="module")
def gateway(lab: Lab, engine: Engine) -> Iterator[Gateway]:
    """Of one tenant, before a single engine: whatever is reused must be there."""
    with processes() as started:
        yield started.gateway([engine.url], "--model-path", str(lab.model))


def chat(turns: Turns) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, *turns]
    return {"messages": messages, "max_tokens": 2}


def messages(turns: Turns) -> dict[str, Any]:
    return {"system": [{"type": "text", "text": "Be brief."}], "messages": turns, "max_tokens": 2}


def responses(turns: Turns) -> dict[str, Any]:
    return {"instructions": "Be brief.", "input": turns, "max_output_tokens": 2}


PATHS = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
}


def ask(gateway: Gateway, path: str, body: dict[str, Any], headers: Any = None) -> Answer:
    answer = Answer(
        gateway.client.post(path, json={"model": MODEL, **body}, headers=headers, timeout=300)
    )
    assert answer.status == 200, answer.response.text
    return answer


def reused(answer: Answer) -> int:
    usage = answer.json["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["cache_read_input_tokens"]
    return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]


@pytest.mark.parametrize("first", PATHS)
def test_c45_what_is_expected_is_what_is_reused_and_chats_are_found_by_messages(
    gateway: Gateway, figures: Figures, first: str
) -> None:
    """The engine adds special tokens to the text of a response, and none to that of a chat: where
    its tokenizer has such, responses have a cache of their own.
    """
    turns: Turns = [
        {"role": "user", "content": text_of(WORDS, f"dialects {first}")},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And then?"},
    ]
    held = sum(rank["held_blocks"] for rank in ranks(gateway))
    cold = ask(gateway, first, PATHS[first](turns))
    assert (cold.predicted, reused(cold)) == (0, 0)
    wait_more(gateway, held)
    paths = [first] if first == "/v1/responses" else ["/v1/chat/completions", "/v1/messages"]
    told: set[tuple[int, int]] = set()
    for path in paths:
        answer = ask(gateway, path, PATHS[path](turns))
        told.add((answer.predicted, reused(answer)))
    figures.add(f"tokens expected and reused after {first}", str(sorted(told)), "one pair, equal")
    assert len(told) == 1
    [(expected, cached)] = told
    assert expected == cached > 0
    assert gateway.metric("over_claims_total") == 0


def ranks(gateway: Gateway) -> list[dict[str, Any]]:
    return [rank for row in gateway.workers().values() for rank in row["detail"]["ranks"]]


def wait_more(gateway: Gateway, held: int) -> None:
    until(lambda: sum(rank["held_blocks"] for rank in ranks(gateway)) > held, "events came")


def test_tools_calls_and_their_results_are_rendered_as_the_engine_does(gateway: Gateway) -> None:
    look = text_of(WORDS, "tools")
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": LOOK}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}
    anthropic = {
        "tools": [{"name": "look", "description": look, "input_schema": SCHEMA}],
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ],
        "max_tokens": 2,
    }
    item = {
        "type": "function_call",
        "call_id": "toolu_1",
        "name": "look",
        "arguments": json.dumps(LOOK),
    }
    openai = {
        "tools": [{"type": "function", "name": "look", "description": look, "parameters": SCHEMA}],
        "input": [
            {"role": "user", "content": "look"},
            item,
            {"type": "function_call_output", "call_id": "toolu_1", "output": "seen"},
            {"role": "user", "content": "so?"},
        ],
        "max_output_tokens": 2,
    }
    for path, body in (("/v1/messages", anthropic), ("/v1/responses", openai)):
        held = sum(rank["held_blocks"] for rank in ranks(gateway))
        ask(gateway, path, body)
        wait_more(gateway, held)
        again = ask(gateway, path, body)
        assert again.predicted == reused(again) > 0


def test_counted_tokens_are_those_that_are_computed(gateway: Gateway) -> None:
    body = messages([{"role": "user", "content": text_of(WORDS, "counted")}])
    asked = {name: value for name, value in body.items() if name != "max_tokens"}
    reply = gateway.client.post("/v1/messages/count_tokens", json={"model": MODEL, **asked})
    usage = ask(gateway, "/v1/messages", body).json["usage"]
    total = usage["input_tokens"] + sum(
        usage.get(name, 0) for name in ("cache_read_input_tokens", "cache_creation_input_tokens")
    )
    assert reply.json()["input_tokens"] == total


def test_a_response_goes_on_under_the_name_that_the_gateway_chose(gateway: Gateway) -> None:
    first = ask(gateway, "/v1/responses", {"input": "hello", "max_output_tokens": 4})
    named = first.json["id"]
    assert len(named) == len("resp_") + 56
    more = {"input": "and then?", "previous_response_id": named, "max_output_tokens": 4}
    second = ask(gateway, "/v1/responses", more).json
    assert second["usage"]["input_tokens"] > first.json["usage"]["input_tokens"]


def test_streams_end_as_their_clients_expect_it(gateway: Gateway) -> None:
    turns: Turns = [{"role": "user", "content": text_of(WORDS, "streams")}]
    for path, last in (("/v1/messages", "message_stop"), ("/v1/responses", "response.completed")):
        body = {"model": MODEL, **PATHS[path](turns), "stream": True}
        reply = gateway.client.post(path, json=body, timeout=300)
        names = [line for line in reply.text.splitlines() if line.startswith("event: ")]
        assert names[-1] == f"event: {last}"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_one_tenant_reuses_its_own_and_nothing_of_another_one(
    lab: Lab, engine: Engine, tmp_path: Path, path: str
) -> None:
    turns: Turns = [{"role": "user", "content": text_of(WORDS, f"apart {path}")}]
    with processes() as started:
        fleet = tenants(started, [engine.url], tmp_path, "--model-path", str(lab.model))
        acme, zeta = (fleet.caller(name) for name in ("acme", "zeta"))

        def cached(who: Caller) -> int:
            return reused(ask(fleet.gateway, path, PATHS[path](turns), who.headers()))

        assert [cached(who) for who in (acme, zeta)] == [0, 0]
        assert cached(acme) == cached(zeta) > 0
