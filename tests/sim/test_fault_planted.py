"""Each check of the simulation can fail: planted faults, each found by the check that is named.

All of them as a table: `PYTHONPATH=tests:tests/sim python -m faults.planted`.
"""

from __future__ import annotations

import pytest
from faults.planted import PLANTED
from faults.planting import Planted, catch, row_of

CHECKS = {"I1", "I2", "I3", "I3b", "I4", "I5", "I7", "I8", "I9", "I10", "I12", "LIVE", "DIR"}


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name.replace(" ", "-"))
def test_a_planted_fault_is_found_by_its_check(planted: Planted) -> None:
    caught = catch(planted)
    assert caught.run is not None, row_of(caught)


def test_there_are_enough_planted_faults_and_one_at_least_for_every_check() -> None:
    assert len(PLANTED) >= 25
    assert len({planted.name for planted in PLANTED}) == len(PLANTED)
    assert {check for planted in PLANTED for check in planted.found_by} == CHECKS


def test_nothing_stays_broken_behind_a_planted_fault() -> None:
    for planted in PLANTED:
        before = [owner.__dict__[name] for owner, name, _ in planted.swaps]
        with planted():
            inside = [owner.__dict__[name] for owner, name, _ in planted.swaps]
        assert all(one is not other for one, other in zip(before, inside, strict=True))
        assert before == [owner.__dict__[name] for owner, name, _ in planted.swaps]
