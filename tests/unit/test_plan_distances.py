"""Hits of every cache size in one pass: against a cache of each size, and with blocks drawn."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.plan import distances
from trunkline.plan.distances import ReuseDistances
from trunkline.plan.naming import Namer
from trunkline.plan.reader import LogReader
from trunkline.sim.cache import PrefixCache

TRACES = Path(__file__).resolve().parents[2] / "traces"
CAPACITIES = [1, 2, 3, 5, 8, 13]
STEPS = st.lists(st.integers(0, 2), max_size=7)


def path_names(steps: list[int]) -> list[int]:
    """Names of a path in a tree: equal where all before is equal."""
    names: list[int] = []
    name = 1
    for step in steps:
        name = name * 4 + step
        names.append(name)
    return names


@given(st.lists(STEPS, max_size=60))
def test_hits_are_those_of_a_cache_of_each_size(prompts: list[list[int]]) -> None:
    counted = ReuseDistances(CAPACITIES)
    caches = [PrefixCache(capacity) for capacity in CAPACITIES]
    hits = [0] * len(CAPACITIES)
    seen: set[int] = set()
    endless = 0
    for steps in prompts:
        names = path_names(steps)
        most = max(0, len(names) - 1)
        counted.use(names, most)
        keys = [name.to_bytes(8, "big") for name in names]
        for index, cache in enumerate(caches):
            hits[index] += min(most, cache.use(keys, array("I", names)).hit_blocks)
        known = next((n for n, name in enumerate(names) if name not in seen), len(names))
        endless += min(most, known)
        seen.update(names)
    assert counted.hit_blocks() == [*hits, endless]
    assert counted.distinct_blocks() == len(seen)


def test_places_of_prompts_are_given_up_when_nothing_is_left_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distances, "_MIN_SLOTS", 4)
    counted = ReuseDistances([2])
    for number in range(100):
        counted.use([7, 8, number % 3 + 100], 3)
    assert counted.hit_blocks() == [198, 198 + 97]


@given(st.lists(st.lists(st.integers(1, 9), max_size=8), max_size=40))
def test_names_that_are_no_prefixes_are_counted_and_break_nothing(
    prompts: list[list[int]],
) -> None:
    """A trace may name one block behind two parents, or twice in one prompt."""
    counted = ReuseDistances([2, 4])
    for names in prompts:
        counted.use(names, len(names))
    hits = counted.hit_blocks()
    assert hits == sorted(hits)
    assert 0 <= hits[-1] <= counted.asked


def test_blocks_that_are_held_have_a_bound_and_the_estimate_stays_near() -> None:
    draw = random.Random(1)
    exact = ReuseDistances([500, 5_000, 20_000])
    bounded = ReuseDistances([500, 5_000, 20_000], max_blocks=4_096)
    for _ in range(6_000):
        root, tail = draw.randrange(40), draw.randrange(4_000)
        names = [hash_of(root, 0, depth) for depth in range(6)]
        names += [hash_of(root, tail + 1, depth) for depth in range(6)]
        for counted in (exact, bounded):
            counted.use(names, len(names) - 1)
        assert len(bounded) <= 4_096
    assert bounded.rate < 1.0
    for true, estimated in zip(exact.hit_blocks(), bounded.hit_blocks(), strict=True):
        assert abs(true - estimated) < 0.03 * exact.asked
    assert abs(bounded.distinct_blocks() / exact.distinct_blocks() - 1.0) < 0.05


def hash_of(root: int, tail: int, depth: int) -> int:
    return random.Random((root << 40) + (tail << 8) + depth).getrandbits(64)


@pytest.mark.parametrize(
    ("trace", "ceiling"),
    [
        ("mooncake_conversation", 37.4),
        ("mooncake_synthetic", 65.1),
        ("agentic_claude_code_152", 95.9),
        ("ragpulse_week", 31.5),
    ],
)
def test_the_ceilings_of_the_bundled_traces_are_those_that_were_published(
    trace: str, ceiling: float
) -> None:
    reader = LogReader(TRACES / f"{trace}.jsonl.gz", Namer(bytes(32)))
    counted, tokens, size = ReuseDistances([]), 0, 0
    for call in reader.calls():
        counted.use(call.blocks, call.most_hits)
        tokens, size = tokens + call.tokens, call.block_tokens
    assert reader.rejects.total == 0
    assert abs(100.0 * counted.hit_blocks()[-1] * size / tokens - ceiling) <= 0.1
