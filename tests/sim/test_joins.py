"""A worker that comes with an empty cache under load. F12.

The figures as a table: `python tests/sim/test_joins.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest

from trunkline.replay.workloads import find_workload, load_workload
from trunkline.sim.model import JOINED, FleetModel, ModelOptions
from trunkline.sim.outcome import Outcome

TRACES = Path(__file__).resolve().parents[2] / "traces"
LOAD = 1.6
REQUESTS = 6_000
TICKS = 120
"""Two minutes behind its coming."""


def run(slow_start_ms: float, *, joins: bool = True) -> Outcome:
    """The conversation trace, so much denser that queues are seconds long."""
    requests = [
        replace(one, arrival_ms=one.arrival_ms / LOAD)
        for one in load_workload("W1", traces_dir=TRACES)
    ][:REQUESTS]
    options = ModelOptions(
        join_worker_at_ms=0.4 * requests[-1].arrival_ms if joins else None,
        slow_start_ms=slow_start_ms,
    )
    return FleetModel(find_workload("W1"), options, lambda: 0.0).run(requests)


def queues(outcome: Outcome) -> tuple[float, float]:
    """Mean queue of the worker that came, and the median of the others' means."""
    ticks = outcome.queues_ms[:TICKS]
    means = {worker: fmean(tick[worker] for tick in ticks) for worker in ticks[0]}
    joined = next(means.pop(worker) for worker in list(means) if worker == JOINED)
    return joined, median(means.values())


def p99_ms(outcome: Outcome) -> float:
    return sorted(outcome.ttft_ms)[int(0.99 * len(outcome.ttft_ms))]


@pytest.fixture(scope="module")
def slowly() -> Outcome:
    return run(60_000.0)


def test_f12_the_queue_of_a_cold_worker_is_at_most_one_and_a_half_of_the_median(
    slowly: Outcome,
) -> None:
    joined_ms, median_ms = queues(slowly)
    assert median_ms > 1_000.0, "there is load"
    assert 0.0 < joined_ms <= 1.5 * median_ms


def test_f12_no_first_token_is_later_for_it(slowly: Outcome) -> None:
    assert p99_ms(slowly) <= 1.1 * p99_ms(run(60_000.0, joins=False))


def test_without_a_slow_start_it_would_be_far_more() -> None:
    """That the bound is no matter of course."""
    joined_ms, median_ms = queues(run(0.0))
    assert joined_ms > 3.0 * median_ms


def row(name: str, outcome: Outcome, *, joined: bool) -> str:
    shown = (f"{ms / 1_000:.1f} s" for ms in queues(outcome)) if joined else ("", "")
    return " ".join(f"{cell:>16}" for cell in (name, *shown, f"{p99_ms(outcome) / 1_000:.1f} s"))


if __name__ == "__main__":
    head = ("", "its queue", "median of others", "p99 TTFT")
    rows = [
        " ".join(f"{cell:>16}" for cell in head),
        row("no worker comes", run(60_000.0, joins=False), joined=False),
        row("no slow start", run(0.0), joined=True),
        row("slow start", run(60_000.0), joined=True),
    ]
    sys.stdout.write("\n".join(rows) + "\n")
