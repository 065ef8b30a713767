"""Pulls of the fleet model: one waits until its source has computed what is asked for, then moves.

    asked ──► of all that its source computes there, the last is computed ──► its turn on both links
              ──► the job has what it came for, and waits for the server like any other

What a source is to pull itself it does not lend yet: the asker gets the blocks before that. A job
whose hits another one there still pulls waits for that pull. Must never: move a block before it was
computed. Read `model.py` for who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trunkline.core.links import LinkProfile, Links
from trunkline.sim.outcome import Outcome
from trunkline.sim.worker import Job, ModelWorker, Pull


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPulls:
    """All pulls of one run."""

    links: Links
    """What the gateway learns of them."""
    profile: LinkProfile
    """What they are."""
    block_bytes: int
    outcome: Outcome
    end_at: Callable[[float, ModelWorker, int], None]
    """A job's pull is over then: its worker and ticket."""
    _waiting: dict[int, tuple[ModelWorker, Pull]] = field(
        default_factory=dict[int, tuple[ModelWorker, Pull]]
    )
    """By the asking job's ticket."""

    def ask(self, source: ModelWorker, keys: list[bytes], first: int, now_ms: float) -> Pull:
        """The blocks of a prompt from `first` on, as far as the source has or computes them."""
        self.outcome.pulls += 1
        pull = Pull(source=source, keys=[], asked_ms=now_ms)
        last = 0 if source.is_dead else source.cache.run(keys)
        for block in range(first, last):
            owing = source.coming.get(keys[block])
            if owing is not None:
                job = source.jobs[owing]
                if job.lacks:
                    break
                pull.waits_for.add(owing)
            pull.keys.append(keys[block])
        return pull

    def begin(self, worker: ModelWorker, ticket: int, pull: Pull, now_ms: float) -> None:
        """At once where nothing is waited for."""
        self._waiting[ticket] = (worker, pull)
        for owing in pull.waits_for:
            pull.source.jobs[owing].askers.append(ticket)
        self._move_if_computed(ticket, now_ms)

    def computed(self, ticket: int, job: Job, now_ms: float) -> None:
        """A job of a source gave its first token."""
        for asker in job.askers:
            if asker in self._waiting:
                self._waiting[asker][1].waits_for.remove(ticket)
                self._move_if_computed(asker, now_ms)
        job.askers.clear()

    def died(self, job: Job, now_ms: float) -> None:
        """A job's worker died, so what others wait for does not come."""
        for asker in job.askers:
            if asker in self._waiting:
                worker, pull = self._waiting.pop(asker)
                pull.missing = len(pull.keys)
                self.end_at(now_ms, worker, asker)
        job.askers.clear()

    def _move_if_computed(self, ticket: int, now_ms: float) -> None:
        worker, pull = self._waiting[ticket]
        if pull.waits_for:
            return
        del self._waiting[ticket]
        setup_ms = self.profile.setup_ms
        there = 0 if pull.source.is_dead else _leading(pull)
        pull.missing = len(pull.keys) - there
        if worker.is_dead or not there:
            self.end_at(now_ms + setup_ms, worker, ticket)
            return
        moved_bytes = there * self.block_bytes
        took_ms = setup_ms + moved_bytes / self.profile.bytes_per_ms
        ready_ms = worker.receive(pull.source, now_ms, took_ms)
        self.outcome.transfer_bytes += moved_bytes
        self.outcome.transfer_ms += ready_ms - pull.asked_ms
        if pull.asked_ms == now_ms:
            ms = ready_ms - now_ms
            self.links.observe(pull.source.name, worker.name, moved_bytes=moved_bytes, ms=ms)
        self.end_at(ready_ms, worker, ticket)


def _leading(pull: Pull) -> int:
    """How many of its blocks, in front, are still there."""
    for count, key in enumerate(pull.keys):
        if not pull.source.cache.holds(key):
            return count
    return len(pull.keys)
