"""Requests inside one rank: waiting, running, over; and the tokens that each is owed.

Owns admission, emission and release. When things happen is decided by `schedule.py`; read it next.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trunkline.ports.publisher import BlockEvent
from trunkline.worker.blocks import STOCK, KvSequence, Terms
from trunkline.worker.cache import BlockCache
from trunkline.worker.coming import Coming, Prompt
from trunkline.worker.pulls import PullCall


def do_nothing() -> None:
    """Where there is nothing behind the device."""


class QueueFull(Exception):
    """So many requests wait already that no further one is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a job ended without its answer, as the client is told."""

    status: int
    message: str


_TOO_LARGE = Failure(
    status=503, message="the request needs more memory than the worker can free for it"
)


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request. `answer[:emitted]` is what the client may have; all times are loop seconds."""

    prompt: array[int] = field(repr=False)
    salt: str | None = field(repr=False)
    wanted_tokens: int
    arrived_at: float
    terms: Terms = STOCK
    sequence: KvSequence | None = None
    call: PullCall | None = None
    """What is to be pulled before it is scheduled."""
    coming: Prompt | None = None
    """What those who pull from here wait for, until it is in the store."""
    cached_tokens: int = 0
    loaded_tokens: int = 0
    """Of these, what had to be copied to the device."""
    computed_tokens: int = 0
    """How far prefill has come, hits included."""
    answer: array[int] = field(default_factory=lambda: array("I"), repr=False)
    emitted: int = 0
    is_over: bool = False
    failure: Failure | None = None
    """Set where the worker ended it, and not the client."""
    started_at: float = 0.0
    first_token_at: float = 0.0
    _waiter: asyncio.Future[None] | None = None

    async def wait_beyond(self, seen: int) -> None:
        """Until more than `seen` tokens are there, or the job is over. For one waiter at a time."""
        while self.emitted <= seen and not self.is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, kw_only=True)
class Totals:
    """Counts since start, in tokens unless said otherwise."""

    queried: int = 0
    hit: int = 0
    loaded: int = 0
    """Hit behind the device."""
    pulled: int = 0
    """Of these, what the request itself had pulled from another worker."""
    lifted: int = 0
    """Of these, what the request itself had read from disk."""
    generated: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    rejected_requests: int = 0


