"""What a worker is expected to hold of the attempts sent to it, and who takes it back."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from picker_bench import (
    BLOCK,
    COMPLETE,
    FAILED,
    GONE,
    W0,
    W1,
    Bench,
    ids,
)

from trunkline.core.hearsay import Hearsay
from trunkline.core.keys import KeyChain
from trunkline.gateway.contracts import (
    AttemptEnd,
)
from trunkline.gateway.tickets import MAX_SIBLINGS


def test_a_failed_attempt_takes_back_what_it_alone_was_to_fill() -> None:
    bench = Bench(W0)
    picked = bench.pick(ids(10 * BLOCK + 1))
    assert bench.expected(W0, ids(10 * BLOCK)) == 10
    bench.picker.ended(picked, FAILED, None)
    assert bench.expected(W0, ids(10 * BLOCK)) == 0


def test_a_failed_attempt_leaves_what_was_expected_before_it() -> None:
    """One failure must not erase a system prompt that thousands have filled."""
    bench = Bench(W0)
    filled = bench.pick(ids(10 * BLOCK + 1))
    bench.picker.first_byte(filled)
    bench.picker.ended(filled, COMPLETE, 0)
    longer = ids(10 * BLOCK) + ids(5 * BLOCK + 1, 7_000)
    picked = bench.pick(longer)
    assert bench.expected(W0, longer) == 15
    bench.picker.ended(picked, FAILED, None)
    assert bench.expected(W0, longer) == 10


def test_a_failed_repeat_of_a_prompt_takes_nothing_back() -> None:
    bench = Bench(W0)
    for end in (COMPLETE, FAILED):
        picked = bench.pick(ids(10 * BLOCK))
        if end is COMPLETE:
            bench.picker.first_byte(picked)
        bench.picker.ended(picked, end, None)
    assert bench.expected(W0, ids(10 * BLOCK)) == 10


def test_what_a_sibling_in_flight_fills_stays_expected_until_it_fails_too() -> None:
    bench = Bench(W0)
    shared = ids(10 * BLOCK)
    first = bench.pick(shared + ids(3 * BLOCK + 1, 7_000))
    second = bench.pick(shared + ids(3 * BLOCK + 1, 8_000))
    bench.picker.ended(first, FAILED, None)
    assert bench.expected(W0, shared + ids(3 * BLOCK, 7_000)) == 10
    assert bench.expected(W0, shared + ids(3 * BLOCK, 8_000)) == 13
    bench.picker.ended(second, FAILED, None)
    assert bench.expected(W0, shared) == 0


@pytest.mark.parametrize(("strangers", "expected_blocks"), [(-1, 5), (0, 0)])
def test_only_the_oldest_in_flight_are_asked_what_they_share(
    strangers: int, expected_blocks: int
) -> None:
    """At the bound less is expected than could be, and nothing that is not there."""
    bench = Bench(W0)
    first = bench.pick(ids(81))
    for number in range(MAX_SIBLINGS + strangers):
        bench.pick(ids(20, 1_000 * (number + 1)))
    bench.pick(ids(81))
    bench.picker.ended(first, FAILED, None)
    assert bench.expected(W0, ids(80)) == expected_blocks


def test_a_client_that_leaves_before_the_first_byte_takes_its_expectations_along() -> None:
    bench = Bench(W0)
    early, late = bench.pick(ids(81)), bench.pick(ids(81, 5_000))
    bench.picker.first_byte(late)
    bench.picker.ended(early, GONE, None)
    bench.picker.ended(late, GONE, None)
    assert bench.expected(W0, ids(80)) == 0
    assert bench.expected(W0, ids(80, 5_000)) == 5


def test_an_answer_that_another_proxy_carried_leaves_its_prompt_there() -> None:
    bench = Bench(W0)
    picked = bench.pick(ids(81), is_stream=False)
    bench.picker.ended(picked, AttemptEnd.UNHEARD, None)
    assert bench.expected(W0, ids(80)) == 5
    assert bench.told[W0, "unheard"] == 1
    bench.assert_clean()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_prompt_that_the_worker_refuses_is_not_expected_there(is_stream: bool) -> None:
    """A 400 is a complete answer, and computed nothing."""
    bench = Bench(W0)
    picked = bench.pick(ids(81), is_stream=is_stream)
    bench.clock.ms += 1_000.0
    bench.pick(ids(20, 9_000))  # until then an unstreamed one is taken for prefilled
    bench.picker.ended(picked, COMPLETE, None)
    assert bench.expected(W0, ids(80)) == 0


def test_an_attempt_of_an_earlier_life_takes_nothing_from_the_next() -> None:
    bench = Bench(W0)
    old = bench.pick(ids(81))
    bench.leave(W0)
    bench.join(W0)
    new = bench.pick(ids(81))
    bench.picker.first_byte(new)
    bench.picker.ended(new, COMPLETE, 0)
    bench.picker.ended(old, FAILED, None)
    assert bench.expected(W0, ids(80)) == 5


CHAINS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.sampled_from([COMPLETE, FAILED, GONE])),
    min_size=1,
    max_size=12,
)


@given(plans=CHAINS, order=st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_expectations_are_those_of_the_filled_and_the_open_whatever_fails(
    plans: list[tuple[int, int, AttemptEnd]], order: random.Random
) -> None:
    """The naive model: a block is expected where an attempt has it that is open or that filled it.
    All attempts are open at once, and end in any order.
    """
    bench = Bench(W0)
    open_picks = [
        (bench.pick(ids(2 * BLOCK) + ids(depth * BLOCK + 1, 1_000 * branch)), end)
        for branch, depth, end in plans
    ]
    order.shuffle(open_picks)
    filled: list[KeyChain] = []
    while open_picks:
        picked, end = open_picks.pop()
        if end is COMPLETE:
            bench.picker.first_byte(picked)
            filled.append(picked.ticket.keys)
        bench.picker.ended(picked, end, None)
        expected = [*(other.ticket.keys for other, _ in open_picks), *filled]
        distinct = {keys[index] for keys in expected for index in range(len(keys))}
        assert bench.directory.predicted_count(W0) == len(distinct)
        for keys in expected:
            assert bench.directory.match(keys).expected[bench.directory.slot(W0)] == len(keys)


def test_what_an_attempt_owes_is_there_to_be_lent_from_its_first_byte_on() -> None:
    bench = Bench(W0)
    prompt = ids(10 * BLOCK + 1)
    picked = bench.pick(prompt)
    keys, state = picked.ticket.keys, picked.ticket.state
    lending, tokens = bench.picker._lending(keys), 10 * BLOCK
    assert lending.there_tokens(state, tokens) == 0
    assert lending.ready_ms(state, tokens, bench.clock.now()) == math.inf, "it lets nobody wait"
    bench.picker.first_byte(picked)
    assert lending.there_tokens(state, tokens) == tokens
    assert lending.ready_ms(state, tokens, bench.clock.now()) == 0.0
    bench.picker.ended(picked, COMPLETE, 0)


# -- what other gateways are told ----------------------------------------------------------------


def heard_by(bench: Bench) -> Hearsay:
    bench.picker.hearsay = Hearsay(bench.directory, lambda _: bench.ttl_ms)
    return bench.picker.hearsay


def told(hearsay: Hearsay) -> list[tuple[int, int]]:
    """First new block and how many, of each run."""
    return [(run.first_block, run.block_count) for _, run in hearsay.drained()]


def test_others_are_told_what_is_new_at_the_worker() -> None:
    bench = Bench(W0)
    hearsay = heard_by(bench)
    bench.pick(ids(10 * BLOCK + 1))
    bench.pick(ids(10 * BLOCK) + ids(5 * BLOCK + 1, 7_000))
    bench.pick(ids(10 * BLOCK))
    assert told(hearsay) == [(0, 10), (10, 5)], "the last block, computed anyway, is not new"


def test_of_a_worker_without_events_others_are_told_all() -> None:
    bench = Bench(W0)
    hearsay = heard_by(bench)
    bench.pick(ids(10 * BLOCK + 1))
    target = bench.picker.target(W0)
    assert target is not None
    target.is_exact = False
    bench.pick(ids(10 * BLOCK) + ids(5 * BLOCK + 1, 7_000))
    assert told(hearsay) == [(0, 10), (0, 15)]


def test_others_are_not_told_of_what_failed_before_the_beat() -> None:
    bench = Bench(W0)
    hearsay = heard_by(bench)
    picked = bench.pick(ids(10 * BLOCK + 1))
    bench.picker.ended(picked, FAILED, None)
    assert told(hearsay) == []


def test_what_another_gateway_chose_is_followed() -> None:
    bench, other = Bench(W0, W1), Bench(W0, W1)
    hearsay, heard = heard_by(bench), heard_by(other)
    for number in range(8):
        prompt = ids(10 * BLOCK + 1, 10_000 * number)
        worker = bench.pick(prompt).worker
        for name, run in hearsay.drained():
            heard.hear(name, run, other.clock.now())
        picked = other.pick(prompt)
        assert (picked.worker, picked.ticket.decision.matched_tokens) == (worker, 10 * BLOCK)
        bench.clock.ms += 100.0
        other.clock.ms += 100.0
