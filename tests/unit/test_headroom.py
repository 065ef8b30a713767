"""What the loss of a worker would leave, by the table of the cache-loss arithmetic."""

from __future__ import annotations

import math

import pytest

from trunkline.core.headroom import Headroom, loss_factor
from trunkline.core.records import Instant


@pytest.mark.parametrize(
    ("workers", "hit", "factor"),
    [
        *((4, 0.5, 1.67), (4, 0.7, 2.11), (8, 0.5, 1.29), (8, 0.7, 1.48), (8, 0.9, 2.43)),
        *((16, 0.7, 1.22), (32, 0.7, 1.11)),
    ],
)
def test_the_factor_is_that_of_the_table(workers: int, hit: float, factor: float) -> None:
    assert loss_factor(workers, hit) == pytest.approx(factor, abs=0.005)


def test_the_only_worker_cannot_be_lost() -> None:
    assert loss_factor(1, 0.5) == math.inf
    assert loss_factor(0, 0.5) == math.inf
    assert math.isfinite(loss_factor(2, 1.0))


def loaded(utilisation: float, hit: float, workers: int, minutes: float = 10) -> Headroom:
    headroom, now = Headroom(Instant(0.0)), 0.0
    while now < minutes * 60_000.0:
        now += 100.0
        headroom.add(100.0 * workers * utilisation, 1_000, round(1_000 * hit), Instant(now))
    return headroom


@pytest.mark.parametrize("minutes", [0.1, 1, 10])
def test_what_is_left_is_one_over_the_factor_less_what_is_in_use(minutes: float) -> None:
    headroom = loaded(0.5, 0.7, 8, minutes)
    now = Instant(minutes * 60_000.0)
    assert headroom.left(8, now) == pytest.approx(1 / 1.482 - 0.5, abs=0.01)


def test_below_the_highest_utilisation_it_is_positive_and_above_it_negative() -> None:
    for utilisation, is_enough in ((0.67, True), (0.69, False)):
        left = loaded(utilisation, 0.7, 8).left(8, Instant(600_000.0))
        assert left is not None
        assert (left > 0.0) is is_enough


def test_an_idle_fleet_has_all_of_it_again_and_an_empty_one_nothing_to_tell() -> None:
    headroom = loaded(0.9, 0.0, 4)
    assert headroom.left(4, Instant(10 * 3_600_000.0)) == pytest.approx(0.75)
    assert headroom.left(0, Instant(10 * 3_600_000.0)) is None
    assert Headroom(Instant(0.0)).left(4, Instant(0.0)) is None
