"""OpenAI's Responses API through a real gateway: the `openai` package, conversations that go on by
name, tenants that share nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fleet import Gateway, Process, Processes, engine_script, processes, text_of, url_of
from scripted import wire, worker
from tenants import tenants

TINY = ("--profile", "tiny")
KEY = "sk-clients-0123456789"
MODEL = "trunkline-sim"
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module")
def pair(started: Processes) -> list[Process]:
    return started.workers(2, *TINY, "--blocks", "65536")


@pytest.fixture(scope="module")
def gateway(started: Processes, pair: list[Process]) -> Gateway:
    return started.gateway([one.url for one in pair], *TINY)


@pytest.fixture(scope="module")
def client(started: Processes, pair: list[Process]) -> openai.OpenAI:
    """Of a gateway that asks for a key."""
    locked = started.gateway([one.url for one in pair], *TINY, "--api-key", KEY)
    return openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0)


def test_the_openai_client_gets_a_response(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input="hello", max_output_tokens=5)
    assert reply.output_text
    assert reply.status == "incomplete"
    assert reply.usage is not None
    assert reply.usage.output_tokens == 5


def test_the_openai_client_streams_what_it_gets_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": text_of(60, "responses"), "max_output_tokens": 20}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert last.output_text == whole.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert kinds.count("response.output_text.delta") > 1
    assert last.usage is not None
    assert last.usage.input_tokens_details.cached_tokens > 0


def test_a_conversation_goes_on_by_name_at_the_worker_that_has_it(
    client: openai.OpenAI, started: Processes, pair: list[Process]
) -> None:
    for number in range(6):
        first = client.responses.create(
            model=MODEL, input=text_of(50, ("by name", number)), max_output_tokens=8
        )
        with client.responses.stream(
            model=MODEL, input="and then?", previous_response_id=first.id, max_output_tokens=8
        ) as stream:
            list(stream)
            second = stream.get_final_response()
        assert second.previous_response_id == first.id
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens, "it has what was before"
        assert second.usage.input_tokens_details.cached_tokens > 0
        third = client.responses.create(
            model=MODEL, input="so?", previous_response_id=second.id, max_output_tokens=1
        )
        assert third.usage is not None
        assert third.usage.input_tokens > second.usage.input_tokens


def test_a_response_that_is_unknown_is_not_found(client: openai.OpenAI) -> None:
    for name in ("resp_1", "resp_" + "0" * 56, "x"):
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="x", previous_response_id=name)


def test_a_response_of_another_tenant_or_before_a_revocation_is_not_found(
    started: Processes, pair: list[Process], tmp_path: Path
) -> None:
    fleet = tenants(started, [one.url for one in pair], tmp_path, *TINY)
    alice, bob = fleet.caller("alice"), fleet.caller("bob")
    ask = fleet.gateway.client.post
    asked = {"input": "mine", "max_output_tokens": 4}
    named = ask(PATH, json=asked, headers=alice.headers()).json()["id"]
    more = {**asked, "previous_response_id": named}
    assert ask(PATH, json=more, headers=alice.headers()).status_code == 200
    foreign = ask(PATH, json=more, headers=bob.headers())
    made_up = ask(PATH, json={**more, "previous_response_id": "x"}, headers=bob.headers())
    assert foreign.status_code == made_up.status_code == 404
    errors = [reply.json()["error"] for reply in (foreign, made_up)]
    assert errors[0]["code"] == errors[1]["code"] == "previous_response_not_found"
    fleet.raised("invalidate", "tenant/alice")
    assert ask(PATH, json=more, headers=alice.headers()).status_code == 404


def test_nothing_of_a_tenant_goes_on_when_its_answer_is_over(
    started: Processes, pair: list[Process], gateway: Gateway, tmp_path: Path
) -> None:
    fleet = tenants(started, [one.url for one in pair], tmp_path, *TINY)
    asked = {"input": "x", "max_output_tokens": 4, "background": True}
    refused = fleet.gateway.client.post(PATH, json=asked, headers=fleet.caller("alice").headers())
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    assert gateway.client.post(PATH, json=asked).status_code == 200, "where there are no tenants"


def cached_in(usage: dict[str, Any]) -> int:
    if "cache_read_input_tokens" in usage:
        return usage["cache_read_input_tokens"]
    return usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", ["/v1/messages", PATH])
@pytest.mark.parametrize("is_stream", [False, True])
def test_two_tenants_share_nothing_and_each_finds_its_own(
    started: Processes, tmp_path: Path, path: str, is_stream: bool
) -> None:
    fleet = tenants(started, [started.worker(*TINY).url], tmp_path, *TINY)

    def cached(headers: dict[str, str], attempt: int) -> int:
        said = text_of(100, (path, is_stream, attempt))
        turns = [{"role": "user", "content": said}]
        asked = {"input": said, "max_output_tokens": 2}
        if path != PATH:
            asked = {"messages": turns, "max_tokens": 2}
        body = {**asked, "stream": is_stream}
        reply = fleet.gateway.client.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        if not is_stream:
            return cached_in(reply.json()["usage"])
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        told = [json.loads(line) for line in lines]
        usages = [one.get("usage") or one.get("response", {}).get("usage") for one in told]
        return cached_in([usage for usage in usages if usage][-1])

    alice, bob = (fleet.caller(name).headers() for name in ("alice", "bob"))
    told = fleet.while_leased(lambda n: [cached(who, n) for who in (alice, bob, alice, bob)])
    assert told[:2] == [0, 0]
    assert told[2] == told[3] > 0


def test_c45_what_is_expected_of_a_response_is_what_is_reused(gateway: Gateway) -> None:
    """Its tokens are those of the chat, with the special ones that engines add there."""
    turns = [{"role": "user", "content": text_of(120, "expected")}]
    asked = {"instructions": "Be brief.", "input": turns, "max_output_tokens": 2}
    replies = [gateway.client.post(PATH, json=asked) for _ in range(2)]
    prompt_tokens = replies[0].json()["usage"]["input_tokens"]
    for reply, reused in zip(replies, (0, (prompt_tokens - 1) // 16 * 16), strict=True):
        assert cached_in(reply.json()["usage"]) == reused
        assert f"matched={reused}/{prompt_tokens}" in reply.headers["x-trunkline-decision"]
    assert gateway.metric("over_claims_total") == 0


BAD: list[dict[str, Any]] = [
    {}, {"input": 1}, {"input": []}, {"input": ["x"]}, {"input": [{"role": "x", "content": "y"}]},
    {"input": [{"role": "user", "content": [{"type": "x"}]}]}, {"input": "x", "prompt": {}},
    {"input": "x", "max_output_tokens": 0}, {"input": "x", "max_output_tokens": 10**9},
    {"input": "x", "tools": [1]}, {"input": "x", "reasoning": 1}, {"input": "x", "stream": 1},
    {"input": "x", "metadata": {"cache_salt": "y"}}, {"input": "x", "chat_template_kwargs": {}},
    {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": "http://169.254.169.254/"}]}]},
]  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_c78_a_body_that_is_none_is_refused(gateway: Gateway, body: dict[str, Any]) -> None:
    reply = gateway.client.post(PATH, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


TERMINAL = ("completed", "incomplete", "failed")


@pytest.mark.parametrize("kind", TERMINAL)
def test_c83_whichever_event_ends_a_response_its_tokens_are_counted(kind: str) -> None:
    @wire
    async def scenario() -> None:
        seen: list[Any] = []
        usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 7}}
        last = {"type": f"response.{kind}", "response": {"status": kind, "usage": usage}}
        event = f"event: response.{kind}\ndata: {json.dumps(last)}\n\n".encode()

        async def answer(path: str, headers: dict[str, str], body: bytes) -> bytes:
            seen.append(json.loads(body))
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
            return head + b"transfer-encoding: chunked\r\n\r\n" + framed

        async with worker(engine_script(answer)) as w:
            with processes() as these:
                gateway = await asyncio.to_thread(these.gateway, [url_of(w)], *TINY)
                async with httpx.AsyncClient(base_url=gateway.url) as client:
                    body = {"model": "m", "input": "x", "stream": True, "request_id": "resp_mine"}
                    reply = await client.post(PATH, json=body)
                    assert reply.content == event
                reused = await asyncio.to_thread(gateway.metric, "reused_tokens_total")
        assert reused == 7
        assert seen[0]["request_id"].startswith("resp_")
        assert seen[0]["request_id"] != "resp_mine"
        assert len(seen[0]["cache_salt"]) == 43

    scenario()
