"""Prompts: equal ids give equal tokens, different ids never do, and answers are the model's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trunkline.core import simkv
from trunkline.errors import TraceError
from trunkline.replay import prompts
from trunkline.replay.article import ArticleShape, article_requests
from trunkline.replay.prompts import PromptMaker, PromptOptions
from trunkline.replay.traces import TraceRequest


def request(*ids: int, tokens: int, block: int = 32, session: str | None = None) -> TraceRequest:
    return TraceRequest(
        arrival_ms=0.0,
        input_tokens=tokens,
        output_tokens=8,
        block_ids=ids,
        block_tokens=block,
        session=session,
    )


def test_prompts_share_exactly_what_their_ids_share() -> None:
    maker = PromptMaker()
    first = maker.prompt(request(1, 2, 3, tokens=96))
    second = maker.prompt(request(1, 2, 4, tokens=96))
    assert len(first) == 96
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]
    assert first[64] != second[64], "also the very first token after the shared prefix"


def test_tokens_depend_on_the_id_alone_and_not_on_cache_or_maker() -> None:
    maker = PromptMaker()
    full = maker.prompt(request(1, 2, tokens=64))
    partial = PromptMaker().prompt(request(1, 2, tokens=50))
    assert full[:50] == partial
    assert maker.prompt(request(1, 2, tokens=50)) == partial


def test_other_seeds_share_nothing() -> None:
    one = PromptMaker(PromptOptions(seed=1)).prompt(request(1, tokens=32))
    two = PromptMaker(PromptOptions(seed=2)).prompt(request(1, tokens=32))
    assert one[:16] != two[:16]


def test_ids_stay_between_special_tokens_and_answer_tokens() -> None:
    options = PromptOptions(vocab_size=4_096, first_id=512)
    tokens = PromptMaker(options).prompt(request(*range(200), tokens=6_400))
    assert min(tokens) >= 512
    assert max(tokens) < simkv.answer_first_id(4_096)
    assert len(set(tokens)) > 1_500, "the range is used"
    with pytest.raises(ValueError, match="leaves no ids"):
        PromptMaker(PromptOptions(vocab_size=512, first_id=512))


def test_lighter_blocks_keep_what_is_shared_and_scale_the_rest() -> None:
    maker = PromptMaker(PromptOptions(tokens_per_block=16, max_output_tokens=3))
    first = request(1, 2, 3, tokens=1_024 + 256, block=512)
    second = request(1, 2, 9, tokens=1_024 + 1, block=512)
    assert len(maker.prompt(first)) == 16 + 16 + 8
    assert len(maker.prompt(second)) == 16 + 16 + 1, "a partial block never vanishes"
    assert maker.prompt(first)[:32] == maker.prompt(second)[:32]
    assert maker.output_tokens(first) == 3


def test_a_last_block_without_an_id_is_shared_with_nobody_else() -> None:
    maker = PromptMaker()
    one = maker.prompt(request(1, tokens=40, session="a"))
    two = maker.prompt(request(1, tokens=40, session="b"))
    assert len(one) == 40
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]


def test_expected_answers_are_the_models_own_in_whatever_order_they_are_asked() -> None:
    maker = PromptMaker()
    many = [request(1, 2, *range(10, 10 + n), tokens=64 + 32 * n + 5 * (n % 2)) for n in range(6)]
    for one in [*many, *reversed(many)]:
        prompt = maker.prompt(one)
        expected = simkv.answer_tokens(prompt, 8, 4_096)
        assert maker.answer(one, prompt, 8) == expected


@pytest.mark.parametrize("tokens_per_block", [16, 24])
def test_expected_answers_are_right_for_lighter_blocks_too(tokens_per_block: int) -> None:
    maker = PromptMaker(PromptOptions(tokens_per_block=tokens_per_block))
    for one in (request(1, 2, 3, tokens=90), request(1, 2, 4, tokens=96)):
        prompt = maker.prompt(one)
        assert maker.answer(one, prompt, 8) == simkv.answer_tokens(prompt, 8, 4_096)


def test_generated_prompts_hold_the_real_answers_to_the_turns_before() -> None:
    maker = PromptMaker()
    requests = article_requests(ArticleShape(requests=150, span_ms=20_000.0))
    by_session: dict[str, TraceRequest] = {}
    followed = 0
    for one in requests:
        before = by_session.get(one.session or "")
        by_session[one.session or ""] = one
        prompt = maker.prompt(one)
        assert len(prompt) == one.input_tokens
        assert maker.answer(one, prompt, 64) == simkv.answer_tokens(prompt, 64, 4_096)
        if before is not None:
            earlier = maker.prompt(before)
            told = earlier + simkv.answer_tokens(earlier, 64, 4_096)
            assert prompt[: len(told)] == told
            followed += 1
    assert followed > 10


def test_a_session_met_in_the_middle_gives_the_same_prompt() -> None:
    requests = article_requests(ArticleShape(requests=150, span_ms=20_000.0))
    late = max(requests, key=lambda one: len(one.parts or ()))
    warm = PromptMaker()
    for one in requests:
        warm.prompt(one)
    assert PromptMaker().prompt(late) == warm.prompt(late)


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "CACHED_BLOCKS", 4)
    monkeypatch.setattr(prompts, "CACHED_STATES", 4)
    maker = PromptMaker()
    one = request(*range(50), tokens=1_600)
    before = maker.prompt(one)
    expected = maker.answer(one, before, 8)
    assert len(maker._blocks) == 4
    assert len(maker._states) == 4
    assert maker.prompt(one) == before
    assert maker.answer(one, before, 8) == expected


def test_a_request_with_a_body_has_no_prompt_of_ours() -> None:
    body = replace(request(1, tokens=10), block_ids=None, body={"prompt": "x"})
    with pytest.raises(TraceError, match="no block ids"):
        PromptMaker().prompt(body)
