"""What both indexes match: long chains, slow tiers, several hashes of one block, holes."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import SECRETS, TWINS, chain_of, needs_compiled, tokens_of

from trunkline.native import _closure, _fallback


@needs_compiled
@pytest.mark.parametrize("seed", range(6))
def test_long_chains_match_alike_however_their_blocks_came_and_went(seed: int) -> None:
    draw = random.Random(seed)
    indexes = [module.BlockIndex(100_000, seed) for module in TWINS]
    chains = [array("I", draw.randbytes(4 * 2 * 120)) for _ in range(5)]
    for index in indexes:
        index.add_namespace(*SECRETS[0])
        for _ in range(5):
            index.add_slot()
    for step in range(300):
        number, slot = draw.randrange(5), draw.randrange(5)
        tokens, base = chains[number], 1_000 * (number + 1)
        first, count = draw.randrange(120), draw.choice([1, 3, 30, 120])
        names = array("Q", range(base + first, base + min(first + count, 120)))
        packed = _fallback.chain_keys(*SECRETS[0], tokens, 2)
        for index in indexes:
            match step % 5:
                case 0 | 1:
                    part = tokens[2 * first : 2 * (first + len(names))]
                    root = 0 if first == 0 else -1
                    index.store(slot, 0, root, base + first - 1, names, part, 2)
                case 2:
                    index.predict(slot, 0, packed[: 32 * (first + 1)], float(step), 10_000)
                case 3:
                    index.remove(slot, 0, names)
                case _:
                    index.expire(step - 40.0)
        for asked in chains:
            keys = _fallback.chain_keys(*SECRETS[0], asked, 2)
            pure, fast = (index.match(keys) for index in indexes)
            assert pure == fast


@pytest.mark.parametrize("module", TWINS)
@pytest.mark.parametrize(
    ("tier", "expected"), [(0, 2), (1, 2), (2, 0), (3, 0)], ids=["device", "host", "disk", "shared"]
)
def test_blocks_in_slow_tiers_are_resident_and_not_expected(
    module: Any, tier: int, expected: int
) -> None:
    index = module.BlockIndex(10)
    index.add_namespace(*SECRETS[0])
    index.add_slot()
    index.store(0, tier, 0, 0, array("Q", [7, 8]), tokens_of((1, 2)), 2)
    packed = chain_of(0, (1, 2))
    assert index.match(packed) == ([2 if tier == 0 else 0], [2], [expected])
    index.predict(0, 0, packed, 5.0, 10)
    assert index.match(packed)[2] == [2]
    index.expire(5.0)
    assert index.match(packed)[1:] == ([2], [expected])


@pytest.mark.parametrize("module", TWINS)
def test_two_hashes_of_one_block_keep_it_until_both_are_gone(module: Any) -> None:
    index = module.BlockIndex(10)
    index.add_namespace(*SECRETS[0])
    index.add_slot()
    for name, tier in ((1, 0), (2, 0), (2, 1), (3, 1)):
        index.store(0, tier, 0, 0, array("Q", [name]), tokens_of((1,)), 2)
    packed = chain_of(0, (1,))
    index.remove(0, 0, array("Q", [1]))
    assert index.match(packed) == ([1], [1], [1]), "hash 2 is on the device still"
    index.remove(0, 0, array("Q", [2]))
    assert index.match(packed) == ([0], [1], [1])
    index.remove(0, 1, array("Q", [3]))
    assert index.match(packed) == ([0], [1], [1])
    index.remove(0, 1, array("Q", [2]))
    assert index.match(packed) == ([0], [0], [0])
    assert index.block_count() == 0


@given(
    masks=st.lists(st.integers(0, 255), max_size=40),
    everyone=st.integers(0, 255),
)
def test_bisection_equals_the_walk_where_masks_only_shrink(masks: list[int], everyone: int) -> None:
    shrinking: list[int] = []
    alive = everyone
    for mask in masks:
        alive &= mask | 0b1010
        shrinking.append(alive)
    probed: list[int] = []

    def probe(depth: int) -> int:
        probed.append(depth)
        return shrinking[depth]

    found = _closure.closed_depths(len(shrinking), everyone, probe)
    assert found == _closure.walked_depths(len(shrinking), everyone, lambda depth: shrinking[depth])
    assert len(probed) == len(set(probed))


def test_pure_match_bisects_also_after_holes_were_made_and_mended() -> None:
    index = _fallback.BlockIndex(1_000)
    index.add_namespace(*SECRETS[0])
    slot = index.add_slot()
    tokens, names = array("I", range(400)), array("Q", range(200))
    index.store(slot, 0, 0, 0, names, tokens, 2)
    index.remove(slot, 0, array("Q", [50]))
    assert [orphans.slots_mask for orphans in index._blocks.orphans] == [1, 1, 1]
    packed = _fallback.chain_keys(*SECRETS[0], tokens, 2)
    assert index.match(packed) == ([50], [50], [50])
    index.store(slot, 0, -1, 49, array("Q", [50]), array("I", [100, 101]), 2)
    assert [orphans.slots_mask for orphans in index._blocks.orphans] == [0, 0, 0]
    assert index.match(packed) == ([200], [200], [200])


@pytest.mark.parametrize("module", TWINS)
def test_a_block_is_expected_as_long_as_the_latest_prediction_says(module: Any) -> None:
    index = module.BlockIndex(1_000)
    index.add_namespace(*SECRETS[0])
    index.add_slot()
    index.add_slot()
    first, second = chain_of(0, (0, 1)), chain_of(0, (2, 1))
    index.predict(0, 0, first, 5.0, 100)
    index.predict(0, 0, first, 7.0, 100)
    index.expire(5.0)
    assert index.match(first)[2] == [2, 0]
    index.unpredict(0, first)
    assert index.block_count() == 0
    index.predict(0, 0, second, 9.0, 100)  # may lie where the first lay
    index.predict(1, 0, second, 8.0, 100)
    index.expire(7.0)
    assert index.match(second)[2] == [2, 2]
    index.expire(8.0)
    assert index.match(second)[2] == [2, 0]
    assert (index.predicted_count(0), index.predicted_count(1)) == (2, 0)
    index.expire(9.0)
    assert index.block_count() == index.predicted_count(0) == 0


@pytest.mark.parametrize("module", TWINS)
def test_what_a_worker_stores_or_forgets_settles_what_was_expected_there(module: Any) -> None:
    index = module.BlockIndex(1_000)
    index.add_namespace(*SECRETS[0])
    index.add_slot()
    index.add_slot()
    packed, names, tokens = chain_of(0, (0, 1)), array("Q", [7, 8]), tokens_of((0, 1))
    index.predict(0, 0, packed, 5.0, 100)
    assert index.store(1, 0, 0, 0, names, tokens, 2) == 2
    assert index.match(packed) == ([0, 2], [0, 2], [2, 2])
    assert index.store(0, 0, 0, 0, names, tokens, 2) == 2
    index.expire(5.0)
    assert index.predicted_count(0) == 0
    assert index.match(packed)[2] == [2, 2], "held, by then"
    index.predict(0, 0, packed, 9.0, 100)
    assert index.remove(0, 0, names) == index.remove(1, 0, names) == 2
    assert index.block_count() == index.predicted_count(0) == 0
    index.predict(1, 0, packed, 9.0, 100)
    index.clear_slot(1)
    assert index.block_count() == index.predicted_count(1) == 0
