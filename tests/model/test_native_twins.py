"""The compiled and the pure index, driven side by side with a naive one (sets of token prefixes).

Where the extension is not built, the pure index still runs beside the naive one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from twins import BLOCK_TOKENS, SECRETS, TWINS, Path, chain_of, compiled, needs_compiled, tokens_of

from trunkline.native import _fallback
from trunkline.native._rows import ROW
from trunkline.native.codes import CONFLICT, FULL, UNKNOWN_PARENT

MAX_BLOCKS = 24
PATHS = st.lists(st.integers(0, 2), min_size=0, max_size=6).map(tuple)
SLOTS = st.sampled_from([0, 1, 2, 3, 4, 63, 64, 127, 128])
TIERS = st.integers(0, 3)


Block = tuple[int, Path]
"""A block as the naive index knows it: its namespace and the path of choices down to it."""


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
        expected = self.naive.expected[slot]
        for name in hashes:
            near_before = self.naive.near(slot)
            if name in slot_copies and slot_copies[name][1][tier]:
                known_count += 1
                slot_copies[name][1][tier] -= 1
                if not slot_copies[name][1].total():
                    del slot_copies[name]
                gone = near_before - self.naive.near(slot)
                expected[:] = [(at, block) for at, block in expected if block not in gone]
        assert self.both("remove", slot, tier, hashes) == known_count

    @rule(slot=SLOTS, tier=TIERS, path=PATHS, left=st.integers(0, 5))
    def serve_and_evict(self, slot: int, tier: int, path: Path, left: int) -> None:
        """The order of a request's life, which single steps seldom fall into."""
        self.predict(slot, 0, path, 9.0, 100)
        self._store(slot, tier, 0, (), path, salt=0)
        self.remove(slot, tier, 0, [path[: n + 1] for n in range(left, len(path))], salt=0)

    @rule(source=SLOTS, to=SLOTS, max_rows=st.sampled_from([1, 3, 100]), is_left_out=st.booleans())
    def hand_over(self, source: int, to: int, max_rows: int, is_left_out: bool) -> None:
        """Each index takes in what the other exported, so that they read the same rows."""
        if not (self._is_live(source) and self._is_live(to)):
            return
        theirs, ours = self.naive.copies[source], self.naive.copies[to]
        taken = {
            name: (block, copies)
            for name, (block, copies) in theirs.items()
            if not (is_left_out and block[0] == 1)
        }
        if any(name in ours and ours[name][0] != block for name, (block, _) in taken.items()):
            return  # which rows are in by then is each index's own affair
        pieces = [self._exported(index, source, max_rows) for index in self.indexes]
        for index, told in zip(self.indexes, reversed(pieces), strict=True):
            left_out: set[int] = set()
            for rows, ids in told:
                kept = [-1 if is_left_out and of == 1 else of for of in ids]
                count, missed = index.adopt_rows(to, rows, kept)
                assert count == len(rows) // ROW.size
                left_out |= set(array("Q", missed))
            assert left_out == theirs.keys() - taken.keys() - ours.keys()
        for name, (block, copies) in taken.items():
            ours[name] = (block, (ours[name][1] if name in ours else Counter[int]()) | copies)

    def _exported(self, index: Any, slot: int, max_rows: int) -> list[tuple[bytes, list[int]]]:
        told: list[tuple[bytes, list[int]]] = []
        at = 0
        while at >= 0:
            at, rows, ids = index.export_rows(slot, at, max_rows)
            assert len(rows) <= max_rows * ROW.size
            told.append((rows, ids))
        names = [row[0] for rows, _ in told for row in ROW.iter_unpack(rows)]
        assert sorted(names) == sorted(self.naive.copies[slot]), "each comes once"
        return told

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

    @rule(namespace_id=st.integers(0, 1), path=PATHS.filter(bool))
    def know(self, namespace_id: int, path: Path) -> None:
        is_known = self.both("knows", chain_of(namespace_id, path)[-32:])
        assert is_known is ((namespace_id, path) in self.naive.blocks())

    @invariant()
    def counts_agree(self) -> None:
        assert self.both("block_count") == len(self.naive.blocks())
        for slot in self.naive.copies:
            held = self.naive.copies[slot].values()
            assert self.both("held_count", slot) == len(held)
            in_tier = [sum(copies[tier] > 0 for _, copies in held) for tier in range(4)]
            assert self.both("tier_counts", slot) == in_tier
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
