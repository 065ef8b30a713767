"""The feed of one worker: order, repeats, gaps, replays, clearing."""

from __future__ import annotations

from feed_desk import T0, WORKER, Desk, batch, gone, run

from trunkline.core.actions import (
    FeedTrusted,
    FeedUntrusted,
)
from trunkline.core.events import (
    AllBlocksCleared,
)
from trunkline.core.feed import DRAIN_BATCHES, FeedState
from trunkline.core.records import Instant


def test_joining_asks_for_the_whole_ring_and_believes_it_only_when_it_is_whole() -> None:
    desk = Desk()
    desk.actions += desk.feed.joined(T0)
    assert desk.asked()[0].from_seq == 0
    desk.replay(batch(40, run(1)), is_whole=False)
    assert desk.usable(1) == 0, "half a history may hold blocks that were removed later"
    desk.replay(batch(41, run(2)))
    assert desk.usable(1) == 1
    assert desk.has(FeedTrusted)


def test_a_first_batch_lost_after_an_empty_replay_is_asked_for_again() -> None:
    desk = Desk()
    desk.actions += desk.feed.joined(T0)
    desk.live(batch(1, run(2)))  # batch 0 was published after the replay was served, and lost
    desk.replay()
    assert len(desk.asked()) == 2
    desk.replay(batch(0, run(1)), batch(1, run(2)))
    assert desk.held() == 2
    assert desk.feed.state is FeedState.LIVE


def test_a_publisher_without_a_ring_is_asked_a_bounded_number_of_times() -> None:
    desk = Desk()
    desk.actions += desk.feed.joined(T0)
    desk.live(batch(500, run(1)))
    while desk.feed.replay_id is not None:
        desk.replay()
        assert len(desk.asked()) <= 5
    assert desk.feed.state is FeedState.RELEARNING
    desk.tick(1_000.0)
    assert desk.usable(1) == 1


def test_c30_a_batch_sent_three_times_counts_once() -> None:
    desk = Desk()
    first, second = batch(0, run(1)), batch(1, run(1))
    desk.live(first, first, second, first, second, second)
    assert desk.feed.stats.repeats == 4
    desk.live(batch(2, gone(1)))
    assert desk.held() == 1, "two copies, one removed"


def test_c22_lost_batches_are_asked_for_and_applied_before_what_came_after_them() -> None:
    desk = Desk()
    desk.live(*(batch(seq) for seq in range(5)))
    desk.live(batch(10, gone(1)))
    (asked,) = desk.asked()
    assert asked.from_seq == 4, "the last batch known comes first: is it the same life?"
    desk.replay(batch(4), batch(5, run(1, 2)), batch(6), batch(7), batch(8), batch(9))
    assert desk.held() == 1
    desk.live(batch(11, run(1)))
    assert desk.usable(1, 2) == 2, "block 1 was removed after all, block 2 stayed"
    assert desk.feed.state is FeedState.LIVE


def test_a_live_batch_waits_while_a_replay_is_open() -> None:  # F16
    desk = Desk()
    desk.live(batch(0, run(1)), batch(2, gone(1)))
    desk.live(batch(3, run(5)))
    assert desk.held() == 1, "neither the removal nor the new block yet"
    desk.replay(batch(0, run(1)), batch(1, run(2)), batch(2, gone(1)), batch(3, run(5)))
    assert desk.usable(1) == 0, "a removed block does not come back to life"
    assert desk.held() == 2


def test_c22_a_replay_that_begins_late_drops_all_entries_until_the_stream_is_whole() -> None:
    desk = Desk()
    desk.live(batch(0, run(1)), batch(9, run(9)))
    desk.replay(batch(6, run(6)), batch(7), batch(8), batch(9, run(9)))
    assert desk.feed.state is FeedState.RELEARNING
    assert desk.usable(1) == desk.usable(6) == 0
    assert desk.has(FeedUntrusted)
    assert desk.feed.stats.late_replays == desk.feed.stats.relearned == 1
    desk.tick(1_000.0)
    assert desk.feed.state is FeedState.LIVE
    assert (desk.usable(1), desk.usable(6), desk.usable(9)) == (0, 1, 1)


def test_a_replay_without_an_answer_ends_and_the_stream_is_followed_from_there() -> None:
    desk = Desk(replay_timeout_ms=100.0)
    desk.live(batch(0, run(1)), batch(5, run(5)), batch(6, run(6)))
    assert desk.feed.next_tick == 100.0
    desk.tick(100.0)
    assert desk.feed.stats.replay_failures == 1
    desk.live(batch(7, run(7)), now=200.0)
    desk.tick(1_100.0)
    assert (desk.usable(1), desk.usable(5), desk.usable(7)) == (0, 1, 1)


def test_answers_to_a_replay_that_is_over_are_ignored() -> None:
    desk = Desk(replay_timeout_ms=100.0)
    desk.live(batch(0, run(1)), batch(5))
    stale = desk.feed.replay_id
    assert stale is not None
    desk.tick(100.0)
    desk.actions += desk.feed.replayed(batch(0, run(1)), stale, Instant(101.0))
    desk.actions += desk.feed.replay_ended(stale, Instant(101.0))
    assert desk.held() == 0


def test_a_slow_replay_goes_on_while_it_makes_progress_but_not_for_ever() -> None:
    desk = Desk(replay_timeout_ms=100.0)
    desk.actions += desk.feed.joined(T0)
    for seq in range(6):
        desk.replay(batch(seq), now=90.0 * seq, is_whole=False)
        desk.tick(90.0 * seq + 80.0)
        assert desk.feed.state is FeedState.REPLAYING
    desk.replay(batch(6), now=590.0, is_whole=False)
    desk.tick(600.0)
    assert desk.feed.stats.replay_failures == 1


