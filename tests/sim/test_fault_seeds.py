"""Every invariant holds in a hundred drawn fleets with drawn faults: the even seeds.

One seed again, told: `make faults SEED=7`. Read `faults/world.py` for what a run is.
"""

from __future__ import annotations

import pytest
from fault_halves import SEEDS, assert_nothing_breaks


@pytest.mark.slow
def test_no_invariant_breaks_in_any_even_seed() -> None:
    assert_nothing_breaks(range(0, SEEDS, 2))
