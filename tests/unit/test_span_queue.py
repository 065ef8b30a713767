"""Spans on their way out: bounded, counted, and nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

from traced import ended
from trunkline.gateway.span_queue import MAX_BATCH, MAX_HELD, SpanQueue
from trunkline.observe import log
from trunkline.ports.spans import Span, SpanExport


def played(export: SpanExport, play: Callable[[SpanQueue], object], most: int = 1_000) -> SpanQueue:
    """A queue that `play` fills, until it is empty; then it is ended."""
    queue = SpanQueue(export, log, pause_s=0.001, most=most)

    async def run() -> None:
        running = asyncio.create_task(queue.run())
        play(queue)
        while len(queue) or not queue.sent:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
    return queue


def filled(count: int) -> Callable[[SpanQueue], object]:
    return lambda queue: [queue.put(ended()) for _ in range(count)]


def test_all_arrive_in_batches_off_the_loop() -> None:
    batches: list[int] = []
    threads: set[int] = set()

    def take(spans: Sequence[Span]) -> bool:
        batches.append(len(spans))
        threads.add(threading.get_ident())
        return True

    queue = played(take, filled(MAX_BATCH + 10))
    assert batches == [MAX_BATCH, 10]
    assert threading.get_ident() not in threads
    assert (queue.sent, queue.full, queue.failed) == (MAX_BATCH + 10, 0, 0)


def test_at_the_bound_the_newest_is_lost_and_counted() -> None:
    queue = played(lambda _spans: True, filled(15), most=10)
    assert (queue.sent, queue.full) == (10, 5)
    labels = {(sample.name, sample.labels): sample.value for sample in queue.samples()}
    assert labels["traces_dropped_total", ("full",)] == 5
    assert labels["traces_waiting", ()] == 0


def test_what_a_collector_does_not_take_is_counted_and_said_once_each_way() -> None:
    said: list[str] = []

    class Kept:
        def info(self, event: str, **fields: object) -> None:
            said.append(event)

        warning = info

    answers = iter([False, False, True])
    queue = SpanQueue(lambda _spans: next(answers), Kept(), pause_s=0.001)  # type: ignore[arg-type]

    async def run() -> None:
        running = asyncio.create_task(queue.run())
        for number in (1, 2, 3):
            queue.put(ended())
            while queue.failed + queue.sent < number:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert (queue.sent, queue.failed) == (1, 2)
    assert said == ["traces.dropped", "traces.taken"]


def test_what_waits_when_the_process_ends_is_sent_still() -> None:
    arrived: list[Span] = []

    def take(spans: Sequence[Span]) -> bool:
        arrived.extend(spans)
        return True

    queue = SpanQueue(take, log, pause_s=3_600.0)

    async def run() -> None:
        running = asyncio.create_task(queue.run())
        await asyncio.sleep(0)
        queue.put(ended())
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert len(arrived) == 1


def test_a_collector_that_never_answers_does_not_keep_the_process_from_ending() -> None:
    never, asked = threading.Event(), threading.Event()
    kept: list[threading.Thread] = []

    def take(_spans: Sequence[Span]) -> bool:
        kept.append(threading.current_thread())
        asked.set()
        never.wait()
        return True

    queue = SpanQueue(take, log, pause_s=0.001, last_s=0.001)

    async def run() -> None:
        running = asyncio.create_task(queue.run())
        queue.put(ended())
        await asyncio.to_thread(asked.wait)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert kept[0].is_alive()
    assert kept[0].daemon, "the interpreter waits for all others"
    never.set()
    kept[0].join()


def test_a_collector_that_never_comes_to_an_end_holds_no_more_than_a_few_batches() -> None:
    """As one that drips its answer: what reads it never knows that it will not end."""
    over = threading.Event()
    count, is_well = 0, False

    def take(_spans: Sequence[Span]) -> bool:
        nonlocal count
        count += 1
        return is_well or over.wait()

    queue = SpanQueue(take, log, pause_s=0.001, batch_s=0.2, last_s=0.001)

    async def until(is_so: Callable[[], bool]) -> None:
        while not is_so():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)

    async def run() -> None:
        nonlocal is_well
        running = asyncio.create_task(queue.run())
        for number in range(1, MAX_HELD + 4):
            queue.put(ended())
            await until(lambda number=number: queue.failed == number)
        assert count == MAX_HELD, "no thread more for what would not arrive"
        is_well = True
        over.set()  # the collector is started again: its connections break
        await until(lambda: not queue.held)
        assert (queue.sent, queue.failed) == (0, MAX_HELD + 3), "what was lost is counted once"
        queue.put(ended())
        await until(lambda: queue.sent == 1)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert queue.failed == MAX_HELD + 3
