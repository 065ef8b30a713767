"""The disk tier's thread: sealed blocks to files and back, with an end to every wait.

One thread does all I/O, so that a disk that hangs holds one thread and not many. Whoever waits for
a read has a deadline; a job that runs for longer than `io_deadline_ms` opens the breaker, and what
is queued behind it is given up: a stalled disk costs misses. Removing is never given up: where it
fails it is tried again, after a pause each time.

Must never: hold its lock during I/O or while calling back. Read `files.py` and `store.py` next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trunkline.core.breaker import Breaker
from trunkline.core.records import Instant
from trunkline.core.transfer import Reason
from trunkline.kv.files import Files
from trunkline.kv.records import Manifest
from trunkline.ports.clock import Clock
from trunkline.ports.sealer import Sealer

_ASSOCIATED_TAG = b"tl-kv-disk-v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """Bounds of a disk tier."""

    capacity_bytes: int
    """Of blocks, sealed."""
    io_deadline_ms: float = 2_000.0
    """For one read or write."""
    max_jobs: int = 256
    """Reads that wait for the thread, and writes likewise; a further one is refused. Nothing is
    written either while so many files can not be removed."""
    moving_blocks: int = 8
    """Blocks on their way to the disk; they keep their memory until they are there."""
    min_saved_ms: float = 0.0
    """What a block has to save for it to be worth a place on disk."""
    failure_threshold: int = 3
    pause_ms: float = 5_000.0
    """Until a tier that failed is tried again, and a removal that did."""


@dataclass(slots=True, kw_only=True)
class DiskCounters:
    """What happened so far."""

    written: int = 0
    read: int = 0
    write_failures: int = 0
    remove_failures: int = 0
    timeouts: int = 0
    refused: int = 0
    """Jobs that were not begun: the breaker was open, or too many waited."""
    phantoms: int = 0
    """Files that were missing, or of another length."""
    spoilt: int = 0
    """Files whose content was not what was written, or whose key is destroyed."""
    swept: int = 0


class _Job:
    """One thing for the thread to do. It ends once: done, or given up."""

    __slots__ = ("event", "is_over", "is_repeated", "result", "run", "tell")

    def __init__(
        self,
        run: Callable[[], bytes | Reason],
        tell: Callable[[bytes | Reason], None] | None = None,
        *,
        is_repeated: bool = False,
    ) -> None:
        self.run = run
        self.is_repeated = is_repeated
        """Until the disk takes it."""
        self.tell = tell
        """Called without a lock, in the tier's thread or by who gives the job up."""
        self.event = threading.Event()
        self.result: bytes | Reason = Reason.TIER
        self.is_over = False

    def end(self, result: bytes | Reason) -> None:
        self.result = result
        self.event.set()
        if self.tell is not None:
            self.tell(result)


