"""Zones and retired namespaces: both indexes side by side with a naive one that knows no keys.

A block is named by the whole way to it, `((secret, step), ...)`: whose key each block on the way is
chained under. A namespace may live several times; what an earlier life stored is dead.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import BLOCK_TOKENS, TWINS, compiled, needs_compiled, tokens_of

from trunkline.native import _fallback
from trunkline.native.codes import CONFLICT, RETIRED, UNKNOWN_PARENT

SECRETS = [(bytes([n]) * 32, bytes([n + 100]) * 32) for n in range(3)]
SLOT_COUNT = 6

Way = tuple[tuple[int, int], ...]


@cache
def keys_along(way: Way) -> bytes:
    """The keys of all blocks on a way, each chained under its own namespace."""
    packed = b""
    for secret, step in way:
        key, root = SECRETS[secret]
        packed += _fallback.chain_keys(key, packed[-32:] or root, tokens_of((step,)), BLOCK_TOKENS)
    return packed


@dataclass(frozen=True)
class Block:
    way: Way
    life: int
    """Of the namespace that the block itself is of."""


class Twins:
    """Every call goes to both indexes and to the naive one."""

    def __init__(self) -> None:
        self.indexes = [module.BlockIndex(10_000, seed) for seed, module in enumerate(TWINS)]
        self.numbers: dict[int, int] = {}  # secret -> number, while it lives
        self.lives: dict[int, int] = {}  # secret -> life, while it lives
        self.life_count = 0
        self.names: dict[tuple[Way, int], int] = {}
        self.held: list[dict[int, tuple[Block, Counter[int]]]] = [{} for _ in range(SLOT_COUNT)]
        self.expected: list[set[Block]] = [set() for _ in range(SLOT_COUNT)]
        self.is_swept = True

    def both(self, method: str, *arguments: Any) -> Any:
        answers = [getattr(index, method)(*arguments) for index in self.indexes]
        assert all(answer == answers[0] for answer in answers), (method, arguments, answers)
        return answers[0]

    def begin(self) -> None:
        for slot in range(SLOT_COUNT):
            assert self.both("add_slot") == slot
        for secret in range(2):
            self.admit(secret)

    def name(self, way: Way, alias: int = 0) -> int:
        return self.names.setdefault((way, alias), 1 + len(self.names))

    def is_live(self, block: Block) -> bool:
        return self.lives.get(block.way[-1][0]) == block.life

    # -- namespaces ------------------------------------------------------------------------------

    def admit(self, secret: int) -> None:
        if secret in self.numbers:
            return
        number = self.both("add_namespace", *SECRETS[secret])
        assert number not in self.numbers.values()
        self.life_count += 1
        self.numbers[secret], self.lives[secret] = number, self.life_count

    def retire(self, secret: int) -> None:
        if secret not in self.numbers:
            return
        number = self.numbers.pop(secret)
        self.both("retire_namespace", number)
        del self.lives[secret]
        self.is_swept = False
        for index in self.indexes:
            with pytest.raises(ValueError, match="is unknown"):
                index.retire_namespace(number)

    def sweep(self, max_blocks: int) -> None:
        left = self.both("sweep", max_blocks)
        if max_blocks == 100_000:
            assert left == 0
        if left == 0:
            self.is_swept = True
            for expected in self.expected:
                expected -= {block for block in expected if not self.is_live(block)}

    # -- what workers announce -------------------------------------------------------------------

    def store_at_the_root(
        self, slot: int, tier: int, secret: int, path: tuple[int, ...], alias: int
    ) -> None:
        if secret in self.numbers:
            self._store(slot, tier, self.numbers[secret], (), secret, path, alias)

    def store_after_a_block(
        self, slot: int, tier: int, pick: int, zone: int | None, path: tuple[int, ...]
    ) -> None:
        """`zone` is the namespace of a run that has both a parent and a salt."""
        if not self.names or (zone is not None and zone not in self.numbers):
            return
        held = self.held[slot]
        known = [item for item in self.names.items() if item[1] in held] if pick % 8 else []
        (way, alias), parent = (known or list(self.names.items()))[
            pick % (len(known) or len(self.names))
        ]
        if len(way) > 6:
            return
        number = -1 if zone is None else self.numbers[zone]
        secret = last_secret(way) if zone is None else zone
        self._store(slot, tier, number, way, secret, path, alias, parent=parent)

    def _store(
        self,
        slot: int,
        tier: int,
        number: int,
        way: Way,
        secret: int,
        path: tuple[int, ...],
        alias: int,
        *,
        parent: int | None = None,
    ) -> None:
        ways = [way + tuple((secret, step) for step in path[: n + 1]) for n in range(len(path))]
        hashes = array("Q", [self.name(one, alias) for one in ways])
        is_zone = parent is not None and number >= 0
        answer = self.both(
            "store", slot, tier, number, parent or 0, hashes, tokens_of(path), 2, is_zone
        )
        held = self.held[slot]
        if parent is not None and parent not in held:
            assert answer == UNKNOWN_PARENT
        elif parent is not None and not self.is_live(held[parent][0]):
            assert answer == RETIRED
        else:
            assert answer == len(hashes)
            for name, one in zip(hashes, ways, strict=True):
                if name not in held or not self.is_live(held[name][0]):
                    held[name] = (Block(one, self.lives[secret]), Counter())
                held[name][1][tier] += 1
                self._replace_dead(one)

    def _replace_dead(self, way: Way) -> None:
        """A key that lives again is no longer expected under its dead namespace."""
        for expected in self.expected:
            expected -= {b for b in expected if b.way == way and not self.is_live(b)}

    def remove(self, slot: int, tier: int, picks: list[int]) -> None:
        known = list(self.names.values())
        hashes = array("Q", [known[pick % len(known)] for pick in picks if known])
        known_count = 0
        for name in hashes:
            if name in self.held[slot] and self.held[slot][name][1][tier]:
                near_before = self._near(slot)
                known_count += 1
                self.held[slot][name][1][tier] -= 1
                if not self.held[slot][name][1].total():
                    del self.held[slot][name]
                self.expected[slot] -= near_before - self._near(slot)
        assert self.both("remove", slot, tier, hashes) == known_count

    def _near(self, slot: int) -> set[Block]:
        return {block for block, n in self.held[slot].values() if n[0] or n[1]}

    def clear(self, slot: int) -> None:
        blocks = {block for block, _ in self.held[slot].values()}
        assert self.both("clear_slot", slot) == len(blocks)
        self.held[slot].clear()
        self.expected[slot].clear()

    # -- what we expect --------------------------------------------------------------------------

    def predict(self, slot: int, lead: int, rest: int, path: tuple[int, ...], split: int) -> None:
        lead_count = min(split, len(path))
        if rest not in self.numbers or lead not in self.numbers:
            return
        way = two_zones(lead, rest, path, lead_count)
        arguments = (keys_along(way), 0.0, 100_000, self.numbers[lead], lead_count)
        self.both("predict", slot, self.numbers[rest], *arguments)
        for n in range(1, len(way) + 1):
            self._replace_dead(way[:n])
            self.expected[slot].add(Block(way[:n], self.lives[way[n - 1][0]]))

    def unpredict(self, slot: int, lead: int, rest: int, path: tuple[int, ...], split: int) -> None:
        way = two_zones(lead, rest, path, min(split, len(path)))
        self.both("unpredict", slot, keys_along(way))
        gone = {way[:n] for n in range(1, len(way) + 1)}
        self.expected[slot] -= {block for block in self.expected[slot] if block.way in gone}

    # -- what is asked ---------------------------------------------------------------------------

    def every_known_way_matches(self) -> None:
        for way, _ in list(self.names)[:60]:
            self._match(way)

    def _match(self, way: Way) -> None:
        device, resident, expected = self.both("match", keys_along(way))
        is_known = False
        for slot in range(SLOT_COUNT):
            live = [(b, n) for b, n in self.held[slot].values() if self.is_live(b)]
            hoped = {block.way for block in self.expected[slot] if self.is_live(block)}
            is_known = is_known or way in hoped.union(b.way for b, _ in live)
            assert device[slot] == leading(way, {b.way for b, n in live if n[0]})
            assert resident[slot] == leading(way, {b.way for b, _ in live})
            near = {b.way for b, n in live if n[0] or n[1]}
            assert expected[slot] == leading(way, near | hoped)
        assert self.both("knows", keys_along(way)[-32:]) is is_known

    def counts_agree(self) -> None:
        block_count = self.both("block_count")
        for slot in range(SLOT_COUNT):
            assert self.both("held_count", slot) == len(self.held[slot])
            live = {b.way for b, _ in self.held[slot].values() if self.is_live(b)}
            keys = sorted(keys_along(way)[-32:] for way in live)
            assert self.both("held", slot) == b"".join(keys)
            predicted_count = self.both("predicted_count", slot)
            if self.is_swept:
                assert predicted_count == len(self.expected[slot])
        if self.is_swept:
            held = {block for slot in self.held for block, _ in slot.values()}
            assert block_count == len(held.union(*self.expected))

    def teardown(self) -> None:
        for secret in list(self.numbers):
            self.retire(secret)
        self.both("sweep", 100_000)
        for slot in range(SLOT_COUNT):
            self.both("clear_slot", slot)
        assert self.both("block_count") == 0
        numbers = {self.both("add_namespace", *SECRETS[0]) for _ in range(3)}
        assert max(numbers) < 3 + self.life_count


def last_secret(way: Way) -> int:
    return way[-1][0]


def two_zones(lead: int, rest: int, path: tuple[int, ...], lead_count: int) -> Way:
    return tuple((lead if n < lead_count else rest, step) for n, step in enumerate(path))


def leading(way: Way, held: set[Way]) -> int:
    return next((n for n in range(len(way)) if way[: n + 1] not in held), len(way))


@pytest.mark.parametrize("seed", range(16))
def test_zones_and_retirement_are_as_in_sets_of_ways(seed: int) -> None:
    """Drawn by hand: what matters is a zone on a block that is held, and then its head retired.

    `Twins` asserts at every step that both indexes answer alike, and as the sets say.
    """
    draw = random.Random(seed)
    twins = Twins()
    twins.begin()
    for _ in range(250):
        take_a_step(twins, draw)
        twins.counts_agree()
        twins.every_known_way_matches()
    twins.teardown()
    assert twins.both("block_count") == 0, "nothing is left of any namespace"


def take_a_step(twins: Twins, draw: random.Random) -> None:
    slot, tier, alias = draw.choice([0, 0, 0, 0, 1, 2, 3, 4, 5]), draw.choice([0, 0, 1, 2, 3]), 0
    lead, rest = draw.randrange(3), draw.randrange(3)
    path = tuple(draw.randrange(2) for _ in range(draw.randint(1, 4)))
    if draw.random() < 0.1:
        alias = 1
    match draw.choices(range(9), [4, 10, 4, 1, 3, 1, 4, 2, 0.3])[0]:
        case 0:
            twins.store_at_the_root(slot, tier, lead, path, alias)
        case 1:
            zone = draw.choice([None, rest, rest])
            twins.store_after_a_block(slot, tier, draw.randrange(1_000), zone, path)
        case 2:
            twins.predict(slot, lead, rest, path, draw.randint(0, 3))
        case 3:
            twins.unpredict(slot, lead, rest, path, draw.randint(0, 3))
        case 4:
            twins.admit(lead)
        case 5:
            twins.retire(lead)
        case 6:
            twins.remove(slot, tier, [draw.randrange(1_000) for _ in range(draw.randint(1, 4))])
        case 7:
            twins.sweep(draw.choice([0, 1, 2, 100_000]))
        case _:
            twins.clear(slot)


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=60),
    public_blocks=st.integers(1, 20),
    block_tokens=st.integers(1, 6),
)
def test_a_run_with_a_parent_and_a_salt_begins_a_zone_in_both_twins(
    tokens: list[int], public_blocks: int, block_tokens: int
) -> None:
    """Its keys are chained under the salt's namespace, from the parent's key on."""
    count = len(tokens) // block_tokens
    public_blocks = min(public_blocks, count)
    ids, cut = array("I", tokens[: count * block_tokens]), public_blocks * block_tokens
    names = array("Q", range(1, count + 1))
    head = _fallback.chain_keys(*SECRETS[0], ids[:cut], block_tokens)
    tail = _fallback.chain_keys(SECRETS[1][0], head[-32:], ids[cut:], block_tokens) if head else b""
    for module in TWINS:
        index = module.BlockIndex(1_000)
        public, private = (index.add_namespace(*secret) for secret in SECRETS[:2])
        index.add_slot()
        index.store(0, 0, public, 0, names[:public_blocks], ids[:cut], block_tokens)
        rest = (names[public_blocks:], ids[cut:], block_tokens)
        if count and len(rest[0]):
            assert index.store(0, 0, private, public_blocks, *rest, True) == len(rest[0])
        assert index.match(head + tail) == ([count], [count], [count])
        plain = _fallback.chain_keys(*SECRETS[0], ids, block_tokens)
        assert index.match(plain)[1] == [public_blocks], "the private part is under its own key"


@pytest.mark.parametrize("module", TWINS)
def test_a_number_is_free_again_when_the_last_block_is_swept(module: Any) -> None:
    index = module.BlockIndex(1_000)
    slot = index.add_slot()
    for round_number in range(500):
        number = index.add_namespace(*SECRETS[0])
        assert number == 0
        names = array("Q", range(10 * round_number + 1, 10 * round_number + 11))
        assert index.store(slot, 0, number, 0, names, tokens_of(tuple(range(10))), 2) == 10
        index.retire_namespace(number)
        assert index.sweep(4) == index.sweep(4) == 1, "ten blocks take three slices of four"
        assert index.sweep(4) == 0
        assert index.block_count() == 10, "the worker still names them"
        assert index.remove(slot, 0, names) == 10
        assert index.block_count() == index.held_count(slot) == 0


@pytest.mark.parametrize("module", TWINS)
def test_one_hash_for_two_blocks_is_a_conflict_also_when_the_first_is_retired(module: Any) -> None:
    index = module.BlockIndex(1_000)
    slot, number = index.add_slot(), index.add_namespace(*SECRETS[0])
    index.store(slot, 0, number, 0, array("Q", [7]), tokens_of((1,)), 2)
    index.retire_namespace(number)
    index.sweep(10)
    other = index.add_namespace(*SECRETS[1])
    assert index.store(slot, 0, other, 0, array("Q", [7]), tokens_of((1,)), 2) == CONFLICT


@pytest.mark.parametrize("module", TWINS)
def test_arguments_of_zones_and_sweeps_are_checked(module: Any) -> None:
    index = module.BlockIndex(10)
    index.add_slot()
    number = index.add_namespace(*SECRETS[0])
    for method, arguments in (
        ("retire_namespace", (1,)),
        ("retire_namespace", (-1,)),
        ("sweep", (-1,)),
        ("predict", (0, number, bytes(64), 1.0, 5, 1, 1)),
        ("predict", (0, number, bytes(64), 1.0, 5, number, 3)),
        ("predict", (0, number, bytes(64), 1.0, 5, number, -1)),
        ("store", (0, 0, 1, 5, array("Q", [1]), tokens_of((1,)), 2, True)),
    ):
        with pytest.raises(ValueError):
            getattr(index, method)(*arguments)
    assert index.block_count() == 0
    index.retire_namespace(number)
    with pytest.raises(ValueError, match="is unknown"):
        index.store(0, 0, number, 0, array("Q", [1]), tokens_of((1,)), 2)


@needs_compiled
def test_a_walk_along_neighbours_never_ends_up_on_a_retired_block() -> None:
    """A block that lives again lies elsewhere, and what it was before still lies beside the one
    before it.
    """
    count = 60
    public, private = SECRETS[:2]
    names, tokens = array("Q", range(1, count + 1)), array("I", range(2 * count))
    half = count // 2
    head = _fallback.chain_keys(*public, tokens[: 2 * half], 2)
    packed = head + _fallback.chain_keys(private[0], head[-32:], tokens[2 * half :], 2)
    index = compiled.BlockIndex(1_000)
    index.add_slot()
    index.add_slot()
    first, second = (index.add_namespace(*secret) for secret in (public, private))
    index.store(0, 0, first, 0, names[:half], tokens[: 2 * half], 2)
    index.store(0, 0, second, half, names[half:], tokens[2 * half :], 2, True)
    assert index.match(packed)[1] == [count, 0]
    index.retire_namespace(second)
    index.sweep(1_000)
    assert index.match(packed)[1] == [half, 0]
    again = index.add_namespace(*private)
    index.store(1, 0, first, 0, names[:half], tokens[: 2 * half], 2)
    index.store(1, 0, again, half, names[half:], tokens[2 * half :], 2, True)
    assert index.match(packed)[1] == [half, count]
