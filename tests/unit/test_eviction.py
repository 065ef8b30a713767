"""Eviction policies: bounds, what each one is for, the tournament's choice, and Belady's limit."""

from __future__ import annotations

import hashlib
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.core.eviction import Evictor, Policy, make_evictor, order_makers
from trunkline.core.frequency import Gdsf, S3Fifo, WTinyLfu
from trunkline.core.recency import Recency
from trunkline.core.residents import SLACK_ENTRIES, LeafHeap, Residents
from trunkline.core.reuse import GHOST_REACH, Reuse
from trunkline.core.tournament import MAX_CHANGES, SAMPLE, Tournament
from trunkline.sim.clairvoyant import belady_hits

ALL = [policy.value for policy in Policy]


def key(*name: object) -> bytes:
    return hashlib.blake2b(repr(name).encode(), digest_size=32).digest()


def session(number: int, length: int) -> list[bytes]:
    return [key(number, depth) for depth in range(length)]


class Cache:
    """Counts hits as the block store would make them."""

    def __init__(self, evictor: Evictor, capacity: int) -> None:
        self.evictor = evictor
        self.capacity = capacity
        self.resident: dict[bytes, bytes] = {}

    def use(self, keys: list[bytes]) -> int:
        hit = 0
        while hit < len(keys) and keys[hit] in self.resident:
            hit += 1
        self.evictor.touch(keys[:hit])
        for index in range(hit, len(keys)):
            before = keys[index - 1] if index else b""
            self.evictor.add(keys[index], before, size_bytes=1)
            self.resident[keys[index]] = before
        while len(self.resident) > self.capacity:
            victim = self.evictor.victim()
            assert victim is not None
            assert victim not in self.resident.values(), "a parent went before its child"
            self.evictor.remove(victim)
            del self.resident[victim]
        return hit


def sessions_in_turn(rounds: int, sessions: int, length: int) -> list[list[bytes]]:
    """More than fits, used in a circle: the worst case of least recently used first."""
    return [session(number, length) for _ in range(rounds) for number in range(sessions)]


@pytest.mark.parametrize("name", ALL)
def test_every_name_makes_an_evictor(name: str) -> None:
    evictor = make_evictor(name, capacity_bytes=10)
    assert evictor.victim() is None
    evictor.add(b"a", b"", size_bytes=1)
    assert evictor.victim() == b"a"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="fifo"):
        make_evictor("fifo", capacity_bytes=10)


@pytest.mark.parametrize("name", ALL)
def test_a_held_block_and_all_before_it_stay(name: str) -> None:
    evictor = make_evictor(name, capacity_bytes=10)
    for block, before in ((b"a", b""), (b"b", b"a"), (b"c", b"b"), (b"x", b"")):
        evictor.add(block, before, size_bytes=1)
    evictor.hold(b"b")
    evictor.hold(b"b")
    gone: list[bytes] = []
    while (victim := evictor.victim()) is not None:
        evictor.remove(victim)
        gone.append(victim)
    assert sorted(gone) == [b"c", b"x"]
    evictor.release(b"b")
    assert evictor.victim() is None
    evictor.release(b"b")
    assert evictor.victim() == b"b"


@pytest.mark.parametrize("name", ALL)
def test_a_child_of_a_block_that_was_revoked_still_counts_for_it_when_it_is_back(name: str) -> None:
    evictor = make_evictor(name, capacity_bytes=10)
    evictor.add(b"a", b"", size_bytes=1)
    evictor.add(b"b", b"a", size_bytes=1)
    evictor.remove(b"a")
    evictor.add(b"a", b"", size_bytes=1)
    assert evictor.victim() == b"b"


def test_misuse_is_an_assertion() -> None:
    evictor = make_evictor("lru", capacity_bytes=10)
    evictor.add(b"a", b"", size_bytes=1)
    with pytest.raises(AssertionError):
        evictor.add(b"a", b"", size_bytes=1)
    with pytest.raises(AssertionError):
        evictor.release(b"a")
    evictor.touch([b"a", b"absent"])
    evictor.set_copies(b"absent", 3)


@pytest.mark.parametrize("name", ["lru", "gdsf", "reuse", "tournament"])
def test_of_two_that_are_used_alike_the_copied_one_goes_first(name: str) -> None:
    evictor = make_evictor(name, capacity_bytes=10, copied_worth=0.1)
    for block in (b"a", b"b"):
        evictor.add(block, b"", size_bytes=1)
    for block in (b"a", b"b", b"a", b"b"):
        evictor.touch([block])
    alone = evictor.victim()
    other = b"a" if alone == b"b" else b"b"
    evictor.set_copies(other, 1)
    assert evictor.victim() == other
    evictor.set_copies(other, 0)
    assert evictor.victim() == alone


@pytest.mark.parametrize("name", ["gdsf", "reuse"])
def test_what_is_dear_stays_longer(name: str) -> None:
    evictor = make_evictor(name, capacity_bytes=10)
    evictor.add(b"dear", b"", size_bytes=1, saved_ms=64.0)
    evictor.add(b"cheap", b"", size_bytes=1, saved_ms=1.0)
    evictor.touch([b"dear"])
    evictor.touch([b"cheap"])
    assert evictor.victim() == b"cheap"


def test_sessions_in_turn_are_not_all_lost_by_reuse_nor_by_the_tournament() -> None:
    prompts = sessions_in_turn(rounds=40, sessions=12, length=40)
    hits = {}
    for name in ("lru", "reuse", "tournament"):
        cache = Cache(make_evictor(name, capacity_bytes=240), 240)
        hits[name] = sum(cache.use(keys) for keys in prompts)
    asked = sum(len(keys) for keys in prompts)
    assert hits["lru"] == 0
    assert hits["reuse"] > asked * 0.4
    assert hits["tournament"] > asked * 0.4


