"""Alarms in the fleet model on real traces: none in a healthy run, one where a cache lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trunkline.core.alarms import Alarm, AlarmEnd, AlarmKind
from trunkline.core.decision import Decision
from trunkline.core.records import Instant, WorkerId
from trunkline.replay.workloads import find_workload, load_workload
from trunkline.sim.model import FleetModel, ModelOptions
from trunkline.sim.worker import Job, ModelWorker

TRACES = Path(__file__).resolve().parents[2] / "traces"
FORGETFUL = WorkerId("w1")


class Watched(FleetModel):
    """Tells the fleet's alarms what a gateway would, and looks each second as one does."""

    forgets_from_ms = float("inf")
    """From then on one worker says that it reused nothing."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.changes: list[Alarm | AlarmEnd] = []
        self.answers = 0
        self._decisions: dict[int, tuple[Decision, float]] = {}

    def _start(self, job: Job, worker: ModelWorker, decision: Decision, now_ms: float) -> None:
        before = self.outcome.hit_tokens
        super()._start(job, worker, decision, now_ms)
        reused = self.outcome.hit_tokens - before if job.attempt == 1 else decision.expected_tokens
        if now_ms >= self.forgets_from_ms and decision.worker == FORGETFUL:
            reused = 0
        self._fleet.alarms.promised(decision, reused, Instant(now_ms))
        self._decisions[self._tickets] = (decision, now_ms)

    def _first_token(self, worker: ModelWorker, ticket: int, now: Instant) -> None:
        decision, sent_ms = self._decisions.pop(ticket)
        candidates, choice = decision.candidates, decision.choice
        predicted_ms = candidates.queue_ms[choice] + decision.miss_ms
        self._fleet.alarms.timed(decision.worker, predicted_ms, now - sent_ms, now)
        self.answers += 1
        super()._first_token(worker, ticket, now)

    def _tick(self, now: Instant) -> None:
        here = [state.worker for state in self._fleet.states()]
        self.changes += self._fleet.alarms.look(here, {}, (), now)
        super()._tick(now)


def watched(workload: str, forgets_from_ms: float = float("inf"), **options: Any) -> Watched:
    model = Watched(find_workload(workload), ModelOptions(**options), lambda: 0.0)
    model.forgets_from_ms = forgets_from_ms
    model.run(load_workload(workload, traces_dir=TRACES))
    return model


@pytest.mark.parametrize(
    ("workload", "options"), [("W1", {"event_delay_ms": 500.0}), ("W2", {}), ("W3", {"seed": 7})]
)
def test_a_healthy_fleet_raises_none(workload: str, options: dict[str, Any]) -> None:
    model = watched(workload, **options)
    assert model.answers > 3_000
    assert model.changes == []


def test_a_worker_that_forgets_what_it_announced_raises_one() -> None:
    model = watched("W1", forgets_from_ms=60_000.0)
    begun = [one for one in model.changes if isinstance(one, Alarm)]
    assert {(one.kind, one.worker) for one in begun} == {(AlarmKind.OVER_CLAIMS, FORGETFUL)}
    assert begun[0].since >= 60_000.0
