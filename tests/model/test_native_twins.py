"""The compiled and the pure index, driven side by side with a naive one (sets of token prefixes).

Where the extension is not built, the pure index still runs beside the naive one.
"""

from __future__ import annotations

import importlib
import random
import time
from array import array
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trunkline.native import _closure, _fallback
from trunkline.native.codes import CONFLICT, FULL, UNKNOWN_PARENT

try:
    compiled: Any = importlib.import_module("trunkline.native._core")  # it has no stubs
except ImportError:
    compiled = None

needs_compiled = pytest.mark.skipif(
    compiled is None, reason="the extension is not built here: no twin to compare with"
)
TWINS: list[Any] = [_fallback] if compiled is None else [_fallback, compiled]

BLOCK_TOKENS = 2
MAX_BLOCKS = 24
PATHS = st.lists(st.integers(0, 2), min_size=0, max_size=6).map(tuple)
SLOTS = st.sampled_from([0, 1, 2, 3, 4, 63, 64, 127, 128])
TIERS = st.integers(0, 3)
SECRETS = [(bytes([n]) * 32, bytes([n + 100]) * 32) for n in range(2)]

Path = tuple[int, ...]
Block = tuple[int, Path]
"""A block as the naive index knows it: its namespace and the path of choices down to it."""


def tokens_of(path: Path) -> array[int]:
    """Each step of a path is one block; steps with equal numbers have equal tokens."""
    return array("I", [token for step in path for token in (step, 1000 + step)])


class NaiveIndex:
    """What the index means, in sets: no keys, no masks, no bound on work."""

    def __init__(self) -> None:
        self.copies: dict[int, dict[int, tuple[Block, Counter[int]]]] = {}
        self.expected: dict[int, list[tuple[float, Block]]] = {}

    def blocks(self) -> set[Block]:
        held = {block for slot in self.copies.values() for block, _ in slot.values()}
        return held | {block for slot in self.expected.values() for _, block in slot}

    def resident(self, slot: int) -> set[Block]:
        return {block for block, _ in self.copies[slot].values()}

    def on_device(self, slot: int) -> set[Block]:
        return {block for block, copies in self.copies[slot].values() if copies[0]}

    def near(self, slot: int) -> set[Block]:
        return {block for block, n in self.copies[slot].values() if n[0] or n[1]}

    def hoped(self, slot: int) -> set[Block]:
        return self.near(slot) | {block for _, block in self.expected[slot]}

    def match(self, namespace_id: int, path: Path, slot_count: int) -> tuple[list[int], ...]:
        def depth(held: set[Block]) -> int:
            steps = range(1, len(path) + 1)
            return next((n - 1 for n in steps if (namespace_id, path[:n]) not in held), len(path))

        views = (self.on_device, self.resident, self.hoped)
        return tuple(
            [depth(view(slot)) if slot in self.copies else 0 for slot in range(slot_count)]
            for view in views
        )


