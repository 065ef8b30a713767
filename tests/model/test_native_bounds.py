"""Both indexes at their bounds: wrong arguments, full tables, level memory, hostile hashes."""

from __future__ import annotations

import random
import time
from array import array
from typing import Any

import pytest
from twins import SECRETS, TWINS, chain_of, compiled, needs_compiled, tokens_of

from trunkline.native import _fallback

WRONG_CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("add_namespace", (b"short", bytes(32))),
    ("add_namespace", (bytes(32), bytes(33))),
    ("clear_slot", (1,)),
    ("drop_slot", (-1,)),
    ("held", (70_000,)),
    ("held_count", (1,)),
    ("predicted_count", (1,)),
    ("match", (bytes(33),)),
    ("knows", (b"",)),
    ("knows", (bytes(64),)),
    ("unpredict", (0, bytes(31))),
    ("predict", (0, 0, bytes(31), 1.0, 5)),
    ("predict", (0, 1, bytes(32), 1.0, 5)),
    ("predict", (0, -1, bytes(32), 1.0, 5)),
    ("predict", (0, 0, bytes(32), float("nan"), 5)),
    ("predict", (0, 0, bytes(32), 1.0, -5)),
    ("remove", (0, 4, array("Q", [1]))),
    ("remove", (0, -1, array("Q", [1]))),
    ("remove", (0, 0, array("I", [1]))),
    ("remove", (0, 0, array("q", [1]))),
    ("remove", (0, 0, array("d", [1.0]))),
    ("remove", (0, 0, b"seven77")),
    ("remove", (0, 0, [1, 2])),
    ("store", (1, 0, 0, 0, array("Q", [1]), array("I", [1, 2]), 2)),
    ("store", (0, 4, 0, 0, array("Q", [1]), array("I", [1, 2]), 2)),
    ("store", (0, 0, 1, 0, array("Q", [1]), array("I", [1, 2]), 2)),
    ("store", (0, 0, -2, 0, array("Q", [1]), array("I", [1, 2]), 2)),
    ("store", (0, 0, 0, -1, array("Q", [1]), array("I", [1, 2]), 2)),
    ("store", (0, 0, 0, 0, array("Q", [1]), array("I", [1, 2, 3]), 2)),
    ("store", (0, 0, 0, 0, array("Q", [1]), array("I"), 0)),
    ("store", (0, 0, 0, 0, array("Q"), array("I"), 65_537)),
    ("store", (0, 0, 0, 0, array("Q", [1]), array("f", [1, 2]), 2)),
    ("store", (0, 0, 0, 0, array("Q", [1]), memoryview(array("I", range(4)))[::2], 2)),
]


@pytest.mark.parametrize(("method", "arguments"), WRONG_CALLS)
@pytest.mark.parametrize("module", TWINS)
def test_wrong_arguments_are_refused_and_change_nothing(
    module: Any, method: str, arguments: tuple[Any, ...]
) -> None:
    index = module.BlockIndex(10)
    index.add_namespace(*SECRETS[0])
    index.add_slot()
    with pytest.raises(ValueError):
        getattr(index, method)(*arguments)
    assert index.block_count() == index.held_count(0) == index.predicted_count(0) == 0
    assert index.store(0, 0, 0, 0, array("Q", [1]), tokens_of((1,)), 2) == 1


@pytest.mark.parametrize("module", TWINS)
def test_chain_refuses_wrong_sizes(module: Any) -> None:
    good = (bytes(32), bytes(32), array("I", range(8)), 4)
    for place, wrong in [
        (0, bytes(31)),
        (1, bytes(64)),
        (2, array("i", [1])),
        (2, b"abc"),
        (2, "text"),
        (3, 0),
        (3, -1),
        (3, 65_537),
    ]:
        arguments = [*good[:place], wrong, *good[place + 1 :]]
        with pytest.raises(ValueError):
            module.chain_keys(*arguments)
    for block_limit in (0, -1, (1 << 31) + 1):
        with pytest.raises(ValueError):
            module.BlockIndex(block_limit)
    for seed in (-1, 1 << 64):
        with pytest.raises(ValueError, match="a seed is outside"):
            module.BlockIndex(10, seed)


@pytest.mark.parametrize("module", TWINS)
def test_all_65535_slots_can_be_taken_and_the_next_is_refused(module: Any) -> None:
    index = module.BlockIndex(10)
    index.add_namespace(*SECRETS[0])
    for slot in range(65_535):
        assert index.add_slot() == slot
    with pytest.raises(ValueError, match="all 65535 slots"):
        index.add_slot()
    for slot in (65_534, 40_000, 64, 0):  # four holders: past what an entry holds inline
        assert index.store(slot, 0, 0, 0, array("Q", [7]), tokens_of((1,)), 2) == 1
    device, _, _ = index.match(chain_of(0, (1,)))
    assert [slot for slot, depth in enumerate(device) if depth] == [0, 64, 40_000, 65_534]
    index.drop_slot(40_000)
    index.drop_slot(64)
    assert index.add_slot() == 64