class DiskTier:
    """Blocks in files. What is where is the store's business."""

    def __init__(self, files: Files, sealer: Sealer, clock: Clock, options: DiskOptions) -> None:
        self.options = options
        self.counters = DiskCounters()
        self._files = files
        self._sealer = sealer
        self._clock = clock
        self._breaker = Breaker(
            failure_threshold=options.failure_threshold,
            success_threshold=1,
            pause_ms=options.pause_ms,
        )
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._removals: deque[_Job] = deque()
        """Not bounded by itself: there is one at most for each file."""
        self._postponed: deque[tuple[Instant, _Job]] = deque()
        """Removals that failed, and when each is tried again; the soonest first."""
        self._running: _Job | None = None
        self._running_since = Instant(0.0)
        self._is_closing = False
        self._removals.append(_Job(self._sweep))
        self._thread = threading.Thread(target=self._work_off, name="kv-disk", daemon=True)
        self._thread.start()

    def file_bytes(self, block_bytes: int) -> int:
        return block_bytes + self._sealer.overhead_bytes

    def capacity_blocks(self, block_bytes: int) -> int:
        return self.options.capacity_bytes // self.file_bytes(block_bytes)

    @property
    def is_usable(self) -> bool:
        """Whether a job would be taken now."""
        with self._lock:
            return self._may_begin(self._clock.now())

    @property
    def is_idle(self) -> bool:
        """Whether the thread has nothing to do."""
        with self._lock:
            return not (self._reads or self._writes or self._removals or self._running)

    def write(
        self, name: str, manifest: Manifest, data: memoryview, tell: Callable[[bool], None]
    ) -> bool:
        """Seal and keep a block; `data` must not change until `tell` says how it went. False where
        that is not even begun.
        """

        def run() -> bytes | Reason:
            sealed = self._sealer.seal(manifest.owner.ns, data, associated(manifest))
            if sealed is None:
                return Reason.EPOCH
            self._files.write(name, sealed)
            return b""

        def end(result: bytes | Reason) -> None:
            is_written = not isinstance(result, Reason)
            self.counters.written += is_written
            self.counters.write_failures += not is_written
            tell(is_written)

        return self._submit(_Job(run, end), self._writes)

    def read(self, name: str, manifest: Manifest, until: Instant) -> bytes | Reason:
        """The plain bytes, whose digests the caller is still to compare. Waits, at most until then:
        not for a thread that serves others.
        """

        def run() -> bytes | Reason:
            sealed = self._files.read(name, self.file_bytes(manifest.size_bytes))
            if sealed is None:
                self.counters.phantoms += 1
                return Reason.MISS
            plain = self._sealer.unseal(manifest.owner.ns, sealed, associated(manifest))
            if plain is None:
                self.counters.spoilt += 1
                return Reason.DIGEST
            self.counters.read += 1
            return plain

        now = self._clock.now()
        job = _Job(run)
        if not self._submit(job, self._reads):
            return Reason.TIER
        wait_ms = min(until - now, self.options.io_deadline_ms)
        if not job.event.wait(max(0.0, wait_ms) / 1_000.0):
            self._give_up(job)
        return job.result

    def remove(self, name: str, tell: Callable[[], None] | None = None) -> None:
        """The file is not referred to any more. `tell` is called when it is gone."""

        def run() -> bytes | Reason:
            self._files.remove(name)
            if tell is not None:
                tell()
            return b""

        with self._work:
            self._removals.append(_Job(run, is_repeated=True))
            self._work.notify()

    def destroy(self, ns: bytes) -> None:
        """Make everything of this namespace unreadable, whatever the disk does."""
        self._sealer.destroy(ns)

    def tend(self) -> None:
        """Give up what waits behind a job that hangs; try again what is to be removed. Not under
        the store's lock.
        """
        with self._work:
            now = self._clock.now()
            while self._postponed and self._postponed[0][0] <= now:
                self._removals.append(self._postponed.popleft()[1])
                self._work.notify()
            if not self._is_stuck(now):
                return
            given_up = self._take_waiting()
            self.counters.timeouts += len(given_up)
        for job in given_up:
            job.end(Reason.TIER)

    def close(self) -> None:
        """End the thread and remove this process's files, unless the disk hangs."""
        with self._work:
            self._is_closing = True
            given_up = self._take_waiting()
            self._work.notify()
        for job in given_up:
            job.end(Reason.TIER)
        self._thread.join(self.options.io_deadline_ms / 1_000.0)
        if not self._thread.is_alive():
            self._files.close()

    # -- jobs ----------------------------------------------------------------------------------

    def _is_stuck(self, now: Instant) -> bool:
        age_ms = now - self._running_since
        return self._running is not None and age_ms >= self.options.io_deadline_ms

    def _may_begin(self, now: Instant) -> bool:
        return not self._is_closing and not self._is_stuck(now) and self._breaker.is_usable(now)

    def _take_waiting(self) -> list[_Job]:
        """Reads and writes that were not begun; they are over."""
        waiting = [*self._reads, *self._writes]
        self._reads.clear()
        self._writes.clear()
        for job in waiting:
            job.is_over = True
        return waiting

    def _submit(self, job: _Job, queue: deque[_Job]) -> bool:
        with self._work:
            now = self._clock.now()
            waiting = len(queue)
            if queue is self._writes:
                waiting = max(waiting, len(self._postponed))
            if not self._may_begin(now) or waiting >= self.options.max_jobs:
                self.counters.refused += 1
                return False
            self._breaker.begin(now)
            queue.append(job)
            self._work.notify()
            return True

    def _give_up(self, job: _Job) -> None:
        """Nobody waits for it any more. It may just have ended: then its result stands."""
        with self._lock:
            if job.is_over:
                return
            job.is_over = True
            if job in self._reads:
                self._reads.remove(job)
            self.counters.timeouts += 1
            self._breaker.failed(self._clock.now())

    def _work_off(self) -> None:
        while True:
            with self._work:
                while not (self._reads or self._removals or self._writes or self._is_closing):
                    self._work.wait()
                if self._is_closing:
                    return
                # Somebody waits for a read; what is written may need the room of what is removed.
                job = (self._reads or self._removals or self._writes).popleft()
                self._running = job
                self._running_since = self._clock.now()
            self._carry_out(job)

    def _carry_out(self, job: _Job) -> None:
        has_failed = False
        try:
            result = job.run()
        except OSError:
            has_failed, result = True, Reason.TIER
        with self._lock:
            now = self._clock.now()
            if has_failed or self._is_stuck(now):
                self._breaker.failed(now)
            elif not job.is_over:
                self._breaker.succeeded()
            is_wanted = not job.is_over
            job.is_over = True
            if has_failed and job.is_repeated:
                self.counters.remove_failures += 1
                self._postponed.append((Instant(now + self.options.pause_ms), job))
                job.is_over = is_wanted = False
        if is_wanted:
            job.end(result)
        with self._lock:
            self._running = None

    def _sweep(self) -> bytes | Reason:
        self.counters.swept += self._files.sweep()
        return b""


def associated(manifest: Manifest) -> bytes:
    """What a sealed block is bound to: it opens as this block of this owner, or not at all."""
    owner, place = manifest.owner, manifest.place
    pieces = [
        _ASSOCIATED_TAG,
        owner.ns,
        place.key,
        place.parent,
        place.index.to_bytes(8, "big"),
        manifest.layout_digest,
        *(subject.encode() for subject in owner.subjects),
        *(epoch.to_bytes(8, "big") for epoch in owner.epochs),
    ]
    return b"".join(len(piece).to_bytes(4, "big") + piece for piece in pieces)
