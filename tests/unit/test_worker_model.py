"""The simulated model's pure functions, and the latency profiles."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core import simkv
from trunkline.core.profiles import (
    PROFILES,
    Profile,
    Scheduling,
    fifo_profile,
    profile_named,
)

TOKENS = st.lists(st.integers(0, 4_095), max_size=80).map(lambda ids: array("I", ids))


@given(prompt=TOKENS, cut=st.integers(0, 40))
def test_a_prompt_with_half_its_answer_continues_with_the_other_half(
    prompt: array[int], cut: int
) -> None:
    whole = simkv.answer_tokens(prompt, 40, 4_096)
    assert simkv.answer_tokens(prompt + whole[:cut], 40 - cut, 4_096) == whole[cut:]


@given(prompt=TOKENS, at=st.integers(0, 79))
def test_changing_any_token_changes_the_answer(prompt: array[int], at: int) -> None:
    if at >= len(prompt):
        return
    other = prompt[:]
    other[at] ^= 1
    assert simkv.answer_tokens(other, 8, 4_096) != simkv.answer_tokens(prompt, 8, 4_096)


@given(prompt=TOKENS, cells=st.integers(0, 5))
def test_prefix_digests_go_on_from_a_kept_state(prompt: array[int], cells: int) -> None:
    states = simkv.prefix_digests(prompt)
    cells = min(cells, len(states))
    kept = states[cells - 1] if cells else simkv.ROOT
    assert simkv.prefix_digests(prompt[cells * simkv.CELL_TOKENS :], kept) == states[cells:]


def test_answers_are_in_the_last_quarter_of_the_vocabulary() -> None:
    answer = simkv.answer_tokens(array("I", [1, 2, 3]), 500, 4_096)
    assert min(answer) >= 3_072
    assert max(answer) < 4_096
    assert len(set(answer)) > 300


def test_the_answer_to_a_fixed_prompt_never_changes() -> None:
    answer = simkv.answer_tokens(array("I", range(40)), 4, 4_096)
    assert answer.tolist() == [3_249, 3_640, 4_077, 3_248]


def test_absorbing_the_kv_gives_the_state_that_computing_it_gave() -> None:
    kv, state = simkv.extend(simkv.ROOT, array("I", range(48)))
    assert len(kv) == 48 * simkv.TOKEN_KV_BYTES
    assert simkv.absorb(simkv.ROOT, kv) == state


def test_masks_come_off_with_their_own_salt_only() -> None:
    kv, _ = simkv.extend(simkv.ROOT, array("I", range(32)))
    masked = simkv.apply_mask(kv, simkv.salt_mask("a"))
    assert simkv.apply_mask(masked, simkv.salt_mask("a")) == kv
    assert simkv.apply_mask(masked, simkv.salt_mask("b")) != kv
    assert simkv.salt_mask(None) != simkv.salt_mask("none")


def test_the_price_of_a_prefill_grows_with_tokens_and_context() -> None:
    profile = PROFILES["llama-3.1-8b-h100"]
    assert profile.prefill_ms(0, 1_000) == 0
    # 27.7k tokens/s and a fixed part.
    assert profile.prefill_ms(4_000, 0) == pytest.approx(8 + 144.4 + 9.44, rel=0.01)
    assert profile.prefill_ms(4_000, 32_000) > profile.prefill_ms(4_000, 0)


def test_the_comparison_profile_is_the_one_that_peers_were_measured_with() -> None:
    profile = PROFILES["peers-w5"]
    assert profile.scheduling is Scheduling.FIFO
    assert profile.prefill_ms(1_000, 9_000) == pytest.approx(105)
    assert profile.decode_token_ms == 10


def test_every_profile_says_where_its_figures_come_from() -> None:
    assert all(len(profile.source) > 20 for profile in PROFILES.values())


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gpt' is unknown; known are .*peers-w5"):
        profile_named("gpt")


def test_a_spelt_profile_comes_back_with_its_kv_size() -> None:
    plain = profile_named(fifo_profile(1.0, 0.5, 2.0))
    assert (plain.prefill_fixed_ms, plain.kv_bytes_per_token) == (1.0, 128 << 10)
    sized = profile_named(fifo_profile(1.0, 0.5, 2.0, 4_096))
    assert (sized.decode_token_ms, sized.kv_bytes_per_token) == (2.0, 4_096)
    for wrong in ("fifo:1,2", "fifo:1,2,3,4.5", "fifo:1,2,3,4,5", "fifo:1,2,3,0"):
        with pytest.raises(ValueError, match="fifo:1,2"):
            profile_named(wrong)


@pytest.mark.parametrize("field", ["prefill_token_ms", "kv_bytes_per_token", "decode_token_ms"])
def test_a_profile_with_a_negative_figure_is_refused(field: str) -> None:
    figures = {
        "prefill_fixed_ms": 1.0,
        "prefill_token_ms": 1.0,
        "prefill_context_ms": 0.0,
        "decode_token_ms": 1.0,
        "kv_bytes_per_token": 1,
        "max_batch_tokens": 1,
    }
    with pytest.raises(ValueError, match=field):
        Profile(name="p", scheduling=Scheduling.FIFO, source="", **{**figures, field: -1})
