"""What a broken worker can make a feed cost: growth of time and memory, and each bound, reached."""

from __future__ import annotations

import itertools
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from trunkline.core.directory import Directory
from trunkline.core.events import BlocksRemoved, BlocksStored, EventBatch
from trunkline.core.feed import DRAIN_BYTES, MAX_BUFFERED_BYTES, WorkerFeed
from trunkline.core.keys import as_tokens
from trunkline.core.orphans import (
    MAX_PARKED_BLOCKS,
    MAX_PARKED_TOKENS,
    MAX_UNPLACED_BLOCKS,
    Orphans,
)
from trunkline.core.records import EngineHash, Instant, Tier, WorkerId
from trunkline.core.sequence import RECENT_BATCHES, Sequence

T0 = Instant(0.0)
WORKER = WorkerId("w")


def orphans(max_parked_runs: int = 1_024) -> Orphans:
    return Orphans(max_parked_runs=max_parked_runs, parked_ttl_ms=5_000.0)


def run(count: int, *, first: int = 1, parent: int = 0, size: int = 1) -> BlocksStored:
    return BlocksStored(
        hashes=array("Q", range(first, first + count)),
        parent=EngineHash(parent),
        tokens=array("I", bytes(4 * count * size)),
        block_tokens=size,
        tier=Tier.DEVICE,
        salt=None,
    )


def remove_parked(count: int) -> None:
    parked = orphans()
    assert parked.park(run(count), T0)
    for engine_hash in range(count, 0, -1):
        assert parked.remove(engine_hash, Tier.DEVICE)
    assert len(parked) == parked.token_count == 0


def make_holes(count: int) -> None:
    parked = orphans(max_parked_runs=1 << 20)
    assert parked.park(run(count), T0)
    for engine_hash in range(1, count + 1, 2):
        assert parked.remove(engine_hash, Tier.DEVICE)
    assert len(parked) == count // 2


def wait_for_one_parent(count: int) -> None:
    parked = orphans(max_parked_runs=1 << 20)
    for number in range(1, count + 1):
        assert parked.park(run(1, first=number), T0)
    for number in range(1, count + 1):
        assert parked.remove(number, Tier.DEVICE)


def forget_unplaced(count: int) -> None:
    unplaced = orphans()
    unplaced.add_unplaced(array("Q", range(MAX_UNPLACED_BLOCKS)))
    unplaced.add_unplaced(array("Q", range(1 << 40, (1 << 40) + count)))
    assert unplaced.unplaced_count == MAX_UNPLACED_BLOCKS


def keep_newest(count: int) -> None:
    sequence = Sequence()
    for seq in range(count):
        sequence.hold(seq, seq, EventBatch(seq=seq, events=()))
    sequence.keep_newest()
    assert sequence.buffered_count == 1


def number_batches(count: int) -> None:
    sequence = Sequence()
    for seq in range(count):
        sequence.advance(seq, seq)
    assert sequence.expected == count
    assert sequence.is_repeat(count - RECENT_BATCHES, count - RECENT_BATCHES)
    assert not sequence.is_repeat(count - RECENT_BATCHES - 1, count - RECENT_BATCHES - 1)


@pytest.mark.parametrize(
    "work",
    [
        remove_parked,
        make_holes,
        wait_for_one_parent,
        forget_unplaced,
        keep_newest,
        number_batches,
    ],
)
def test_sixty_thousand_blocks_are_worked_off_before_the_test_limit(
    work: Callable[[int], None],
) -> None:
    """The square of it would take minutes; `benchmarks/feed.py` shows the growth."""
    work(60_000)


