"""One rank of the simulated engine: cache, queue and schedule on the event loop's clock.

One timer for everything that is due, however many answers run. Read `api.py` next, which speaks
HTTP for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trunkline.core.profiles import Profile
from trunkline.ports.publisher import BlockEvent
from trunkline.worker.blocks import STOCK, Erasure, Stamp, Terms
from trunkline.worker.cache import BlockCache
from trunkline.worker.coming import Coming
from trunkline.worker.faults import FaultyFeed
from trunkline.worker.fence import Guard
from trunkline.worker.jobs import Failure, Job, Jobs, Totals, do_nothing
from trunkline.worker.pulls import PullCall
from trunkline.worker.schedule import make_schedule
from trunkline.worker.tiers import HostTier

# Things due within this are done together: a timer has no finer grain than about 1 ms.
_SLACK_S = 0.0005

ERASE_SLICE_BLOCKS = 256
"""Blocks overwritten between two looks at the sockets: 256 KiB at 16 tokens each, about 0.2 ms."""


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
        self,
        shape: EngineShape,
        feed: FaultyFeed,
        observe: Callable[[Job], None],
        guard: Guard | None = None,
        tier: HostTier | None = None,
        coming: Coming | None = None,
    ) -> None:
        self._shape = shape
        self.cache = BlockCache(
            capacity=shape.capacity_blocks,
            block_tokens=shape.block_tokens,
            guard=guard,
            tier=tier,
        )
        self._jobs = Jobs(
            self.cache,
            vocab_size=shape.vocab_size,
            max_running=shape.max_running,
            max_waiting=shape.max_waiting,
            observe=observe,
            publish=feed.publish,
            flush=tier.flush if tier else do_nothing,
            coming=coming,
        )
        self._publish = feed.publish
        if tier is not None:
            tier.listen(self._tell_of_tier)
        self._schedule = make_schedule(shape.profile, self._jobs, shape.time_factor)
        self._timer: asyncio.TimerHandle | None = None
        self._eraser: asyncio.Handle | None = None

    @property
    def running(self) -> int:
        return len(self._jobs.running)

    @property
    def waiting(self) -> int:
        return len(self._jobs.waiting) + len(self._jobs.pulling)

    @property
    def totals(self) -> Totals:
        return self._jobs.totals

    def submit(
        self,
        prompt: array[int],
        salt: str | None,
        wanted_tokens: int,
        terms: Terms = STOCK,
        call: PullCall | None = None,
    ) -> Job:
        """Queue one request; with a call, once `pulled` says that this has ended. Raises QueueFull
        at the bound.
        """
        assert prompt
        assert wanted_tokens > 0
        now = asyncio.get_running_loop().time()
        job = Job(
            prompt=prompt,
            salt=salt,
            wanted_tokens=wanted_tokens,
            arrived_at=now,
            terms=terms,
            call=call,
        )
        self._jobs.add(job)
        self._turn()
        return job

    def turn_ms(self, job: Job) -> float:
        """What there is to prefill before a job that came when this one did: hits of those that
        wait are not known yet, so it is the most that it may be.
        """
        prefill_ms = self._shape.profile.prefill_ms
        ahead = [*self._jobs.running]
        ahead += [other for other in self._jobs.waiting if other.arrived_at < job.arrived_at]
        rest_ms = (prefill_ms(len(o.prompt) - o.computed_tokens, o.computed_tokens) for o in ahead)
        return sum(rest_ms) * self._shape.time_factor

    def pulled(self, job: Job) -> None:
        """What it waited for has ended, one way or another."""
        self._jobs.pulled(job)
        self._turn()

    def abort(self, job: Job) -> None:
        """Free what the job holds. Does nothing to one that is over."""
        if not job.is_over:
            self._jobs.abort(job)
            self._turn()

    def condemn(self, is_stale: Callable[[Stamp], bool], erasure: Erasure | None) -> None:
        """Make all blocks of these stamps unreachable now, and overwrite them bit by bit."""
        self.cache.condemn(is_stale, erasure)
        self._erase_soon()

    def abort_all(self, is_meant: Callable[[Job], bool], failure: Failure) -> int:
        """End jobs, running or waiting, and tell their clients why; how many."""
        meant = [job for job in self._all_jobs() if is_meant(job)]
        for job in meant:
            self._jobs.fail(job, failure)
        if meant:
            self._turn()
        return len(meant)

    def _all_jobs(self) -> Iterator[Job]:
        yield from self._jobs.running
        yield from self._jobs.waiting
        yield from self._jobs.pulling

    def reset(self) -> bool:
        """Forget all prefixes; False while requests run. Published with the next step's events."""
        return self.cache.reset()

    def tell(self) -> None:
        """Publish what happened in the cache now, as an engine does that tells while it is idle."""
        self._jobs.end_step()

    def _tell_of_tier(self, events: list[BlockEvent]) -> None:
        """What happened in the cache before goes first: a reset that were told after what came
        behind the device since would take it away from whoever hears it.
        """
        self._publish([*self.cache.take_events(), *events])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._eraser is not None:
            self._eraser.cancel()

    def _erase_soon(self) -> None:
        if self.cache.has_dirty and self._eraser is None:
            self._eraser = asyncio.get_running_loop().call_soon(self._erase_slice)

    def _erase_slice(self) -> None:
        self._eraser = None
        self.cache.erase(ERASE_SLICE_BLOCKS)
        self._jobs.end_step()
        self._erase_soon()

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
        self._erase_soon()
