"""When tokens are due: both models of a machine, driven by hand on a made-up clock."""

from __future__ import annotations

from array import array

import pytest

from trunkline.core.profiles import Profile, Scheduling
from trunkline.core.simkv import answer_tokens
from trunkline.ports.publisher import BlockEvent
from trunkline.worker.cache import BlockCache
from trunkline.worker.jobs import Job, Jobs, QueueFull
from trunkline.worker.schedule import Schedule, make_schedule


class Bench:
    """A rank without a loop: time moves when told, from one due moment to the next."""

    def __init__(
        self,
        scheduling: Scheduling,
        *,
        max_batch_tokens: int = 64,
        capacity: int = 64,
        max_running: int = 8,
        max_waiting: int = 4,
    ) -> None:
        profile = Profile(
            name="bench",
            prefill_fixed_ms=5,
            prefill_token_ms=1,
            prefill_context_ms=0,
            decode_token_ms=10,
            kv_bytes_per_token=1,
            max_batch_tokens=max_batch_tokens,
            scheduling=scheduling,
            source="made up for this test",
        )
        self.published: list[list[BlockEvent]] = []
        self.first_tokens: list[Job] = []
        self.jobs = Jobs(
            BlockCache(capacity=capacity, block_tokens=16),
            vocab_size=4_096,
            max_running=max_running,
            max_waiting=max_waiting,
            observe=self.first_tokens.append,
            publish=self.published.append,
        )
        self.schedule: Schedule = make_schedule(profile, self.jobs, time_factor=1.0)
        self.now = 0.0
        self.trace: list[tuple[float, int, int]] = []
        """(ms, job's number, tokens it has then)."""
        self._all: list[Job] = []

    def submit(self, tokens: int, wanted: int, first: int = 300, at_ms: float | None = None) -> Job:
        if at_ms is not None:
            self.advance(at_ms)
        prompt = array("I", (first + index for index in range(tokens)))
        job = Job(prompt=prompt, salt=None, wanted_tokens=wanted, arrived_at=self.now)
        self.jobs.add(job)
        self._all.append(job)
        self.turn(self.now)
        return job

    def advance(self, upto_ms: float) -> None:
        while (due := self.schedule.due()) is not None and due <= upto_ms / 1e3 + 1e-9:
            self.turn(due)
        self.now = max(self.now, upto_ms / 1e3)

    def turn(self, now: float) -> None:
        self.now = now
        before = [job.emitted for job in self._all]
        self.schedule.run(now + 1e-9)
        self.schedule.start(now)
        for number, (job, seen) in enumerate(zip(self._all, before, strict=True)):
            if job.emitted > seen:
                self.trace.append((round(now * 1e3, 3), number, job.emitted))


def test_fifo_prefills_one_after_the_other_and_decodes_without_contention() -> None:
    bench = Bench(Scheduling.FIFO)
    bench.submit(20, 3)
    bench.submit(15, 2, first=900)
    bench.advance(1_000)
    assert bench.trace == [(25, 0, 1), (35, 0, 2), (45, 0, 3), (45, 1, 1), (55, 1, 2)]


def test_late_timers_do_not_add_up() -> None:
    bench = Bench(Scheduling.FIFO)
    bench.submit(20, 1)
    bench.submit(15, 1, first=900)
    bench.advance(24)
    bench.turn(0.040)  # the first was due at 25 ms
    assert bench.schedule.due() == pytest.approx(0.045)


def test_what_was_generated_is_hit_by_the_next_turn() -> None:
    bench = Bench(Scheduling.FIFO)
    first = bench.submit(20, 30)
    bench.advance(1_000)
    again_prompt = first.prompt + first.answer + array("I", [5])
    follow_up = Job(prompt=again_prompt, salt=None, wanted_tokens=1, arrived_at=bench.now)
    bench.jobs.add(follow_up)
    bench.turn(bench.now)
    assert follow_up.cached_tokens == 48