def test_the_tournament_changes_its_leader_and_keeps_its_blocks() -> None:
    makers = order_makers(1.0)
    names = {each.value: makers[each] for each in (Policy.LRU, Policy.REUSE)}
    evictor = Tournament(names, 640)
    cache = Cache(evictor, 640)
    assert evictor.leader == "lru"
    hits: list[int] = []
    for keys in sessions_in_turn(rounds=40, sessions=16, length=80):
        before = set(cache.resident)
        changes = len(evictor.changes)
        hits.append(cache.use(keys))
        if len(evictor.changes) > changes:
            assert len(before & set(cache.resident)) >= len(before) - len(keys)
    assert evictor.leader == "reuse"
    assert sum(hits[-160:]) > 160 * 80 * 0.3, "least recently used first would hit nothing"
    assert [change.policy for change in evictor.changes] == ["reuse"]
    assert evictor.changes[0].scores["reuse"] > evictor.changes[0].scores["lru"]


def test_one_common_root_does_not_keep_the_sample_from_telling() -> None:
    makers = order_makers(1.0)
    evictor = Tournament({each.value: makers[each] for each in (Policy.LRU, Policy.REUSE)}, 640)
    cache = Cache(evictor, 640)
    for keys in sessions_in_turn(rounds=40, sessions=16, length=80):
        cache.use([b"root", *keys])
    assert evictor.leader == "reuse"


def crowd(evictor: Evictor, capacity: int, prompts: int, draw: Random) -> Cache:
    cache = Cache(evictor, capacity)
    for _ in range(prompts):
        number = draw.randrange(60)
        cache.use(session(number, 1 + draw.randrange(30)))
    return cache


def test_ghosts_and_heaps_are_bounded() -> None:
    capacity = 200
    for order in (
        Gdsf(),
        S3Fifo(capacity_bytes=capacity),
        WTinyLfu(capacity_bytes=capacity),
    ):
        crowd(Residents(order), capacity, 2_000, Random(3))
        assert 0 < len(order.ghosts) <= capacity + 1
    reuse = Reuse(capacity_bytes=capacity)
    crowd(Residents(reuse), capacity, 2_000, Random(3))
    assert 0 < reuse.ghost_count <= GHOST_REACH * capacity
    assert reuse.heap_size <= 2 * capacity + SLACK_ENTRIES
    recency = Recency()
    crowd(Residents(recency), capacity, 2_000, Random(3))
    assert sum(len(heap) for heap in recency.heaps) <= 2 * capacity + SLACK_ENTRIES


def test_a_heap_sweeps_what_is_stale() -> None:
    order = Recency()
    evictor = Residents(order)
    evictor.add(b"a", b"", size_bytes=1)
    for _ in range(10 * SLACK_ENTRIES):
        evictor.touch([b"a"])
    assert len(order.heaps[0]) <= 2 + SLACK_ENTRIES
    assert LeafHeap().first() is None


def test_the_tournaments_shadows_and_changes_are_bounded() -> None:
    capacity = 400
    evictor = Tournament({p.value: m for p, m in order_makers(0.5).items()}, capacity)
    crowd(evictor, capacity, 3_000, Random(5))
    for shadow in evictor.shadows.values():
        assert 0 < shadow.held_bytes <= capacity // SAMPLE
    assert len(evictor.changes) <= MAX_CHANGES


def test_the_same_uses_give_the_same_victims() -> None:
    runs = []
    for _ in range(2):
        cache = crowd(make_evictor("tournament", capacity_bytes=150), 150, 800, Random(7))
        runs.append(list(cache.resident))
    assert runs[0] == runs[1]


def best_possible(prompts: list[list[bytes]], capacity: int) -> int:
    """Every set of at most so many blocks after every prompt, tried."""
    reached: dict[frozenset[bytes], int] = {frozenset(): 0}
    for keys in prompts:
        after: dict[frozenset[bytes], int] = {}
        for resident, hits in reached.items():
            run = 0
            while run < len(keys) and keys[run] in resident:
                run += 1
            pool = sorted(resident | set(keys))
            for size in range(min(capacity, len(pool)) + 1):
                for kept in combinations(pool, size):
                    kept_set = frozenset(kept)
                    after[kept_set] = max(after.get(kept_set, 0), hits + run)
        reached = after
    return max(reached.values())


def path_to(number: int) -> list[bytes]:
    """In a tree of blocks in which block n comes after block (n - 1) // 2."""
    path = [number]
    while path[-1]:
        path.append((path[-1] - 1) // 2)
    return [bytes([each]) for each in reversed(path)]


@given(
    st.lists(st.integers(0, 10).map(path_to), min_size=1, max_size=7),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_belady_hits_exactly_the_most_that_is_possible(
    prompts: list[list[bytes]], capacity: int
) -> None:
    assert belady_hits(prompts, capacity) == best_possible(prompts, capacity)


@given(st.lists(st.integers(0, 30).map(path_to), max_size=60), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_no_policy_hits_more_than_belady(prompts: list[list[bytes]], capacity: int) -> None:
    most = belady_hits(prompts, capacity)
    for name in ALL:
        cache = Cache(make_evictor(name, capacity_bytes=capacity), capacity)
        assert sum(cache.use(keys) for keys in prompts) <= most
