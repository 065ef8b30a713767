"""The feed of one worker: order, gaps, repeats, restarts, orphans, strikes; and each bound,
reached.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import replace

import pytest

from trunkline.core.actions import (
    Action,
    FeedBlind,
    FeedTrusted,
    FeedUntrusted,
    RequestReplay,
    WorkerRestarted,
)
from trunkline.core.directory import Directory
from trunkline.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BlocksUnnamed,
    CacheEvent,
    EventBatch,
)
from trunkline.core.feed import DRAIN_BATCHES, FeedLimits, FeedState, WorkerFeed
from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import as_tokens, chain
from trunkline.core.orphans import MAX_UNPLACED_BLOCKS
from trunkline.core.records import EngineHash, Instant, Tier, WorkerId

WORKER = WorkerId("w")
T0 = Instant(0.0)
MODEL = ModelIdentity(model_id="m", block_tokens=2)


def namespace(tenant: str) -> Namespace:
    scope = Scope(kind=ScopeKind.TENANT, org="o", tenant=tenant)
    return derive_namespace(bytes(32), scope, MODEL)


NAMESPACE = namespace("t")
STRANGER = namespace("stranger")


def run(
    *names: int,
    parent: int | None = None,
    salt: str | None = NAMESPACE.salt,
    size: int = 2,
    tier: Tier = Tier.DEVICE,
) -> BlocksStored:
    """A run whose block `n` has the tokens (n, n): its key follows from the names before it."""
    return BlocksStored(
        hashes=array("Q", names),
        parent=None if parent is None else EngineHash(parent),
        tokens=as_tokens(n for n in names for _ in range(size)),
        block_tokens=size,
        tier=tier,
        salt=salt if parent is None else None,
    )


def gone(*names: int, tier: Tier = Tier.DEVICE) -> BlocksRemoved:
    return BlocksRemoved(hashes=array("Q", names), tier=tier)


def batch(seq: int, *events: CacheEvent, life: int = 0, bad_count: int = 0) -> EventBatch:
    return EventBatch(seq=seq, events=events, fingerprint=1_000 * life + seq, bad_count=bad_count)


class Desk:
    """A feed with its directory and the actions so far."""

    def __init__(self, *, can_replay: bool = True, **limits: float) -> None:
        self.directory = Directory(max_blocks=1_000_000)
        self.directory.admit_namespace(NAMESPACE)
        self.directory.join(WORKER, block_tokens=2)
        self.feed = WorkerFeed(
            WORKER,
            self.directory,
            can_replay=can_replay,
            limits=FeedLimits(**limits),  # type: ignore[arg-type] # tests name whole numbers
        )
        self.actions: list[Action] = []

    def live(self, *batches: EventBatch, now: float = 0.0) -> None:
        for one in batches:
            self.actions += self.feed.live(one, Instant(now))

    def replay(self, *batches: EventBatch, now: float = 0.0, is_whole: bool = True) -> None:
        replay_id = self.feed.replay_id
        assert replay_id is not None, "no replay is open"
        for one in batches:
            self.actions += self.feed.replayed(one, replay_id, Instant(now))
        if is_whole:
            self.actions += self.feed.replay_ended(replay_id, Instant(now))

    def tick(self, now: float) -> None:
        self.actions += self.feed.tick(Instant(now))

    def usable(self, *names: int) -> int:
        """Leading blocks that the worker is believed to hold of a prompt."""
        prompt = chain(NAMESPACE, as_tokens(n for n in names for _ in range(2)))
        return self.directory.match(prompt).resident[self.directory.slot(WORKER)]

    def held(self) -> int:
        return self.directory.held_count(WORKER)

    def asked(self) -> list[RequestReplay]:
        return [action for action in self.actions if isinstance(action, RequestReplay)]

    def has(self, kind: type[Action]) -> bool:
        return any(isinstance(action, kind) for action in self.actions)


# -- order, repeats, gaps --------------------------------------------------------------------------


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


# -- restarts and leaving --------------------------------------------------------------------------


def test_a_number_that_does_not_grow_means_another_life() -> None:
    desk = Desk()
    desk.live(batch(0, run(1)), batch(1, run(2)))
    before = desk.directory.incarnation(WORKER)
    desk.live(batch(0, run(3), life=1))
    (restarted,) = [a for a in desk.actions if isinstance(a, WorkerRestarted)]
    assert restarted.incarnation > before
    assert desk.held() == 1
    assert desk.usable(3) == 1
    assert desk.feed.state is FeedState.LIVE


def test_a_restart_seen_late_learns_the_beginning_of_the_new_life() -> None:
    desk = Desk()
    desk.live(*(batch(seq, run(seq + 1)) for seq in range(10)))
    desk.live(batch(4, run(44), life=1))
    assert desk.asked()[-1].from_seq == 0
    desk.replay(batch(3, run(33), life=1), batch(4, run(44), life=1))
    assert desk.held() == 2


def test_a_restart_hidden_in_a_gap_shows_in_the_replay() -> None:
    desk = Desk()
    desk.live(*(batch(seq, run(seq + 1)) for seq in range(5)))
    desk.live(batch(9, run(99), life=1))  # numbers 0 to 8 of the new life were lost
    desk.replay(batch(4, life=1), is_whole=False)
    assert desk.has(WorkerRestarted)
    assert desk.held() == 0
    desk.replay(*(batch(seq, run(90 + seq), life=1) for seq in range(10)))
    assert desk.held() == 10


def test_a_new_connection_is_checked_for_losses_and_for_another_life() -> None:
    desk = Desk()
    desk.live(batch(0, run(1)), batch(1, run(2)))
    desk.actions += desk.feed.reconnected(T0)
    assert desk.asked()[-1].from_seq == 1
    assert desk.usable(1) == 1, "still believed meanwhile"
    desk.replay(batch(1), batch(2, run(3)))
    assert desk.held() == 3
    desk.actions += desk.feed.reconnected(T0)
    desk.replay()  # the new life has published nothing yet
    assert desk.has(WorkerRestarted)
    assert desk.held() == 0


def test_c19_events_that_wait_when_a_worker_leaves_bring_nothing_back() -> None:
    desk = Desk()
    desk.live(batch(0, run(1)), batch(2))
    desk.directory.leave(WORKER)
    for seq in range(3, 1_003):
        assert desk.feed.live(batch(seq, run(seq)), T0) == []
    assert desk.directory.block_count() == 0
    assert desk.feed.stats.after_leave == 1_000
    assert desk.feed.state is FeedState.ENDED
    desk.directory.join(WORKER, block_tokens=2)  # the same name and slot, another generation
    replay_id = desk.feed.replay_id
    assert replay_id is not None
    assert desk.feed.replayed(batch(1, run(5)), replay_id, T0) == []
    assert desk.feed.tick(Instant(1e9)) == []
    assert desk.directory.block_count() == 0
    assert desk.directory.is_trusted(WORKER)


def test_c31_a_batch_of_another_rank_is_no_part_of_the_stream() -> None:
    desk = Desk()
    desk.feed = WorkerFeed(WORKER, desk.directory, rank=1)
    desk.live(EventBatch(seq=0, events=(run(1),), rank=0))
    assert (desk.held(), desk.feed.stats.wrong_rank) == (0, 1)
    desk.live(EventBatch(seq=0, events=(run(1),), rank=1), EventBatch(seq=1, events=(run(2),)))
    assert desk.held() == 2


def test_c31_ranks_of_one_worker_are_kept_apart() -> None:
    directory = Directory(max_blocks=1_000)
    directory.admit_namespace(NAMESPACE)
    ranks = [WorkerId("w@0"), WorkerId("w@1")]
    for worker in ranks:
        directory.join(worker, block_tokens=2)
    feeds = [WorkerFeed(worker, directory, rank=rank) for rank, worker in enumerate(ranks)]
    for seq, rank in enumerate((0, 1, 0)):
        sent = EventBatch(seq=seq, events=(run(10 * seq + 1),), rank=rank, fingerprint=seq)
        for feed in feeds:  # one topic: each subscriber sees the batches of both
            feed.live(sent, T0)
    assert [feed.stats.wrong_rank for feed in feeds] == [1, 2]
    found = [directory.match(chain(NAMESPACE, as_tokens([n, n]))).resident for n in (1, 11)]
    assert found == [[1, 0], [0, 1]]


def test_without_replay_a_new_connection_forgets_all_since_it_may_be_another_life() -> None:
    desk = Desk(can_replay=False)
    desk.actions += desk.feed.joined(T0)
    desk.actions += desk.feed.reconnected(T0)
    assert desk.actions == [], "the first connection: there is nothing to forget"
    desk.live(*(batch(seq, run(seq + 1)) for seq in range(3)))
    desk.actions += desk.feed.reconnected(Instant(20.0))
    assert (desk.held(), desk.usable(1)) == (0, 0)
    assert desk.has(FeedUntrusted)
    desk.live(batch(3, run(9), life=1), now=30.0)  # the new life is just as far, unseen
    desk.tick(1_020.0)
    assert (desk.usable(1), desk.usable(9)) == (0, 1)
    assert desk.feed.state is FeedState.LIVE
    assert desk.asked() == []


def test_until_the_first_batch_events_are_taken_to_come_two_minutes_late() -> None:
    desk = Desk()
    prompt = chain(NAMESPACE, as_tokens([1, 1]))

    def is_expected(at: float) -> bool:
        desk.directory.expire(Instant(at))
        return desk.directory.predicted_count(WORKER) == 1

    desk.actions += desk.feed.joined(T0)
    desk.directory.predict(WORKER, prompt, now=T0, ttl_ms=100.0)
    assert [is_expected(120_099.0), is_expected(120_100.0)] == [True, False]
    desk.replay(now=200_000.0)
    desk.actions += desk.feed.live(batch(0), Instant(200_000.0), age_ms=30.0)
    desk.directory.clear(WORKER)
    desk.directory.predict(WORKER, prompt, now=Instant(200_000.0), ttl_ms=100.0)
    assert [is_expected(200_129.0), is_expected(200_130.0)] == [True, False]


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


# -- orphans ---------------------------------------------------------------------------------------


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


# -- breaches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "counter"),
    [
        (run(1, size=4), "wrong_block_size"),  # C54
        (run(1, parent=1), "conflicts"),
        (run(1, 2, 1), "conflicts"),
        (BlocksStored(hashes=array("Q", [1]), parent=None, tokens=as_tokens([1]), block_tokens=2,
                      tier=Tier.DEVICE, salt=NAMESPACE.salt), "bad_events"),
    ],
    ids=["block size", "own parent", "one hash, two blocks", "tokens do not fill the block"],
)  # fmt: skip
def test_c54_three_breaches_turn_reuse_off_until_the_worker_registers_again(
    event: CacheEvent, counter: str
) -> None:
    desk = Desk()
    desk.live(batch(0, run(77)), batch(1, event), batch(2, event))
    assert desk.usable(77) == 1
    desk.live(batch(3, event))
    assert getattr(desk.feed.stats, counter) == 3
    assert desk.feed.state is FeedState.BLIND
    assert desk.feed.reason
    assert desk.has(FeedBlind)
    assert desk.held() == 0
    desk.live(batch(4, run(78)))
    desk.tick(1e9)
    assert desk.usable(78) == 0
    desk.directory.join(WORKER, block_tokens=2)
    desk.feed = WorkerFeed(WORKER, desk.directory)
    desk.live(batch(0, run(78)))
    assert desk.usable(78) == 1


def test_breaches_count_for_ten_minutes() -> None:
    desk = Desk()
    minute = 60_000.0
    for seq, at in enumerate((0.0, 5.0, 10.0, 15.0, 20.0)):
        desk.live(batch(seq, run(1), bad_count=1), now=at * minute)
        assert desk.feed.state is FeedState.LIVE, at
    desk.live(batch(5, bad_count=1), now=24.9 * minute)
    assert desk.feed.state is FeedState.BLIND


def test_blocks_of_an_adapter_are_counted_and_match_no_prompt() -> None:
    desk = Desk()
    desk.live(
        batch(0, replace(run(1, 2), adapter="lora-x"), replace(run(3, parent=2), adapter="x"))
    )
    desk.live(batch(1, run(4, parent=3)))
    assert (desk.feed.stats.unnamed, desk.feed.stats.unplaced) == (3, 1)
    assert (desk.held(), desk.feed.parked_count, desk.usable(1, 2)) == (0, 0, 0)
    desk.live(batch(2, gone(1, 2)))
    assert desk.feed.state is FeedState.LIVE


def test_events_that_made_no_sense_count_as_one_breach_a_batch() -> None:
    desk = Desk()
    desk.live(batch(0, run(1), bad_count=50), batch(1, gone(1), bad_count=1))
    assert (desk.feed.stats.bad_events, desk.held()) == (51, 0)
    desk.live(batch(2, bad_count=1))
    assert desk.feed.state is FeedState.BLIND


def test_c24_a_worker_that_registers_with_another_block_size_loses_its_old_entries() -> None:
    desk = Desk()
    desk.live(batch(0, run(1)))
    desk.directory.join(WORKER, block_tokens=4)
    assert desk.directory.block_count() == 0
    wide = derive_namespace(bytes(32), NAMESPACE.scope, ModelIdentity(model_id="m", block_tokens=4))
    desk.directory.admit_namespace(wide)
    desk.feed = WorkerFeed(WORKER, desk.directory)
    desk.live(batch(0, run(1, size=4, salt=wide.salt)))
    match = desk.directory.match(chain(wide, as_tokens([1, 1, 1, 1])))
    assert match.resident == [1]


def test_a_full_directory_counts_and_goes_on() -> None:
    desk = Desk()
    desk.directory = Directory(max_blocks=2)
    desk.directory.admit_namespace(NAMESPACE)
    desk.directory.join(WORKER, block_tokens=2)
    desk.feed = WorkerFeed(WORKER, desk.directory)
    desk.live(batch(0, run(1, 2, 3)), batch(1, run(4, parent=3)), batch(2, gone(1, 2)))
    assert desk.feed.stats.full == 1
    assert desk.feed.parked_count == 0
    desk.live(batch(3, run(9)))
    assert desk.usable(9) == 1
    assert desk.feed.state is FeedState.LIVE


def test_a_slow_tier_with_larger_blocks_is_ignored_without_a_breach() -> None:
    desk = Desk()
    desk.live(*(batch(seq, run(seq, size=4, tier=Tier.HOST)) for seq in range(5)))
    assert desk.feed.stats.wrong_block_size == 5
    assert desk.feed.state is FeedState.LIVE
