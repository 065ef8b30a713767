"""What the two halves of the seeds of a change ask for; they are two files so that they run side by
side, each a few seeds at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from faults.runs import Tally, explained, tallied

EVEN, ODD = range(0, 200, 2), range(1, 200, 2)
AT_ONCE = 10
RARE_AT_LEAST = 40
"""Of `faults.rare.CATALOGUE`, in each half."""


def portions(seeds: range) -> list[range]:
    return [seeds[first : first + AT_ONCE] for first in range(0, len(seeds), AT_ONCE)]


def assert_nothing_breaks(seeds: Sequence[int], all_of_them: Tally) -> None:
    tally = tallied(seeds)
    assert not tally.failed, explained(tally.failed[0])
    all_of_them.runs += tally.runs
    all_of_them.reached.update(tally.reached)


def assert_rare_states_were_reached(all_of_them: Tally, seeds: range) -> None:
    if all_of_them.runs < len(seeds):
        pytest.skip("not all seeds were run")
    assert len(all_of_them.rare) >= RARE_AT_LEAST, all_of_them.table()
