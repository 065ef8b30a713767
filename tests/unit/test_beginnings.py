"""Which beginnings of prompts are counted, and that there is an end to them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import KeyChain, chain
from trunkline.core.records import Instant
from trunkline.gateway.beginnings import (
    HALF_LIFE_MS,
    MAX_BEGINNING_BLOCKS,
    MAX_BEGINNINGS,
    Beginnings,
)

BLOCK = 4
NAMESPACE = derive_namespace(
    bytes(range(32)),
    Scope(kind=ScopeKind.TENANT, org="o", tenant="t"),
    ModelIdentity(model_id="m", block_tokens=BLOCK),
)
NOW = Instant(1_000.0)


def keys(blocks: int, seed: int = 0) -> KeyChain:
    return chain(NAMESPACE, array("I", [seed, *range(blocks * BLOCK - 1)]))


def test_prompts_that_share_a_power_of_two_of_blocks_count_together() -> None:
    beginnings, prompt = Beginnings(), keys(9)
    for found_blocks in (4, 5, 7, 8):
        beginnings.note(prompt, found_blocks * BLOCK, NOW)
    seen = {one.tokens: one.requests(NOW) for one in beginnings.hottest(NOW, 10)}
    assert seen == {4 * BLOCK: 3.0, 8 * BLOCK: 1.0}


def test_what_was_not_found_anywhere_is_not_counted() -> None:
    beginnings = Beginnings()
    beginnings.note(keys(3), BLOCK - 1, NOW)
    assert len(beginnings) == 0


def test_a_request_weighs_half_after_a_minute() -> None:
    beginnings = Beginnings()
    beginnings.note(keys(1), BLOCK, NOW)
    beginnings.note(keys(1), BLOCK, Instant(NOW + HALF_LIFE_MS))
    [one] = beginnings.hottest(NOW, 10)
    assert one.requests(Instant(NOW + HALF_LIFE_MS)) == 1.5


def test_those_that_spare_most_come_first_and_a_long_one_is_kept_to_its_bound() -> None:
    beginnings, long = Beginnings(), keys(2 * MAX_BEGINNING_BLOCKS, seed=1)
    beginnings.note(long, len(long) * BLOCK, NOW)
    beginnings.note(keys(2, seed=2), 2 * BLOCK, NOW)
    first, second = beginnings.hottest(NOW, 2)
    assert (first.tokens, second.tokens) == (MAX_BEGINNING_BLOCKS * BLOCK, 2 * BLOCK)
    assert first.lead is not None
    assert first.key == first.lead[len(first.lead) - 1]


def test_at_the_bound_the_half_that_was_asked_for_least_goes() -> None:
    beginnings = Beginnings()
    for seed in range(MAX_BEGINNINGS):
        for _ in range(1 + seed % 2):
            beginnings.note(keys(1, seed), BLOCK, NOW)
    beginnings.note(keys(1, MAX_BEGINNINGS), BLOCK, NOW)
    assert len(beginnings) == MAX_BEGINNINGS // 2 + 1
    kept = {one.key for one in beginnings.hottest(NOW, MAX_BEGINNINGS)}
    assert {keys(1, seed)[0] for seed in range(1, MAX_BEGINNINGS, 2)} < kept


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.floats(0.0, 90_000.0))))
def test_counts_are_those_of_a_plain_list_of_requests(asked: list[tuple[int, int, float]]) -> None:
    beginnings, now, listed = Beginnings(), 0.0, list[tuple[bytes, float]]()
    for seed, found_blocks, pause_ms in asked:
        now += pause_ms
        beginnings.note(keys(6, seed), found_blocks * BLOCK, Instant(now))
        if found_blocks:
            blocks = max(n for n in (1, 2, 4) if n <= found_blocks)
            listed.append((keys(6, seed)[blocks - 1], now))
    for one in beginnings.hottest(Instant(now), 100):
        naive = sum(0.5 ** ((now - at) / HALF_LIFE_MS) for key, at in listed if key == one.key)
        assert abs(one.requests(Instant(now)) - naive) < 1e-6
    assert len(beginnings) == len({key for key, _ in listed})
