"""Deadlines from a worker's own history, and what missing them leads to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.pace import (
    EJECTED_MS,
    GAP_FLOOR_MS,
    HISTORY_FIRST,
    HISTORY_GAPS,
    MAX_EJECTED_MS,
    STRIKE_APART_MS,
    STRIKE_LASTS_MS,
    WINDOW_MS,
    Pace,
    Standing,
)
from trunkline.core.records import Instant


def at(ms: float) -> Instant:
    return Instant(ms)


def paced(gap_ms: float, gap_floor_ms: float = GAP_FLOOR_MS) -> Pace:
    """With a history of that pause between tokens."""
    pace = Pace(gap_floor_ms=gap_floor_ms)
    for number in range(HISTORY_GAPS):
        pace.moved(1, gap_ms, at(number))
    return pace


def test_without_a_history_there_is_no_deadline() -> None:
    pace = Pace()
    for _ in range(HISTORY_FIRST - 1):
        pace.first_token(predicted_ms=100.0, observed_ms=100.0)
    for number in range(HISTORY_GAPS - 1):
        pace.moved(1, 20.0, at(number))
    assert pace.first_token_limit_ms(prefill_ms=100.0, queue_ms=0.0) is None
    assert pace.gap_limit_ms() is None


def test_a_first_token_may_take_three_times_its_prefill_the_queue_and_two_seconds() -> None:
    pace = Pace()
    for _ in range(HISTORY_FIRST):
        pace.first_token(predicted_ms=100.0, observed_ms=100.0)
    assert pace.first_token_limit_ms(prefill_ms=1_000.0, queue_ms=500.0) == 5_500.0


def test_a_worker_that_is_slower_than_its_profile_has_so_much_more_time() -> None:
    pace = Pace()
    for _ in range(HISTORY_FIRST):
        pace.first_token(predicted_ms=750.0, observed_ms=40_000.0)  # 40 times what was predicted
    assert pace.first_token_limit_ms(prefill_ms=1_000.0, queue_ms=500.0) == 40 * 3_500.0 + 2_000.0


def test_tokens_may_be_five_seconds_apart_at_a_fast_worker_and_20_medians_at_a_slow_one() -> None:
    assert paced(20.0).gap_limit_ms() == GAP_FLOOR_MS
    assert paced(20_000.0).gap_limit_ms() == 400_000.0
    assert paced(20.0, gap_floor_ms=60_000.0).gap_limit_ms() == 60_000.0


def test_a_newcomer_has_ten_times_as_long_as_its_pool_until_it_has_a_history() -> None:
    pool = Pace()
    newcomer = Pace(pool=pool)
    assert newcomer.gap_limit_ms() is None
    old = Pace(pool=pool)
    for number in range(HISTORY_GAPS):
        old.moved(1, 20.0, at(number))
    for _ in range(HISTORY_FIRST):
        old.first_token(predicted_ms=100.0, observed_ms=100.0)
    assert (old.gap_limit_ms(), newcomer.gap_limit_ms()) == (5_000.0, 50_000.0)
    assert old.first_token_limit_ms(prefill_ms=1_000.0, queue_ms=500.0) == 5_500.0
    assert newcomer.first_token_limit_ms(prefill_ms=1_000.0, queue_ms=500.0) == 55_000.0
    for number in range(HISTORY_GAPS):
        newcomer.moved(1, 400.0, at(number))
    assert newcomer.gap_limit_ms() == 8_000.0
    assert old.gap_limit_ms() == 5_000.0, "another one's pace is nothing to it"


def test_one_stall_does_not_move_the_median() -> None:
    pace = paced(20.0)
    pace.moved(1, 100_000.0, at(0.0))
    for number in range(HISTORY_GAPS):
        pace.moved(1, 20.0, at(number))
    assert pace.gap_limit_ms() == GAP_FLOOR_MS


def test_two_strikes_are_a_suspicion_and_a_third_puts_it_out_for_a_while() -> None:
    pace = Pace()
    pace.missed(at(0.0))
    assert pace.standing(at(0.0)) is Standing.GOOD
    pace.missed(at(1_000.0))
    assert pace.standing(at(1_000.0)) is Standing.SUSPECT
    pace.missed(at(2_000.0))
    assert pace.standing(at(2_000.0)) is Standing.EJECTED
    assert pace.standing(at(2_000.0 + EJECTED_MS - 1.0)) is Standing.EJECTED
    assert pace.standing(at(2_000.0 + EJECTED_MS)) is Standing.GOOD, "it begins anew"


def test_a_suspicion_fades() -> None:
    pace = Pace()
    pace.missed(at(0.0))
    pace.missed(at(10_000.0))
    assert pace.standing(at(STRIKE_LASTS_MS - 1.0)) is Standing.SUSPECT
    assert pace.standing(at(STRIKE_LASTS_MS)) is Standing.GOOD


def test_a_stall_that_breaks_all_streams_at_once_is_one_strike() -> None:
    pace = Pace()
    for number in range(64):
        pace.missed(at(number))
    assert pace.standing(at(64.0)) is Standing.GOOD


def test_what_ends_late_of_an_ejected_worker_does_not_keep_it_out() -> None:
    pace = Pace()
    for number in range(30):
        pace.missed(at(number * 1_000.0))
    assert pace.standing(at(2_000.0 + EJECTED_MS)) is Standing.GOOD


def test_each_further_time_out_is_twice_as_long_up_to_a_bound() -> None:
    pace, now, lasted = Pace(), 0.0, list[float]()
    for _ in range(6):
        while pace.standing(at(now)) is not Standing.EJECTED:
            pace.missed(at(now))
            now += 1_000.0
        began = now - 1_000.0
        while pace.standing(at(now)) is Standing.EJECTED:
            now += 1_000.0
        lasted.append(now - began)
    assert lasted == [30_000.0, 60_000.0, 120_000.0, 240_000.0, MAX_EJECTED_MS, MAX_EJECTED_MS]


def streamed(pace: Pace, gap_ms: float, now: float, windows: int) -> float:
    """Tokens at this pause for so many windows; the time behind them."""
    end = now + windows * (WINDOW_MS + 1_000.0)
    while now < end:
        now += 250.0
        for _ in range(10):  # streams
            pace.moved(max(1, round(250.0 / gap_ms)), max(250.0, gap_ms), at(now))
    return now


def test_a_worker_that_becomes_ten_times_slower_than_it_was_is_put_out() -> None:
    pace = Pace()
    now = streamed(pace, 20.0, 0.0, 5)
    assert pace.standing(at(now)) is Standing.GOOD
    now = streamed(pace, 200.0, now, 3)
    assert pace.standing(at(now)) is not Standing.GOOD


def test_a_full_batch_is_no_fault_and_neither_is_a_worker_that_was_always_slow() -> None:
    pace = Pace()
    now = streamed(pace, 20.0, 0.0, 5)
    now = streamed(pace, 100.0, now, 30)
    assert pace.standing(at(now)) is Standing.GOOD
    slow = Pace()
    assert slow.standing(at(streamed(slow, 20_000.0, 0.0, 10))) is Standing.GOOD


@given(st.lists(st.integers(0, 200_000), max_size=60))
def test_it_is_never_out_for_fewer_than_three_strikes_nor_for_ever(gaps: list[int]) -> None:
    """Against a naive twin that keeps all strikes that count."""
    pace, now, counted = Pace(), 0.0, list[float]()
    out_until, times_out = -1.0, 0
    for gap in gaps:
        now += gap
        is_out = now < out_until
        if not is_out and not (counted and now - counted[-1] < STRIKE_APART_MS):
            counted.append(now)
            if sum(now - one < STRIKE_LASTS_MS for one in counted) >= 3:
                out_until = now + min(EJECTED_MS * 2**times_out, MAX_EJECTED_MS)
                times_out += 1
                counted.clear()
        pace.missed(at(now))
        live = sum(now - one < STRIKE_LASTS_MS for one in counted)
        wanted = Standing.SUSPECT if live >= 2 else Standing.GOOD
        if now < out_until:
            wanted = Standing.EJECTED
        assert pace.standing(at(now)) is wanted
    assert pace.standing(at(now + MAX_EJECTED_MS + STRIKE_LASTS_MS)) is Standing.GOOD
