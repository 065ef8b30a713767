"""One rank of the simulated engine: cache, queue and schedule on the event loop's clock.

One timer for everything that is due, however many answers run. Read `api.py` next, which speaks
HTTP for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from trunkline.core.profiles import Profile
from trunkline.worker.cache import BlockCache
from trunkline.worker.faults import FaultyFeed
from trunkline.worker.jobs import Job, Jobs, Totals
from trunkline.worker.schedule import make_schedule

# Things due within this are done together: a timer has no finer grain than about 1 ms.
_SLACK_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Sizes and speed of one rank."""

    profile: Profile
    time_factor: float
    block_tokens: int
    capacity_blocks: int
    vocab_size: int
    max_running: int
    max_waiting: int
    die_after_tokens: int = 0


class Engine:
    """Takes jobs, gives tokens. All methods belong to the loop that runs them."""

    def __init__(
        self, shape: EngineShape, feed: FaultyFeed, observe: Callable[[Job], None]
    ) -> None:
        self._shape = shape
        self.cache = BlockCache(capacity=shape.capacity_blocks, block_tokens=shape.block_tokens)
        self._jobs = Jobs(
            self.cache,
            vocab_size=shape.vocab_size,
            max_running=shape.max_running,
            max_waiting=shape.max_waiting,
            observe=observe,
            publish=feed.publish,
        )
        self._schedule = make_schedule(shape.profile, self._jobs, shape.time_factor)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        return len(self._jobs.running)

    @property
    def waiting(self) -> int:
        return len(self._jobs.waiting)

    @property
    def totals(self) -> Totals:
        return self._jobs.totals

    def submit(self, prompt: array[int], salt: str | None, wanted_tokens: int) -> Job:
        """Queue one request. Raises QueueFull at the bound."""
        assert prompt
        assert wanted_tokens > 0
        now = asyncio.get_running_loop().time()
        job = Job(prompt=prompt, salt=salt, wanted_tokens=wanted_tokens, arrived_at=now)
        self._jobs.add(job)
        self._turn()
        return job

    def abort(self, job: Job) -> None:
        """Free what the job holds. Does nothing to one that is over."""
        if not job.is_over:
            self._jobs.abort(job)
            self._turn()

    def reset(self) -> bool:
        """Forget all prefixes; False while requests run. Published with the next step's events."""
        return self.cache.reset()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._schedule.run(now + _SLACK_S)
        self._schedule.start(now)
        if 0 < self._shape.die_after_tokens < self._jobs.totals.generated:
            # As abrupt as a crash: nothing is flushed, no connection is closed in order.
            os.kill(os.getpid(), signal.SIGKILL)
        due = self._schedule.due()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else loop.call_at(due, self._turn)
