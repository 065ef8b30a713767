"""Workers that fail their probes, and those that come back as another than they were."""

from __future__ import annotations

import functools

from bench import W0, Bench, bench_test, metrics, refused, some_chain, until

from trunkline.core.decision import Exclusion
from trunkline.errors import WorkerTimeout

TEST_S = 10.0


@bench_test
async def test_three_failed_probes_take_a_worker_out_and_two_good_ones_bring_it_back_empty(
    bench: Bench,
) -> None:
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    first_life = bench.directory.incarnation(W0)
    answers.failure = functools.partial(WorkerTimeout, "slow")
    await until(lambda: not bench.state().is_healthy)
    _, excluded = bench.fleet.usable(bench.clock.boot())
    assert excluded == {W0: Exclusion.UNHEALTHY}
    assert bench.log.count("worker.unhealthy") == 1
    answers.failure = None
    await until(lambda: bench.state().is_healthy)
    assert bench.directory.incarnation(W0) > first_life
    assert bench.directory.predicted_count(W0) == 0
    view = bench.membership.view("w0:1")
    assert view is not None
    assert view.reason == "the worker announces no events", "an old trouble is not shown"


@bench_test
async def test_a_single_refused_connection_means_a_new_life_though_health_never_failed(
    bench: Bench,
) -> None:
    """A worker that restarts faster than three probes has lost its cache all the same."""
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answers.failure = refused
    seen = len(answers.asked)
    await until(lambda: len(answers.asked) > seen)
    answers.failure = None
    await until(lambda: bench.log.count("worker.joined") == 2)
    assert bench.log.count("worker.unhealthy") == 0
    assert bench.directory.predicted_count(W0) == 0


@bench_test
async def test_a_single_slow_answer_means_nothing(bench: Bench) -> None:
    answers = await bench.joined()
    answers.failure = functools.partial(WorkerTimeout, "slow")
    seen = len(answers.asked)
    await until(lambda: len(answers.asked) > seen)
    answers.failure = None
    await until(lambda: answers.asked.count("/health") > 5)
    assert bench.log.count("worker.joined") == 1


@bench_test
async def test_what_is_in_flight_stays_counted_through_a_new_life(bench: Bench) -> None:
    answers = await bench.joined()
    old = bench.state()
    old.queue.start(1, 5.0, bench.clock.now())
    answers.pages["/metrics"] = metrics(block_tokens=64)
    await until(lambda: bench.state() is not old)
    assert bench.state().queue.in_flight_count == 1
    assert old.queue.end(1, bench.clock.now())
    assert bench.state().queue.in_flight_count == 0


@bench_test
async def test_c24_another_block_size_at_the_same_url_is_taken_over_and_logged(
    bench: Bench,
) -> None:
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answers.pages["/metrics"] = metrics(block_tokens=64)
    await until(lambda: bench.fleet.block_sizes() == [64])
    assert bench.directory.predicted_count(W0) == 0
    _, fields = next(e for e in bench.log.events if e[0] == "worker.block_size_changed")
    assert (fields["was"], fields["block_tokens"]) == (16, 64)


@bench_test
async def test_a_worker_that_became_another_and_does_not_say_what_is_out_until_it_does(
    bench: Bench,
) -> None:
    answers = await bench.joined()
    old, models = bench.state(), answers.pages.pop("/v1/models")
    answers.pages["/metrics"] = metrics(block_tokens=64)
    await until(lambda: not old.is_healthy)
    assert bench.fleet.usable(bench.clock.boot())[0] == []
    answers.pages["/v1/models"] = models
    await until(lambda: bench.fleet.block_sizes() == [64])
    assert bench.state().is_healthy


@bench_test
async def test_a_draining_worker_stays_so_through_a_new_life(bench: Bench) -> None:
    answers = await bench.joined()
    assert bench.membership.drain("w0:1")
    old = bench.state()
    answers.pages["/metrics"] = metrics(block_tokens=64)
    await until(lambda: bench.state() is not old)
    assert bench.state().is_draining
