"""The fair queue: shares under floods, its stated bounds, its limits, and what it forgets."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.fairness import Added, FairQueue, Full, Waiting


def queue_of(
    max_entries: int = 10_000, max_per_tenant: int = 5_000, max_resting: int = 10_000
) -> FairQueue[int]:
    return FairQueue(
        max_entries=max_entries, max_per_tenant=max_per_tenant, max_resting=max_resting
    )


def added(
    queue: FairQueue[int], tenant: str, cost: float = 1.0, item: int = 0, weight: float = 1.0
) -> Waiting[int]:
    outcome = queue.add(tenant, cost, item, weight=weight)
    assert isinstance(outcome, Added), outcome
    return outcome.entry


def taken(queue: FairQueue[int]) -> str:
    entry = queue.take()
    return "" if entry is None else entry.tenant


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    queue = queue_of()
    for number in range(100):
        added(queue, "a", cost=1.0 + number % 7, item=number)
    order = [entry.item for entry in iter(queue.take, None)]
    assert order == list(range(100))


def test_a_tenant_waits_for_one_entry_of_a_flood_and_not_for_all() -> None:
    queue = queue_of()
    for _ in range(1_000):
        added(queue, "flood", 1_000.0)
    assert taken(queue) == "flood"
    added(queue, "quiet", 10_000.0)
    assert [taken(queue) for _ in range(3)] == ["quiet", "flood", "flood"]


def test_many_flooding_tenants_delay_a_quiet_one_by_one_entry_each() -> None:
    queue = queue_of()
    for number in range(50):
        for _ in range(20):
            added(queue, f"flood{number}", 500.0)
    for _ in range(333):
        taken(queue)
    added(queue, "quiet", 10.0)
    assert "quiet" in [taken(queue) for _ in range(51)]


def test_tenants_share_by_tokens_and_not_by_requests() -> None:
    queue = queue_of()
    for _ in range(100):
        added(queue, "long", 9_000.0)
    for _ in range(900):
        added(queue, "short", 1_000.0)
    first = [taken(queue) for _ in range(500)]
    assert first.count("long") == pytest.approx(50, abs=1)


def test_a_weight_of_three_gets_three_times_the_tokens() -> None:
    queue = queue_of()
    for _ in range(1_000):
        added(queue, "gold", 100.0, weight=3.0)
        added(queue, "plain", 100.0)
    first = [taken(queue) for _ in range(400)]
    assert first.count("gold") == pytest.approx(300, abs=1)


def test_being_silent_saves_up_no_turns() -> None:
    queue = queue_of()
    for _ in range(500):
        added(queue, "busy", 100.0)
    for _ in range(200):
        assert taken(queue) == "busy"
    for _ in range(200):
        added(queue, "silent", 100.0)
    first = [taken(queue) for _ in range(100)]
    assert first.count("silent") == pytest.approx(50, abs=1)


def test_whoever_comes_back_with_nothing_owed_is_not_held_back() -> None:
    queue = queue_of()
    added(queue, "huge", 1_000_000.0)
    assert taken(queue) == "huge"
    added(queue, "huge", 1.0)
    added(queue, "other", 1.0)
    assert [taken(queue), taken(queue)] == ["other", "huge"]
    queue.restart()
    added(queue, "huge", 1.0)
    added(queue, "other", 1.0)
    assert [taken(queue), taken(queue)] == ["huge", "other"]


def test_a_cost_of_nothing_is_a_cost_of_one() -> None:
    queue = queue_of()
    for _ in range(100):
        added(queue, "free", 0.0)
        added(queue, "paid", 1.0)
    first = [taken(queue) for _ in range(50)]
    assert first.count("free") == 25


def test_equal_tags_go_by_the_order_in_which_tenants_came() -> None:
    queue = queue_of()
    for tenant in ("c", "a", "b"):
        added(queue, tenant, 5.0)
    assert [taken(queue) for _ in range(4)] == ["c", "a", "b", ""]


class TestCancelling:
    """Entries that nobody waits for any more."""

    def test_what_is_cancelled_is_not_taken_and_costs_its_tenant_nothing(self) -> None:
        queue = queue_of()
        entries = [added(queue, "a", 1e9, item=number) for number in range(3)]
        added(queue, "b", 10.0)
        last = added(queue, "a", 10.0, item=9)
        assert all(queue.cancel(entry) for entry in entries)
        assert len(queue) == 2
        assert [taken(queue), taken(queue), taken(queue)] == ["a", "b", ""]
        assert not queue.cancel(last)

    def test_it_is_cancelled_once(self) -> None:
        queue = queue_of()
        entry = added(queue, "a")
        assert [queue.cancel(entry), queue.cancel(entry)] == [True, False]
        assert len(queue) == 0
        assert queue.tenant_count == 0

    def test_cancelling_and_coming_again_leaves_no_litter(self) -> None:
        queue = queue_of()
        added(queue, "owes little", 1e3)
        added(queue, "owes much", 1e6)
        assert [taken(queue), taken(queue)] == ["owes little", "owes much"]
        added(queue, "other", 1.0)
        for _ in range(5_000):
            assert queue.cancel(added(queue, "owes much"))
            assert queue.cancel(added(queue, "owes nothing"))
            assert max(queue.heap_sizes) <= 100
        assert queue.tenant_count == 3

    def test_cancelling_and_coming_again_brings_no_second_turn(self) -> None:
        queue = queue_of()
        added(queue, "owes", 100.0)
        for _ in range(4):
            added(queue, "b", 50.0)
        assert [taken(queue), taken(queue)] == ["owes", "b"]
        for _ in range(3):
            queue.cancel(added(queue, "owes", 50.0))
        for _ in range(3):
            added(queue, "owes", 50.0)
        assert [taken(queue) for _ in range(6)] == ["b", "owes", "b", "owes", "b", "owes"]


class TestBounds:
    """What happens when a bound is reached."""

    def test_a_tenant_may_have_so_many_and_no_more(self) -> None:
        queue = queue_of(max_entries=10, max_per_tenant=3)
        for _ in range(3):
            added(queue, "a")
        assert queue.add("a", 1.0, 0) is Full.TENANT
        assert queue.depth("a") == 3
        added(queue, "b")

    def test_a_full_queue_makes_room_for_whoever_has_less_at_the_cost_of_who_has_most(
        self,
    ) -> None:
        queue = queue_of(max_entries=6, max_per_tenant=6)
        flood = [added(queue, "flood", item=number) for number in range(5)]
        added(queue, "some")
        outcome = queue.add("quiet", 1.0, 0)
        assert isinstance(outcome, Added)
        assert outcome.pushed_out is flood[4]
        assert (len(queue), queue.depth("flood"), queue.depth("quiet")) == (6, 4, 1)
        assert queue.add("flood", 1.0, 0) is Full.ALL

    def test_a_full_queue_of_equals_takes_nobody_in(self) -> None:
        queue = queue_of(max_entries=4, max_per_tenant=4)
        for tenant in ("a", "b", "a", "b"):
            added(queue, tenant)
        assert queue.add("a", 1.0, 0) is Full.ALL
        assert isinstance(queue.add("c", 1.0, 0), Added)
        # Now b has two, a and c have one: taking from b for c would only turn it round.
        assert queue.add("c", 1.0, 0) is Full.ALL
        assert len(queue) == 4

    def test_no_flood_keeps_a_newcomer_out_of_a_full_queue(self) -> None:
        queue = queue_of(max_entries=100, max_per_tenant=50)
        for number in range(1_000):
            queue.add(f"flood{number % 10}", 1.0, 0)
        assert len(queue) == 100
        for number in range(50):
            assert isinstance(queue.add(f"quiet{number}", 1.0, 0), Added)
        assert len(queue) == 100

    def test_tenants_that_owe_nothing_are_forgotten(self) -> None:
        queue = queue_of()
        for number in range(1_000):
            added(queue, f"t{number}", 1.0)
            assert taken(queue) == f"t{number}"
            added(queue, "steady", 2.0)
            assert taken(queue) == "steady"
        assert queue.tenant_count <= 3

    def test_tenants_that_rest_and_owe_are_bounded(self) -> None:
        queue = queue_of(max_resting=10)
        for number in range(100):
            added(queue, f"t{number}", 1_000.0 + number)
        added(queue, "z", 1.0)
        while len(queue) > 1:
            taken(queue)
            assert queue.tenant_count <= 10 + len(queue)
        # Those that are left owe most.
        added(queue, "t0", 1.0)
        added(queue, "t99", 1.0)
        assert [taken(queue) for _ in range(3)] == ["z", "t0", "t99"]


class Textbook:
    """Start-time fair queueing as it is written down: tags are given at arrival, and kept."""

    def __init__(self) -> None:
        self.virtual = 0.0
        self.finish: dict[str, float] = {}
        self.waiting: list[tuple[float, str, float, float]] = []

    def add(self, tenant: str, cost: float, weight: float) -> None:
        start = max(self.virtual, self.finish.get(tenant, 0.0))
        self.finish[tenant] = start + cost / weight
        self.waiting.append((start, tenant, cost, weight))

    def take(self) -> list[tuple[float, str, float, float]]:
        """All that may be next: those with the least tag, the first of each tenant."""
        least = min(start for start, *_ in self.waiting)
        return [entry for entry in self.waiting if entry[0] == least]


# Powers of two, so that sums of costs over weights are exact and equal tags are equal.
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 4.0}
OPERATIONS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 1_000)) | st.none(), max_size=120
)


@given(OPERATIONS)
def test_without_cancelling_it_is_the_textbooks_order(
    operations: list[tuple[str, int] | None],
) -> None:
    queue, book = queue_of(), Textbook()
    for operation in operations:
        if operation is not None:
            tenant, cost = operation
            added(queue, tenant, cost, weight=WEIGHTS[tenant])
            book.add(tenant, float(cost), WEIGHTS[tenant])
            continue
        entry = queue.take()
        assert (entry is None) is (not book.waiting)
        if entry is not None:
            chosen = next(c for c in book.take() if c[1] == entry.tenant)
            assert chosen[2] == entry.cost_tokens
            book.waiting.remove(chosen)
            book.virtual = chosen[0]


@given(OPERATIONS)
def test_while_two_tenants_wait_their_shares_differ_by_at_most_one_entry_each(
    operations: list[tuple[str, int] | None],
) -> None:
    """Theorem 1, over every stretch of takes in which both wait all the time."""
    queue = queue_of()
    takes: list[tuple[str, float, frozenset[str]]] = []
    largest = dict.fromkeys(WEIGHTS, 0.0)
    for operation in [*operations, *([None] * 130)]:
        if operation is not None:
            added(queue, operation[0], operation[1], weight=WEIGHTS[operation[0]])
            largest[operation[0]] = max(largest[operation[0]], float(operation[1]))
        else:
            before = frozenset(t for t in WEIGHTS if queue.depth(t))
            entry = queue.take()
            if entry is not None:
                takes.append((entry.tenant, entry.cost_tokens, before))
    for one, other in combinations(WEIGHTS, 2):
        bound = largest[one] / WEIGHTS[one] + largest[other] / WEIGHTS[other]
        for first in range(len(takes)):
            share = {one: 0.0, other: 0.0}
            for tenant, cost, waiting in takes[first:]:
                if not {one, other} <= waiting:
                    break
                if tenant in share:
                    share[tenant] += cost / WEIGHTS[tenant]
                assert abs(share[one] - share[other]) <= bound


@given(OPERATIONS, st.sampled_from("abcd"), st.integers(1, 1_000))
def test_an_entry_waits_for_no_more_than_the_stated_bound(
    operations: list[tuple[str, int] | None], tenant: str, cost: int
) -> None:
    queue = queue_of()
    largest = dict.fromkeys(WEIGHTS, 0.0)
    own_waiting = 0.0
    for operation in operations:
        if operation is None:
            entry = queue.take()
            own_waiting -= entry.cost_tokens if entry and entry.tenant == tenant else 0.0
        else:
            added(queue, operation[0], operation[1], weight=WEIGHTS[operation[0]])
            largest[operation[0]] = max(largest[operation[0]], float(operation[1]))
            own_waiting += operation[1] if operation[0] == tenant else 0.0
    advance = largest[tenant]
    mine = added(queue, tenant, cost, item=1, weight=WEIGHTS[tenant])
    others = dict.fromkeys(WEIGHTS, 0.0)
    while True:
        for flooding in WEIGHTS:  # everybody else keeps asking for more
            added(queue, flooding, 1_000.0, weight=WEIGHTS[flooding])
        entry = queue.take()
        assert entry is not None
        if entry is mine:
            break
        others[entry.tenant] += entry.cost_tokens
    for other, got in others.items():
        if other != tenant:
            owed = (own_waiting + advance) * WEIGHTS[other] / WEIGHTS[tenant]
            assert got <= owed + 1_000.0


STEP = st.tuples(st.sampled_from("abc"), st.sampled_from([1.0, 7.0, 100.0]), st.booleans())


@given(steps=st.lists(STEP, max_size=60))
def test_a_cost_that_is_told_when_an_entry_is_taken_counts_as_if_it_had_been_known(
    steps: list[tuple[str, float, bool]],
) -> None:
    """The order goes by where entries start, so what one costs is needed when it is taken."""
    known, told = queue_of(), queue_of()
    weights = {"a": 1.0, "b": 3.0, "c": 0.5}
    for number, (tenant, cost, takes) in enumerate(steps):
        added(known, tenant, cost=cost, item=number, weight=weights[tenant])
        added(told, tenant, cost=50.0, item=number, weight=weights[tenant])
        for _ in range(2 if takes else 0):
            first, second = known.take(), told.take()
            assert (first and first.item) == (second and second.item)
            if second is not None:
                told.recharge(second, steps[second.item][1])
            assert told.tenant_count == known.tenant_count
            assert told._resting_count == known._resting_count
    while (entry := told.take()) is not None:
        told.recharge(entry, 0.0)
    assert told._resting_count == told.tenant_count


def test_a_cost_that_is_told_for_one_that_was_forgiven_changes_nothing() -> None:
    queue = queue_of(max_resting=1)
    for tenant, cost in [("a", 10.0), ("b", 1.0)]:
        added(queue, tenant, cost=cost)
        entry = queue.take()
        assert entry is not None
    assert queue.tenant_count == 1
    queue.recharge(entry, 90.0)
    assert queue.tenant_count == 1
