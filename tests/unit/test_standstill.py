"""A feed that stands still: when it begins and ends, and what may be taken in meanwhile."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from feed_desk import WORKER, Desk, batch, gone, run

from trunkline.core.directory import Directory
from trunkline.core.events import AllBlocksCleared
from trunkline.core.feed import FeedState
from trunkline.core.handover import Rows, Standing
from trunkline.core.orphans import MAX_UNPLACED_BLOCKS
from trunkline.core.records import Instant
from trunkline.core.standstill import (
    LOOK_MS,
    MAX_STANDSTILL_MS,
    MAX_WAITING_BATCHES,
)

T0 = Instant(0.0)
NOTHING = array("Q")


def stood(desk: Desk) -> int:
    token = desk.feed.standstill.begin(T0)
    assert token is not None
    return token


def standing(desk: Desk, token: int) -> Standing:
    at = desk.feed.standstill.standing(token)
    assert at is not None
    return at


def told(desk: Desk) -> list[Rows]:
    return list(slices(desk.directory))


def slices(directory: Directory) -> list[Rows]:
    made = [directory.export(WORKER, 0, 2)]
    while made[-1].next_start >= 0:
        made.append(directory.export(WORKER, made[-1].next_start, 2))
    return made


def two() -> tuple[Desk, Desk]:
    """One that heard all from the beginning, and one that heard the last batch alone."""
    knows, late = Desk(can_replay=False), Desk(can_replay=False)
    knows.live(batch(0, run(1, 2, 3)), batch(1, run(7)), batch(2, run(8, parent=3)))
    late.live(batch(2, run(8, parent=3)))
    return knows, late


def test_all_that_one_knows_is_known_to_the_other_and_what_comes_next_follows() -> None:
    knows, late = two()
    assert (late.usable(1, 2, 3, 8), late.feed.standstill.is_wanted()) == (0, True)
    token = stood(late)
    at = standing(knows, stood(knows))
    for rows in told(knows):
        assert late.feed.standstill.adopt(token, rows, NOTHING, at)
    late.live(batch(3, run(9, parent=8), gone(7)))
    assert late.usable(1, 2, 3, 8, 9) == 4, "what comes meanwhile waits"
    assert late.feed.state is FeedState.LIVE
    assert late.feed.standstill.complete(token, at)
    late.tick(1.0)
    assert late.usable(1, 2, 3, 8, 9) == 5
    assert late.usable(7) == 0
    assert (late.feed.standstill.knows_since, late.feed.parked_count) == (0, 0)
    assert not late.feed.standstill.is_wanted()
    assert (late.feed.stats.handovers, late.feed.stats.handed_over_blocks) == (1, 5)


@pytest.mark.parametrize("wrong", [{"seq": 3}, {"seq": 1}, {"fingerprint": 5}])
def test_a_slice_of_another_batch_or_another_life_is_not_taken(wrong: dict[str, int]) -> None:
    knows, late = two()
    token, at = stood(late), standing(knows, stood(knows))
    [*rows] = told(knows)
    assert not late.feed.standstill.adopt(token, rows[0], NOTHING, replace(at, **wrong))
    assert late.held() == 0


def test_it_goes_on_to_the_batch_where_the_other_one_is_and_no_further() -> None:
    desk = Desk(can_replay=False)
    desk.live(batch(0, run(1)))
    token = stood(desk)
    desk.live(batch(1, run(2)), batch(2, run(3)), batch(3, run(4)))
    assert desk.held() == 1
    assert desk.feed.standstill.go_to(token, 2)
    assert desk.feed.standstill.standing(token) is None, "not there yet"
    desk.tick(1.0)
    assert (standing(desk, token).seq, desk.held()) == (2, 3)
    assert not desk.feed.standstill.go_to(token, 1), "it is past that"
    desk.feed.standstill.go_on(token)
    desk.tick(2.0)
    assert desk.held() == 4


def test_a_gap_ends_it_and_is_repaired_as_ever() -> None:
    desk = Desk()
    desk.feed.joined(T0)
    desk.replay(batch(0, run(1)))
    token = stood(desk)
    assert desk.feed.standstill.go_to(token, 5)
    desk.live(batch(2, run(3)))
    assert not desk.feed.standstill.is_on(token)
    desk.replay(batch(0, run(1)), batch(1, run(2)), batch(2, run(3)))
    desk.tick(1.0)
    assert (desk.held(), desk.feed.state) == (3, FeedState.LIVE)


def test_another_life_of_the_engine_ends_it() -> None:
    desk = Desk(can_replay=False)
    desk.live(batch(0, run(1)), batch(1, run(2)))
    token = stood(desk)
    desk.live(batch(0, run(5), life=1))
    assert not desk.feed.standstill.is_on(token)
    assert desk.held() == 1


@pytest.mark.parametrize("is_back", [False, True])
def test_nothing_is_taken_in_for_a_worker_that_left_or_lives_anew(is_back: bool) -> None:
    knows, late = two()
    token, at = stood(late), standing(knows, stood(knows))
    rows = told(knows)
    assert late.feed.standstill.adopt(token, rows[0], NOTHING, at)
    late.directory.leave(WORKER)
    if is_back:
        late.directory.join(WORKER, block_tokens=2)
    assert not late.feed.standstill.adopt(token, rows[1], NOTHING, at)
    assert not late.feed.standstill.complete(token, at)
    assert not is_back or late.held() == 0
    late.feed.standstill.go_on(token)
    assert late.feed.standstill.begin(T0) is None


def test_too_many_batches_that_wait_end_it_and_none_is_lost() -> None:
    desk = Desk(can_replay=False)
    desk.live(batch(0, run(1)))
    token = stood(desk)
    for seq in range(1, MAX_WAITING_BATCHES + 1):
        desk.live(batch(seq, run(1_000 + seq)))
    assert desk.feed.standstill.is_on(token), "at the bound"
    desk.live(batch(MAX_WAITING_BATCHES + 1, run(7)))
    assert not desk.feed.standstill.is_on(token), "one more"
    while desk.feed.has_backlog:
        desk.tick(1.0)
    assert desk.held() == MAX_WAITING_BATCHES + 2
    assert desk.feed.stats.relearned == 0


def test_time_ends_it_and_it_is_not_asked_again_and_again_meanwhile() -> None:
    desk = Desk(can_replay=False)
    desk.live(batch(0, run(1)), batch(1, run(3, parent=2)))
    desk.tick(6_000.0)  # the orphan was given up
    token = desk.feed.standstill.begin(Instant(6_000.0))
    assert token is not None
    desk.live(batch(2, run(4)), now=6_000.0)
    now = 6_000.0
    for _ in range(10):
        desk.tick(now)
        assert desk.feed.next_tick == now + LOOK_MS
        assert not desk.feed.has_backlog
        now += LOOK_MS
    desk.tick(6_000.0 + MAX_STANDSTILL_MS)
    assert (desk.feed.standstill.is_on(token), desk.held()) == (False, 2)


def test_one_at_a_time_and_not_while_something_is_pending() -> None:
    desk = Desk()
    assert desk.feed.standstill.begin(T0) is None, "nothing was heard"
    desk.feed.joined(T0)
    assert not desk.feed.is_settled, "a replay is open"
    desk.replay(batch(0, run(1)))
    token = stood(desk)
    assert desk.feed.standstill.begin(T0) is None
    desk.feed.standstill.go_on(token + 1)
    assert desk.feed.standstill.is_on(token), "of another"
    desk.feed.standstill.go_on(token)
    assert desk.feed.standstill.begin(T0) == token + 1


def test_what_is_known_here_and_told_otherwise_is_refused() -> None:
    knows, late = two()
    late.live(batch(3, run(1)))
    knows.live(batch(3))
    other = Desk(can_replay=False)
    other.live(*(batch(seq) for seq in range(3)), batch(3, run(5), run(1, parent=5)))
    token, at = stood(late), standing(other, stood(other))
    assert not all(late.feed.standstill.adopt(token, rows, NOTHING, at) for rows in told(other))


def test_copies_are_counted_as_the_one_who_knows_more_has_them() -> None:
    knows, late = Desk(can_replay=False), Desk(can_replay=False)
    knows.live(batch(0, run(1)), batch(1, run(1)))
    late.live(batch(1, run(1)))
    token, at = stood(late), standing(knows, stood(knows))
    for rows in told(knows):
        assert late.feed.standstill.adopt(token, rows, NOTHING, at)
    assert late.feed.standstill.complete(token, at)
    late.live(batch(2, gone(1)))
    assert late.usable(1) == 1
    late.live(batch(3, gone(1)))
    assert late.usable(1) == 0


def test_what_descends_from_what_has_no_place_waits_for_nobody() -> None:
    _, late = two()
    token = stood(late)
    at = replace(standing(late, token), base=0)
    assert late.feed.standstill.adopt(token, Rows(packed=b"", tags=()), array("Q", [77]), at)
    assert late.feed.standstill.complete(token, at)
    late.live(batch(3, run(78, parent=77)))
    assert (late.feed.parked_count, late.feed.stats.unplaced) == (0, 1)


@pytest.mark.parametrize("slice_count", [1, 2, 3])
def test_what_waits_for_a_parent_is_not_counted_twice_where_it_breaks_off(slice_count: int) -> None:
    knows, late = two()
    token = stood(late)
    at = standing(late, token)
    assert late.feed.parked_count == 1
    rows = told(knows)
    assert len(rows) == 3
    for one in rows[:slice_count]:
        assert late.feed.standstill.adopt(token, one, NOTHING, at)
    late.feed.standstill.go_on(token)
    for one in (batch(3, gone(8)), batch(4, gone(3)), batch(5, run(3, parent=2))):
        for desk in (knows, late):
            desk.live(one)
    assert knows.usable(1, 2, 3, 8) == 3
    assert late.usable(1, 2, 3, 8) <= 3, "nothing is believed to be there that is gone"


def test_what_has_no_place_is_bounded() -> None:
    _, late = two()
    token = stood(late)
    at = standing(late, token)
    empty = Rows(packed=b"", tags=())
    for base in (0, MAX_UNPLACED_BLOCKS):
        many = array("Q", range(base, base + MAX_UNPLACED_BLOCKS))
        assert late.feed.standstill.adopt(token, empty, many, at)
        assert len(late.feed.standstill._unplaced) == MAX_UNPLACED_BLOCKS
    assert late.feed.standstill.complete(token, at)
    assert len(late.feed.standstill.unplaced()) == MAX_UNPLACED_BLOCKS


def test_a_worker_that_dropped_all_is_known_whole() -> None:
    _, late = two()
    late.live(batch(3, AllBlocksCleared(), run(5)))
    assert late.feed.standstill.knows_since == 0
