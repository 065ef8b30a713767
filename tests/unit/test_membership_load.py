"""How busy and how full a worker says it is, and what is made of its silence."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from member_bench import (
    TEST_S,
    W0,
    Answers,
    Bench,
    bench_test,
    metrics,
    play,
    some_chain,
    until,
)

from trunkline.config import HealthConfig
from trunkline.core.decision import Exclusion
from trunkline.errors import WorkerTimeout
from trunkline.ports.worker import AttemptEnd, Endpoint
from virtual_loop import VirtualLoop


@bench_test
async def test_c11_a_worker_without_any_load_endpoint_is_degraded_and_warned_of_once(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers())
    await until(lambda: answers.asked.count("/get_loads") > 3)
    view = bench.membership.view("w0:1")
    assert view is not None
    assert view.degraded == ("load",)
    assert bench.log.count("worker.load_unknown") == 1
    answers.pages["/load"] = b'{"server_load": 2}'
    await until(lambda: (v := bench.membership.view("w0:1")) is not None and not v.degraded)


@bench_test
async def test_c11_a_worker_with_only_load_is_read_there_and_not_degraded(bench: Bench) -> None:
    answers = await bench.joined(answers=Answers(load=b'{"server_load": 2}'))
    await until(lambda: answers.asked.count("/load") > 3)
    assert answers.asked.count("/get_loads") == 0
    assert answers.asked.count("/metrics") == 2, "once to join and once to learn that it is no use"
    view = bench.membership.view("w0:1")
    assert view is not None
    assert view.degraded == ()
    assert bench.log.count("worker.load_unknown") == 0


@bench_test
async def test_other_gateways_work_counts_until_the_worker_no_longer_tells_of_it(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers(metrics=metrics(waiting=9)))
    bench.state().queue.start(1, 50.0, bench.clock.now())
    bench.state().queue.end(1, bench.clock.now())
    await until(lambda: bench.state().queue.foreign_ms > 0)
    answers.failure = functools.partial(WorkerTimeout, "slow")
    await until(lambda: bench.state().queue.foreign_ms == 0)
    assert bench.log.count("worker.joined") == 1, "it did not begin anew"


@bench_test
async def test_memory_above_the_watermark_keeps_new_prefixes_away_until_it_falls(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers(metrics=metrics(memory=0.99)))
    await until(lambda: bench.state().is_full)
    answers.pages["/metrics"] = metrics(memory=0.5)
    await until(lambda: not bench.state().is_full)
    assert bench.log.count("worker.joined") == 1, "it did not begin anew"


@bench_test
async def test_c20_a_worker_that_sleeps_holds_nothing(bench: Bench) -> None:
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    assert bench.directory.predicted_count(W0) == 20
    answers.pages["/metrics"] += b'vllm:engine_sleep_state{sleep_state="awake"} 0\n'
    await until(lambda: bench.directory.predicted_count(W0) == 0)


@bench_test
async def test_c20_a_worker_that_sleeps_is_left_alone_until_it_wakes(bench: Bench) -> None:
    answers = await bench.joined()
    awake = answers.pages["/metrics"]
    answers.pages["/metrics"] += b'vllm:engine_sleep_state{sleep_state="awake"} 0\n'
    await until(lambda: bench.view().exclusion is Exclusion.ASLEEP)
    assert "sleeps or is paused" in bench.view().reason
    answers.pages["/metrics"] = awake
    await until(lambda: bench.view().exclusion is None)


@bench_test
async def test_c20_a_paused_worker_is_left_alone_and_what_it_held_is_not_forgotten(
    bench: Bench,
) -> None:
    """It may have kept its cache; if not, its first events say so."""
    answers = await bench.joined(
        answers=Answers(metrics=metrics(), is_paused=b'{"is_paused":true}')
    )
    await until(lambda: bench.view().exclusion is Exclusion.ASLEEP)
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answers.pages["/is_paused"] = b'{"is_paused":false}'
    await until(lambda: bench.view().exclusion is None)
    assert bench.directory.predicted_count(W0) == 20


@bench_test
async def test_whether_it_is_paused_is_asked_once_where_nobody_tells(bench: Bench) -> None:
    answers = await bench.joined()
    await until(lambda: answers.asked.count("/metrics") > 4)
    assert answers.asked.count("/is_paused") == 1


@bench_test
async def test_c20_an_idle_worker_without_memory_in_use_keeps_its_cache(bench: Bench) -> None:
    """Engines count blocks of running requests alone: cached ones are free, and usage is 0."""
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answers.pages["/metrics"] = metrics(memory=0.0)
    seen = answers.asked.count("/metrics")
    await until(lambda: answers.asked.count("/metrics") > seen + 2)
    assert bench.directory.predicted_count(W0) == 20


@bench_test
async def test_c20_entries_of_a_worker_without_news_expire_by_themselves(bench: Bench) -> None:
    await bench.joined()
    now = bench.clock.now()
    bench.directory.predict(W0, some_chain(), now=now, ttl_ms=100.0)
    assert bench.directory.predicted_count(W0) == 20
    bench.directory.expire(type(now)(now + 100.0))
    assert bench.directory.predicted_count(W0) == 0


@bench_test
async def test_a_full_worker_that_no_longer_tells_of_its_memory_is_not_held_for_full(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers(metrics=metrics(memory=0.99)))
    await until(lambda: bench.state().is_full)
    del answers.pages["/metrics"]
    answers.pages["/load"] = b'{"server_load": 2}'
    await until(lambda: not bench.state().is_full)
    assert bench.log.count("worker.joined") == 1


@bench_test
async def test_other_gateways_work_is_forgotten_when_the_worker_tells_only_of_its_load(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers(metrics=metrics(waiting=9)))
    bench.state().queue.start(1, 50.0, bench.clock.now())
    bench.state().queue.end(1, bench.clock.now())
    await until(lambda: bench.state().queue.foreign_ms > 0)
    del answers.pages["/metrics"]
    answers.pages["/load"] = b'{"server_load": 2}'
    await until(lambda: bench.state().queue.foreign_ms == 0)
    assert bench.log.count("worker.joined") == 1, "it did not begin anew"


class Stopped(Answers):
    """While `stops` is set it accepts and says nothing of its load."""

    def __init__(self) -> None:
        super().__init__(metrics=metrics())
        self.stops: asyncio.Event | None = None
        self.left_count = 0
        """Questions that were given up."""


async def _stopped(bench: Bench) -> Stopped:
    answers = Stopped()
    await bench.joined(answers=answers)
    await bench.joined(2)
    plain = bench.fetch

    async def fetch(
        endpoint: Endpoint, method: str, path: str, *, timeout_ms: float
    ) -> tuple[int, bytes]:
        if endpoint.port == 1 and answers.stops is not None and path == "/metrics":
            try:
                async with asyncio.timeout(timeout_ms / 1_000.0):
                    await answers.stops.wait()
            except TimeoutError:
                answers.left_count += 1
                raise WorkerTimeout(f"{path} was not answered") from None
        return await plain(endpoint, method, path, timeout_ms=timeout_ms)

    bench.parts.fetch = fetch
    return answers


async def _just_read(answers: Answers) -> None:
    """A reading of its load was answered in this step."""
    seen = answers.asked.count("/metrics")
    await until(lambda: answers.asked.count("/metrics") > seen)


def each_timeout(test: Callable[[Bench], Awaitable[None]]) -> Callable[[float], None]:
    """With readings that fail long before the worker is silent, just before it, or not before."""

    @pytest.mark.parametrize("timeout_secs", [0.1, 0.5, 1.0, 5.0])
    @functools.wraps(test)
    def run(timeout_secs: float) -> None:
        @bench_test
        async def once(bench: Bench) -> None:
            bench.parts.health = HealthConfig(
                load_interval_secs=1.0, health_check_timeout_secs=timeout_secs
            )
            await test(bench)

        once()

    del run.__wrapped__
    return run


@each_timeout
async def test_f2_a_worker_that_says_nothing_is_left_out_half_a_heartbeat_before_the_third(
    bench: Bench,
) -> None:
    answers = await _stopped(bench)
    await _just_read(answers)
    answers.stops = asyncio.Event()
    stopped_at = bench.clock.now()
    await until(lambda: bench.view().exclusion is Exclusion.SILENT)
    assert 2_400.0 <= bench.clock.now() - stopped_at <= 2_510.0  # `until` looks now and then
    assert bench.view("w1:2").exclusion is None
    assert bench.log.count("gray.silent") == 1
    answers.stops.set()
    answers.stops = None
    await until(lambda: bench.view().exclusion is None)
    assert bench.log.count("gray.heard") == 1


@each_timeout
async def test_one_reading_that_is_lost_is_no_silence(bench: Bench) -> None:
    """Whether it fails, or is answered when its first packet came in the second time."""
    answers = await _stopped(bench)
    for _ in range(2):
        await _just_read(answers)
        answers.stops, left = asyncio.Event(), answers.left_count
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0 + 1.1):  # the pause before it, and what it may take
                await until(lambda left=left: answers.left_count > left)
        answers.stops.set()
        answers.stops = None
    assert bench.log.count("gray.silent") == 0


@bench_test
async def test_a_silent_worker_is_asked_no_more_often_than_any_other(bench: Bench) -> None:
    bench.parts.health = HealthConfig(load_interval_secs=1.0, health_check_timeout_secs=0.1)
    answers = await _stopped(bench)
    answers.stops = asyncio.Event()
    await until(lambda: bench.view().exclusion is Exclusion.SILENT)
    left = answers.left_count
    await asyncio.sleep(4.0)
    assert answers.left_count - left <= 4


@bench_test
async def test_a_worker_too_busy_to_tell_its_load_is_not_silent_while_it_gives_tokens(
    bench: Bench,
) -> None:
    answers = await _stopped(bench)
    pace = bench.table.targets[W0].pace
    assert pace is not None
    answers.stops = asyncio.Event()
    for _ in range(30):
        await asyncio.sleep(0.1)
        pace.moved(3, 100.0, bench.clock.now())
        assert bench.view().exclusion is None
    await until(lambda: bench.view().exclusion is Exclusion.SILENT)
    pace.moved(3, 100.0, bench.clock.now())
    await until(lambda: bench.view().exclusion is None)


@bench_test
async def test_time_in_which_the_gateway_did_not_run_is_no_silence(bench: Bench) -> None:
    """The answer may have come meanwhile, and is read after it."""
    bench.parts.health = HealthConfig(load_interval_secs=1.0)
    answers = await _stopped(bench)
    await _just_read(answers)
    answers.stops = asyncio.Event()
    await asyncio.sleep(1.1)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.stall(6.0)
    await asyncio.sleep(0.3)
    answers.stops.set()
    answers.stops = None
    await asyncio.sleep(1.5)
    assert bench.log.count("gray.silent") == 0


@bench_test
async def test_missed_deadlines_leave_a_worker_out_until_its_time_is_over(bench: Bench) -> None:
    await bench.joined()
    await bench.joined(2)
    target = bench.table.targets[W0]
    for wanted in (None, Exclusion.SUSPECT, Exclusion.EJECTED):
        target.on_sent()
        target.on_ended(AttemptEnd.WORKER_LATE)
        assert bench.view().exclusion is wanted
        await asyncio.sleep(1.1)
    assert bench.log.count("gray.ejected") == 1


def test_nothing_is_held_against_a_worker_where_gray_detection_is_off() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.parts.health = replace(bench.parts.health, disable_gray_detection=True)
        async with asyncio.timeout(TEST_S), bench.membership:
            answers = await _stopped(bench)
            target = bench.table.targets[W0]
            assert target.pace is None
            answers.stops = asyncio.Event()
            for _ in range(5):
                target.on_sent()
                target.on_ended(AttemptEnd.WORKER_LATE)
                await asyncio.sleep(1.0)
                assert bench.view().exclusion is None

    play(scenario)
