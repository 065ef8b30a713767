"""Namespaces in the directory: their limit, their end, and that no changed part of one hits."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from feed_desk import MODEL, NAMESPACE, STRANGER, WORKER, Desk, batch, gone, run
from test_identity import MODEL as FULL_MODEL
from test_identity import ROOT_KEY, SCOPE, mutations

from trunkline.core import directory as directory_module
from trunkline.core.directory import MAX_NAMESPACES, SWEEP_BLOCKS, Directory, StoreOutcome
from trunkline.core.events import BlocksStored
from trunkline.core.identity import Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import KeyChain, as_tokens, chain
from trunkline.core.records import BlockKey, Instant, NamespaceTag, Tier, WorkerId

T0 = Instant(0.0)
TOKENS = as_tokens(range(512))


def blocks(of: Namespace, tokens: array[int] = TOKENS, first_hash: int = 1) -> BlocksStored:
    size = of.model.block_tokens
    count = len(tokens) // size
    return BlocksStored(
        hashes=array("Q", range(first_hash, first_hash + count)),
        parent=None,
        tokens=tokens,
        block_tokens=size,
        tier=Tier.DEVICE,
        salt=of.salt,
    )


# -- S7 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "changed"), mutations(), ids=lambda value: str(value)[:20])
def test_each_single_part_of_a_namespace_refuses_the_hit(part: str, changed: Namespace) -> None:
    """24 of 24, whatever told the directory of the blocks: events, decisions, heartbeats."""
    base = derive_namespace(ROOT_KEY, SCOPE, FULL_MODEL)
    directory = Directory(max_blocks=1_000)
    worker = WorkerId("w")
    for namespace in (base, changed):
        directory.admit_namespace(namespace)
    directory.join(worker, block_tokens=base.model.block_tokens)
    ours, theirs = chain(base, TOKENS), chain(changed, TOKENS)
    assert directory.stored(worker, blocks(base)) is StoreOutcome.STORED
    directory.predict(worker, ours, now=T0, ttl_ms=1_000.0)
    reported = [key for _, key in ours.checkpoints()]
    directory.report(worker, reported, is_complete=True, taken_at=T0)
    own, foreign = directory.match(ours), directory.match(theirs)
    assert own.device == own.resident == own.expected == [len(ours)]
    assert foreign.device == foreign.resident == foreign.expected == [0], part


# -- the limit ----------------------------------------------------------------------------------


class Numbered:
    """Namespaces without their derivation, which costs 10 us each."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> Namespace:
        self._count += 1
        name = self._count.to_bytes(16, "big")
        return replace(NAMESPACE, tag=NamespaceTag(name), salt=name.hex(), key=name * 2)


def test_65536_namespaces_live_at_a_time_and_any_number_one_after_another() -> None:
    directory, made = Directory(max_blocks=1_000), Numbered()
    worker = WorkerId("w")
    directory.join(worker, block_tokens=2)
    live = [made.next() for _ in range(MAX_NAMESPACES)]
    for namespace in live:
        directory.admit_namespace(namespace)
    one_more = made.next()
    with pytest.raises(ValueError, match="65536 namespaces"):
        directory.admit_namespace(one_more)
    directory.predict(worker, chain(one_more, as_tokens([1, 1])), now=T0, ttl_ms=1e3)
    assert directory.predicted_count(worker) == 0, "no room: a hint less, and no error"
    memory = directory.memory_bytes()
    for namespace in live[:10_000]:
        assert directory.retire_namespace(namespace.tag)
        directory.admit_namespace(made.next())
    assert directory.namespace_count() == MAX_NAMESPACES
    assert directory.memory_bytes() <= memory + 1_000


def test_ten_sessions_at_a_time_of_many_take_the_memory_of_ten() -> None:
    directory, made = Directory(max_blocks=10_000), Numbered()
    worker = WorkerId("w")
    directory.join(worker, block_tokens=2)
    live: list[tuple[Namespace, int]] = []
    sizes: list[int] = []
    for number in range(3_000):
        namespace = made.next()
        directory.admit_namespace(namespace)
        first = 1 + 50 * number
        run_of_50 = blocks(namespace, as_tokens(range(100)), first)
        assert directory.stored(worker, run_of_50) is StoreOutcome.STORED
        live.append((namespace, first))
        if len(live) > 10:
            oldest, first = live.pop(0)
            directory.retire_namespace(oldest.tag)
            hashes = array("Q", range(first, first + 50))
            assert directory.removed(worker, replace(gone(), hashes=hashes)) == 50
            assert directory.block_count() == 500
        if number % 500 == 499:
            sizes.append(directory.memory_bytes())
    assert max(sizes) == sizes[0]


# -- the end of a namespace ---------------------------------------------------------------------


def usable(directory: Directory, of: Namespace) -> list[int]:
    match = directory.match(chain(of, TOKENS))
    assert match.device == match.resident
    return match.expected


