"""What seeds of the long run once broke in, each as small as it was found.

The first three were mistakes of the checks, which took for the product's what was none of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from faults.runs import played, told
from faults.setting import setting_of

FOUND: tuple[tuple[str, int, tuple[int, ...], tuple[int, ...]], ...] = (
    ("a dead gateway writes when all is cleared away", 4098, (2, 3, 6, 10), (3,)),
    ("an idle connection is closed just when the world looks", 6748, (), (32, 36)),
    ("a breaker opened for a long queue", 6202, (), (16, *range(18, 29))),
)
"""What it was, the seed, and the numbers of its troubles and calls."""


@pytest.mark.parametrize(
    ("what", "seed", "troubles", "calls"), FOUND, ids=lambda one: str(one)[:40]
)
def test_what_was_found_once_holds(
    what: str, seed: int, troubles: tuple[int, ...], calls: tuple[int, ...]
) -> None:
    whole = setting_of(seed, pulls=False)
    smaller = replace(
        whole,
        troubles=tuple(whole.troubles[number] for number in troubles),
        calls=tuple(whole.calls[number] for number in calls),
    )
    run = played(smaller)
    assert not run.violations, f"{what}:\n{told(run)}"
