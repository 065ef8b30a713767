"""Every invariant holds in a hundred drawn fleets with drawn faults: the odd seeds."""

from __future__ import annotations

import pytest
from fault_halves import SEEDS, assert_nothing_breaks


@pytest.mark.slow
def test_no_invariant_breaks_in_any_odd_seed() -> None:
    assert_nothing_breaks(range(1, SEEDS, 2))
