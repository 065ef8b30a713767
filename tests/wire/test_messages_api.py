"""Anthropic's API through a real gateway: the `anthropic` package, errors, usage, one cache for a
conversation on both paths.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest
from fleet import KEY, MODEL, TINY, Gateway, Processes, engine_script, processes, text_of, url_of
from scripted import json_answer, wire, worker

pytest_plugins = ["one_worker"]

PATH = "/v1/messages"


@pytest.fixture
def client(locked: Gateway) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=locked.url, api_key=KEY, max_retries=0)


def hello(content: Any = "hello", **more: Any) -> Any:  # bodies of the anthropic package
    return {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": content}],
        **more,
    }


def test_the_anthropic_client_gets_a_message(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(**hello())
    assert (reply.type, reply.role, reply.stop_reason) == ("message", "assistant", "max_tokens")
    assert reply.content[0].type == "text"
    assert reply.content[0].text
    assert reply.usage.output_tokens == 5


def test_the_anthropic_client_finds_the_id_of_answers_and_errors(
    client: anthropic.Anthropic,
) -> None:
    raw = client.messages.with_raw_response.create(**hello())
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**{**hello(), "model": "other"})
    with pytest.raises(anthropic.AuthenticationError) as stranger:
        client.with_options(api_key="wrong").messages.create(**hello())
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**hello([{"type": "text", "text": 1}]))
    for error in (unknown.value, stranger.value, bad.value):
        assert error.request_id
        assert error.request_id == error.response.headers["x-request-id"]


def test_a_time_to_keep_that_is_not_known_is_refused_as_anthropic_has_it(
    client: anthropic.Anthropic,
) -> None:
    control = {"type": "ephemeral", "ttl": "1d"}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**hello([{"type": "text", "text": "x", "cache_control": control}]))
    error: Any = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"] == "cache_control.ttl must be one of 5m, 1h"


def test_the_anthropic_client_streams_what_it_gets_whole(client: anthropic.Anthropic) -> None:
    asked = hello(text_of(60, "messages stream"), max_tokens=20)
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        events: list[str] = [event.type for event in stream]
        last = stream.get_final_message()
    assert words_of(last) == words_of(whole)
    assert (last.usage.output_tokens, last.stop_reason) == (20, "max_tokens")
    assert last.usage.cache_read_input_tokens == (total(last.usage) - 1) // 16 * 16
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert "content_block_delta" in events


def words_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def total(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_anthropic_client_counts_tokens_and_nothing_is_computed(
    client: anthropic.Anthropic,
) -> None:
    asked = hello(text_of(200, "counted"), system="Be brief.")
    del asked["max_tokens"]
    counted = client.messages.count_tokens(**asked)
    told = client.messages.create(**asked, max_tokens=1)
    assert counted.input_tokens == total(told.usage)
    assert told.usage.cache_read_input_tokens == 0, "counting filled no cache"


def test_a_tool_is_called_and_answered_in_turns(client: anthropic.Anthropic) -> None:
    tool = {"name": "look", "description": "looks", "input_schema": {"type": "object"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "it"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    reply = client.messages.create(**hello(messages=turns, tools=[tool], system="Use tools."))
    assert reply.usage.output_tokens == 5


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    asked = hello(text_of(40, "stops"), max_tokens=20)
    stop = words_of(client.messages.create(**asked))[8:12]
    reply = client.messages.create(**asked, stop_sequences=[stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (anthropic.BadRequestError, {"stop_sequences": [""]}),
        (anthropic.BadRequestError, {"messages": []}),
        (anthropic.BadRequestError, {"max_tokens": 20_000_000, "timeout": 60}),
        (anthropic.NotFoundError, {"model": "no-such-model"}),
    ],
    ids=["field", "messages", "length", "model"],
)
def test_c81_the_anthropic_client_raises_the_error_that_it_is(
    client: anthropic.Anthropic, error: type[anthropic.APIStatusError], field: dict[str, Any]
) -> None:
    with pytest.raises(error) as caught:
        client.messages.create(**hello(**field))
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"]
    assert body["error"]["message"]


def test_c81_a_workers_own_error_passes_through_untouched(started: Processes) -> None:
    small = started.worker(*TINY, "--max-model-len", "256")
    gateway = started.gateway([small.url], *TINY, "--max-model-len", "1024")
    asked = hello(max_tokens=300)
    reply, own = gateway.client.post(PATH, json=asked), httpx.post(f"{small.url}{PATH}", json=asked)
    assert (reply.status_code, reply.content) == (400, own.content)
    assert reply.json()["error"]["type"] == "BadRequestError"


def test_the_anthropic_client_with_a_wrong_key_is_told_so(locked: Gateway) -> None:
    stranger = anthropic.Anthropic(base_url=locked.url, api_key="sk-other", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(**hello())
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"
    bearer = anthropic.Anthropic(base_url=locked.url, auth_token=KEY, api_key=None, max_retries=0)
    assert bearer.messages.create(**hello()).usage.output_tokens == 5


def test_an_empty_fleet_is_overloaded_in_the_words_of_anthropic(started: Processes) -> None:
    empty = started.gateway([], ready=0)
    reply = empty.client.post(PATH, json=hello())
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "overloaded_error")
    assert reply.headers["retry-after"]


BAD_BODIES: list[dict[str, Any]] = [
    {"messages": "x"}, {"messages": [1]}, {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": [{}]}]},
    {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, {"max_tokens": None},
    {"max_tokens": 0}, {"system": 1}, {"system": [1]}, {"tools": {}}, {"tools": [{}]},
    {"tool_choice": "auto"}, {"stop_sequences": [""]}, {"stream": "yes"}, {"top_p": 2},
    {"chat_template": "x"}, {"chat_template_kwargs": {}}, {"metadata": {"cache_salt": "mine"}},
]  # fmt: skip


@pytest.mark.parametrize("field", BAD_BODIES, ids=lambda one: str(one)[:40])
def test_c78_a_body_that_is_none_is_refused_in_the_shape_of_the_path(
    gateway: Gateway, field: dict[str, Any]
) -> None:
    reply = gateway.client.post(PATH, json=hello(**field))
    body = reply.json()
    assert reply.status_code == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == reply.headers["x-request-id"]


# -- one cache -------------------------------------------------------------------------------------


def test_c45_a_conversation_has_one_cache_by_chat_and_by_messages(gateway: Gateway) -> None:
    turns = [{"role": "user", "content": text_of(120, "both ways")}]
    chat = [{"role": "system", "content": "Be brief."}, *turns]
    first = gateway.post("/v1/chat/completions", {"messages": chat})
    assert first.predicted == 0
    asked = {"system": [{"type": "text", "text": "Be brief."}], "messages": turns}
    second = gateway.post(PATH, asked)
    usage = second.json["usage"]
    assert usage["cache_read_input_tokens"] == second.predicted
    assert second.predicted == (first.prompt_tokens - 1) // 16 * 16
    assert gateway.metric("over_claims_total") == 0


def test_reuse_that_a_stream_tells_is_in_the_receipt(gateway: Gateway) -> None:
    before = gateway.metric("reused_tokens_total")
    asked = {"messages": [{"role": "user", "content": text_of(100, "told")}], "stream": True}
    gateway.post(PATH, asked)
    again = gateway.post(PATH, asked)
    assert again.predicted > 0
    gateway.wait_quiet()
    assert gateway.metric("reused_tokens_total") - before == again.predicted


def test_the_salt_reaches_the_worker_and_the_clients_does_not() -> None:
    @wire
    async def scenario() -> None:
        seen: list[Any] = []

        async def answer(path: str, headers: dict[str, str], body: bytes) -> bytes:
            seen.append((path, headers, json.loads(body)))
            return json_answer(b'{"usage":{"input_tokens":1}}')

        async with worker(engine_script(answer)) as w:
            with processes() as these:
                gateway = await asyncio.to_thread(these.gateway, [url_of(w)])
                mine = {"cache_salt": "mine", "extra_key": "x"}
                headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
                async with httpx.AsyncClient(base_url=gateway.url) as client:
                    for body in (hello(model="m"), hello(model="m", **mine)):
                        reply = await client.post(PATH, json=body, headers=headers)
                        assert reply.status_code == 200
        assert len({body["cache_salt"] for _, _, body in seen}) == 1
        for path, headers, body in seen:
            assert path == PATH
            assert len(body["cache_salt"]) == 43
            assert "extra_key" not in body
            assert "x-api-key" not in headers
            assert headers["anthropic-version"] == "2023-06-01"

    scenario()
