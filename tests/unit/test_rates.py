"""Rates of tenants: waits that are exact, a rate that holds over any time, bounded memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.rates import RateLimits, RateQuota, TokenBucket, retry_after_s
from trunkline.core.records import Instant

ZERO = Instant(0.0)
QUOTA = RateQuota(requests_per_s=2.0, requests_burst=2.0, tokens_per_s=100.0, tokens_burst=1_000.0)


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(2.0, 3.0, ZERO)
    for _ in range(3):
        assert bucket.wait_ms(1.0, ZERO) == 0.0
        bucket.charge(1.0, ZERO)
    assert bucket.wait_ms(1.0, ZERO) == 500.0
    assert bucket.wait_ms(1.0, Instant(499.0)) == pytest.approx(1.0)
    assert bucket.wait_ms(1.0, Instant(500.0)) == 0.0


def test_asking_takes_nothing_and_a_clock_that_stands_gives_nothing() -> None:
    bucket = TokenBucket(1.0, 1.0, Instant(1_000.0))
    assert [bucket.wait_ms(1.0, Instant(1_000.0)) for _ in range(5)] == [0.0] * 5
    bucket.charge(1.0, Instant(1_000.0))
    assert bucket.wait_ms(1.0, Instant(500.0)) == 1_000.0
    assert bucket.wait_ms(1.0, Instant(1_000.0)) == 1_000.0


def test_more_than_the_burst_waits_for_a_full_bucket_and_is_paid_off_afterwards() -> None:
    bucket = TokenBucket(10.0, 100.0, ZERO)
    assert bucket.wait_ms(500.0, ZERO) == 0.0
    bucket.charge(500.0, ZERO)
    assert bucket.wait_ms(1.0, ZERO) == 40_100.0
    assert bucket.wait_ms(500.0, ZERO) == 50_000.0


@pytest.mark.parametrize(
    ("per_s", "burst"),
    [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (1.0, math.nan), (math.nan, 1.0)],
)
def test_a_bucket_without_rate_or_burst_is_refused(per_s: float, burst: float) -> None:
    with pytest.raises(ValueError, match="bucket"):
        TokenBucket(per_s, burst, ZERO)


@pytest.mark.parametrize("burst", [1.0, 3.0])
def test_c97_a_clock_that_steps_back_lets_exactly_the_burst_through(burst: float) -> None:
    bucket = TokenBucket(1.0, burst, Instant(20_000.0))
    passed = 0
    for at_ms in (20_000.0, 10_000.0, 10_001.0, 0.0, 19_999.0, 20_000.0):
        wait_ms = bucket.wait_ms(1.0, Instant(at_ms))
        assert 0.0 <= wait_ms <= 1_000.0
        if not wait_ms:
            bucket.charge(1.0, Instant(at_ms))
            passed += 1
    assert passed == burst
    assert bucket.wait_ms(1.0, Instant(20_500.0)) == 500.0
    assert bucket.wait_ms(1.0, Instant(21_000.0)) == 0.0


def test_c97_a_rate_of_nothing_is_no_rate_of_no_limit() -> None:
    limits = RateLimits()
    with pytest.raises(ValueError, match="bucket"):
        limits.admit("t", 1.0, RateQuota(requests_per_s=0.0), ZERO)
    assert retry_after_s(-1e9) == 1


STEPS = st.lists(st.tuples(st.floats(0.0, 5_000.0), st.floats(0.0, 50.0)), max_size=60)


@given(steps=STEPS, per_s=st.floats(0.1, 50.0), burst=st.floats(1.0, 40.0))
def test_between_any_two_moments_no_more_passes_than_the_bound(
    steps: list[tuple[float, float]], per_s: float, burst: float
) -> None:
    bucket = TokenBucket(per_s, burst, ZERO)
    now_ms, passed = 0.0, list[tuple[float, float]]()
    for pause_ms, amount in steps:
        now_ms += pause_ms
        if bucket.wait_ms(amount, Instant(now_ms)) == 0.0:
            bucket.charge(amount, Instant(now_ms))
            passed.append((now_ms, amount))
    for first in range(len(passed)):
        total, largest = 0.0, burst
        for at_ms, amount in passed[first:]:
            total += amount
            largest = max(largest, amount)
            bound = per_s * (at_ms - passed[first][0]) / 1_000.0 + largest
            assert total <= bound * (1 + 1e-9) + 0.01


@given(steps=STEPS, per_s=st.floats(0.1, 50.0), burst=st.floats(1.0, 40.0))
def test_what_is_to_be_waited_is_just_enough(
    steps: list[tuple[float, float]], per_s: float, burst: float
) -> None:
    bucket = TokenBucket(per_s, burst, ZERO)
    now_ms = 0.0
    for pause_ms, amount in steps:
        now_ms += pause_ms
        wait_ms = bucket.wait_ms(amount, Instant(now_ms))
        if wait_ms > 1.0:
            assert bucket.wait_ms(amount, Instant(now_ms + wait_ms - 0.5)) > 0.0
            now_ms += wait_ms
            assert bucket.wait_ms(amount, Instant(now_ms)) == 0.0
        bucket.charge(amount, Instant(now_ms))


def test_a_request_passes_where_both_rates_allow_it_and_is_charged_to_both_or_to_none() -> None:
    limits = RateLimits()
    assert limits.admit("a", 1_000.0, QUOTA, ZERO) == 0.0
    assert limits.admit("a", 10.0, QUOTA, ZERO) == 100.0
    assert limits.admit("a", 10.0, QUOTA, Instant(100.0)) == 0.0
    # Had the refused one been charged a request, this would have to wait for the requests' rate.
    assert limits.admit("a", 0.0, QUOTA, Instant(400.0)) == pytest.approx(100.0)


def test_tenants_do_not_share_a_bucket() -> None:
    limits = RateLimits()
    limits.admit("a", 1_000.0, QUOTA, ZERO)
    assert limits.admit("a", 1.0, QUOTA, ZERO) > 0.0
    assert limits.admit("b", 1.0, QUOTA, ZERO) == 0.0


def test_tokens_that_become_known_later_count() -> None:
    limits = RateLimits()
    limits.admit("a", 500.0, QUOTA, ZERO)
    limits.charge("a", 700.0, QUOTA, ZERO)
    assert limits.admit("a", 100.0, QUOTA, ZERO) == 3_000.0


def test_tokens_that_become_known_later_count_for_one_whose_buckets_were_full_and_forgotten() -> (
    None
):
    limits = RateLimits()
    quota = RateQuota(tokens_per_s=100.0, tokens_burst=1_000.0)
    assert limits.admit("a", 0.0, quota, ZERO) == 0.0
    assert len(limits) == 0
    limits.charge("a", 1_300.0, quota, ZERO)
    assert limits.levels("a", quota, ZERO) == (None, -300.0)
    assert limits.admit("a", 0.0, quota, ZERO) == 3_000.0


def test_without_a_quota_nothing_waits_and_nothing_is_kept() -> None:
    limits = RateLimits()
    assert [limits.admit("a", 1e9, RateQuota(), ZERO) for _ in range(100)] == [0.0] * 100
    assert len(limits) == 0


def test_a_quota_of_requests_alone_does_not_count_tokens() -> None:
    limits = RateLimits()
    quota = RateQuota(requests_per_s=1.0, requests_burst=2.0)
    waits = [limits.admit("a", 1e9, quota, ZERO) for _ in range(3)]
    limits.charge("a", 1e9, quota, ZERO)
    assert waits == [0.0, 0.0, 1_000.0]


def test_a_changed_quota_counts_from_the_next_request_on() -> None:
    limits = RateLimits()
    slow = RateQuota(requests_per_s=1.0, requests_burst=1.0)
    assert [limits.admit("a", 1.0, slow, ZERO) for _ in range(2)] == [0.0, 1_000.0]
    fast = RateQuota(requests_per_s=10.0, requests_burst=1.0)
    assert [limits.admit("a", 1.0, fast, ZERO) for _ in range(2)] == [0.0, 100.0]


def test_tenants_whose_buckets_are_full_again_are_forgotten() -> None:
    limits = RateLimits()
    for number in range(100):
        limits.admit(f"t{number}", 1.0, QUOTA, ZERO)
    assert len(limits) == 100
    for step in range(60):
        limits.admit("busy", 1.0, QUOTA, Instant(2_000.0 + step))
    assert len(limits) == 1


def test_at_the_bound_the_longest_unused_is_forgotten() -> None:
    limits = RateLimits(max_tenants=3)
    for tenant in ("a", "b", "c"):
        limits.admit(tenant, 1_000.0, QUOTA, ZERO)
    limits.admit("a", 1.0, QUOTA, ZERO)
    limits.admit("d", 1_000.0, QUOTA, ZERO)
    assert len(limits) == 3
    assert limits.admit("a", 1.0, QUOTA, ZERO) > 0.0
    assert limits.admit("b", 1.0, QUOTA, ZERO) == 0.0


@pytest.mark.parametrize(
    ("wait_ms", "seconds"), [(0.0, 1), (1.0, 1), (1_000.0, 1), (1_000.1, 2), (1e12, 3_600)]
)
def test_retry_after_is_in_whole_seconds_rounded_up(wait_ms: float, seconds: int) -> None:
    assert retry_after_s(wait_ms) == seconds
