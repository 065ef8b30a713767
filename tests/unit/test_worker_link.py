"""The modelled link of a simulated worker: turns, and turns that are given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.records import Instant
from trunkline.worker.link import MAX_GAPS, Link, Turn


def test_transfers_on_a_link_go_one_after_another() -> None:
    link = Link(0.5)
    assert link.book(100, Instant(1_000)) == (1_000, 1_050)
    assert link.book(100, Instant(1_010)) == (1_050, 1_100)
    assert link.book(10, Instant(2_000)) == (2_000, 2_005)
    assert link.free_at == 2_005


def test_what_is_too_late_does_not_take_a_link() -> None:
    link = Link(0.5)
    link.book(100, Instant(1_000))
    assert link.book(100, Instant(1_000), begins_by=Instant(1_049)) is None
    assert link.book(100, Instant(1_000), through_by=Instant(1_099)) is None
    assert link.book(100, Instant(1_000), begins_by=Instant(1_050)) == (1_050, 1_100)
    assert link.book(100, Instant(1_000), through_by=Instant(1_150)) == (1_100, 1_150)


def _booked(link: Link, tokens: int, now: float = 0.0) -> Turn:
    turn = link.book(tokens, Instant(now))
    assert turn is not None
    return turn


def test_a_turn_that_is_given_back_is_the_next_ones_that_fits() -> None:
    link = Link(1.0)
    _, second, third = _booked(link, 100), _booked(link, 50), _booked(link, 100)
    link.give_back(second, Instant(10))
    assert _booked(link, 60, 10.0) == (250, 310), "it does not fit"
    assert _booked(link, 30, 10.0) == (100, 130)
    assert _booked(link, 20, 10.0) == (130, 150)
    assert _booked(link, 1, 10.0) == (310, 311)
    assert third == (150, 250), "who was told its turn keeps it"


def test_of_a_turn_that_has_begun_only_the_rest_is_given_back_and_of_one_that_is_over_nothing() -> (
    None
):
    link = Link(1.0)
    turn = _booked(link, 100)
    link.give_back(turn, Instant(100))
    assert link.free_at == 100
    again = _booked(link, 100, 200.0)
    link.give_back(again, Instant(240))
    assert link.free_at == 240


def test_turns_given_back_at_the_end_make_it_free_from_there() -> None:
    link = Link(1.0)
    _, second, third = (_booked(link, 10) for _ in range(3))
    link.give_back(second, Instant(0))
    link.give_back(third, Instant(0))
    assert link.free_at == 10
    assert _booked(link, 1_000) == (10, 1_010)


def test_a_turn_is_given_back_once() -> None:
    link = Link(1.0)
    _, second, _ = (_booked(link, 10) for _ in range(3))
    link.give_back(second, Instant(0))
    with pytest.raises(AssertionError, match="twice"):
        link.give_back(second, Instant(0))


def test_gaps_are_bounded_and_beyond_that_the_first_to_end_is_lost() -> None:
    link = Link(1.0)
    turns = [_booked(link, 10) for _ in range(2 * MAX_GAPS + 3)]
    for turn in turns[1:-1:2]:
        link.give_back(turn, Instant(0))
    assert _booked(link, 10) == turns[3], "the first is lost"
    for turn in turns[5:-1:2]:
        assert _booked(link, 10) == turn
    assert _booked(link, 10)[0] == turns[-1][1]


@given(
    st.lists(
        st.tuples(st.sampled_from(["book", "back"]), st.integers(1, 9), st.integers(0, 12)),
        max_size=50,
    )
)
def test_a_turn_is_the_earliest_that_touches_no_other(
    steps: list[tuple[str, int, int]],
) -> None:
    link, now = Link(1.0), 0.0
    told: list[Turn] = []
    """The twin: who has the link, whenever that is."""
    for what, size, pause in steps:
        now += pause / 3
        if what == "book":
            turn = _booked(link, size, now)
            starts = sorted({now, *(end for _, end in told if end > now)})
            free = (
                at for at in starts if all(at + size <= begin or at >= end for begin, end in told)
            )
            assert turn[0] == next(free)
            told.append(turn)
        elif told:
            turn = told.pop(size % len(told))
            link.give_back(turn, Instant(now))
            if turn[0] < now:
                told.append((turn[0], min(turn[1], Instant(now))))
