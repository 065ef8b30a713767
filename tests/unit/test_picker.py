"""The picker's books: whatever happens to an attempt, what it left behind is gone at its end."""

from __future__ import annotations

import random
from collections import Counter

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

from trunkline.core.fleet import WorkerState
from trunkline.errors import NoWorker
from trunkline.gateway.contracts import (
    Pick,
)

# -- load accounting -------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "first byte", "complete", "fail", "leave", "drop", "join"]),
        st.integers(0, 2**16),
    ),
    max_size=60,
)


@given(steps=STEPS)
@settings(max_examples=150)
def test_c06_counters_equal_the_live_requests_at_each_step(steps: list[tuple[str, int]]) -> None:
    """Starts, first bytes, ends, errors, leaving clients and leaving workers in any order."""
    bench = Bench(W0, W1)
    live: list[tuple[Pick, WorkerState]] = []
    ends = {"complete": COMPLETE, "fail": FAILED, "leave": GONE}
    for step, draw in steps:
        bench.clock.ms += draw % 7
        if step == "start":
            prompt = ids(BLOCK * (draw % 5) + 1, draw % 3)
            try:
                picked = bench.pick(prompt, is_stream=bool(draw % 2))
            except NoWorker:
                assert not bench.fleet.states()
            else:
                live.append((picked, picked.ticket.state))
        elif step == "first byte" and live:
            bench.picker.first_byte(live[draw % len(live)][0])
        elif step in ends and live:
            picked, _ = live.pop(draw % len(live))
            bench.picker.ended(picked, ends[step], 0)
        elif step == "drop" and bench.fleet.get(W0) is not None:
            bench.leave(W0)
        elif step == "join" and bench.fleet.get(W0) is None:
            bench.join(W0)
        counted = Counter(id(state) for _, state in live)
        for state in {id(s): s for _, s in live}.values():
            assert state.queue.in_flight_count == counted[id(state)]
        for state in bench.fleet.states():
            assert state.queue.in_flight_count == counted[id(state)]
        assert len(bench.picker._tickets) == len(live)
    for picked, _ in live:
        bench.picker.ended(picked, GONE, None)
    bench.assert_clean()


def test_c07_ten_thousand_requests_with_failures_leave_nothing_behind() -> None:
    bench = Bench(W0, W1)
    dice = random.Random(3)
    live: list[Pick] = []
    for number in range(10_000):
        bench.clock.ms += 0.3
        live.append(bench.pick(ids(33, number % 50), is_stream=number % 3 > 0))
        if dice.random() < 0.7:
            bench.picker.first_byte(live[dice.randrange(len(live))])
        while len(live) > 40:
            picked = live.pop(dice.randrange(len(live)))
            draw = dice.random()
            end = FAILED if draw < 0.3 else GONE if draw < 0.4 else COMPLETE
            bench.picker.ended(picked, end, 16)
        assert len(bench.picker._tickets) == len(live)
    for picked in live:
        bench.picker.ended(picked, FAILED, None)
    bench.assert_clean()
    assert len(bench.picker.receipts) == 8
    sent = sum(bench.told[name, "sent"] for name in (W0, W1))
    ended = sum(count for (_, what), count in bench.told.items() if what != "sent")
    assert sent == ended == 10_000


def test_c08_a_second_end_of_one_attempt_is_a_bug_and_never_a_second_decrement() -> None:
    bench = Bench(W0)
    first, second = bench.pick(ids(20)), bench.pick(ids(20))
    bench.picker.ended(first, FAILED, None)
    with pytest.raises(AssertionError, match="ended twice"):
        bench.picker.ended(first, FAILED, None)
    assert bench.in_flight(W0) == 1
    bench.picker.ended(second, COMPLETE, None)
    bench.assert_clean()


def test_c09_a_retry_moves_the_charge_to_the_second_worker() -> None:
    bench = Bench(W0, W1)
    first = bench.pick(ids(40))
    other = W1 if first.worker == W0 else W0
    assert (bench.in_flight(first.worker), bench.in_flight(other)) == (1, 0)
    bench.picker.ended(first, FAILED, None)
    second = bench.pick(ids(40), first.worker)
    assert second.worker == other
    assert (bench.in_flight(first.worker), bench.in_flight(other)) == (0, 1)
    bench.picker.ended(second, COMPLETE, 0)
    bench.assert_clean()


def test_an_attempt_that_outlives_its_worker_is_charged_to_nobody_else() -> None:
    bench = Bench(W0)
    picked = bench.pick(ids(40))
    bench.leave(W0)
    bench.join(W0)
    assert bench.in_flight(W0) == 0
    bench.picker.ended(picked, FAILED, None)
    bench.assert_clean()


def test_no_worker_is_said_when_all_were_tried() -> None:
    bench = Bench(W0, W1)
    with pytest.raises(NoWorker):
        bench.pick(ids(40), W0, W1)
    bench.assert_clean()


# -- prefills that give no sign --------------------------------------------------------------------


def test_an_unstreamed_prefill_counts_as_over_when_it_was_predicted_to_be() -> None:
    bench = Bench(W0)
    bench.pick(ids(20_000), is_stream=False)  # 1 + 0.005 * 20,000 = 101 ms
    state = bench.fleet.get(W0)
    assert state is not None
    bench.clock.ms += 100.0
    assert state.queue.queue_ms(bench.clock.now()) == pytest.approx(1.0)
    bench.clock.ms += 2.0
    bench.pick(ids(17, 30_000), is_stream=False)
    assert (state.queue.in_flight_count, state.queue.stream_count) == (2, 1)


def test_a_long_unstreamed_prefill_does_not_hold_back_the_short_ones_of_other_workers() -> None:
    bench = Bench(W0, W1)
    long = bench.pick(ids(40_000), is_stream=False)
    short = bench.pick(ids(17, 50_000), long.worker, is_stream=False)
    bench.clock.ms += 5.0
    bench.pick(ids(17, 60_000), short.worker, is_stream=False)
    assert short.ticket.is_prefilled
    assert not long.ticket.is_prefilled


def test_ended_prefills_do_not_wait_in_memory_for_the_time_they_were_due() -> None:
    bench = Bench(W0, ttl_ms=0.0)
    for number in range(2_000):
        picked = bench.pick(ids(2_000, number * 3_000), is_stream=False)
        bench.picker.ended(picked, COMPLETE, None)
        assert bench.picker._tickets.due_count <= 66


# -- calibration -----------------------------------------------------------------------------------


def test_a_slow_answer_to_a_known_prompt_moves_the_scale_of_its_worker() -> None:
    bench = Bench(W0)
    picked = bench.pick(ids(4_000))
    bench.clock.ms += 200.0
    bench.picker.first_byte(picked)
    assert picked.ticket.state.queue.scale > 1.0


def test_a_stream_of_an_unknown_prompt_says_nothing_about_speed() -> None:
    bench = Bench(W0)
    state = bench.fleet.get(W0)
    assert state is not None
    for _ in range(50):
        picked = bench.pick(None)
        bench.clock.ms += 20_000.0
        bench.picker.first_byte(picked)
        bench.picker.ended(picked, COMPLETE, None)
    assert state.queue.scale == 1.0
    assert bench.picker.accounts.unread_prompts == 50