def test_fifo_charges_only_what_did_not_hit() -> None:
    bench = Bench(Scheduling.FIFO)
    first = bench.submit(40, 1)
    bench.advance(100)
    again = bench.submit(40, 1, at_ms=100)
    bench.advance(1_000)
    assert (first.cached_tokens, again.cached_tokens) == (0, 32)
    assert bench.trace == [(45, 0, 1), (113, 1, 1)]


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_every_answer_is_the_right_one_and_nothing_is_left_behind(scheduling: Scheduling) -> None:
    bench = Bench(scheduling)
    jobs = [bench.submit(30 + 9 * number, 40, at_ms=7 * number) for number in range(4)]
    bench.advance(10_000)
    for job in jobs:
        assert job.is_over
        assert job.emitted == 40
        assert job.answer == answer_tokens(job.prompt, 40, 4_096)
    assert bench.schedule.due() is None
    assert bench.jobs.cache.used_share == 0
    assert bench.jobs.totals.generated == 160
    assert bench.first_tokens == jobs


def test_batched_prefills_in_chunks_beside_running_answers() -> None:
    bench = Bench(Scheduling.BATCHED, max_batch_tokens=32)
    bench.submit(16, 9)
    bench.advance(21)
    # 31 tokens fit beside one answer: three chunks, each with a token of the first job.
    bench.submit(80, 1, first=900)
    bench.advance(1_000)
    # The step without prefill had begun already; then 10 + 31 + 5 twice, then 10 + 18 + 5.
    assert bench.trace[:6] == [
        (21, 0, 1),
        (31, 0, 2),
        (77, 0, 3),
        (123, 0, 4),
        (156, 0, 5),
        (156, 1, 1),
    ]


def test_batched_followers_of_the_same_step_hit_what_the_first_just_computes() -> None:
    bench = Bench(Scheduling.BATCHED, max_batch_tokens=4_096)
    bench.submit(16, 1, first=900)
    first, second = bench.submit(70, 1), bench.submit(70, 1)
    bench.advance(1_000)
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_events_come_out_when_the_step_ends_and_not_before(scheduling: Scheduling) -> None:
    bench = Bench(scheduling)
    bench.submit(20, 1)
    bench.advance(24)
    assert bench.published == []
    bench.advance(25)
    assert [len(batch) for batch in bench.published] == [1]


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_a_job_that_does_not_fit_waits_until_memory_is_free(scheduling: Scheduling) -> None:
    bench = Bench(scheduling, capacity=4)
    first = bench.submit(40, 8)
    second = bench.submit(40, 8, first=900)
    bench.advance(100)
    assert first.emitted
    assert not second.emitted
    assert len(bench.jobs.waiting) == 1
    bench.advance(1_000)
    assert second.answer == answer_tokens(second.prompt, 8, 4_096)


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_the_queue_refuses_one_more_than_its_bound(scheduling: Scheduling) -> None:
    bench = Bench(scheduling, max_running=1, max_waiting=2)
    for number in range(3):
        bench.submit(20, 50, first=300 * (number + 1))
    with pytest.raises(QueueFull, match="2 requests wait"):
        bench.submit(20, 50)
    assert bench.jobs.totals.rejected_requests == 1


@pytest.mark.parametrize("scheduling", list(Scheduling))
@pytest.mark.parametrize("at_ms", [1, 26, 50])
def test_an_aborted_job_frees_its_blocks_and_the_next_goes_on(
    scheduling: Scheduling, at_ms: float
) -> None:
    bench = Bench(scheduling, max_running=1)
    leaving = bench.submit(20, 50)
    staying = bench.submit(20, 4, first=900)
    bench.advance(at_ms)
    bench.jobs.abort(leaving)
    bench.jobs.abort(leaving)
    bench.schedule.start(bench.now)
    bench.advance(5_000)
    assert leaving.is_over
    assert leaving.emitted < 50
    assert staying.emitted == 4
    assert bench.jobs.cache.used_share == 0
    assert bench.jobs.totals.aborted_requests == 1


def test_a_waiting_job_can_be_aborted() -> None:
    bench = Bench(Scheduling.FIFO, max_running=1)
    bench.submit(20, 5)
    waiting = bench.submit(20, 5, first=900)
    bench.jobs.abort(waiting)
    bench.advance(1_000)
    assert waiting.is_over
    assert waiting.emitted == 0
    assert len(bench.first_tokens) == 1
