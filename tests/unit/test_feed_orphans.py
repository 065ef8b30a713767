"""Blocks whose parent is not known (yet): parked, joined, dropped, and bounded in number."""

from __future__ import annotations

import itertools
from array import array

from feed_desk import STRANGER, T0, Desk, batch, gone, run

from trunkline.core.events import (
    BlocksUnnamed,
)
from trunkline.core.orphans import MAX_UNPLACED_BLOCKS


def test_c21_an_orphan_counts_for_nothing_until_its_parent_comes() -> None:
    desk = Desk()
    desk.live(batch(0, run(3, 4, parent=2)))
    assert desk.directory.block_count() == 0
    desk.live(batch(1, run(5, parent=4)))
    desk.live(batch(2, run(1, 2)))
    assert desk.usable(1, 2, 3, 4, 5) == 5
    assert desk.feed.stats.parked_joined == 2


def test_a_removal_reaches_a_parked_block_and_what_is_behind_it_waits_on() -> None:
    desk = Desk()
    desk.live(batch(0, run(2, 3, 4, parent=1)), batch(1, gone(3)), batch(2, run(1)))
    assert desk.usable(1, 2, 3, 4) == 2, "the removed block does not come back to life"
    desk.live(batch(3, run(3, parent=2)))
    assert desk.usable(1, 2, 3, 4) == 4, "the block behind it never went away"


def test_c21_an_orphan_whose_time_is_up_is_dropped_and_one_resync_is_asked_for() -> None:
    desk = Desk(parked_ttl_ms=5_000.0)
    desk.live(batch(7, run(1)), batch(8, run(3, parent=2)))
    desk.tick(5_000.0)
    assert (desk.feed.parked_count, desk.feed.stats.parked_dropped) == (0, 1)
    assert [asked.from_seq for asked in desk.asked()] == [0]
    desk.replay(batch(5, run(2)), batch(6), batch(7, run(1)), batch(8, run(3, parent=2)))
    assert desk.usable(2, 3) == 2
    assert desk.usable(1) == 1


def test_a_resync_that_cannot_help_keeps_what_is_known_and_is_not_repeated() -> None:
    desk = Desk(parked_ttl_ms=5_000.0)
    desk.live(batch(7, run(1)), batch(8, run(3, parent=2)))
    desk.tick(5_000.0)
    desk.replay(batch(8, run(3, parent=2)))  # the ring begins later than we did
    assert desk.usable(1) == 1
    for number in range(20):
        desk.live(batch(9 + number, run(100 + number, parent=50 + number)), now=6e3 + 1e5 * number)
        desk.tick(6e3 + 1e5 * number + 5_000.0)
    assert len(desk.asked()) == 1


def test_resyncs_for_lost_orphans_are_at_least_a_minute_apart() -> None:
    desk = Desk(parked_ttl_ms=1.0, replay_timeout_ms=10.0)
    seq, now, times = 7, 0.0, list[float]()
    while now < 400_000.0:
        asked_count = len(desk.asked())
        desk.live(batch(seq, run(1_000 + seq, parent=500_000 + seq)), now=now)
        desk.tick(now + 1.0)
        if len(desk.asked()) > asked_count:
            times.append(now)
            desk.tick(now + 11.0)  # never answered
        seq, now = seq + 1, now + 1_000.0
    assert len(times) > 1
    assert all(later - earlier >= 60_000.0 for earlier, later in itertools.pairwise(times))


def test_without_replay_a_lost_orphan_asks_for_nothing_and_wakes_nobody() -> None:
    desk = Desk(can_replay=False)
    desk.live(batch(7, run(3, parent=2), run(1, salt=STRANGER.salt)))
    desk.tick(5_000.0)
    assert desk.feed.stats.parked_dropped == 1
    assert desk.asked() == []
    assert desk.feed.next_tick is None


def test_parked_runs_are_bounded_in_number() -> None:
    desk = Desk(max_parked_runs=4)
    desk.live(batch(0, *(run(10 * n, parent=10 * n - 1) for n in range(1, 8))))
    assert desk.feed.parked_count == 4
    assert desk.feed.stats.parked_dropped == 3


def test_children_of_blocks_that_have_no_place_are_dropped_at_once() -> None:
    desk = Desk()
    desk.live(batch(0, run(1, 2, salt=STRANGER.salt), BlocksUnnamed(hashes=array("Q", [7]))))
    desk.live(batch(1, run(3, parent=2), run(4, parent=3), run(8, parent=7)))
    assert desk.feed.parked_count == 0
    assert (desk.feed.stats.unknown_salt, desk.feed.stats.unplaced) == (1, 3)
    assert desk.directory.block_count() == 0


def test_the_memory_of_unplaced_blocks_is_bounded() -> None:
    desk = Desk()
    count = MAX_UNPLACED_BLOCKS + 100
    for seq in range(0, count, 100):
        desk.live(batch(seq // 100, BlocksUnnamed(hashes=array("Q", range(seq, seq + 100)))))
    assert desk.feed._residency.unplaced_count == MAX_UNPLACED_BLOCKS


def test_a_namespace_admitted_later_is_learnt_by_a_resync() -> None:
    desk = Desk()
    desk.actions += desk.feed.joined(T0)
    ring = [batch(3, run(1, salt=STRANGER.salt)), batch(4, run(2))]
    desk.replay(*ring)
    desk.tick(500.0)
    assert len(desk.asked()) == 1
    desk.directory.admit_namespace(STRANGER)
    due = desk.feed.next_tick
    assert due is not None
    desk.tick(due)
    assert len(desk.asked()) == 2
    desk.replay(*ring, now=due)
    assert desk.held() == 2
    assert desk.feed.next_tick is None
