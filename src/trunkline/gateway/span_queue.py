"""Records of traces on their way out: a bounded queue, emptied by one thread after the other.

Putting one in never waits. A batch has one deadline for all of it: a collector that drips its
answer keeps the thread that reads it, a few of them at most, and nobody else. When it is full, or a
batch does not arrive, what is lost is counted, and said once when that begins and once when it
ends. Read `tracing.py` for what is put in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import Thread

from trunkline.gateway.metrics import Sample
from trunkline.gateway.tracing import Trace, spans_of
from trunkline.observe import EventLog
from trunkline.ports.spans import SpanExport

MAX_WAITING = 2_048
"""Requests, and so many are sent in each `PAUSE_S` at most: 0.1 ms of the exporter's thread each,
whatever callers want sampled. At 100 a second, some twenty seconds of a collector that is away.
"""
MAX_BATCH = 256
PAUSE_S = 1.0
BATCH_S = 10.0
"""Of one batch from first to last. The exporter's own time-outs are shorter, and begin anew with
each byte that comes.
"""
MAX_HELD = 4
"""Batches whose time was over, and whose threads wait still: beyond it, nothing is sent."""
LAST_WORDS_S = 2.0
"""How long the end of the process waits for a collector."""


class SpanQueue:
    """See the module. Belongs to the event loop; a `MetricsSource`."""

    def __init__(
        self,
        export: SpanExport,
        log: EventLog,
        *,
        pause_s: float = PAUSE_S,
        most: int = MAX_WAITING,
        last_s: float = LAST_WORDS_S,
        batch_s: float = BATCH_S,
    ) -> None:
        self._export = export
        self._log = log
        self._pause_s = pause_s
        self._most = most
        self._last_s = last_s
        self._batch_s = batch_s
        self._waiting: deque[Trace] = deque()
        self._is_lossy = False
        self._sending: asyncio.Future[int] | None = None
        """The last batch."""
        self.held = 0
        """Threads that wait for a collector longer than anybody waits for them."""
        self.sent = 0
        """Spans that arrived."""
        self.full = 0
        """Requests that found no room."""
        self.failed = 0
        """Requests whose spans did not arrive."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, trace: Trace) -> None:
        """A request is over."""
        if len(self._waiting) >= self._most:
            self.full += 1
        else:
            self._waiting.append(trace)

    def samples(self) -> Iterable[Sample]:
        yield Sample("trace_spans_total", self.sent)
        yield Sample("traces_waiting", len(self._waiting))
        yield Sample("traces_dropped_total", self.full, ("full",))
        yield Sample("traces_dropped_total", self.failed, ("not-taken",))

    async def run(self) -> None:
        """Until it is cancelled; what waits then has a last chance."""
        try:
            while True:
                await asyncio.sleep(self._pause_s)
                due = len(self._waiting)  # what comes meanwhile waits: a bound on what it costs
                while due > 0:
                    due -= await self._send()
        finally:
            await self._send_last()

    async def _send_last(self) -> None:
        try:
            async with asyncio.timeout(self._last_s):
                if self._sending is not None and not self._sending.done():
                    await asyncio.shield(self._sending)
                while self._waiting:
                    await self._send()
        except TimeoutError:
            self._log.warning("traces.dropped", why="the process ends", lost=len(self._waiting))

    async def _send(self) -> int:
        """One batch; of how many requests it was."""
        batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        self._sending = sending = asyncio.get_running_loop().create_future()
        sending.add_done_callback(lambda done: self._counted(done, len(batch)))
        if self.held >= MAX_HELD:
            sending.set_result(0)
            return len(batch)
        # Of no pool: the process would wait for its threads, for as long as a collector likes.
        Thread(target=self._carry, args=(batch, sending), name="spans", daemon=True).start()
        try:
            async with asyncio.timeout(self._batch_s):
                await asyncio.shield(sending)
        except TimeoutError:
            if not sending.done():
                self.held += 1
                sending.set_result(0)
        return len(batch)

    def _carry(self, batch: Sequence[Trace], sending: asyncio.Future[int]) -> None:
        """Send it, on a thread of its own, and say on the loop what came of it."""
        settle: partial[None]
        try:
            settle = partial(sending.set_result, self._exported(batch))
        except Exception as error:  # noqa: BLE001 - a bug of ours, for who waits for the batch
            settle = partial(sending.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the process has ended without it
            sending.get_loop().call_soon_threadsafe(self._settled, sending, settle)

    def _settled(self, sending: asyncio.Future[int], settle: Callable[[], None]) -> None:
        if sending.done():  # it is counted as lost already, though some of it may have arrived
            self.held -= 1
        else:
            settle()

    def _counted(self, done: asyncio.Future[int], trace_count: int) -> None:
        """A batch arrived, or did not; also where nobody waits for it any more."""
        count = 0 if done.cancelled() else done.result()
        self.sent += count
        if not count:
            self.failed += trace_count
        if bool(count) is self._is_lossy:
            self._is_lossy = not count
            if count:
                self._log.info("traces.taken", lost=self.failed + self.full)
            else:
                self._log.warning("traces.dropped", why="the collector does not take them")

    def _exported(self, batch: Sequence[Trace]) -> int:
        """How many spans arrived: all or none."""
        spans = [span for trace in batch for span in spans_of(trace)]
        return len(spans) if self._export(spans) else 0
