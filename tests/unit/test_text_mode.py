"""Where no tokenizer of the model is known, texts are told apart by their bytes, and it is said."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from member_bench import W0 as WORKER
from member_bench import Bench, bench_test, with_events
from picker_bench import W0, W1, Characters, Contents, namespace, request
from picker_bench import Bench as PickerBench

from trunkline.adapters.template import why_not_by_template
from trunkline.assembly import NO_TOKENIZER, Parity
from trunkline.control.discovery import Facts
from trunkline.control.engine import CacheFacts, parse_models
from trunkline.control.views import Mode
from trunkline.core.keys import chain
from trunkline.gateway.contracts import ChatPrompt, ClientError, Pick
from trunkline.gateway.tokenise import TEXT_MARK, PromptTokens
from trunkline.ports.worker import AttemptEnd

TURN = {"role": "user", "content": "What is the weather like in Łódź today? " * 8}
ANSWER = {"content": "Fine.", "role": "assistant"}


def _text_reader(max_tokens: int = 1 << 24) -> PromptTokens:
    prompts = PromptTokens(Characters(), Contents(), max_tokens=max_tokens)
    prompts.read_text()
    return prompts


def _read(prompts: PromptTokens, prompt: Any) -> array[int]:
    tokens = prompts.tokens(request(prompt))
    assert tokens is not None
    return tokens


def _common_blocks(one: array[int], other: array[int]) -> int:
    a, b = (chain(namespace(16), tokens).packed for tokens in (one, other))
    return next((n for n in range(len(a) // 32) if a[32 * n : 32 * n + 32] != b[32 * n :][:32]), 0)


def test_a_conversation_that_goes_on_has_the_keys_of_what_it_was_before() -> None:
    prompts = _text_reader()
    first = _read(prompts, ChatPrompt(messages=[TURN]))
    later = _read(prompts, ChatPrompt(messages=[TURN, ANSWER, TURN]))
    assert _common_blocks(later, first) == len(first) // 16 > 4


def test_c48_other_tools_are_another_text_from_the_first_block_on() -> None:
    prompts = _text_reader()
    tool = {"type": "function", "function": {"name": "f"}}
    plain = _read(prompts, ChatPrompt(messages=[TURN]))
    with_tool = _read(prompts, ChatPrompt(messages=[TURN], tools=[tool]))
    assert _common_blocks(plain, with_tool) == 0


def test_the_order_of_a_messages_fields_is_none_of_the_text() -> None:
    prompts = _text_reader()
    turned = dict(reversed(TURN.items()))
    assert _read(prompts, ChatPrompt(messages=[TURN])) == _read(
        prompts, ChatPrompt(messages=[turned])
    )


@given(text=st.text(st.characters(), max_size=200))
def test_a_text_counts_as_runs_of_four_bytes_behind_a_mark_that_is_no_token(text: str) -> None:
    prompts = _text_reader()
    tokens = _read(prompts, text)
    written = text.encode("utf-8", "surrogatepass")
    assert tokens[0] == TEXT_MARK
    assert tokens[1:].tobytes() == written[: len(written) // 4 * 4]
    assert prompts.vocab_size <= TEXT_MARK, "no client can send it"


def test_token_ids_that_a_client_gives_stay_what_they_are() -> None:
    prompts = _text_reader()
    given_ids = array("I", range(40))
    assert _read(prompts, given_ids) is given_ids
    assert not prompts.is_guess(request(given_ids))


def test_nobody_is_refused_for_an_estimate_and_ids_are_counted_still() -> None:
    bench = PickerBench(W0)
    bench.picker._prompts.read_text()
    bench.picker._max_tokens = 10
    assert isinstance(bench.picker.pick(request("word " * 100), frozenset()), Pick)
    with pytest.raises(ClientError, match="11 tokens"):
        bench.picker.pick(request(array("I", range(11))), frozenset())


def test_what_was_sent_somewhere_is_expected_there_and_a_claim_is_not_held_against_it() -> None:
    bench = PickerBench(W0, W1)
    bench.picker._prompts.read_text()
    first = bench.pick("A long and always equal beginning. " * 40)
    bench.picker.first_byte(first)
    bench.picker.ended(first, AttemptEnd.COMPLETE, 0)
    again = bench.pick("A long and always equal beginning. " * 40 + "more")
    assert again.worker == first.worker
    assert again.ticket.decision.expected_tokens > 300
    bench.picker.first_byte(again)
    bench.picker.ended(again, AttemptEnd.COMPLETE, 16)
    assert bench.picker.accounts.over_claims == 0
    assert bench.picker.accounts.reused_tokens == 16


def _facts(digest: str = "") -> Facts:
    cache = CacheFacts(block_tokens=16, capacity_blocks=None)
    return Facts(
        models=("m",), max_model_len=None, cache=cache, sources=(), tokenizer_digest=digest
    )


def test_without_a_model_folder_a_worker_of_the_same_tokenizer_is_exact_and_no_other() -> None:
    prompts = PromptTokens(Characters(), Contents())
    parity = Parity(prompts, is_model_given=False, doubt="")
    assert parity.why_not("characters") == ""
    assert "--model-path" in parity.why_not("")
    assert not prompts.is_text, "the first one that joined decides how prompts are read"
    assert parity.why_not("characters") == ""


def test_where_the_first_worker_tells_no_tokenizer_everything_goes_by_text() -> None:
    prompts = PromptTokens(Characters(), Contents())
    parity = Parity(prompts, is_model_given=False, doubt="")
    assert parity.why_not("") == NO_TOKENIZER
    assert prompts.is_text
    assert not prompts.is_exact
    assert parity.why_not("characters") == NO_TOKENIZER


def test_a_given_model_is_exact_unless_engines_render_it_by_themselves() -> None:
    prompts = PromptTokens(Characters(), Contents())
    assert Parity(prompts, is_model_given=True, doubt="").why_not("") == ""
    assert prompts.is_exact
    assert Parity(prompts, is_model_given=True, doubt="by hand").why_not("x") == "by hand"
    assert not prompts.is_exact
    assert not prompts.is_text


def test_the_digest_of_a_tokenizer_is_read_where_it_is_one() -> None:
    def digest(value: str) -> str:
        return parse_models(b'{"data": [{"id": "m", "trunkline_tokenizer": %s}]}' % value.encode())[
            0
        ].tokenizer_digest

    assert digest('"abc"') == "abc"
    assert digest("7") == digest("null") == digest('"' + "x" * 300 + '"') == ""


@bench_test
async def test_an_inexact_workers_events_are_not_used_and_it_says_why(bench: Bench) -> None:
    bench.parts.inexact = lambda facts: f"{facts.models[0]} is read otherwise"
    await bench.joined(1, with_events(0))
    assert bench.mode("w0:1") is Mode.APPROXIMATE
    assert bench.view("w0:1").reason == "m is read otherwise"
    assert not bench.feeds
    joined = next(fields for name, fields in bench.log.events if name == "worker.joined")
    assert joined["why"] == "m is read otherwise"


@bench_test
async def test_what_an_inexact_worker_says_of_checkpoints_counts_for_nothing(bench: Bench) -> None:
    bench.parts.inexact = lambda _facts: "it is read otherwise"
    await bench.joined()
    assert bench.beat(1) is None
    assert bench.mode() is Mode.APPROXIMATE
    assert not bench.table.targets[WORKER].wants_checkpoints


@pytest.mark.parametrize(
    ("files", "is_by_template"),
    [
        ({}, True),
        ({"config.json": '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'}, True),
        ({"config.json": '{"model_type": "gpt_oss"}'}, False),
        ({"config.json": '{"architectures": ["DeepseekV32ForCausalLM"]}'}, False),
        ({"config.json": "not JSON"}, True),
        ({"tekken.json": "{}"}, True),
        ({"tekken.json": "{}", "consolidated.safetensors": ""}, False),
    ],
)
def test_models_that_engines_render_by_code_are_named(
    tmp_path: Path, files: dict[str, str], is_by_template: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert (why_not_by_template(tmp_path) == "") is is_by_template
