"""Workers that vanished, of whom nothing at all is heard, and those that only answer badly."""

from __future__ import annotations

import asyncio

from member_bench import W0, Answers, Bench, bench_test, metrics, refused, until

from trunkline.config import HealthConfig
from trunkline.control.health import UNHEARD_SECS, Health
from trunkline.errors import WorkerTimeout
from trunkline.ports.worker import Endpoint

EVERYTHING = ("",)


class Deaf(Answers):
    """Takes questions on the paths that begin with one of these, and leaves them unanswered."""

    def __init__(self) -> None:
        super().__init__(metrics=metrics())
        self.unanswered: tuple[str, ...] = ()
        self.is_back = asyncio.Event()


async def deaf(bench: Bench) -> Deaf:
    answers = Deaf()
    plain = bench.fetch

    async def fetch(
        endpoint: Endpoint, method: str, path: str, *, timeout_ms: float
    ) -> tuple[int, bytes]:
        if path.startswith(answers.unanswered):
            try:
                async with asyncio.timeout(timeout_ms / 1_000.0):
                    await answers.is_back.wait()
            except TimeoutError:
                raise WorkerTimeout(f"{path} was not answered") from None
        return await plain(endpoint, method, path, timeout_ms=timeout_ms)

    bench.parts.fetch = fetch
    await bench.joined(answers=answers)
    return answers


def is_gone(bench: Bench) -> bool:
    return bench.table.targets[W0].stay.is_gone()


@bench_test
async def test_f1_a_worker_that_answers_nothing_is_gone_within_three_heartbeats(
    bench: Bench,
) -> None:
    answers = await deaf(bench)
    assert not is_gone(bench)
    answers.unanswered = EVERYTHING
    vanished_at = bench.clock.now()
    await until(lambda: is_gone(bench))
    assert 1_500.0 <= bench.clock.now() - vanished_at <= 2_500.0
    answers.unanswered = ()
    answers.is_back.set()
    await until(lambda: not is_gone(bench))


@bench_test
async def test_a_worker_that_is_gone_stays_so_while_it_is_asked_again_and_again(
    bench: Bench,
) -> None:
    bench.parts.health = HealthConfig(health_failure_threshold=1_000, load_interval_secs=0.05)
    answers = await deaf(bench)
    answers.unanswered = EVERYTHING
    await until(lambda: is_gone(bench))
    for _ in range(65):  # its answers are waited for 5 s, and its probes come as often
        await asyncio.sleep(0.1)
        assert is_gone(bench)


@bench_test
async def test_f1_a_worker_whose_probes_fail_in_a_row_is_gone_though_its_load_is_never_read(
    bench: Bench,
) -> None:
    bench.parts.health = HealthConfig(
        health_check_interval_secs=0.5, health_check_timeout_secs=0.5, load_interval_secs=60.0
    )
    answers = await deaf(bench)
    await until(lambda: answers.asked.count("/metrics") == 2)  # to join, and its load once
    answers.unanswered = EVERYTHING
    vanished_at = bench.clock.now()
    await until(lambda: is_gone(bench))
    assert 2_000.0 <= bench.clock.now() - vanished_at <= 3_000.0
    assert not bench.state().is_silent


@bench_test
async def test_a_worker_out_for_what_its_machine_answers_is_not_gone(bench: Bench) -> None:
    answers = await deaf(bench)
    for failure in (refused, None):
        answers.failure = failure
        if failure is None:
            del answers.pages["/health"]  # 404
        await until(lambda: not bench.state().is_healthy)
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert not bench.state().is_healthy
            assert not is_gone(bench)


@bench_test
async def test_a_worker_whose_probe_is_not_due_is_asked_as_soon_as_its_load_is_late(
    bench: Bench,
) -> None:
    bench.parts.health = HealthConfig(health_check_interval_secs=60.0, load_interval_secs=0.05)
    answers = await deaf(bench)
    answers.unanswered = EVERYTHING
    vanished_at = bench.clock.now()
    await until(lambda: is_gone(bench))
    assert bench.clock.now() - vanished_at <= 2_500.0


@bench_test
async def test_a_worker_whose_health_answers_is_silent_and_not_gone(bench: Bench) -> None:
    answers = await deaf(bench)
    answers.unanswered = ("/metrics",)
    await until(lambda: bench.state().is_silent)
    for _ in range(30):
        await asyncio.sleep(0.1)
        assert not is_gone(bench)


@bench_test
async def test_a_worker_that_tells_its_load_is_not_gone_when_its_health_hangs(
    bench: Bench,
) -> None:
    answers = await deaf(bench)
    answers.unanswered = ("/health",)
    for _ in range(60):
        await asyncio.sleep(0.1)
        assert not is_gone(bench)


@bench_test
async def test_a_worker_too_busy_to_answer_anything_is_not_gone_while_it_gives_tokens(
    bench: Bench,
) -> None:
    answers = await deaf(bench)
    pace = bench.table.targets[W0].pace
    assert pace is not None
    answers.unanswered = EVERYTHING
    for _ in range(45):
        await asyncio.sleep(0.1)
        pace.moved(3, 100.0, bench.clock.now())
        assert not is_gone(bench)
    bench.fleet.update(W0, is_healthy=False)
    assert not is_gone(bench)


@bench_test
async def test_a_probe_may_take_a_heartbeat_before_nothing_is_heard(bench: Bench) -> None:
    health = Health(lambda: HealthConfig())

    async def probe(takes_secs: float) -> str:
        await asyncio.sleep(takes_secs)
        health.heard()
        return "busy"

    for takes_secs, expected in ((UNHEARD_SECS - 0.1, False), (UNHEARD_SECS + 0.1, True)):
        following = asyncio.create_task(health.follow(probe(takes_secs), lambda: 0))
        await asyncio.sleep(UNHEARD_SECS + 0.05)
        assert health.is_unheard is expected
        assert await following == "busy"
        assert not health.is_unheard, "also an answer that says no is one"