def test_a_retired_namespace_misses_before_its_blocks_are_swept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory_module, "SWEEP_BLOCKS", 0)
    directory = Directory(max_blocks=1_000)
    directory.join(WORKER, block_tokens=2)
    for namespace in (NAMESPACE, STRANGER):
        directory.admit_namespace(namespace)
    directory.stored(WORKER, blocks(NAMESPACE))
    directory.stored(WORKER, blocks(STRANGER, first_hash=1_001))
    directory.predict(WORKER, chain(NAMESPACE, TOKENS), now=T0, ttl_ms=1e9)
    assert directory.retire_namespace(NAMESPACE.tag)
    assert not directory.retire_namespace(NAMESPACE.tag), "it is unknown already"
    assert not directory.sweep(), "nothing was dropped yet"
    assert usable(directory, NAMESPACE) == [0]
    assert usable(directory, STRANGER) == [256]
    assert directory.predicted_count(WORKER) == 256
    monkeypatch.undo()
    assert directory.sweep()
    assert directory.predicted_count(WORKER) == 0
    assert directory.held_keys(WORKER) == b"".join(sorted(keys_of(chain(STRANGER, TOKENS))))
    assert not directory.knows_salt(NAMESPACE.salt)
    assert not directory.knows_namespace(NAMESPACE.tag)


def keys_of(made: KeyChain) -> list[BlockKey]:
    return [made[index] for index in range(len(made))]


def test_a_large_namespace_is_dropped_in_slices_and_expire_goes_on_with_it() -> None:
    count = 3 * SWEEP_BLOCKS
    directory = Directory(max_blocks=100_000)
    directory.admit_namespace(NAMESPACE)
    directory.join(WORKER, block_tokens=2)
    whole = chain(NAMESPACE, as_tokens(range(2 * count)))
    directory.predict(WORKER, whole, now=T0, ttl_ms=1e9)
    directory.retire_namespace(NAMESPACE.tag)
    left = [directory.predicted_count(WORKER)]
    while left[-1]:
        directory.expire(T0)
        left.append(directory.predicted_count(WORKER))
    assert left == [2 * SWEEP_BLOCKS, SWEEP_BLOCKS, 0]
    assert directory.block_count() == 0


def test_what_heartbeats_report_of_a_retired_namespace_counts_no_more() -> None:
    directory = Directory(max_blocks=1_000)
    directory.admit_namespace(NAMESPACE)
    directory.join(WORKER, block_tokens=2)
    whole = chain(NAMESPACE, TOKENS)
    reported = [key for _, key in whole.checkpoints()]
    directory.report(WORKER, reported, is_complete=True, taken_at=T0)
    assert directory.match(whole).expected == [128]
    directory.retire_namespace(NAMESPACE.tag)
    assert directory.match(whole).expected == [0]


def test_a_namespace_that_comes_back_starts_from_nothing() -> None:
    directory = Directory(max_blocks=1_000)
    directory.join(WORKER, block_tokens=2)
    directory.admit_namespace(NAMESPACE)
    directory.stored(WORKER, blocks(NAMESPACE))
    directory.retire_namespace(NAMESPACE.tag)
    directory.admit_namespace(NAMESPACE)
    assert usable(directory, NAMESPACE) == [0]
    assert directory.stored(WORKER, blocks(NAMESPACE)) is StoreOutcome.STORED
    assert usable(directory, NAMESPACE) == [256]
    assert directory.block_count() == directory.held_count(WORKER) == 256


# -- late events --------------------------------------------------------------------------------


def test_late_events_of_a_retired_namespace_are_of_an_unknown_salt() -> None:
    """Their descendants are dropped at once: parked, each would ask for a replay in the end."""
    desk = Desk()
    desk.live(batch(0, run(1, 2)))
    desk.directory.retire_namespace(NAMESPACE.tag)
    desk.live(batch(1, run(3, parent=2), run(4, parent=3)), batch(2, run(11), run(12, parent=11)))
    assert desk.feed.parked_count == 0
    assert (desk.feed.stats.unknown_salt, desk.feed.stats.unplaced) == (2, 2)
    assert desk.usable(1, 2, 3, 4) == desk.usable(11, 12) == 0
    asked = len(desk.asked())
    desk.tick(600_000.0)
    assert len(desk.asked()) == asked, "nothing is missing that a replay could bring"
    desk.live(batch(3, gone(4, 3, 2, 1)))
    assert desk.feed.stats.removed_unknown == 2, "the directory kept the names of 1 and 2"
    assert desk.directory.block_count() == desk.held() == 0


def test_a_run_with_a_parent_and_a_salt_is_placed_under_its_own_namespace() -> None:
    desk = Desk()
    desk.directory.admit_namespace(STRANGER)
    desk.live(batch(0, run(1), replace(run(2, parent=1), salt=STRANGER.salt)))
    assert desk.usable(1, 2) == 1, "block 2 is not of the namespace of block 1"
    assert desk.held() == 2
    unknown = derive_namespace(
        bytes(32), Scope(kind=ScopeKind.TENANT, org="o", tenant="nobody"), MODEL
    )
    desk.live(batch(1, replace(run(3, parent=1), salt=unknown.salt), run(4, parent=3)))
    assert (desk.feed.stats.unknown_salt, desk.feed.stats.unplaced) == (1, 1)


def test_a_zone_whose_parent_comes_late_is_placed_when_it_does() -> None:
    desk = Desk()
    desk.directory.admit_namespace(STRANGER)
    desk.live(batch(0, replace(run(2, 3, parent=1), salt=STRANGER.salt)))
    assert desk.feed.parked_count == 1
    desk.live(batch(1, run(1)))
    assert (desk.feed.parked_count, desk.held()) == (0, 3)
    assert desk.usable(1, 2) == 1
