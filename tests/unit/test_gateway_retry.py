"""The retry budget holds in every window, and pauses are jittered inside their bounds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from trunkline.config import RetryConfig
from trunkline.gateway.retry import RetryBudget, backoff_ms


def test_a_quiet_gateway_may_retry_up_to_the_floor() -> None:
    budget = RetryBudget(RetryConfig())

    spent = sum(budget.try_spend(1.0) for _ in range(1_000))

    assert spent == 100  # 10 a second over 10 s


def test_retries_stay_a_fifth_of_many_requests() -> None:
    budget = RetryBudget(RetryConfig(retry_budget_floor_per_s=0.0))

    for _ in range(1_000):
        budget.count_request(5.0)
    spent = sum(budget.try_spend(5.0) for _ in range(1_000))

    assert spent == 200


def test_the_window_forgets_after_ten_seconds() -> None:
    budget = RetryBudget(RetryConfig(retry_budget_floor_per_s=0.1))

    assert budget.try_spend(0.0)
    assert not budget.try_spend(9.9)
    assert budget.try_spend(10.0)


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_no_window_of_ten_seconds_ever_exceeds_share_and_floor(
    steps: list[tuple[float, int, int]],
) -> None:
    budget = RetryBudget(RetryConfig(retry_budget_floor_per_s=1.0))
    now_s = 0.0
    history: list[tuple[int, int, int]] = []
    for pause_s, requests, wishes in steps:
        now_s += pause_s
        for _ in range(requests):
            budget.count_request(now_s)
        granted = sum(budget.try_spend(now_s) for _ in range(wishes))
        history.append((int(now_s), requests, granted))
        recent = [entry for entry in history if entry[0] > int(now_s) - 10]
        asked = sum(entry[1] for entry in recent)
        if granted:
            assert sum(entry[2] for entry in recent) <= 0.2 * asked + 10


def test_a_clock_that_steps_back_neither_breaks_nor_refills() -> None:
    budget = RetryBudget(RetryConfig(retry_budget_floor_per_s=0.1))

    assert budget.try_spend(100.0)
    assert not budget.try_spend(90.0)


def test_pauses_double_up_to_their_cap_and_are_jittered() -> None:
    config = RetryConfig(retry_initial_backoff_ms=25, retry_max_backoff_ms=250)
    dice = random.Random(1)

    for index, ceiling_ms in enumerate((25, 50, 100, 200, 250, 250)):
        pauses_ms = [backoff_ms(config, index, dice) for _ in range(50)]
        assert all(ceiling_ms / 2 <= pause_ms <= ceiling_ms for pause_ms in pauses_ms)
        assert len(set(pauses_ms)) > 40


def test_f9_where_every_call_fails_for_half_a_minute_attempts_stay_at_1_2_a_request() -> None:
    config = RetryConfig()
    budget = RetryBudget(config)
    requests = retries = 0
    for second in range(30):
        for number in range(1_000):
            now_s = second + number / 1_000.0
            budget.count_request(now_s)
            requests += 1
            for _ in range(config.retry_max_retries):
                retries += budget.try_spend(now_s)
    floor = config.retry_budget_floor_per_s * 30
    assert retries <= config.retry_budget_ratio * requests + floor
    assert (requests + retries) / requests <= 1.2 + floor / requests