@pytest.mark.parametrize("module", TWINS)
def test_copies_are_counted_to_65535_and_no_further(module: Any) -> None:
    index = module.BlockIndex(10)
    index.add_namespace(*SECRETS[0])
    index.add_slot()
    for _ in range(65_537):
        index.store(0, 1, 0, 0, array("Q", [7]), tokens_of((1,)), 2)
    assert index.remove(0, 1, array("Q", [7] * 65_534)) == 65_534
    assert index.held_count(0) == 1
    assert index.remove(0, 1, array("Q", [7, 7, 7])) == 1
    assert index.held_count(0) == index.block_count() == 0


@pytest.mark.parametrize("module", TWINS)
def test_predicting_the_same_blocks_again_and_again_does_not_grow_the_queue(module: Any) -> None:
    index = module.BlockIndex(1_000)
    index.add_namespace(*SECRETS[0])
    index.add_slot()
    packed = _fallback.chain_keys(*SECRETS[0], array("I", range(200)), 2)
    sizes: list[int] = []
    for round_number in range(400):
        index.predict(0, 0, packed, float(round_number), 1_000)
        sizes.append(queued_blocks(index, module))
    assert max(sizes) <= 2 * 100 + 1_024 + 100
    index.expire(398.0)
    assert index.predicted_count(0) == 100, "the latest prediction of each block counts"
    index.expire(399.0)
    assert index.predicted_count(0) == index.block_count() == 0


def queued_blocks(index: Any, module: Any) -> int:
    """Compiled: what the memory can hold; pure: what the queue holds."""
    if module is _fallback:
        return sum(len(keys) for _, _, keys in index._blocks.slots[0].queue)
    base = module.BlockIndex(1_000)
    base.add_slot()
    fixed_bytes = 70_000  # one chunk of entries, small tables
    return max(0, index.memory_bytes() - base.memory_bytes() - fixed_bytes) // 8


@needs_compiled
def test_c27_memory_stays_level_under_churn_with_a_constant_live_set() -> None:
    """Many distinct prefixes come and go, and only what is live takes memory."""
    index = compiled.BlockIndex(1_000_000)
    index.add_namespace(*SECRETS[0])
    for _ in range(6):
        index.add_slot()
    live: list[tuple[int, array[int]]] = []
    draw = random.Random(27)
    sizes: list[int] = []
    for step in range(12_000):
        first = step * 64
        hashes = array("Q", range(first, first + 64))
        tokens = array("I", range(first, first + 128))
        for slot in range(draw.choice([1, 1, 5])):  # one in three grows past inline holders
            assert index.store(slot, 0, 0, 0, hashes, tokens, 2) == 64
        live.append((step, hashes))
        if len(live) > 200:
            _, oldest = live.pop(draw.randrange(len(live)))
            for slot in range(6):
                index.remove(slot, 0, oldest)
        if step % 1_000 == 999:
            sizes.append(index.memory_bytes())
    assert index.block_count() == 200 * 64
    assert max(sizes) < 1.02 * sizes[1], sizes  # 10,000 further prefixes of 64 blocks each
    assert sizes[-1] < 200 * 64 * 250


UNKEYED = 0x9FB21C651E98DF25
"""The constant of the mixer `v ^= v >> 32; v *= c; v ^= v >> 29; v *= c`, which anyone can undo."""


def colliding(number: int) -> int:
    """Numbers whose upper 32 bits that mixer makes equal."""

    def unshifted(value: int, shift: int) -> int:
        found = value
        for _ in range(64 // shift + 1):
            found = value ^ found >> shift
        return found

    undo = pow(UNKEYED, -1, 1 << 64)
    value = ((7 << 32 | number) * undo) % (1 << 64)
    return unshifted((unshifted(value, 29) * undo) % (1 << 64), 32)


@needs_compiled
def test_hashes_made_to_collide_under_an_unkeyed_mixer_cost_no_more_than_others() -> None:
    count = 20_000
    hashes = array("Q", (colliding(number) for number in range(count)))
    ordinary = array("Q", random.Random(1).randbytes(8 * count))

    def cpu_s(names: array[int]) -> float:
        index = compiled.BlockIndex(1_000_000, 12_345)
        index.add_namespace(*SECRETS[0])
        index.add_slot()
        started = time.thread_time()
        assert index.store(0, 0, 0, 0, names, array("I", bytes(4 * count)), 1) == count
        assert index.remove(0, 0, names) == count
        return time.thread_time() - started

    plain = min(cpu_s(ordinary) for _ in range(3))
    assert min(cpu_s(hashes) for _ in range(3)) < 20 * plain, "50 times where it was not keyed"
