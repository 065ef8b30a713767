"""What the dashboard is told, from the books that a gateway keeps."""

from __future__ import annotations

from typing import Any

import pytest
from picker_bench import ids, request
from test_receipts import decision, outcome

from trunkline.adapters.clock import SystemClock
from trunkline.assembly import Core
from trunkline.config import Config
from trunkline.core.fleet import WorkerState
from trunkline.core.records import WallTime, WorkerId
from trunkline.gateway.contracts import AttemptEnd, Pick
from trunkline.gateway.counters import Counters
from trunkline.gateway.metrics import HistogramView
from trunkline.gateway.overview import SHOWN_DECISIONS, DecisionFilter, Overview
from trunkline.overview_side import SHOWN_RUNNING, Overviews, from_buckets
from trunkline.ports.worker import Endpoint, Target
from trunkline.wiring import build_core

BLOCK = 16


class NoMembers:
    """A membership that shows nobody."""

    def views(self) -> list[Any]:
        return []


class Desk:
    """A core with two workers, and what is shown of it."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.core: Core = build_core(Config(), self.clock)
        for name in map(WorkerId, ("w0", "w1")):
            slot = self.core.directory.join(name, block_tokens=BLOCK)
            self.core.fleet.add(WorkerState(worker=name, slot=slot, block_tokens=BLOCK))
            endpoint = Endpoint(host="127.0.0.1", port=1, host_header="w")
            target = Target(worker=name, endpoint=endpoint, predicted_ttl_ms=60_000.0)
            self.core.picker.add_target(target)
        members: Any = NoMembers()
        self.overviews = Overviews(
            membership=members,
            cores=[self.core],
            counters=Counters(),
            waiting=lambda: 3,
            clock=self.clock,
        )

    def ask(self, prompt: Any, reused: int | None = None) -> Pick:
        picked = self.core.picker.pick(request(prompt), frozenset())
        assert isinstance(picked, Pick)
        self.core.picker.first_byte(picked)
        if reused is not None:
            self.core.picker.ended(picked, AttemptEnd.COMPLETE, reused)
        return picked

    def look(self) -> Overview:
        return self.overviews.overview()


def test_choices_hits_and_prefixes_are_those_of_the_books() -> None:
    desk = Desk()
    prompt = ids(5 * BLOCK)
    first = desk.ask(prompt, reused=0)
    desk.ask(prompt, reused=4 * BLOCK)
    look = desk.look()
    assert (look.traffic.decisions, look.traffic.waiting) == (2, 3)
    assert (look.traffic.prompt_tokens, look.traffic.hit_tokens) == (10 * BLOCK, 4 * BLOCK)
    assert look.traffic.foregone.looked_at == 2
    [prefix] = look.prefixes
    assert (prefix.tokens, round(prefix.requests), prefix.holders) == (4 * BLOCK, 1, 1)
    shown = look.decisions[0]
    assert (shown.worker, shown.reason, shown.matched_tokens) == (first.worker, "cache-hit", 64)
    assert (shown.end, shown.is_stream, shown.reused_tokens) == ("complete", True, 64)


def test_a_prefix_of_a_namespace_that_is_gone_has_no_holder() -> None:
    desk = Desk()
    desk.ask(ids(5 * BLOCK), reused=0)
    desk.ask(ids(5 * BLOCK), reused=64)
    for core_worker in ("w0", "w1"):
        desk.core.directory.leave(WorkerId(core_worker))
    [prefix] = desk.look().prefixes
    assert prefix.holders == 0


def test_what_still_runs_does_not_push_out_all_that_came_true() -> None:
    desk = Desk()
    receipts = desk.core.picker.receipts
    for number in range(3 * SHOWN_DECISIONS):
        made = decision(f"r{number}")
        receipts.add(made, WallTime(float(number)), number)
        if number < 2 * SHOWN_DECISIONS:
            receipts.ended(made, outcome())
    ends = [row.end for row in desk.look().decisions]
    assert ends == [""] * SHOWN_RUNNING + ["complete"] * (SHOWN_DECISIONS - SHOWN_RUNNING)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (DecisionFilter(), ["r3", "r2", "r1", "r0"]),
        (DecisionFilter(limit=2), ["r3", "r2"]),
        (DecisionFilter(text="r1"), ["r1"]),
        (DecisionFilter(text="w9"), ["r3"]),
        (DecisionFilter(reason="cache-hit", end="complete"), ["r0"]),
        (DecisionFilter(end="running"), ["r3", "r2"]),
        (DecisionFilter(reason="cold-home"), []),
    ],
)
def test_a_filter_finds_what_it_says(wanted: DecisionFilter, found: list[str]) -> None:
    desk = Desk()
    receipts = desk.core.picker.receipts
    made = [decision(f"r{number}", "w9" if number == 3 else "w1") for number in range(4)]
    for one in made:
        receipts.add(one, WallTime(0.0), one)
    receipts.ended(made[0], outcome())
    receipts.ended(made[1], outcome("client-gone"))
    assert [row.request for row in desk.overviews.chosen(wanted)] == found


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((0, 0, 0), None),
        ((10, 0, 0), (5.0, 9.5, 9.9)),
        ((50, 50, 0), (10.0, 19.0, 19.8)),
        ((0, 0, 4), (20.0, 20.0, 20.0)),
    ],
)
def test_quantiles_of_buckets_are_spread_evenly_inside_them(
    counts: tuple[int, ...], expected: tuple[float, float, float] | None
) -> None:
    seen = from_buckets(HistogramView((0.01, 0.02), counts, 0.0))
    assert (None if seen is None else (seen.p50, seen.p95, seen.p99)) == expected