class Jobs:
    """The books of one rank.

    `observe` is told of each job that gives its first token; `publish` gets what happened in the
    cache at the end of each step that changed it, and not before.
    """

    def __init__(
        self,
        cache: BlockCache,
        *,
        vocab_size: int,
        max_running: int,
        max_waiting: int,
        observe: Callable[[Job], None],
        publish: Callable[[list[BlockEvent]], None],
        flush: Callable[[], None] = do_nothing,
        coming: Coming | None = None,
    ) -> None:
        """`flush` has the tiers behind the device tell what changed there; `coming` is told what is
        to be there.
        """
        self.cache = cache
        self.waiting: deque[Job] = deque()
        self.pulling: dict[Job, None] = {}
        self.running: dict[Job, None] = {}
        self.totals = Totals()
        self._vocab_size = vocab_size
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._observe = observe
        self._publish = publish
        self._flush = flush
        self._coming = coming

    def add(self, job: Job) -> None:
        """Queue a job, or set it aside until its pull has ended. Raises QueueFull at the bound."""
        waiting_count = len(self.waiting) + len(self.pulling)
        if waiting_count >= self._max_waiting:
            self.totals.rejected_requests += 1
            raise QueueFull(f"{waiting_count} requests wait, the most allowed")
        if job.call is None:
            self._announce(job)
            self.waiting.append(job)
        else:
            self.pulling[job] = None

    def pulled(self, job: Job) -> None:
        """Its pull has ended: it has the place in the queue that it came for."""
        if job not in self.pulling:
            return  # it is over
        del self.pulling[job]
        self._announce(job)
        later = (n for n, other in enumerate(self.waiting) if other.arrived_at > job.arrived_at)
        self.waiting.insert(next(later, len(self.waiting)), job)

    def admit_next(self, now: float) -> Job | None:
        """Bring the first waiting job into memory; None when there is none, or no room for it."""
        while self.waiting and len(self.running) < self._max_running:
            job = self.waiting[0]
            sequence = self.cache.admit(job.prompt, job.salt, job.wanted_tokens, job.terms)
            if sequence is not None:
                self.waiting.popleft()
                self._begin(job, sequence, now)
                return job
            if not self._is_hopeless(job):
                return None
            self.fail(job, _TOO_LARGE)
        return None

    def prefill(self, job: Job, tokens: int) -> None:
        """Compute that many more tokens of the prompt; with the last one the answer is known."""
        assert job.sequence is not None
        job.computed_tokens += tokens
        assert job.computed_tokens <= len(job.prompt)
        self.cache.compute(job.sequence, job.computed_tokens, keeps=False)
        if job.computed_tokens == len(job.prompt):
            wanted = job.wanted_tokens
            job.answer = self.cache.answer(job.sequence, wanted, self._vocab_size)

    def emit(self, job: Job, now: float) -> None:
        """One token more; with the last one the job is over. Where its hits may not stand any more,
        it gives none and is back at the head of the queue.
        """
        assert job.sequence is not None
        if job.emitted:
            self._keep_generated(job)
        elif self.cache.fault(job.sequence) is not None:
            self._restart(job)
            return
        else:
            job.first_token_at = now
            self.cache.keep(job.sequence)
            self._is_there(job)
            if job.terms.ticket is not None:
                self._count_lookup(job)
            self._observe(job)
        job.emitted += 1
        self.totals.generated += 1
        if job.emitted == job.wanted_tokens:
            self.totals.finished_requests += 1
            self._end(job)
        else:
            job.wake()

    def end_step(self) -> None:
        """Publish what the step changed. A reset of an idle cache is told with the next step,
        too."""
        events = self.cache.take_events()
        if events:
            self._publish(events)
        self._flush()

    def abort(self, job: Job) -> None:
        """The client is gone, or wants no more. Does nothing to a job that is over."""
        if job.is_over:
            return
        self._is_there(job)
        self.totals.aborted_requests += 1
        if job.sequence is None:
            if job in self.pulling:
                del self.pulling[job]
            else:
                self.waiting.remove(job)
            if job.call is not None:
                job.call.cancel()
            job.is_over = True
            job.wake()
        else:
            self._end(job)

    def fail(self, job: Job, failure: Failure) -> None:
        """The worker ends the job, and says why. Does nothing to a job that is over."""
        if not job.is_over:
            job.failure = failure
            self.abort(job)

    def _begin(self, job: Job, sequence: KvSequence, now: float) -> None:
        job.sequence = sequence
        job.cached_tokens = job.computed_tokens = sequence.cached_tokens
        job.loaded_tokens = sequence.loaded_blocks * self.cache.block_tokens
        job.started_at = now
        self.running[job] = None
        if job.terms.ticket is None:
            self._count_lookup(job)

    def _announce(self, job: Job) -> None:
        if self._coming is not None:
            job.coming = self._coming.add(job.prompt, job.salt, job.terms)

    def _is_there(self, job: Job) -> None:
        """Its prompt is in the store, or it never will be."""
        if self._coming is not None and job.coming is not None:
            self._coming.end(job.coming)
            job.coming = None

    def _restart(self, job: Job) -> None:
        """Compute it all, once. The queue may pass its bound by as many as run."""
        assert job.sequence is not None
        self._is_there(job)
        assert job.terms.reuses
        self.cache.release(job.sequence)
        del self.running[job]
        job.sequence = None
        job.computed_tokens = job.cached_tokens = job.loaded_tokens = 0
        job.terms = replace(job.terms, reuses=False)
        self.waiting.appendleft(job)

    def _is_hopeless(self, job: Job) -> bool:
        """Whether waiting does not help: others' floors leave too little memory for it."""
        is_alone = not self.running
        return is_alone or self.cache.never_fits(job.prompt, job.wanted_tokens, job.terms)

    def _count_lookup(self, job: Job) -> None:
        self.totals.queried += len(job.prompt)
        self.totals.hit += job.cached_tokens
        self.totals.loaded += job.loaded_tokens
        if job.call is not None:
            pulled = self._pulled_tokens(job, job.call)
            self.totals.pulled += pulled
            self.totals.lifted += min(job.call.lifted_tokens, job.loaded_tokens - pulled)

    def _pulled_tokens(self, job: Job, call: PullCall) -> int:
        """What of the hits is there because it was pulled for this very request."""
        if call.pulled is None:
            return 0
        first = call.pulled.first_block * self.cache.block_tokens
        last = min(first + call.pulled.tokens, job.cached_tokens)
        return max(0, last - max(first, job.cached_tokens - job.loaded_tokens))

    def _keep_generated(self, job: Job) -> None:
        """The token before the new one goes through the model now, and into the cache."""
        assert job.sequence is not None
        job.sequence.tokens.append(job.answer[job.emitted - 1])
        length = len(job.sequence.tokens)
        if length % self.cache.block_tokens == 0:
            self.cache.compute(job.sequence, length)

    def _end(self, job: Job) -> None:
        assert job.sequence is not None
        self.cache.release(job.sequence)
        del self.running[job]
        job.is_over = True
        job.wake()
