"""Long, odd and unreadable prompts: what the picker reads of them, and what it sends on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from array import array

import pytest
from picker_bench import (
    BLOCK,
    GONE,
    MAX_TOKENS,
    W0,
    W1,
    Bench,
    Characters,
    Contents,
    ids,
    namespace,
    request,
)

from trunkline.gateway.contracts import (
    ChatPrompt,
    ClientError,
    Pick,
)
from trunkline.gateway.tokenise import INLINE_BYTES, PromptTokens


def test_a_long_prompt_is_awaited_and_a_client_that_left_meanwhile_costs_nothing() -> None:
    bench = Bench(W0)

    async def scenario() -> None:
        picked = bench.picker.pick(request("x", body=b"{%b}" % (b" " * INLINE_BYTES)), frozenset())
        assert not isinstance(picked, Pick)
        late = await picked
        bench.picker.ended(late, GONE, None)

    asyncio.run(scenario())
    bench.assert_clean()
    assert bench.directory.predicted_count(W0) == 0
    assert bench.told == {(W0, "sent"): 1, (W0, "client-gone"): 1}


@pytest.mark.parametrize("length", [MAX_TOKENS, INLINE_BYTES])
def test_a_prompt_at_the_context_limit_is_taken_and_one_token_more_is_refused(length: int) -> None:
    bench = Bench(W0)
    bench.picker._prompts = PromptTokens(Characters(), Contents(), max_tokens=length)

    async def pick(count: int) -> Pick:
        message = {"role": "user", "content": "x" * count}
        picked = bench.picker.pick(request(ChatPrompt(messages=[message])), frozenset())
        return picked if isinstance(picked, Pick) else await picked

    async def scenario() -> None:
        assert (await pick(length)).ticket.decision.prompt_tokens == length
        with pytest.raises(ClientError, match=f"has {length + 1} tokens") as caught:
            await pick(length + 1)
        assert caught.value.refusal.code == "context_length_exceeded"
        assert len(bench.picker._tickets) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"x"}',
        b'  \r\n\t{"prompt":"{"}',
        b"{ }",
        b'{\n "prompt" : [1], "a" : {"b" : {}} }',
        '{"prompt":"\u00e9\U0001f600"}'.encode(),
    ],
)
@pytest.mark.parametrize("wants_checkpoints", [False, True])
def test_our_salt_goes_into_any_object_and_changes_nothing_else(
    body: bytes, wants_checkpoints: bool
) -> None:
    bench = Bench()
    bench.join(W0, wants_checkpoints=wants_checkpoints)
    asked = request(ids(300), body=body)
    picked = bench.picker.pick(asked, frozenset())
    assert isinstance(picked, Pick)
    sent = json.loads(picked.body)
    assert sent.pop("cache_salt") == namespace(BLOCK).salt
    if wants_checkpoints:
        [[tokens, label]] = sent.pop("kv_transfer_params")["trunkline"]["checkpoints"]
        assert (tokens, len(label)) == (256, 44)
    assert sent == json.loads(body)
    assert asked.body == body, "a retry salts the client's own bytes again"


def test_a_prompt_shorter_than_a_block_is_salted_too() -> None:
    bench = Bench(W0)
    picked = bench.pick(ids(1))
    assert json.loads(picked.body)["cache_salt"] == namespace(BLOCK).salt
    assert picked.ticket.decision.matched_tokens == 0


def test_an_unknown_prompt_is_sent_as_it_came() -> None:
    bench = Bench(W0)
    assert bench.pick(None).body == b'{"a":1}'


def test_an_empty_prompt_promises_nothing() -> None:
    bench = Bench(W0)
    assert bench.pick(array("I")).ticket.decision.matched_tokens == 0


def test_a_prompt_longer_than_the_least_that_a_worker_takes_is_refused_by_us() -> None:
    """So that a client hears the same words, whichever worker was nearest."""
    bench = Bench(W0, W1)
    small = dataclasses.replace(bench.picker._targets[W1], max_model_len=32)
    bench.picker.add_target(dataclasses.replace(bench.picker._targets[W0], max_model_len=64))
    bench.picker.add_target(small)
    bench.pick(ids(32))
    with pytest.raises(ClientError, match="prompt has 33 tokens; the context has 32") as caught:
        bench.pick(ids(33))
    assert caught.value.refusal.code == "context_length_exceeded"
    assert len(bench.picker._tickets) == 1
    bench.leave(W1)
    bench.pick(ids(64))
    with pytest.raises(ClientError, match="the context has 64"):
        bench.pick(ids(65))
