"""What is counted of each tenant: once a request, as the fleet's own figures, within a bound."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import astuple
from typing import NamedTuple

import pytest
from fair_world import Policy, asks
from picker_bench import BLOCK, COMPLETE, FAILED, W0, W1, Bench, ids

from hand_clock import HandClock
from trunkline.core.records import WorkerId
from trunkline.gateway import tenant_counts as module
from trunkline.gateway.allowance import Allowance, RateLimited
from trunkline.gateway.contracts import InferenceRequest, Pick
from trunkline.gateway.tenant_counts import TenantCount, TenantCounts


class Told(NamedTuple):
    """One thing that was counted; `tenant` is empty for what is not among those kept."""

    tenant: str
    requests: int = 0
    limited: int = 0
    prompt_tokens: int = 0
    reported_tokens: int = 0
    hit_tokens: int = 0


class Twin:
    """Keeps all that it was told, and adds it up when it is asked."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.kept: list[str] = []
        self.had_no_room = False
        self.told: list[Told] = []

    def tell(self, told: Told, *, may_be_new: bool) -> None:
        if may_be_new and told.tenant not in self.kept and len(self.kept) < self.bound:
            self.kept.append(told.tenant)
        self.had_no_room |= may_be_new and told.tenant not in self.kept
        is_kept = told.tenant in self.kept
        self.told.append(told if is_kept else told._replace(tenant=""))

    def forget(self, tenant: str) -> None:
        if tenant in self.kept:
            self.kept.remove(tenant)
            self.told = [one for one in self.told if one.tenant != tenant]

    def sums(self, tenant: str) -> tuple[int, ...]:
        own = [one[1:] for one in self.told if one.tenant == tenant]
        return tuple(map(sum, zip(*own, strict=True))) if own else (0,) * 5


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_a_list_that_is_added_up(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(module, "MAX_COUNTED", bound := rng.randint(1, 6))
    names = [f"t{number}" for number in range(8)]
    counts, twin = TenantCounts(), Twin(bound)
    for _ in range(400):
        tenant, tokens, cached = rng.choice(names), rng.randint(0, 99), rng.randint(0, 9)
        match rng.choice(["sent", "sent", "reported", "limited", "forget"][: rng.choice([4, 5])]):
            case "sent":
                counts.sent(tenant, tokens)
                twin.tell(Told(tenant, requests=1, prompt_tokens=tokens), may_be_new=True)
            case "reported":
                counts.reported(tenant, tokens, cached)
                told = Told(tenant, reported_tokens=tokens, hit_tokens=cached)
                twin.tell(told, may_be_new=False)
            case "limited":
                counts.limited(tenant)
                twin.tell(Told(tenant, limited=1), may_be_new=True)
            case _:
                counts.forget(tenant)
                twin.forget(tenant)
        assert len(counts) == len(twin.kept)
        for name in names:
            shown = counts.of(name)
            if shown is None:
                assert name not in twin.kept
                assert twin.had_no_room
            else:
                assert name in twin.kept or not twin.had_no_room, "it may be among the others"
                assert astuple(shown) == twin.sums(name)
        assert astuple(counts.others()) == twin.sums("")


def test_at_the_bound_new_tenants_are_counted_together_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_COUNTED", 3)
    counts = TenantCounts()
    for number in range(10):
        counts.sent(f"t{number}", 100)
        counts.reported(f"t{number}", 100, 40)
    assert len(counts) == 3
    assert [counts.of(f"t{number}") is not None for number in range(10)] == [True] * 3 + [False] * 7
    of_seven = TenantCount(
        requests=7, prompt_tokens=700, reported_tokens=700, hit_tokens=280
    )  # fmt: skip
    assert counts.others() == of_seven
    counts.forget("t0")
    assert counts.of("t9") is None, "it is among the others as it was before"
    counts.sent("t9", 1)
    assert counts.of("t9") == TenantCount(requests=1, prompt_tokens=1), "there is room again"
    assert counts.others() == of_seven


def test_what_is_shown_does_not_move() -> None:
    counts = TenantCounts()
    counts.sent("a", 5)
    shown = counts.of("a")
    counts.sent("a", 5)
    assert shown == TenantCount(requests=1, prompt_tokens=5)


# --- where it is counted --------------------------------------------------------------------------


def counting(*workers: WorkerId) -> tuple[Bench, TenantCounts]:
    bench, counts = Bench(*workers), TenantCounts()
    bench.picker.accounts.tenants = counts
    return bench, counts


def picked(bench: Bench, asked: InferenceRequest, *tried: WorkerId) -> Pick:
    pick = bench.picker.pick(asked, frozenset(tried))
    assert isinstance(pick, Pick)
    return pick


def test_a_request_counts_once_however_many_attempts_it_takes() -> None:
    bench, counts = counting(W0, W1)
    asked = asks("a", ids(3 * BLOCK))
    first = picked(bench, asked)
    bench.picker.ended(first, FAILED, None)
    second = picked(bench, asked, first.worker)
    bench.picker.first_byte(second)
    bench.picker.ended(second, COMPLETE, BLOCK)
    assert counts.of("a") == TenantCount(
        requests=1, prompt_tokens=3 * BLOCK, reported_tokens=3 * BLOCK, hit_tokens=BLOCK
    )


def test_hits_are_held_against_the_prompts_of_answers_that_told_alone() -> None:
    bench, counts = counting(W0)
    for cached in (None, BLOCK):
        pick = picked(bench, asks("a", ids(4 * BLOCK)))
        bench.picker.first_byte(pick)
        bench.picker.ended(pick, COMPLETE, cached)
    assert counts.of("a") == TenantCount(
        requests=2, prompt_tokens=8 * BLOCK, reported_tokens=4 * BLOCK, hit_tokens=BLOCK
    )


def test_tenants_together_are_what_the_fleets_own_figure_says() -> None:
    bench, counts = counting(W0, W1)
    rng = random.Random(3)
    for _ in range(60):
        pick = picked(bench, asks(rng.choice("abc"), ids(rng.randint(1, 9) * BLOCK)))
        end = rng.choice([COMPLETE, COMPLETE, FAILED])
        bench.picker.first_byte(pick)
        bench.picker.ended(pick, end, rng.choice([None, 0, BLOCK]) if end is COMPLETE else None)
    rows = [counts.of(tenant) for tenant in "abc"]
    accounts = bench.picker.accounts
    assert sum(row.requests for row in rows if row) == accounts.decisions == 60
    assert sum(row.reported_tokens for row in rows if row) == accounts.prompt_tokens
    assert sum(row.hit_tokens for row in rows if row) == accounts.reused_tokens > 0


def test_where_everybody_is_one_tenant_nothing_is_counted() -> None:
    bench = Bench(W0)
    asked = asks("a", ids(BLOCK))
    bench.picker.ended(picked(bench, asked), COMPLETE, 0)
    assert bench.picker.accounts.tenants is None
    assert not asked.is_counted


def test_who_is_over_its_rate_is_counted_as_refused_by_itself() -> None:
    policies: defaultdict[str, Policy] = defaultdict(Policy)
    policies["a"] = Policy(requests_per_s=1.0)
    allowance = Allowance(policies.__getitem__, HandClock(ms=1_000.0))
    allowance.admit("b")
    allowance.admit("a")
    for _ in range(2):
        with pytest.raises(RateLimited):
            allowance.admit("a")
    assert allowance.counts.of("a") == TenantCount(limited=2)
    assert allowance.counts.of("b") == TenantCount()
