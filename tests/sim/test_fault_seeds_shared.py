"""Every invariant holds in drawn fleets of several gateways, with drawn faults.

One seed again, told: `make faults SEED=7 ARGS='--gateways 2'`. Read `faults/shared.py` for what the
gateways share.
"""

from __future__ import annotations

import pytest
from faults.runs import Tally, command_of, explained, tallied
from faults.setting import OF_SEVERAL, setting_of

PORTIONS = [
    *((2, range(first, first + 10)) for first in range(0, 40, 10)),
    (3, range(10)),
]
OWN_STATES = (
    *("two gateways reuse", "gateway without a lease", "sent without reuse"),
    *("gateway-cut under load", "registry restored", "log control.restored"),
)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gateways", "seeds"), PORTIONS, ids=lambda what: str(what).replace(" ", "")
)
def test_no_invariant_breaks_where_gateways_share_a_registry(
    gateways: int, seeds: range, tally: Tally
) -> None:
    found = tallied(seeds, gateways=gateways)
    assert not found.failed, explained(found.failed[0])
    tally.runs += found.runs
    tally.reached.update(found.reached)


@pytest.mark.slow
def test_what_only_several_gateways_can_come_to_was_reached(tally: Tally) -> None:
    if tally.runs < sum(len(seeds) for _, seeds in PORTIONS):
        pytest.skip("not all seeds were run")
    assert set(OWN_STATES) <= set(tally.rare), tally.table()


def test_the_command_of_a_run_says_how_many_gateways_it_has() -> None:
    assert command_of(setting_of(5, gateways=3)) == "make faults SEED=5 ARGS='--gateways 3'"


def test_one_gateway_meets_nothing_that_only_several_can() -> None:
    for seed in range(50):
        assert OF_SEVERAL.isdisjoint(setting_of(seed).kinds)
