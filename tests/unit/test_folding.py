"""Small pages taken together to blocks: its bounds, and what the feed makes of the rest.

That the right blocks come out is shown by `tests/model/test_folding_machine.py`.
"""

from __future__ import annotations

from array import array

from feed_desk import NAMESPACE, T0, WORKER, batch, gone

from trunkline.core.directory import Directory
from trunkline.core.events import BlocksStored
from trunkline.core.feed import FeedState, WorkerFeed
from trunkline.core.folding import MAX_JOINTS, Folding, Unfolded
from trunkline.core.records import EngineHash, Tier


def pages(*names: int, parent: int | None = None, size: int = 1) -> BlocksStored:
    """Page `n` has the token n (its low bits), or that again and again."""
    return BlocksStored(
        hashes=array("Q", names),
        parent=None if parent is None else EngineHash(parent),
        tokens=array("I", (name & 0xFFFF for name in names for _ in range(size))),
        block_tokens=size,
        tier=Tier.DEVICE,
        salt=NAMESPACE.salt,
    )


def made(folding: Folding, run: BlocksStored) -> BlocksStored:
    block = folding.stored(run)
    assert isinstance(block, BlocksStored)
    return block


def desk(folding: Folding) -> tuple[Directory, WorkerFeed]:
    directory = Directory(max_blocks=1_000)
    directory.admit_namespace(NAMESPACE)
    directory.join(WORKER, block_tokens=2)
    return directory, WorkerFeed(WORKER, directory, folding=folding)


def test_blocks_bear_the_names_of_their_last_pages_and_the_salt_only_at_the_root() -> None:
    folding = Folding(page_tokens=1, block_tokens=2)
    first = made(folding, pages(1, 2, 3))
    assert (first.hashes, first.tokens, first.parent) == (array("Q", [2]), array("I", [1, 2]), None)
    second = made(folding, pages(4, 5, parent=3))
    assert (second.hashes, second.tokens) == (array("Q", [4]), array("I", [3, 4]))
    assert (first.salt, second.parent, second.salt) == (NAMESPACE.salt, 2, None)


def test_pages_beyond_the_bound_are_forgotten_the_longest_unused_run_first() -> None:
    folding = Folding(page_tokens=1, block_tokens=2, max_pages=5)
    folding.stored(pages(1, 2, 3))
    folding.stored(pages(11, 12))
    made(folding, pages(4, parent=3))  # uses the first run
    assert folding.page_count <= 5
    assert folding.stored(pages(5, parent=12)) is Unfolded.ORPHAN
    assert made(folding, pages(6, 7, parent=1)).tokens == array("I", [1, 6])


def test_runs_are_bounded_in_number_too() -> None:
    folding = Folding(page_tokens=1, block_tokens=2, max_runs=3)
    for name in range(1, 9):
        assert folding.stored(pages(name)) is Unfolded.PENDING
    assert folding.page_count == 3
    assert folding.stored(pages(20, parent=5)) is Unfolded.ORPHAN


def test_a_run_larger_than_the_bound_is_not_kept_and_its_blocks_are() -> None:
    folding = Folding(page_tokens=1, block_tokens=2, max_pages=4)
    assert len(made(folding, pages(*range(1, 9))).hashes) == 4
    assert folding.page_count == 0


def test_more_places_inside_a_run_are_continued_than_are_kept_at_hand() -> None:
    folding = Folding(page_tokens=1, block_tokens=2)
    long = range(1, 4 * MAX_JOINTS)
    folding.stored(pages(*long))
    for page in [*long, *long]:
        branch = folding.stored(pages(1_000 + page, parent=page))
        assert isinstance(branch, BlocksStored) is (page % 2 == 1)


def test_names_that_share_bytes_with_their_neighbours_are_told_apart() -> None:
    folding = Folding(page_tokens=1, block_tokens=2)
    packed = array("Q", [0x1111_2222_3333_4444, 0x5555_6666_7777_8888]).tobytes()
    straddling = array("Q", packed[4:12])[0]
    folding.stored(pages(*array("Q", packed)))
    assert folding.stored(pages(9, parent=straddling)) is Unfolded.ORPHAN
    folding.stored(pages(*array("Q", packed), straddling, 3))
    assert made(folding, pages(9, parent=straddling)).tokens[1] == 9


def test_an_orphan_is_counted_and_a_resync_is_asked_for() -> None:
    directory, feed = desk(Folding(page_tokens=1, block_tokens=2))
    feed.joined(T0)
    feed.replayed(batch(5, pages(7, 8, parent=6)), feed.replay_id or 0, T0)
    feed.replay_ended(feed.replay_id or 0, T0)
    assert feed.stats.parked_dropped == 1
    assert directory.held_count(WORKER) == 0


def test_removals_of_pages_that_name_no_block_are_nothing_to_count() -> None:
    directory, feed = desk(Folding(page_tokens=1, block_tokens=2))
    feed.live(batch(0, pages(1, 2, 3, 4), gone(4, 3)), T0)
    assert (feed.stats.removed_blocks, feed.stats.removed_unknown) == (1, 0)
    assert directory.held_count(WORKER) == 1


def test_c54_pages_of_another_size_than_it_told_of_make_it_blind() -> None:
    _, feed = desk(Folding(page_tokens=1, block_tokens=2))
    for seq in range(3):
        feed.live(batch(seq, pages(seq, size=3)), T0)
    assert feed.state is FeedState.BLIND
