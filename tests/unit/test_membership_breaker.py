"""The breaker of a worker, as the ends of its attempts move it."""

from __future__ import annotations

import asyncio

from member_bench import W0, Bench, bench_test, metrics, play, until

from trunkline.ports.worker import AttemptEnd

TEST_S = 10.0


def test_c85_failures_open_the_breaker_and_a_trial_after_the_pause_closes_it() -> None:
    async def scenario() -> None:
        bench = Bench(cb_failure_threshold=3, cb_success_threshold=1, cb_timeout_duration_secs=0.1)
        async with asyncio.timeout(TEST_S), bench.membership:
            await bench.joined()
            target = bench.table.targets[W0]
            for _ in range(3):
                target.on_sent()
                target.on_ended(AttemptEnd.WORKER_FAILED)
            assert bench.state().is_breaker_open
            await until(lambda: not bench.state().is_breaker_open)
            target.on_sent()
            assert bench.state().is_breaker_open, "one trial at a time"
            target.on_ended(AttemptEnd.COMPLETE)
            assert not bench.state().is_breaker_open

    play(scenario)


@bench_test
async def test_c84_refusals_and_leaving_clients_leave_the_breaker_closed(bench: Bench) -> None:
    await bench.joined()
    target = bench.table.targets[W0]
    for end in [AttemptEnd.COMPLETE, AttemptEnd.CLIENT_GONE] * 100:
        target.on_sent()
        target.on_ended(end)
    assert not bench.state().is_breaker_open


def test_a_new_life_begins_with_a_closed_breaker_and_answers_for_itself_alone() -> None:
    async def scenario() -> None:
        bench = Bench(cb_failure_threshold=1)
        async with asyncio.timeout(TEST_S), bench.membership:
            answers = await bench.joined()
            old_target = bench.table.targets[W0]
            old_target.on_ended(AttemptEnd.WORKER_FAILED)
            old = bench.state()
            assert old.is_breaker_open
            answers.pages["/metrics"] = metrics(block_tokens=64)
            await until(lambda: bench.state() is not old)
            assert not bench.state().is_breaker_open
            old_target.on_ended(AttemptEnd.WORKER_FAILED)
            assert not bench.state().is_breaker_open, "a late end of the life before"
            bench.table.targets[W0].on_ended(AttemptEnd.WORKER_FAILED)
            assert bench.state().is_breaker_open

    play(scenario)
