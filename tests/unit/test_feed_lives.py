"""The feed of a worker that restarts, reconnects or leaves, and of its ranks."""

from __future__ import annotations

from feed_desk import NAMESPACE, T0, WORKER, Desk, batch, run

from trunkline.core.actions import (
    FeedUntrusted,
    WorkerRestarted,
)
from trunkline.core.directory import Directory
from trunkline.core.events import (
    EventBatch,
)
from trunkline.core.feed import FeedState, WorkerFeed
from trunkline.core.keys import as_tokens, chain
from trunkline.core.records import Instant, WorkerId


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
