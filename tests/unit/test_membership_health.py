"""Workers that fail their probes, and those that come back as another than they were."""

from __future__ import annotations

import asyncio
import functools
import itertools

from member_bench import W0, Answers, Bench, bench_test, metrics, refused, some_chain, until

from trunkline.config import HealthConfig
from trunkline.control.health import PROBE_GAP_SECS, Health
from trunkline.control.probe import is_refusal
from trunkline.core.decision import Exclusion
from trunkline.errors import WorkerTimeout
from trunkline.ports.worker import AttemptEnd


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
async def test_a_single_refused_connection_takes_a_worker_out_at_once_and_means_a_new_life(
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
    assert bench.log.count("worker.unhealthy") == 1
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


def began(started_s: float) -> bytes:
    """The page of a process that began then."""
    return metrics() + f"process_start_time_seconds {started_s}\n".encode()


@bench_test
async def test_a_worker_that_is_back_before_any_probe_failed_is_a_new_life_all_the_same(
    bench: Bench,
) -> None:
    """Else its breaker stays open, and its events are waited for where they came from before."""
    answers = await bench.joined(answers=Answers(metrics=began(1_000.0)))
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    for _ in range(bench.parts.breaker.cb_failure_threshold):
        fail(bench)
    assert bench.state().is_breaker_open
    answers.pages["/metrics"] = began(1_002.5)
    await until(lambda: bench.log.count("worker.joined") == 2)
    assert not bench.state().is_breaker_open
    assert bench.directory.predicted_count(W0) == 0
    assert bench.log.count("worker.unhealthy") == 0


class InTurn(Answers):
    """Two processes behind one port: the older one answers when a worker is asked for all it is."""

    def answer(self, path: str) -> tuple[int, bytes]:
        is_joining = "/v1/models" in self.asked[-2:]
        self.pages["/metrics"] = began(1_000.0 if is_joining else 1_001.0)
        return super().answer(path)


@bench_test
async def test_of_processes_that_answer_in_turn_each_is_a_new_life_once_at_most(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=InTurn())
    joined = functools.partial(bench.log.count, "worker.joined")
    await until(lambda: answers.asked.count("/metrics") > 20 or joined() > 2)
    assert joined() <= 2


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


# -- what failed requests give reason for ----------------------------------------------------------


def at_rest(bench: Bench) -> None:
    """Nothing is asked of a worker for a minute, unless something gives reason for it."""
    bench.parts.health = HealthConfig(health_check_interval_secs=60.0, load_interval_secs=60.0)


def fail(bench: Bench) -> None:
    target = bench.table.targets[W0]
    target.on_sent()
    target.on_ended(AttemptEnd.WORKER_FAILED)


@bench_test
async def test_a_failed_request_has_a_worker_that_is_gone_out_and_back_without_a_probes_turn(
    bench: Bench,
) -> None:
    at_rest(bench)
    answers = await bench.joined()
    await until(lambda: answers.asked.count("/metrics") == 2)  # its load was read
    answers.failure = refused
    fail(bench)
    await until(lambda: not bench.state().is_healthy)
    assert answers.asked.count("/health") == 1
    answers.failure = None
    await until(lambda: bench.state().is_healthy)
    assert bench.log.count("worker.joined") == 2


@bench_test
async def test_a_refused_reading_of_its_load_takes_a_worker_out_too(bench: Bench) -> None:
    bench.parts.health = HealthConfig(health_check_interval_secs=60.0, load_interval_secs=0.05)
    answers = await bench.joined()
    answers.failure = refused
    await until(lambda: not bench.state().is_healthy)
    assert answers.asked.count("/health") == 0


@bench_test
async def test_a_failed_request_at_a_worker_that_is_well_changes_nothing(bench: Bench) -> None:
    at_rest(bench)
    answers = await bench.joined()
    fail(bench)
    await until(lambda: answers.asked.count("/health") == 1)
    assert bench.state().is_healthy


@bench_test
async def test_a_client_that_leaves_and_a_late_end_of_an_earlier_life_give_no_reason_to_ask(
    bench: Bench,
) -> None:
    at_rest(bench)
    answers = await bench.joined()
    early = bench.table.targets[W0]
    bench.beat(1, block_tokens=64)  # another block size: it is asked anew
    await until(lambda: bench.log.count("worker.joined") == 2)
    seen = answers.asked.count("/health")
    early.on_ended(AttemptEnd.WORKER_FAILED)
    bench.table.targets[W0].on_ended(AttemptEnd.CLIENT_GONE)
    await asyncio.sleep(PROBE_GAP_SECS + 0.1)  # nothing is to come
    assert answers.asked.count("/health") == seen


@bench_test
async def test_a_flood_of_failures_makes_no_flood_of_probes(bench: Bench) -> None:
    """Never two at a time, and none sooner after another than the gap."""
    health = Health(lambda: HealthConfig(health_check_interval_secs=60.0))
    now, times = asyncio.get_running_loop().time, list[float]()

    async def flood() -> None:
        while True:
            health.doubt()
            await asyncio.sleep(0.01)

    flooding = asyncio.create_task(flood())
    for _ in range(3):
        await health.until_due()
        times.append(now())
    flooding.cancel()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(PROBE_GAP_SECS <= gap < PROBE_GAP_SECS + 1.0 for gap in gaps)


def test_a_name_with_two_addresses_that_both_refuse_is_refused() -> None:
    """What asyncio raises then is no ConnectionRefusedError."""
    both = OSError(
        "Multiple exceptions: [Errno 111] Connect call failed ('::1', 9, 0, 0), "
        "[Errno 111] Connect call failed ('127.0.0.1', 9)"
    )
    assert is_refusal(both)
    assert is_refusal(ConnectionRefusedError())
    assert not is_refusal(ConnectionResetError(104, "Connection reset by peer"))
    assert not is_refusal(None)