def test_a_replay_whose_end_is_lost_has_told_all_if_it_came_up_to_what_waits() -> None:
    for last, is_all_there in ((2, True), (1, True), (0, False)):
        desk = Desk(replay_timeout_ms=100.0)
        desk.actions += desk.feed.joined(T0)
        desk.live(batch(2, run(3)), batch(3, run(4)))
        desk.replay(*(batch(seq, run(seq + 1)) for seq in range(last + 1)), is_whole=False)
        desk.tick(100.0)
        assert desk.feed.stats.replay_failures == 1
        assert desk.feed.stats.relearned == (0 if is_all_there else 1)
        assert desk.usable(1) == desk.usable(4) == is_all_there
        assert desk.directory.is_trusted(WORKER) is is_all_there


def test_a_replay_whose_end_is_lost_may_lack_more_where_nothing_came_since() -> None:
    desk = Desk(replay_timeout_ms=100.0)
    desk.actions += desk.feed.joined(T0)
    desk.replay(batch(0, run(1)), batch(1, run(2)), is_whole=False)
    desk.tick(100.0)
    assert (desk.feed.stats.relearned, desk.held()) == (1, 0)


def test_a_worker_without_replay_relearns_at_a_gap_without_asking() -> None:
    desk = Desk(can_replay=False)
    desk.actions += desk.feed.joined(T0)
    desk.live(batch(7, run(1)), batch(9, run(2)))
    assert desk.asked() == []
    assert desk.held() == 1
    desk.tick(1_000.0)
    assert desk.usable(2) == 1


def test_gaps_in_a_row_lengthen_the_pause_and_ask_for_no_replay_meanwhile() -> None:
    desk = Desk(replay_timeout_ms=10.0)
    pauses: list[float] = []
    now = 0.0
    desk.live(batch(0))
    for number in range(1, 9):
        seq = 10 * number
        desk.live(batch(seq), now=now)
        desk.tick(now + 10.0)
        asked_count = len(desk.asked())
        desk.live(batch(seq + 5), now=now + 10.0)
        assert len(desk.asked()) == asked_count
        until = desk.feed.next_tick
        assert until is not None
        pauses.append(until - now - 10.0)
        now = until
        desk.tick(now)
        assert desk.feed.state is FeedState.LIVE
    assert pauses == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]


def test_the_buffer_of_live_batches_is_bounded_and_given_up_at_the_bound() -> None:
    desk = Desk(max_buffered_batches=16)
    desk.live(batch(0, run(1)))
    desk.live(*(batch(seq, run(seq)) for seq in range(2, 18)))
    assert desk.feed.buffered_count == 16
    desk.live(batch(18, run(18)))
    assert desk.feed.buffered_count == 0
    assert desk.feed.stats.overflows == 1
    assert not desk.directory.is_trusted(WORKER)
    assert desk.feed.replay_id is None
    desk.tick(1_000.0)
    assert (desk.usable(1), desk.usable(18)) == (0, 1)
    assert desk.held() == 1, "what waited was given up, not applied"


def test_a_long_backlog_is_worked_off_in_bounded_steps() -> None:
    desk = Desk()
    desk.live(batch(0), *(batch(seq) for seq in range(2, 1_002)))
    desk.replay(batch(0), batch(1))
    assert desk.feed.buffered_count == 1_000 - DRAIN_BATCHES
    while desk.feed.has_backlog:
        desk.tick(1.0)
    assert desk.feed.state is FeedState.LIVE


def test_an_undecodable_batch_is_a_gap_and_costs_all_entries_if_replayed_no_better() -> None:
    desk = Desk()
    desk.live(batch(0, run(1)))
    desk.actions += desk.feed.undecodable(1, T0, fingerprint=1)
    assert desk.asked()[0].from_seq == 0
    replay_id = desk.feed.replay_id
    assert replay_id is not None
    desk.replay(batch(0), is_whole=False)
    desk.actions += desk.feed.replay_undecodable(1, replay_id, T0, fingerprint=1)
    desk.replay(batch(2, run(2)))
    desk.tick(1_000.0)
    assert (desk.usable(1), desk.usable(2)) == (0, 1)


def test_an_undecodable_batch_that_replays_well_costs_nothing() -> None:
    desk = Desk()
    desk.live(batch(0, run(1)))
    desk.actions += desk.feed.undecodable(1, T0, fingerprint=99)
    desk.replay(batch(0), batch(1, run(2)))
    assert desk.feed.state is FeedState.LIVE
    assert desk.held() == 2
    assert desk.feed.stats.relearned == 0


def test_a_message_without_a_number_is_counted_and_no_more() -> None:
    desk = Desk()
    desk.live(batch(0, run(1)))
    desk.actions += desk.feed.undecodable(None, T0)
    assert desk.actions == []
    assert desk.feed.stats.undecodable == 1
    assert desk.usable(1) == 1


# -- clearing --------------------------------------------------------------------------------------


def test_c20_clearing_empties_the_view_however_often_it_comes() -> None:
    desk = Desk()
    desk.live(batch(0, run(1, 2), run(9, parent=8)), batch(1, *[AllBlocksCleared()] * 100))
    assert (desk.held(), desk.feed.parked_count) == (0, 0)
    desk.live(batch(2, run(1)))
    assert desk.usable(1) == 1


def test_removals_of_unknown_blocks_are_counted_and_harmless() -> None:
    desk = Desk()
    desk.live(batch(0, gone(5), gone(5)), batch(1, run(5)), batch(2, gone(5), gone(5)))
    assert desk.feed.stats.removed_unknown == 3
    assert desk.held() == 0
