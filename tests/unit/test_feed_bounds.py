"""What a broken worker can make a feed cost: growth of time and memory, and each bound, reached."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import pytest

from trunkline.core.events import BlocksStored, EventBatch
from trunkline.core.keys import as_tokens
from trunkline.core.orphans import (
    MAX_PARKED_BLOCKS,
    MAX_PARKED_TOKENS,
    MAX_UNPLACED_BLOCKS,
    Orphans,
)
from trunkline.core.records import EngineHash, Instant, Tier
from trunkline.core.sequence import Sequence

T0 = Instant(0.0)


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
def test_the_time_of_a_feed_s_work_grows_with_its_blocks_and_not_with_their_square(
    work: Callable[[int], None],
) -> None:
    def cpu_s(count: int) -> float:
        started = time.thread_time()
        work(count)
        return time.thread_time() - started

    small = min(cpu_s(7_500) for _ in range(3))
    # 8 times the work: 8 times the time, where the square would be 64 times.
    assert min(cpu_s(60_000) for _ in range(2)) < 24 * small


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
