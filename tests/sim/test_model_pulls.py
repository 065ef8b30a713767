"""Pulls of the fleet model: nothing moves before it was computed, and nobody else waits for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trunkline.core.decision import Candidates, Decision, Gain, Reason
from trunkline.core.links import LinkProfile
from trunkline.core.records import Instant, WorkerId
from trunkline.replay.traces import TraceRequest
from trunkline.replay.workloads import find_workload
from trunkline.sim.limit import computed_limit, limit
from trunkline.sim.model import FleetModel, ModelOptions
from trunkline.sim.worker import Job, ModelWorker

BLOCK = 100
WORKLOAD = replace(
    find_workload("W4"),
    workers=3,
    capacity_blocks=100,
    block_tokens=BLOCK,
    prefill_fixed_ms=0.0,
    prefill_token_ms=1.0,
)
BLOCK_MS, MOVE_MS, SETUP_MS = 100.0, 10.0, 2.0
"""Of one block: to compute, to move; and of a pull beside."""


def prompt(*block_ids: int) -> TraceRequest:
    """Whole blocks, and one token more."""
    return TraceRequest(
        arrival_ms=0.0,
        input_tokens=len(block_ids) * BLOCK + 1,
        output_tokens=1,
        block_ids=block_ids,
        block_tokens=BLOCK,
    )


Placed = tuple[TraceRequest, int, int | None, int, int]


class Table:
    """Three workers. Prompts are placed by hand: where, and what is to be pulled from whom."""

    def __init__(self, *, kill_worker_at_ms: float | None = None) -> None:
        options = ModelOptions(
            links=LinkProfile(setup_ms=SETUP_MS, bytes_per_ms=BLOCK / MOVE_MS),
            kv_bytes_per_token=1,
            kill_worker_at_ms=kill_worker_at_ms,
        )
        self.model = FleetModel(WORKLOAD, options, lambda: 0.0)
        self._placed: list[Placed] = []

    def place(
        self,
        request: TraceRequest,
        at_ms: float,
        worker: int,
        *,
        source: int | None = None,
        has: int = 0,
        pulls: int = 0,
    ) -> None:
        """`has` and `pulls` are blocks."""
        self._placed.append((replace(request, arrival_ms=at_ms), worker, source, has, pulls))

    def place_again(self, number: int, worker: int) -> None:
        """Where a prompt goes whose worker died, without any more arriving."""
        request = replace(self._placed[number][0], arrival_ms=math.inf)
        self._placed.append((request, worker, None, 0, 0))

    def run(self) -> list[float]:
        """When each prompt, in order of arrival, gave its first token, since the beginning."""
        decisions = iter(self._placed)
        ended: dict[int, float] = {}
        jobs: list[Job] = []
        end = self.model._first_token

        def decide(job: Job, now_ms: float) -> Decision:
            if not any(job is known for known in jobs):
                jobs.append(job)
            return decision_of(*next(decisions))

        def first_token(worker: ModelWorker, ticket: int, now: Instant) -> None:
            if ticket in worker.jobs:
                job = worker.jobs[ticket]
                ended[next(n for n, known in enumerate(jobs) if known is job)] = now
            end(worker, ticket, now)

        self.model._decide = decide
        self.model._first_token = first_token
        arriving = [request for request, *_ in self._placed if request.arrival_ms < math.inf]
        outcome = self.model.run(arriving)
        assert outcome.lost == outcome.false_hits == 0
        assert outcome.directory_agrees
        for worker in self.model._workers.values():
            assert (len(worker.jobs), len(worker.coming), len(worker.ready)) == (0, 0, 0)
        return [ended[number] for number in range(len(arriving))]


def decision_of(
    request: TraceRequest, worker: int, source: int | None, has: int, pulls: int
) -> Decision:
    return Decision(
        request_id="",
        policy="by hand",
        prompt_tokens=request.input_tokens,
        choice=0,
        reason=Reason.POLICY,
        gain=Gain(saved_prefill_ms=0.0, queue_ms=0.0, transfer_ms=0.0, imbalance_ms=0.0),
        source=None if source is None else WorkerId(f"w{source}"),
        candidates=Candidates(
            workers=[WorkerId(f"w{worker}")],
            matched_tokens=[has * BLOCK],
            pulled_tokens=[pulls * BLOCK],
            queue_ms=[0.0],
            transfer_ms=[0.0],
            miss_ms=[0.0],
            imbalance_ms=[0.0],
            decode_pressure_ms=[0.0],
            cost_ms=[0.0],
        ),
    )


def test_a_pull_begins_when_its_source_has_computed_the_blocks_and_not_before() -> None:
    table = Table()
    table.place(prompt(1, 2, 3, 4), 0.0, 0)
    table.place(prompt(1, 2, 9), 10.0, 1, source=0, pulls=2)
    computed_ms = 4 * BLOCK_MS + 1.0
    came_ms = computed_ms + SETUP_MS + 2 * MOVE_MS
    assert table.run() == pytest.approx([computed_ms, came_ms + BLOCK_MS + 1.0])
    assert table.model.outcome.transfer_bytes == 2 * BLOCK


def test_who_waits_for_a_source_holds_up_nobody() -> None:
    table = Table()
    table.place(prompt(1, 2, 3, 4), 0.0, 0)
    table.place(prompt(1, 2, 9), 10.0, 1, source=0, pulls=2)
    table.place(prompt(7), 20.0, 1)
    source_ms, waiting_ms, other_ms = table.run()
    assert other_ms == pytest.approx(20.0 + BLOCK_MS + 1.0)
    assert waiting_ms == pytest.approx(source_ms + SETUP_MS + 2 * MOVE_MS + BLOCK_MS + 1.0)


def test_what_is_there_moves_at_once() -> None:
    table = Table()
    table.place(prompt(1, 2), 0.0, 0)
    table.place(prompt(1, 2, 9), 500.0, 1, source=0, pulls=2)
    assert table.run()[1] == pytest.approx(500.0 + SETUP_MS + 2 * MOVE_MS + BLOCK_MS + 1.0)


def test_what_a_source_is_to_pull_itself_is_not_waited_for() -> None:
    table = Table()
    table.place(prompt(1, 2), 0.0, 0)
    table.place(prompt(1, 2, 3), 10.0, 1, source=0, pulls=2)
    table.place(prompt(1, 2, 4), 20.0, 2, source=1, pulls=2)
    assert table.run()[2] == pytest.approx(20.0 + SETUP_MS + 3 * BLOCK_MS + 1.0), "all computed"
    assert table.model.outcome.failed_pulls == 1


def test_a_job_that_hits_what_another_still_pulls_waits_for_that_pull() -> None:
    table = Table()
    table.place(prompt(1, 2), 0.0, 0)
    table.place(prompt(1, 2, 3), 10.0, 1, source=0, pulls=2)
    table.place(prompt(1, 2, 3, 4), 20.0, 1, has=3)
    source_ms, leader_ms, follower_ms = table.run()
    assert leader_ms == pytest.approx(source_ms + SETUP_MS + 2 * MOVE_MS + BLOCK_MS + 1.0)
    assert follower_ms == pytest.approx(leader_ms + BLOCK_MS + 1.0)


def test_who_waits_for_a_source_that_dies_computes_at_once() -> None:
    table = Table(kill_worker_at_ms=100.0)
    table.place(prompt(1, 2, 3, 4), 0.0, 0)
    table.place(prompt(1, 2, 9), 10.0, 1, source=0, pulls=2)
    table.place_again(0, 2)
    assert table.run() == pytest.approx([100.0 + 401.0, 100.0 + 301.0])
    outcome = table.model.outcome
    assert (outcome.failed_pulls, outcome.hit_tokens) == (1, 0)


def test_the_limit_of_what_is_computed_lies_behind_the_limit_that_knows_the_future() -> None:
    requests = [replace(prompt(1, 2, 3), arrival_ms=at_ms) for at_ms in (0.0, 150.0, 1_000.0)]
    free, computed = limit(WORKLOAD, requests), computed_limit(WORKLOAD, requests)
    assert free.ttft_ms == pytest.approx([301.0, 1.0, 1.0])
    # The second waits for the second and the third block, which are half and not begun.
    assert computed.ttft_ms == pytest.approx([301.0, 151.0, 1.0])
    assert free.hit_tokens == computed.hit_tokens == 6 * BLOCK