def test_parked_runs_are_bounded_in_blocks_and_in_tokens() -> None:
    parked = orphans()
    assert parked.park(run(MAX_PARKED_BLOCKS - 1), T0)
    assert not parked.park(run(2, first=1 << 40), T0)
    assert parked.park(run(1, first=1 << 40), T0)
    parked = orphans()
    assert parked.park(run(4, size=MAX_PARKED_TOKENS // 4), T0)
    for engine_hash in (2, 3, 4):
        assert parked.remove(engine_hash, Tier.DEVICE)
    assert not parked.park(run(1, first=9), T0), "its tokens are kept until all of it is gone"
    assert parked.remove(1, Tier.DEVICE)
    assert parked.park(run(1, first=9), T0)


def test_a_part_behind_a_hole_is_given_up_at_the_bound() -> None:
    parked = orphans(max_parked_runs=1)
    assert parked.park(run(5), T0)
    assert parked.remove(3, Tier.DEVICE)
    assert len(parked) == 1
    assert [parked.is_unplaced(engine_hash) for engine_hash in (2, 4, 5)] == [False, True, True]
    (left,) = parked.take_children([0])
    assert left.hashes == array("Q", [1, 2])
    assert parked.expire(Instant(1e9)) == 0


def test_each_part_of_a_run_with_holes_is_taken_by_the_block_it_waits_for() -> None:
    parked = orphans()
    whole = run(5, size=2)
    assert parked.park(whole, T0)
    assert parked.take_children([7]) == []
    assert parked.remove(2, Tier.DEVICE)
    assert not parked.remove(2, Tier.DEVICE)
    assert not parked.remove(3, Tier.HOST)
    (behind,) = parked.take_children([2])
    assert (behind.parent, behind.hashes, len(behind.tokens)) == (2, array("Q", [3, 4, 5]), 6)
    (before,) = parked.take_children([0])
    assert (before.parent, before.hashes, before.tokens) == (0, array("Q", [1]), as_tokens([0, 0]))
    assert len(parked) == parked.token_count == 0


# -- batches that wait -----------------------------------------------------------------------------


def removals(seq: int, count: int) -> EventBatch:
    gone = tuple(BlocksRemoved(hashes=array("Q", [n]), tier=Tier.DEVICE) for n in range(count))
    return EventBatch(seq=seq, events=gone, fingerprint=seq)


def stores(seq: int, count: int) -> EventBatch:
    return EventBatch(seq=seq, events=tuple(run(1, size=16) for _ in range(count)), fingerprint=seq)


def long_runs(seq: int, count: int) -> EventBatch:
    return EventBatch(seq=seq, events=(run(count, size=16),), fingerprint=seq)


def empty(seq: int, _: int) -> EventBatch:
    return EventBatch(seq=seq, events=(), fingerprint=seq)


@pytest.mark.parametrize("make", [removals, stores, long_runs, empty])
def test_what_waits_takes_no_more_memory_than_is_counted(
    make: Callable[[int, int], EventBatch],
) -> None:
    sequence = Sequence()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for seq in range(1_000):
        one = make(seq, 100)
        sequence.hold(one.seq, one.fingerprint, one)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 1.3 * sequence.buffered_bytes
    for seq in range(1_000):
        sequence.release(seq)
    assert sequence.buffered_bytes == 0


def test_batches_of_removals_count_for_the_bound_of_the_buffer_too() -> None:
    directory = Directory(max_blocks=1_000)
    directory.join(WORKER, block_tokens=2)
    feed = WorkerFeed(WORKER, directory)
    feed.joined(T0)
    one = removals(0, 8_192)
    room = MAX_BUFFERED_BYTES // (one.size_bytes() + 400)
    assert room < 100
    for seq in range(room):
        feed.live(replace(one, seq=seq, fingerprint=seq), T0)
    assert (feed.buffered_count, feed.stats.overflows) == (room, 0)
    feed.live(replace(one, seq=room, fingerprint=room), T0)
    assert (feed.buffered_count, feed.stats.overflows) == (0, 1)
    assert not directory.is_trusted(WORKER)


def test_a_backlog_of_large_batches_is_worked_off_in_steps_of_bounded_size() -> None:
    directory = Directory(max_blocks=1_000)
    directory.join(WORKER, block_tokens=2)
    feed = WorkerFeed(WORKER, directory)
    feed.joined(T0)
    one = removals(0, 2_000)
    for seq in range(60):
        feed.live(replace(one, seq=seq, fingerprint=seq), T0)
    assert feed.replay_id is not None
    feed.replay_ended(feed.replay_id, T0)
    most = DRAIN_BYTES // one.size_bytes() + 1
    counts = [60, feed.buffered_count]
    while feed.has_backlog:
        feed.tick(T0)
        counts.append(feed.buffered_count)
    assert all(0 < before - after <= most for before, after in itertools.pairwise(counts))
    assert feed.stats.removed_unknown == 60 * 2_000
