"""The in-flight book: exact, never negative, and blind to nothing that was sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.load import CHURN_HALF_LIFE_MS, ChurnClock, PrefillQueue
from trunkline.core.records import Instant


def test_the_queue_is_the_work_sent_less_what_the_head_was_served() -> None:
    queue = PrefillQueue()
    queue.start(1, 100.0, Instant(0.0))
    queue.start(2, 50.0, Instant(10.0))
    assert queue.queue_ms(Instant(40.0)) == pytest.approx(110.0)
    queue.first_token(1, Instant(90.0))
    assert queue.queue_ms(Instant(90.0)) == pytest.approx(50.0)
    assert queue.queue_ms(Instant(110.0)) == pytest.approx(30.0)


def test_a_late_head_does_not_eat_into_the_work_behind_it() -> None:
    queue = PrefillQueue()
    queue.start(1, 100.0, Instant(0.0))
    queue.start(2, 50.0, Instant(0.0))
    assert queue.queue_ms(Instant(5_000.0)) == pytest.approx(50.0)


def test_who_leaves_from_behind_the_head_does_not_restart_it() -> None:
    queue = PrefillQueue()
    queue.start(1, 10_000.0, Instant(0.0))
    queue.start(2, 500.0, Instant(0.0))
    queue.end(2, Instant(9_000.0))
    assert queue.queue_ms(Instant(9_000.0)) == pytest.approx(1_000.0)
    queue.start(3, 100.0, Instant(9_000.0))
    queue.first_token(3, Instant(9_500.0))  # a short one overtook
    assert queue.queue_ms(Instant(9_500.0)) == pytest.approx(500.0)


def test_foreign_work_counts_in_front_of_an_empty_book() -> None:
    queue = PrefillQueue()
    queue.foreign_ms = 70.0
    assert queue.queue_ms(Instant(0.0)) == 70.0


def test_a_ticket_cannot_be_in_the_book_twice() -> None:
    queue = PrefillQueue()
    queue.start(1, 1.0, Instant(0.0))
    with pytest.raises(ValueError, match="ticket 1"):
        queue.start(1, 1.0, Instant(0.0))


@given(
    st.lists(st.tuples(st.sampled_from(["start", "first", "end"]), st.integers(0, 7)), max_size=200)
)
def test_c06_counters_equal_the_live_requests_at_each_step(steps: list[tuple[str, int]]) -> None:
    """C06: any interleaving of start, first byte and end, repeated ends included."""
    queue = PrefillQueue()
    waiting: dict[int, float] = {}
    streaming: set[int] = set()
    head_since = 0.0
    for clock, (verb, ticket) in enumerate(steps):
        now = Instant(float(clock))
        head = next(iter(waiting), None)
        if verb == "start" and ticket not in waiting and ticket not in streaming:
            queue.start(ticket, 10.0 + ticket, now)
            waiting[ticket] = 10.0 + ticket
        elif verb == "first":
            queue.first_token(ticket, now)
            if ticket in waiting:
                del waiting[ticket]
                streaming.add(ticket)
        elif verb == "end":
            assert queue.end(ticket, now) == (ticket in waiting or ticket in streaming)
            waiting.pop(ticket, None)
            streaming.discard(ticket)
        if next(iter(waiting), None) != head:
            head_since = now
        assert queue.stream_count == len(streaming)
        assert queue.in_flight_count == len(waiting) + len(streaming)
        served_ms = min(now - head_since, next(iter(waiting.values()), 0.0))
        assert queue.queue_ms(now) == pytest.approx(sum(waiting.values()) - served_ms)


def test_churn_halves_in_a_half_life_against_what_is_placed_now() -> None:
    clock = ChurnClock(Instant(0.0))
    old, new = PrefillQueue(), PrefillQueue()
    clock.watch(old)
    clock.watch(new)
    clock.add(old, 1_000, Instant(0.0))
    clock.add(new, 1_000, Instant(CHURN_HALF_LIFE_MS))
    assert old.churn / new.churn == pytest.approx(0.5)


def test_churn_keeps_its_ratios_over_weeks_without_overflow() -> None:
    clock = ChurnClock(Instant(0.0))
    first, second = PrefillQueue(), PrefillQueue()
    clock.watch(first)
    clock.watch(second)
    now = 0.0
    for _ in range(20_000):  # two weeks, a minute at a time
        now += CHURN_HALF_LIFE_MS
        clock.add(first, 300, Instant(now))
        clock.add(second, 100, Instant(now))
    assert first.churn / second.churn == pytest.approx(3.0)
    assert first.churn < 1e30


def test_a_gateway_that_idled_for_a_month_has_forgotten_its_churn_and_goes_on() -> None:
    clock = ChurnClock(Instant(0.0))
    queue = PrefillQueue()
    clock.watch(queue)
    clock.add(queue, 1_000_000, Instant(0.0))
    month_ms = 30 * 86_400_000.0
    assert clock.floor(Instant(month_ms)) == pytest.approx(4_096.0)
    assert queue.churn == 0.0
    clock.add(queue, 10, Instant(month_ms))
    assert queue.churn == pytest.approx(10.0)


def test_a_slow_start_weighs_the_queue_ten_times_at_first_and_once_when_the_work_was_sent() -> None:
    queue = PrefillQueue()
    assert queue.slow_factor == 0.0
    queue.start_slowly(1_000.0)
    weights = [queue.slow_factor + 1.0]
    for ticket in range(5):
        queue.start(ticket, 250.0, Instant(0.0))
        queue.end(ticket, Instant(0.0))
        weights.append(queue.slow_factor + 1.0)
    assert weights == pytest.approx([10.0, 4.0, 2.0, 4.0 / 3.0, 1.0, 1.0])
    assert queue.worked_ms == 1_250.0
