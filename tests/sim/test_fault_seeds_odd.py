"""Every invariant holds in a hundred drawn fleets with drawn faults: the odd seeds."""

from __future__ import annotations

import pytest
from fault_halves import ODD, assert_nothing_breaks, assert_rare_states_were_reached, portions
from faults.runs import Tally


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.mark.slow
@pytest.mark.parametrize("seeds", portions(ODD), ids=lambda seeds: f"from-{seeds[0]}")
def test_no_invariant_breaks(seeds: range, tally: Tally) -> None:
    assert_nothing_breaks(seeds, tally)


@pytest.mark.slow
def test_the_odd_seeds_reach_rare_states(tally: Tally) -> None:
    assert_rare_states_were_reached(tally, ODD)