class TwinIndexes(RuleBasedStateMachine):
    """Every call goes to all indexes; every answer must be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.indexes = [module.BlockIndex(MAX_BLOCKS, seed) for seed, module in enumerate(TWINS)]
        self.naive = NaiveIndex()
        self.now_ms = 0.0
        self.slot_count = 0

    def both(self, method: str, *arguments: Any) -> Any:
        answers = [getattr(index, method)(*arguments) for index in self.indexes]
        assert all(answer == answers[0] for answer in answers), (method, arguments, answers)
        return answers[0]

    @initialize(slot_count=st.sampled_from([5, 65, 129]))
    def begin(self, slot_count: int) -> None:
        for key, root in SECRETS:
            self.both("add_namespace", key, root)
        for slot in range(slot_count):
            assert self.both("add_slot") == slot
            self._reset(slot)
        self.slot_count = slot_count

    def _reset(self, slot: int) -> None:
        self.naive.copies[slot] = {}
        self.naive.expected[slot] = []

    def _is_live(self, slot: int) -> bool:
        return slot in self.naive.copies

    @rule(
        slot=SLOTS, tier=TIERS, namespace_id=st.integers(0, 1), path=PATHS, salt=st.integers(0, 1)
    )
    def store_from_root(
        self, slot: int, tier: int, namespace_id: int, path: Path, salt: int
    ) -> None:
        self._store(slot, tier, namespace_id, (), path, salt)

    @rule(
        slot=SLOTS,
        tier=TIERS,
        namespace_id=st.integers(0, 1),
        base=PATHS,
        path=PATHS,
        salt=st.integers(0, 1),
    )
    def store_after_parent(
        self, slot: int, tier: int, namespace_id: int, base: Path, path: Path, salt: int
    ) -> None:
        self._store(slot, tier, namespace_id, base, path, salt, is_continued=True)

    def _store(
        self,
        slot: int,
        tier: int,
        namespace_id: int,
        base: Path,
        path: Path,
        salt: int,
        *,
        is_continued: bool = False,
    ) -> None:
        """`salt` gives one block two engine hashes; in namespace 1 few hashes make conflicts."""
        if not self._is_live(slot):
            return
        full = [base + path[: n + 1] for n in range(len(path))]
        hashes = array("Q", [engine_hash(namespace_id, p, salt) for p in full])
        parent = engine_hash(namespace_id, base, salt)
        answer = self.both(
            "store",
            slot,
            tier,
            -1 if is_continued else namespace_id,
            parent,
            hashes,
            tokens_of(path),
            BLOCK_TOKENS,
        )
        slot_copies = self.naive.copies[slot]
        if is_continued:
            if parent not in slot_copies:
                assert answer == UNKNOWN_PARENT
                return
            (namespace_id, base), _ = slot_copies[parent]
            full = [base + path[: n + 1] for n in range(len(path))]
        for index, (name, block_path) in enumerate(zip(hashes, full, strict=True)):
            block = (namespace_id, block_path)
            if name not in slot_copies:
                known = self.naive.blocks()
                if block not in known and len(known) >= MAX_BLOCKS:
                    assert answer == FULL, index
                    return
                slot_copies[name] = (block, Counter())
            elif slot_copies[name][0] != block:
                assert answer == CONFLICT, index
                return
            slot_copies[name][1][tier] += 1
        assert answer == len(hashes)

    @rule(
        slot=SLOTS,
        tier=TIERS,
        namespace_id=st.integers(0, 1),
        paths=st.lists(PATHS, max_size=8),
        salt=st.integers(0, 1),
    )
    def remove(self, slot: int, tier: int, namespace_id: int, paths: list[Path], salt: int) -> None:
        if not self._is_live(slot):
            return
        hashes = array("Q", [engine_hash(namespace_id, path, salt) for path in paths])
        known_count = 0
        slot_copies = self.naive.copies[slot]
        for name in hashes:
            if name in slot_copies and slot_copies[name][1][tier]:
                known_count += 1
                slot_copies[name][1][tier] -= 1
                if not slot_copies[name][1].total():
                    del slot_copies[name]
        assert self.both("remove", slot, tier, hashes) == known_count

    @rule(slot=SLOTS)
    def clear(self, slot: int) -> None:
        if self._is_live(slot):
            assert self.both("clear_slot", slot) == len(self.naive.resident(slot))
            self._reset(slot)

    @rule(slot=SLOTS)
    def drop(self, slot: int) -> None:
        if self._is_live(slot):
            self.both("drop_slot", slot)
            del self.naive.copies[slot]
            del self.naive.expected[slot]

    @precondition(lambda self: len(self.naive.copies) < self.slot_count)
    @rule()
    def add(self) -> None:
        slot = self.both("add_slot")
        assert slot == min(set(range(self.slot_count)) - set(self.naive.copies))
        self._reset(slot)

    @rule(
        slot=SLOTS,
        namespace_id=st.integers(0, 1),
        path=PATHS,
        ttl_ms=st.sampled_from([5.0, 9.0]),
        max_predicted=st.sampled_from([0, 4, 100]),
    )
    def predict(
        self, slot: int, namespace_id: int, path: Path, ttl_ms: float, max_predicted: int
    ) -> None:
        if not self._is_live(slot):
            return
        expected = self.naive.expected[slot]
        expires_ms = self.now_ms + ttl_ms
        packed = chain_of(namespace_id, path)
        try:
            self.both("predict", slot, namespace_id, packed, expires_ms, max_predicted)
        except ValueError:  # a shorter TTL than before; the other index must refuse it too
            for index in self.indexes:
                with pytest.raises(ValueError, match="in the order"):
                    index.predict(slot, namespace_id, packed, expires_ms, max_predicted)
            return
        known = self.naive.blocks()
        for n in range(1, len(path) + 1):
            block = (namespace_id, path[:n])
            if block not in known and len(known) >= MAX_BLOCKS:
                break
            known.add(block)
            expected[:] = [(at, other) for at, other in expected if other != block]
            expected.append((expires_ms, block))
        if len(expected) > max_predicted:
            # Oldest predictions go first, a whole prediction at a time: how far is the twins' own
            # affair (they are compared with one another below), but never beyond need.
            left = self.both("predicted_count", slot)
            assert left <= max_predicted
            expected[:] = expected[len(expected) - left :]

    @rule(slot=SLOTS, namespace_id=st.integers(0, 1), path=PATHS)
    def unpredict(self, slot: int, namespace_id: int, path: Path) -> None:
        if not self._is_live(slot):
            return
        self.both("unpredict", slot, chain_of(namespace_id, path))
        gone = {(namespace_id, path[:n]) for n in range(1, len(path) + 1)}
        expected = self.naive.expected[slot]
        expected[:] = [(at, block) for at, block in expected if block not in gone]

    @rule(later_ms=st.sampled_from([1.0, 5.0]))
    def pass_time(self, later_ms: float) -> None:
        self.now_ms += later_ms
        self.both("expire", self.now_ms)
        for expected in self.naive.expected.values():
            expected[:] = [(at, block) for at, block in expected if at > self.now_ms]

    @rule(namespace_id=st.integers(0, 1), path=PATHS)
    def match(self, namespace_id: int, path: Path) -> None:
        answer = self.both("match", chain_of(namespace_id, path))
        assert answer == self.naive.match(namespace_id, path, self.slot_count)

    @invariant()
    def counts_agree(self) -> None:
        assert self.both("block_count") == len(self.naive.blocks())
        for slot in self.naive.copies:
            assert self.both("held_count", slot) == len(self.naive.copies[slot])
            assert self.both("predicted_count", slot) == len(self.naive.expected[slot])

    def teardown(self) -> None:
        for slot in self.naive.copies:
            keys = sorted(chain_of(*block)[-32:] for block in self.naive.resident(slot))
            assert self.both("held", slot) == b"".join(keys)
        for slot in list(self.naive.copies):
            self.both("clear_slot", slot)
        if self.slot_count:
            assert self.both("block_count") == 0


def engine_hash(namespace_id: int, path: Path, salt: int) -> int:
    """Different for different blocks in namespace 0; in namespace 1 several blocks share one."""
    number = 1
    for step in path:
        number = number * 4 + step + 1
    return number * 2 + salt if namespace_id == 0 else (1 << 63) + number % 7


def chain_of(namespace_id: int, path: Path) -> bytes:
    key, root = SECRETS[namespace_id]
    return _fallback.chain_keys(key, root, tokens_of(path), BLOCK_TOKENS)


TwinIndexes.TestCase.settings = settings(settings.default, max_examples=150, stateful_step_count=60)
test_indexes_agree_with_each_other_and_with_sets = TwinIndexes.TestCase


@needs_compiled
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200).map(lambda ids: array("I", ids)),
    block_tokens=st.integers(1, 50),
    extra=st.binary(max_size=300),
    secret=st.binary(min_size=32, max_size=32),
)
@example(tokens=array("I"), block_tokens=16, extra=b"", secret=bytes(32))
@example(tokens=array("I", range(96)), block_tokens=22, extra=b"", secret=bytes(32))  # 128 bytes
@example(tokens=array("I", range(96)), block_tokens=23, extra=b"", secret=bytes(32))  # 132 bytes
def test_both_chain_the_same_keys(
    tokens: array[int], block_tokens: int, extra: bytes, secret: bytes
) -> None:
    expected = _fallback.chain_keys(secret, secret[::-1], tokens, block_tokens, extra)
    assert compiled.chain_keys(secret, secret[::-1], tokens, block_tokens, extra) == expected
    assert (
        compiled.chain_keys(secret, secret[::-1], tokens.tobytes(), block_tokens, extra) == expected
    )
    assert len(expected) == len(tokens) // block_tokens * 32


WRONG_CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("add_namespace", (b"short", bytes(32))),
    ("add_namespace", (bytes(32), bytes(33))),
    ("clear_slot", (1,)),
    ("drop_slot", (-1,)),
    ("held", (70_000,)),
    ("held_count", (1,)),
    ("predicted_count", (1,)),
    ("match", (bytes(33),)),
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
        return sum(len(keys) for _, _, keys in index._slots[0].queue)
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
    assert [orphans.slots_mask for orphans in index._orphans] == [1, 1, 1]
    packed = _fallback.chain_keys(*SECRETS[0], tokens, 2)
    assert index.match(packed) == ([50], [50], [50])
    index.store(slot, 0, -1, 49, array("Q", [50]), array("I", [100, 101]), 2)
    assert [orphans.slots_mask for orphans in index._orphans] == [0, 0, 0]
    assert index.match(packed) == ([200], [200], [200])
