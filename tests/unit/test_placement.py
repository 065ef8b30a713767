"""Homes of cold prefixes: spread evenly, equal everywhere, and stable when workers come and go."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from trunkline.core.placement import HashRing
from trunkline.core.records import WorkerId

_DRAW = random.Random(5)
KEYS = [_DRAW.randbytes(32) for _ in range(10_000)]


def ring_of(count: int, virtual_nodes: int = 128) -> HashRing:
    ring = HashRing(virtual_nodes)
    for index in range(count):
        ring.add(WorkerId(f"w{index}"))
    return ring


def test_c15_ten_thousand_prefixes_spread_over_ten_workers() -> None:
    ring = ring_of(10)
    share = Counter(ring.homes(key)[0] for key in KEYS)
    assert max(share.values()) / (len(KEYS) / 10) < 1.25


def test_c15_a_week_of_workers_coming_and_going_leaves_the_spread_as_it_was() -> None:
    ring = ring_of(10)
    draw = random.Random(1)
    for _ in range(7 * 24):
        name = WorkerId(f"w{draw.randrange(10)}")
        ring.remove(name)
        ring.add(name)
    fresh = ring_of(10)
    assert [ring.homes(key) for key in KEYS[:500]] == [fresh.homes(key) for key in KEYS[:500]]


@pytest.mark.parametrize("count", [4, 16])
def test_a_joining_worker_moves_only_its_share(count: int) -> None:
    before, after = ring_of(count), ring_of(count + 1)
    moved = sum(before.homes(key)[0] != after.homes(key)[0] for key in KEYS)
    assert 0 < moved / len(KEYS) <= 1.5 / (count + 1)


def test_the_two_homes_are_different_workers() -> None:
    ring = ring_of(3)
    assert all(len(set(ring.homes(key))) == 2 for key in KEYS[:200])


def test_a_ring_smaller_than_two_gives_what_it_has() -> None:
    assert HashRing(8).homes(KEYS[0]) == []
    assert ring_of(1).homes(KEYS[0]) == ["w0"]


def test_no_virtual_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="virtual_nodes is 0"):
        HashRing(0)
