"""Who keeps most gives way first: against a list that is scanned, and at the edges."""

from __future__ import annotations

import random

import pytest

from trunkline.core.shelves import Shelves


class Scanned:
    """The same by scanning a list of (owner, key), the longest unused first."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int]] = []
        self.touched: list[str] = []
        """Owners, the one whose shelf was touched last at the end."""

    def touch(self, owner: str) -> None:
        self.touched = [*(other for other in self.touched if other != owner), owner]

    def add(self, entry: tuple[str, int]) -> None:
        self.entries.append(entry)
        self.touch(entry[0])

    def remove(self, entry: tuple[str, int]) -> None:
        self.entries.remove(entry)
        self.touch(entry[0])

    def evict(self) -> tuple[str, int]:
        owners = [owner for owner, _ in self.entries]
        most = max(map(owners.count, owners))
        loser = next(owner for owner in self.touched if owners.count(owner) == most)
        found = self.entries[owners.index(loser)]
        self.remove(found)
        return found


@pytest.mark.parametrize("seed", range(20))
def test_it_gives_back_what_a_scan_of_everything_would(seed: int) -> None:
    dice = random.Random(seed)
    shelves, scanned = Shelves[int, tuple[str, int]](), Scanned()
    for key in range(600):
        action = dice.randrange(5) if scanned.entries else 4
        if action == 0:
            assert shelves.evict() == scanned.evict()
        elif action < 3:
            entry = dice.choice(scanned.entries)
            assert (shelves.get if action == 1 else shelves.pop)(*entry) == entry
            scanned.remove(entry)
            if action == 1:
                scanned.add(entry)
        for _ in range(2 if action == 4 else 0):
            new = (f"t{min(dice.randrange(8), dice.randrange(8))}", key)
            if new not in scanned.entries:
                shelves.put(*new, new)
                scanned.add(new)
        assert len(shelves) == len(scanned.entries)
    kept = sorted((owner, key) for owner, key, _ in shelves.items())
    assert kept == sorted(scanned.entries)
    while scanned.entries:
        assert shelves.evict() == scanned.evict()


def test_an_owner_with_less_than_an_equal_share_loses_nothing_to_others() -> None:
    shelves = Shelves[int, str]()
    for key in range(10):
        shelves.put("small", key, f"small {key}")
    for key in range(10_000):
        shelves.put("flood", key, f"flood {key}")
        if len(shelves) > 64:
            assert shelves.evict() == f"flood {key - 54}"
    assert (shelves.count_of("small"), shelves.count_of("flood")) == (10, 54)


def test_of_owners_with_one_each_the_longest_quiet_goes() -> None:
    shelves = Shelves[int, str]()
    for owner in ("a", "b", "c"):
        shelves.put(owner, 1, owner)
    assert shelves.get("a", 1) == "a"
    assert [shelves.evict() for _ in range(3)] == ["b", "c", "a"]
    assert (len(shelves), list(shelves.items()), shelves.count_of("a")) == (0, [], 0)


def test_what_is_not_kept_is_nothing_and_cannot_be_given_back() -> None:
    shelves = Shelves[int, str]()
    assert shelves.get("a", 1) is None
    shelves.put("a", 1, "x")
    assert shelves.get("a", 2) is None
    assert shelves.get("b", 1) is None
    with pytest.raises(KeyError):
        shelves.pop("b", 1)
