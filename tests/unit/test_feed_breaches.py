"""Events that break a promise of the worker's, and those that only look so."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from feed_desk import NAMESPACE, WORKER, Desk, batch, gone, run

from trunkline.core.actions import (
    FeedBlind,
)
from trunkline.core.directory import Directory
from trunkline.core.events import (
    BlocksStored,
    CacheEvent,
)
from trunkline.core.feed import FeedState, WorkerFeed
from trunkline.core.identity import ModelIdentity, derive_namespace
from trunkline.core.keys import as_tokens, chain
from trunkline.core.records import Tier


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
