"""Rates of tenants: what is refused, for how long, and what a client is told."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict

import pytest
from fair_world import Policy, asks
from picker_bench import ids

from hand_clock import HandClock
from trunkline.gateway import allowance as module
from trunkline.gateway.allowance import Allowance, RateLimited


class Till:
    """Policies, an allowance over them, and a clock that is moved."""

    def __init__(self, **options: float) -> None:
        self.clock = HandClock(ms=1_000.0)
        self.policies: defaultdict[str, Policy] = defaultdict(Policy)
        self.allowance = Allowance(
            self.policies.__getitem__, self.clock, **options  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    def is_admitted(self, tenant: str, tokens: int = 0) -> bool:
        """One request, whose prompt is known at once."""
        try:
            self.allowance.admit(tenant)
        except RateLimited:
            return False
        self.allowance.charge(tenant, asks(tenant, ids(tokens)))
        return True


def test_tenants_without_a_limit_leave_nothing_behind_and_are_told_nothing() -> None:
    till = Till()
    asked = asks("a", ids(1_000))
    for _ in range(1_000):
        till.allowance.admit("a")
        till.allowance.charge("a", asked)
    assert len(till.allowance) == 0
    assert asked.limit_headers == ()


@pytest.mark.parametrize(("per_s", "wait_s"), [(0.1, 10), (0.3, 4), (1.0, 1), (50.0, 1)])
def test_retry_after_is_the_whole_seconds_until_it_would_be_admitted(
    per_s: float, wait_s: int
) -> None:
    till = Till()
    till.policies["a"] = Policy(requests_per_s=per_s)
    while till.is_admitted("a"):
        pass
    with pytest.raises(RateLimited) as refused:
        till.allowance.admit("a")
    assert (refused.value.status, refused.value.retry_after_s) == (429, wait_s)
    till.clock.ms += 1_000.0 * (wait_s - 1)
    assert not till.is_admitted("a")
    till.clock.ms += 1_000.0
    assert till.is_admitted("a")


def test_a_default_rate_of_tokens_is_for_those_whose_policy_says_nothing() -> None:
    till = Till(default_tokens_per_s=100.0)
    till.policies["own"] = Policy(tokens_per_s=10_000.0)
    for tenant in ("a", "b", "own"):
        assert till.is_admitted(tenant, 500)
    assert [till.is_admitted(tenant) for tenant in ("a", "b", "own")] == [False, False, True]


@pytest.mark.parametrize("seed", range(5))
def test_between_any_two_moments_no_tenant_gets_more_than_rate_and_burst_and_one_prompt(
    seed: int,
) -> None:
    dice = random.Random(seed)
    per_s, largest = 1_000.0, 3_000
    till = Till()
    till.policies["a"] = Policy(tokens_per_s=per_s)
    taken = [(0.0, 0)]
    for _ in range(600):
        till.clock.ms += dice.expovariate(1 / 50.0)
        tokens = dice.randrange(1, largest)
        if till.is_admitted("a", tokens):
            taken.append((till.clock.ms, tokens))
    assert len(taken) > 20
    for first in range(1, len(taken)):
        got = 0
        for at_ms, tokens in taken[first:]:
            got += tokens
            assert got <= (at_ms - taken[first][0]) / 1_000.0 * per_s + per_s + largest
    # And what it is owed it gets: it asked for far more all the time.
    total = sum(tokens for _, tokens in taken)
    assert total >= (taken[-1][0] - taken[1][0]) / 1_000.0 * per_s - largest


def test_a_refused_request_is_not_counted() -> None:
    till = Till()
    till.policies["a"] = Policy(requests_per_s=2.0)
    assert [till.is_admitted("a") for _ in range(10)] == [True] * 2 + [False] * 8
    till.clock.ms += 500.0
    assert [till.is_admitted("a") for _ in range(2)] == [True, False]
    assert till.allowance.refused_requests == 9
    assert till.allowance.refused_tokens == 0


def test_what_is_told_is_rounded_so_that_who_believes_it_is_admitted() -> None:
    till = Till()
    till.policies["a"] = Policy(requests_per_s=3.0, tokens_per_s=10.0)
    asked = asks("a", ids(1_005))
    till.allowance.admit("a")
    till.allowance.charge("a", asked)
    assert dict(asked.limit_headers) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "334ms",
        "x-ratelimit-limit-tokens": "10",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m41s",
    }


def test_a_prompt_that_is_not_read_costs_no_tokens_and_a_batch_costs_all_of_it() -> None:
    till = Till()
    till.policies["a"] = Policy(tokens_per_s=100.0)
    unread = asks("a", ids(1))
    unread.prompt = None
    till.allowance.charge("a", unread)
    assert dict(unread.limit_headers)["x-ratelimit-remaining-tokens"] == "100"
    batch = asks("a", array("I", [1, 2, 3]))
    batch.further_tokens = 50
    till.allowance.charge("a", batch)
    assert dict(batch.limit_headers)["x-ratelimit-remaining-tokens"] == "47"


def test_tenants_and_pairs_of_rates_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUOTAS", 8)
    till = Till(max_tenants=5)
    for number in range(50):
        till.policies[f"t{number}"] = Policy(tokens_per_s=1.0 + number)
        assert till.is_admitted(f"t{number}", 10_000)
        assert len(till.allowance) <= 5
        assert len(till.allowance._quotas) <= 8
    assert not till.is_admitted("t49")
    assert till.is_admitted("t0"), "the longest unused was not forgotten"


def test_of_a_limit_that_was_lifted_nothing_is_kept() -> None:
    till = Till()
    till.policies["a"] = Policy(tokens_per_s=1.0)
    assert till.is_admitted("a", 1_000)
    assert len(till.allowance) == 1
    till.policies["a"] = Policy()
    assert till.is_admitted("a", 1_000)
    assert len(till.allowance) == 0
