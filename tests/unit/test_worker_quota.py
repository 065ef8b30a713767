"""Floors and caps of the worker's store: who gives way to whom; the store beside a naive twin."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.kv.tickets import Ticket
from trunkline.worker.blocks import KvSequence, Terms
from trunkline.worker.quota import MAX_DOMAINS, Places
from worker_tenants import BLOCK, Store, ticket, tokens


def _named(letter: str, *, floor: int = 0, cap: int | None = None) -> Ticket:
    tag = letter.encode() * 16
    return ticket(ns=tag, tenant=letter * 32, floor=floor, cap=cap)


def _run(store: Store, asked: Ticket, prompt: array[int]) -> int:
    return store.run(prompt, asked, salt=asked.tenant)


def _held(store: Store, asked: Ticket) -> int:
    domains = store.cache.places.domains
    return sum(domain.held for domain in domains if domain.name == asked.tenant)


def _flood(store: Store, asked: Ticket, requests: int, blocks: int = 4) -> None:
    for number in range(requests):
        _run(store, asked, tokens(blocks * BLOCK, first=1_000 + 16 * number))


def test_a_flood_never_pushes_another_below_its_floor() -> None:
    store = Store(capacity=32)
    store.lease()
    victim, noisy = _named("a", floor=8), _named("b")
    prompt = tokens(8 * BLOCK + 1)
    _run(store, victim, prompt)
    _flood(store, noisy, 50)
    assert _held(store, victim) == 8
    assert _run(store, victim, prompt) == 8 * BLOCK


def test_what_lies_above_a_floor_goes_least_recently_used_first() -> None:
    store = Store(capacity=32)
    store.lease()
    victim, noisy = _named("a", floor=8), _named("b")
    _run(store, victim, tokens(12 * BLOCK))
    _flood(store, noisy, 4)
    assert _held(store, victim) == 12
    _flood(store, noisy, 50)
    assert _held(store, victim) == 8


def test_a_domain_below_its_floor_takes_from_those_above_theirs() -> None:
    store = Store(capacity=32)
    store.lease()
    victim, noisy = _named("a", floor=16), _named("b")
    _flood(store, noisy, 20)
    assert _held(store, noisy) == 32
    _run(store, victim, tokens(16 * BLOCK))
    assert (_held(store, victim), _held(store, noisy)) == (16, 16)


def test_a_domain_at_its_floor_evicts_its_own_for_its_own_sake() -> None:
    store = Store(capacity=17)
    store.lease()
    one, two = _named("a", floor=8), _named("b", floor=9)
    _run(store, one, tokens(8 * BLOCK))
    _run(store, two, tokens(8 * BLOCK))
    _flood(store, two, 20)
    assert (_held(store, one), _held(store, two)) == (8, 9)


def test_a_domain_at_its_cap_evicts_its_own_though_there_is_room() -> None:
    store = Store(capacity=32)
    store.lease()
    capped = _named("a", cap=8)
    first = tokens(4 * BLOCK, first=300)
    _run(store, capped, first)
    _flood(store, capped, 10)
    assert _held(store, capped) == 8
    assert _run(store, capped, first) == 0


def test_a_request_larger_than_the_cap_keeps_its_beginning() -> None:
    store = Store(capacity=32)
    store.lease()
    capped = _named("a", cap=3)
    prompt = tokens(10 * BLOCK)
    _run(store, capped, prompt)
    assert _held(store, capped) == 3
    assert _run(store, capped, prompt) == 3 * BLOCK


def test_a_cap_of_nothing_keeps_nothing() -> None:
    store = Store()
    store.lease()
    capped = _named("a", cap=0)
    _run(store, capped, tokens(64))
    assert store.cache.resident_blocks == 0
    assert store.cache.used_share == 0


def test_floors_beyond_the_capacity_count_in_proportion() -> None:
    store = Store(capacity=32)
    store.lease()
    one, two, noisy = _named("a", floor=32), _named("b", floor=16), _named("c", floor=16)
    _run(store, one, tokens(12 * BLOCK))
    _run(store, two, tokens(10 * BLOCK))
    _flood(store, noisy, 50)
    # 32, 16 and 16 of 64: half, a quarter and a quarter of the 32 there are.
    assert (_held(store, one), _held(store, two), _held(store, noisy)) == (12, 8, 12)
    _flood(store, one, 50)
    assert (_held(store, one), _held(store, two), _held(store, noisy)) == (16, 8, 8)


def test_a_floor_keeps_no_place_empty() -> None:
    store = Store(capacity=32)
    store.lease()
    _run(store, _named("a", floor=32), tokens(16))
    _flood(store, _named("b"), 20)
    assert _held(store, _named("b")) == 31


def test_a_request_that_others_floors_leave_no_room_for_is_known_as_such() -> None:
    store = Store(capacity=16)
    store.lease()
    _run(store, _named("a", floor=12), tokens(12 * BLOCK))
    large, terms = tokens(5 * BLOCK), Terms(ticket=_named("b"))
    assert store.cache.admit(large, "b", 1, terms) is None
    assert store.cache.never_fits(large, 1, terms)
    fitting = tokens(4 * BLOCK - 1)
    assert not store.cache.never_fits(fitting, 1, terms)
    assert store.cache.admit(fitting, "b", 1, terms) is not None


def test_a_floor_that_rises_later_yields_to_what_was_promised() -> None:
    store = Store(capacity=8)
    store.lease()
    _run(store, _named("a"), tokens(4 * BLOCK))
    promised = store.cache.admit(tokens(8 * BLOCK - 1), "b", 1, Terms(ticket=_named("b")))
    assert promised is not None
    store.cache.admit(tokens(8), "a", 1, Terms(ticket=_named("a", floor=8)))
    store.cache.compute(promised, 7 * BLOCK)
    assert _held(store, _named("a")) == 1


def test_memory_that_a_domain_uses_and_does_not_keep_is_no_other_ones_loss() -> None:
    store = Store(capacity=8)
    store.lease()
    bystander, user = _named("a", floor=2), _named("b", floor=3)
    _run(store, bystander, tokens(2 * BLOCK))
    _run(store, user, tokens(3 * BLOCK))
    promised = store.cache.admit(tokens(3 * BLOCK - 1), "c", 1, Terms(ticket=_named("c")))
    assert promised is not None
    # It is let in for the three idle blocks of its own; the three clean places are promised.
    kept_nowhere = ticket(ns=b"", tenant=user.tenant, floor=3)
    using = store.cache.admit(tokens(48, first=900), "b", 0, Terms(ticket=kept_nowhere))
    assert using is not None
    store.cache.compute(using, 3 * BLOCK)
    promised.tokens.extend(tokens(1))
    store.cache.compute(promised, 3 * BLOCK)
    assert (_held(store, bystander), _held(store, user)) == (2, 0)


def test_what_a_domain_writes_counts_towards_its_floor_as_what_it_keeps_does() -> None:
    store = Store(capacity=6)
    store.lease()
    user, other = _named("a", floor=3), Terms(ticket=_named("b"))
    _run(store, user, tokens(3 * BLOCK))
    assert store.cache.admit(tokens(4 * BLOCK - 1), "b", 1, other) is None
    kept_nowhere = Terms(ticket=ticket(ns=b"", tenant=user.tenant, floor=3))
    using = store.cache.admit(tokens(48, first=900), "a", 0, kept_nowhere)
    assert using is not None
    store.cache.compute(using, 3 * BLOCK)
    assert store.cache.admit(tokens(3 * BLOCK - 1), "b", 1, other) is not None


def test_a_floor_of_a_domain_that_is_gone_counts_no_more() -> None:
    places = Places(8)
    one, two = places.domain("a", 8, None), places.domain("b", 8, None)
    assert places.floor_of(one) == 4
    places.forget_if_empty(two)
    assert places.floor_of(one) == 8


def test_domains_beyond_the_bound_share_one_without_a_floor() -> None:
    places = Places(8, max_domains=3)
    one, two = places.domain("a", 1, None), places.domain("b", 2, None)
    shared = places.domain("c", 3, None)
    assert (shared.name, shared.floor_blocks) == ("", 0)
    assert places.domain("d", 3, 1) is shared
    assert places.domain("a", 4, None) is one
    places.forget_if_empty(two)
    assert places.domain("c", 3, None).floor_blocks == 3


def test_a_domain_with_nothing_left_is_forgotten() -> None:
    store = Store(capacity=8)
    store.lease()
    for number in range(MAX_DOMAINS // 64):
        asked = ticket(ns=bytes(16), tenant=f"{number:032x}")
        _run(store, asked, tokens(4 * BLOCK))
    names = [domain.name for domain in store.cache.places.domains]
    assert len(names) == 1 + 2, "the two that fit and the one without a name"


# S10 of the security reference.


def _victim_requests(rng: random.Random, count: int) -> list[array[int]]:
    """Turns of twelve conversations that share a system prompt of two blocks."""
    system = tokens(2 * BLOCK)
    turns: list[array[int]] = []
    for _ in range(count):
        own = tokens(rng.randint(1, 3) * BLOCK + 5, first=1_300 + 64 * rng.randrange(12))
        turns.append(system + own)
    return turns


def _hit_tokens(capacity: int, seed: int, *, noisy_a_turn: int, floor: int) -> int:
    rng, noise = random.Random(seed), random.Random(seed + 1)
    store = Store(capacity=capacity)
    store.lease()
    victim, noisy = _named("a", floor=floor), _named("b")
    hit = 0
    for prompt in _victim_requests(rng, 120):
        for _ in range(noisy_a_turn):
            first = noise.randrange(10_000, 1_000_000)
            _run(store, noisy, tokens(noise.randint(1, 12) * BLOCK, first))
            assert _held(store, victim) <= capacity
        before = _held(store, victim)
        hit += _run(store, victim, prompt)
        assert _held(store, victim) >= min(before, floor)
    return hit


@pytest.mark.parametrize("seed", range(3))
def test_a_flooded_victim_hits_as_in_a_store_of_its_floor_alone(seed: int) -> None:
    floor = 24
    alone = _hit_tokens(floor, seed, noisy_a_turn=0, floor=floor)
    flooded = _hit_tokens(64, seed, noisy_a_turn=12, floor=floor)
    without = _hit_tokens(64, seed, noisy_a_turn=12, floor=0)
    assert flooded >= 0.9 * alone
    assert without < 0.5 * alone, "else the flood shows nothing"


# The store beside a naive twin: a list of what is kept, looked through from end to end.

_FLOORS = {"a": 6, "b": 3, "c": 0}
_CAPS: dict[str, int | None] = {"a": None, "b": 5, "c": 7}
_CAPACITY = 16


@dataclass(slots=True)
class _Kept:
    owner: str
    name: bytes
    users: int
    let_go_at: int = 0


@dataclass(slots=True)
class _Twin:
    """Whole blocks as records; `writing` counts places that are used and not kept."""

    kept: list[_Kept] = field(default_factory=list[_Kept])
    writing: dict[str, int] = field(default_factory=lambda: dict.fromkeys("abc", 0))
    ticks: int = 0

    def held(self, owner: str) -> int:
        return sum(1 for one in self.kept if one.owner == owner)

    def has(self, owner: str) -> int:
        return self.held(owner) + self.writing[owner]

    def bind(self, names: list[bytes]) -> list[_Kept]:
        hits: list[_Kept] = []
        for name in names:
            found = next((one for one in self.kept if one.name == name), None)
            if found is None:
                break
            hits.append(found)
        for one in hits:
            one.users += 1
        return hits

    def write(self, owner: str, name: bytes, *, is_publishing: bool) -> _Kept | None:
        cap = _CAPS[owner]
        idle = sorted((k for k in self.kept if not k.users), key=lambda k: k.let_go_at)
        own = [one for one in idle if one.owner == owner]
        is_full = cap is not None and self.held(owner) >= cap
        used = len(self.kept) + sum(self.writing.values())
        if is_full and own:
            self.kept.remove(own[0])
        elif used >= _CAPACITY:
            above = [one for one in idle if self.has(one.owner) > _FLOORS[one.owner]]
            self.kept.remove((above or own)[0])
        if is_publishing and not (cap is not None and self.held(owner) >= cap):
            self.kept.append(_Kept(owner, name, 1))
            return self.kept[-1]
        self.writing[owner] += 1
        return None

    def let_go(self, blocks: list[_Kept | None], owner: str) -> None:
        for one in reversed(blocks):
            if one is None:
                self.writing[owner] -= 1
                continue
            one.users -= 1
            if not one.users:
                self.ticks += 1
                one.let_go_at = self.ticks


@dataclass(slots=True)
class _Open:
    owner: str
    sequence: KvSequence
    twins: list[_Kept | None]
    is_publishing: bool = True


_STEPS = st.lists(
    st.tuples(
        st.sampled_from("aabbbcccc"),
        st.sampled_from([300, 301, 900]),
        st.integers(1, 8 * BLOCK),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(steps=_STEPS)
def test_the_store_does_what_a_naive_twin_does(steps: list[tuple[str, int, int, int]]) -> None:
    """Up to three requests are open at once; each step opens one and may end the oldest."""
    store, twin = Store(capacity=_CAPACITY), _Twin()
    store.lease()
    running: list[_Open] = []
    for owner, first, length, ends in steps:
        for _ in range(max(ends, len(running) - 2) if running else 0):
            if running:
                _end(store, twin, running.pop(0))
        opened = _begin(store, twin, owner, tokens(length, first))
        if opened is not None:
            running.append(opened)
        _compare(store, twin)
    for one in running:
        _end(store, twin, one)
    _compare(store, twin)
    assert store.cache.used_share == 0


def _begin(store: Store, twin: _Twin, owner: str, prompt: array[int]) -> _Open | None:
    terms = Terms(ticket=_named(owner, floor=_FLOORS[owner], cap=_CAPS[owner]))
    others_before = {other: twin.has(other) for other in "abc" if other != owner}
    sequence = store.cache.admit(prompt, owner, 1, terms)
    if sequence is None:
        assert (
            any(one.users for one in twin.kept)
            or any(twin.writing.values())
            or (store.cache.never_fits(prompt, 1, terms))
        ), "nothing runs, and it was not let in"
        return None
    limit = (len(prompt) - 1) // BLOCK
    twins: list[_Kept | None] = [*twin.bind(sequence.hashes[:limit])]
    assert sequence.cached_tokens == len(twins) * BLOCK
    opened = _Open(owner, sequence, twins)
    for name in sequence.hashes[len(twins) :]:
        written = twin.write(owner, name, is_publishing=opened.is_publishing)
        opened.is_publishing = written is not None
        twins.append(written)
    store.cache.compute(sequence, len(prompt))
    for other, before in others_before.items():
        assert twin.has(other) >= min(before, _FLOORS[other]), f"{other} fell below its floor"
    return opened


def _end(store: Store, twin: _Twin, one: _Open) -> None:
    store.cache.release(one.sequence)
    twin.let_go(one.twins, one.owner)


def _compare(store: Store, twin: _Twin) -> None:
    domains = {domain.name[:1]: domain for domain in store.cache.places.domains}
    for owner in "abc":
        domain = domains.get(owner)
        held, working = (domain.held, domain.working) if domain else (0, 0)
        assert (held, working) == (twin.held(owner), twin.writing[owner])
        cap = _CAPS[owner]
        assert cap is None or held <= cap
    assert store.cache.resident_blocks == len(twin.kept)
    assert all(store.cache.is_resident(one.name) for one in twin.kept)
