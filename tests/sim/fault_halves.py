"""What the two halves of the seeds of a change ask for; they are two files so that they run side by
side.
"""

from __future__ import annotations

from collections.abc import Iterable

from faults.runs import explained, tallied

SEEDS = 200
RARE_AT_LEAST = 40
"""Of `faults.rare.CATALOGUE`, in each half. All of it is asked of ten thousand seeds."""


def assert_nothing_breaks(seeds: Iterable[int]) -> None:
    tally = tallied(seeds)
    assert not tally.failed, explained(tally.failed[0])
    assert len(tally.rare) >= RARE_AT_LEAST, tally.table()
