"""Two real worker processes, one pulling from the other: what a pull may and may not do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pulling import BLOCK, PROMPT, Member, Pair, pair, pulled
from single import cached, right

Two = tuple[Pair, Member, Member]
LONG = 8 * BLOCK


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with pair(tmp_path) as made:
        yield made


def test_pulled_blocks_are_hits_and_the_answer_is_the_computed_one(two: Two) -> None:
    fleet, source, destination = two
    assert source.cached() == 0
    answer = destination.ask(headers=fleet.order(source, fleet.grant(source, destination)))
    told = pulled(answer)
    assert (told["end"], told["reason"]) == ("published", None)
    assert (told["blocks"], told["tokens"], told["bytes"]) == (8, LONG, LONG * 4_096)
    assert told["ms"] > 0
    assert cached(answer.json()) == LONG
    assert right(PROMPT) == right(PROMPT)
