"""When a rank's tokens are due: two models of a machine shared by many requests.

`FifoSchedule` prefills one request at a time and decodes without contention; `BatchedSchedule`
runs steps as continuous batching does. Both are driven from outside: `start` begins what can
begin, `due` says when something happens next, `run` lets it happen. They keep ideal times, so late
timers do not add up.

Must never: wait, or read a clock. Read `engine.py` next.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from trunkline.core.profiles import Profile, Scheduling
from trunkline.worker.jobs import Job, Jobs

# A machine that cannot keep its timers by this much does not try to catch up.
_LATE_TIMER_S = 0.05


class Schedule(Protocol):
    """Times are seconds of the event loop's clock."""

    def start(self, now: float) -> None:
        """Begin what can begin: call it after a job came, ended or was aborted."""
        ...

    def due(self) -> float | None:
        """When `run` is wanted next; None while nothing goes on."""
        ...

    def run(self, now: float) -> None:
        """Let everything happen that is due by now."""
        ...


def make_schedule(profile: Profile, jobs: Jobs, time_factor: float) -> Schedule:
    """`time_factor` stretches all times of the profile."""
    if profile.scheduling is Scheduling.FIFO:
        return FifoSchedule(profile, jobs, time_factor)
    return BatchedSchedule(profile, jobs, time_factor)


class FifoSchedule:
    """One prefill server in order of arrival; each answer then has its own steady pace."""

    def __init__(self, profile: Profile, jobs: Jobs, time_factor: float) -> None:
        self._profile = profile
        self._jobs = jobs
        self._ms = time_factor / 1e3
        self._prefilling: Job | None = None
        self._prefill_ends_at = 0.0
        # (when the next token is due, order of entry, job); jobs that are over are skipped.
        self._decoding: list[tuple[float, int, Job]] = []
        self._entries = 0

    def start(self, now: float) -> None:
        if self._prefilling is not None:
            if not self._prefilling.is_over:
                return
            self._prefilling = None
            self._prefill_ends_at = now
        job = self._jobs.admit_next(now)
        if job is None:
            return
        # The server went on to this job when it was done with the last one, not when a timer fired;
        # a job that had to wait for memory has its time from now.
        was_ready_at = max(self._prefill_ends_at, job.arrived_at)
        begin = was_ready_at if now - was_ready_at < _LATE_TIMER_S else now
        uncached = len(job.prompt) - job.cached_tokens
        self._jobs.prefill(job, uncached)
        duration_ms = self._profile.prefill_ms(uncached, job.cached_tokens)
        duration_ms += self._profile.load_ms(job.loaded_tokens)
        self._prefilling = job
        self._prefill_ends_at = begin + duration_ms * self._ms

    def due(self) -> float | None:
        times = [self._decoding[0][0]] if self._decoding else []
        if self._prefilling is not None:
            times.append(self._prefill_ends_at)
        return min(times, default=None)

    def run(self, now: float) -> None:
        while self._prefilling is not None and self._prefill_ends_at <= now:
            job, self._prefilling = self._prefilling, None
            self._emit(job, self._prefill_ends_at)
            self._jobs.end_step()
            self.start(now)
        while self._decoding and self._decoding[0][0] <= now:
            due, _, job = heapq.heappop(self._decoding)
            self._emit(job, due)
            self._jobs.end_step()

    def _emit(self, job: Job, at: float) -> None:
        if job.is_over:
            return
        self._jobs.emit(job, at)
        is_begun_anew = job.sequence is None
        if not (job.is_over or is_begun_anew):
            self._entries += 1
            next_at = at + self._profile.decode_token_ms * self._ms
            heapq.heappush(self._decoding, (next_at, self._entries, job))


class BatchedSchedule:
    """Steps of at most `max_batch_tokens`: a token for each answer, and prefill in what is left."""

    def __init__(self, profile: Profile, jobs: Jobs, time_factor: float) -> None:
        self._profile = profile
        self._jobs = jobs
        self._ms = time_factor / 1e3
        self._step: list[Job] | None = None
        """Jobs that give a token at the end of the running step."""
        self._step_ends_at = 0.0

    def start(self, now: float) -> None:
        if self._step is None:
            self._begin_step(now, now)

    def due(self) -> float | None:
        return None if self._step is None else self._step_ends_at

    def run(self, now: float) -> None:
        while self._step is not None and self._step_ends_at <= now:
            givers, self._step = self._step, None
            for job in givers:
                if not job.is_over:
                    self._jobs.emit(job, self._step_ends_at)
            self._jobs.end_step()
            is_late = now - self._step_ends_at > _LATE_TIMER_S
            self._begin_step(now if is_late else self._step_ends_at, now)

    def _begin_step(self, begin: float, now: float) -> None:
        jobs = self._jobs
        prefilled = [job for job in jobs.running if job.computed_tokens == len(job.prompt)]
        budget = max(0, self._profile.max_batch_tokens - len(prefilled))
        givers = prefilled[:]
        step_ms = self._profile.decode_token_ms if prefilled else 0.0
        chunks_ms = 0.0
        unfinished = [job for job in jobs.running if job.computed_tokens < len(job.prompt)]
        while budget > 0:
            job = unfinished.pop(0) if unfinished else jobs.admit_next(now)
            if job is None:
                break
            if job.computed_tokens == job.cached_tokens:  # it begins: its hits are brought first
                chunks_ms += self._profile.load_ms(job.loaded_tokens)
            chunk = min(budget, len(job.prompt) - job.computed_tokens)
            fixed_ms = self._profile.prefill_fixed_ms
            chunks_ms += self._profile.prefill_ms(chunk, job.computed_tokens) - fixed_ms
            jobs.prefill(job, chunk)
            budget -= chunk
            if job.computed_tokens == len(job.prompt):
                givers.append(job)
        is_prefilling = budget < self._profile.max_batch_tokens - len(prefilled)
        if is_prefilling:
            step_ms += chunks_ms + self._profile.prefill_fixed_ms
        if not givers and not is_prefilling:
            return
        self._step = givers
        self._step_ends_at = begin + step_ms * self._ms
