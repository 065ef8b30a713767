"""What operators are shown and told of a worker: a reason that fits its state, and no floods."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging

from member_bench import W0, Answers, Bench, bench_test, metrics, play, refused, until, with_events

from trunkline.control.trouble import MAX_REMINDER_MS, REMINDER_MS, Trouble
from trunkline.core.actions import FeedTrusted, FeedUntrusted
from trunkline.core.decision import Exclusion
from trunkline.core.records import Instant
from trunkline.errors import WorkerTimeout
from trunkline.ports.worker import AttemptEnd

USABLE = "the worker announces no events"

# -- the state and its reason ----------------------------------------------------------------------


@bench_test
async def test_a_worker_that_failed_one_probe_is_shown_as_usable_as_it_is(bench: Bench) -> None:
    answers = await bench.joined()
    answers.failure = functools.partial(WorkerTimeout, "slow")
    seen = answers.asked.count("/health")
    await until(lambda: answers.asked.count("/health") > seen)
    view = bench.view()
    assert (view.exclusion, view.reason) == (None, USABLE)


@bench_test
async def test_a_worker_that_is_out_is_shown_with_what_its_probes_met(bench: Bench) -> None:
    answers = await bench.joined()
    answers.failure = refused
    await until(lambda: bench.view().exclusion)
    view = bench.view()
    assert (view.exclusion, view.reason) == (Exclusion.UNHEALTHY, "refused")


@bench_test
async def test_an_open_breaker_is_the_reason_while_it_is_open(bench: Bench) -> None:
    await bench.joined()
    await bench.joined(2)  # of a fleet that fails as a whole nobody is left out
    target = bench.table.targets[W0]
    for _ in range(bench.parts.breaker.cb_failure_threshold):
        target.on_sent()
        target.on_ended(AttemptEnd.WORKER_FAILED)
    view = bench.view()
    assert (view.exclusion, view.breaker) == (Exclusion.BREAKER, 1)
    assert view.reason == "10 requests in a row or a trial failed there; after 60 s one is tried"


def test_a_breaker_that_is_switched_off_is_shown_closed_and_never_told_of() -> None:
    async def scenario() -> None:
        bench = Bench(cb_failure_threshold=1, disable_circuit_breaker=True)
        async with asyncio.timeout(10.0), bench.membership:
            await bench.joined()
            bench.table.targets[W0].on_ended(AttemptEnd.WORKER_FAILED)
            view = bench.view()
            assert (view.exclusion, view.breaker, view.reason) == (None, 0, USABLE)
            assert bench.log.count("breaker.opened") == 0

    play(scenario)


@bench_test
async def test_a_lease_that_ran_out_is_the_reason_until_the_next_heartbeat(bench: Bench) -> None:
    await bench.joined()
    assert bench.beat(1) is None
    await until(lambda: bench.view().exclusion)
    view = bench.view()
    assert view.exclusion is Exclusion.LEASE
    assert view.reason.startswith("its heartbeats stopped")
    assert bench.beat(2) is None
    view = bench.view()
    assert (view.exclusion, view.reason) == (None, "sends heartbeats with checkpoint keys")


@bench_test
async def test_a_draining_worker_is_shown_so_and_with_its_trouble_when_it_is_gone(
    bench: Bench,
) -> None:
    answers = await bench.joined()
    bench.membership.drain("w0:1")
    view = bench.view()
    assert (view.exclusion, view.reason) == (
        Exclusion.DRAINING,
        "takes no new requests; those in flight end",
    )
    answers.failure = refused
    await until(lambda: not bench.state().is_healthy)
    view = bench.view()
    assert view.exclusion is Exclusion.DRAINING
    assert view.reason.endswith("; refused")


@bench_test
async def test_a_fleet_is_starting_until_a_worker_joined_and_never_again(bench: Bench) -> None:
    assert not bench.membership.is_starting(), "nobody is to come"
    answers = Answers(metrics=metrics())
    answers.failure = refused
    bench.add(answers=answers)
    assert bench.membership.is_starting()
    answers.failure = None
    await until(lambda: bench.log.count("worker.joined"))
    assert not bench.membership.is_starting()
    answers.failure = refused
    await until(lambda: not bench.state().is_healthy)
    assert not bench.membership.is_starting()
    bench.membership.remove("w0:1")
    bench.add(answers=answers)
    assert not bench.membership.is_starting()


# -- lines -----------------------------------------------------------------------------------------


def test_a_breaker_is_told_of_once_when_it_opens_and_once_when_it_closes() -> None:
    async def scenario() -> None:
        bench = Bench(cb_failure_threshold=2, cb_success_threshold=1, cb_timeout_duration_secs=0.05)
        async with asyncio.timeout(10.0), bench.membership:
            await bench.joined()
            target = bench.table.targets[W0]
            for _ in range(4):
                target.on_ended(AttemptEnd.WORKER_FAILED)
            for end in (AttemptEnd.WORKER_FAILED, AttemptEnd.COMPLETE):  # a trial each
                assert bench.log.count("breaker.closed") == 0
                await until(lambda: not bench.state().is_breaker_open)
                target.on_sent()
                target.on_ended(end)
            target.on_ended(AttemptEnd.COMPLETE)
        lines = [line for line in bench.log.levels if line[0].startswith("breaker.")]
        assert lines == [("breaker.opened", logging.WARNING), ("breaker.closed", logging.INFO)]
        [fields] = [fields for name, fields in bench.log.events if name == "breaker.opened"]
        assert fields["worker"] == W0

    play(scenario)


def test_a_breaker_that_is_open_closes_with_the_life_it_was_for() -> None:
    async def scenario() -> None:
        bench = Bench(cb_failure_threshold=1)
        async with asyncio.timeout(10.0), bench.membership:
            await bench.joined()
            target = bench.table.targets[W0]
            target.on_ended(AttemptEnd.WORKER_FAILED)
            bench.membership.remove("w0:1")
            assert bench.log.count("breaker.closed") == 1
            target.on_ended(AttemptEnd.WORKER_FAILED)
            assert bench.log.count("breaker.opened") == 1, "a late end of the life before"

    play(scenario)


@bench_test
async def test_a_worker_that_is_not_there_is_told_of_once_and_again_when_it_is_reached(
    bench: Bench,
) -> None:
    answers = Answers(metrics=metrics())
    answers.failure = refused
    bench.add(answers=answers)
    await until(lambda: len(answers.asked) == 3)
    assert bench.log.count("worker.unreachable") == 1
    answers.failure = None
    await until(lambda: bench.log.count("worker.reached"))
    [fields] = [told for name, told in bench.log.events if name == "worker.reached"]
    away_ms = fields["away_ms"]
    assert isinstance(away_ms, float)
    assert away_ms >= 1_000.0, "two pauses between three attempts"


@bench_test
async def test_a_worker_that_was_never_missed_is_not_told_to_be_back(bench: Bench) -> None:
    answers = await bench.joined()
    answers.pages["/metrics"] = metrics(block_tokens=64)
    await until(lambda: bench.log.count("worker.joined") == 2)
    assert bench.log.count("worker.reached") == 0


def test_the_same_trouble_is_worth_a_line_at_growing_intervals_and_another_at_once() -> None:
    trouble, second_ms = Trouble(), 1_000.0
    said = [at for at in range(4_000) if trouble.is_worth_saying("away", Instant(at * second_ms))]
    first = REMINDER_MS / second_ms
    pauses = [later - earlier for earlier, later in itertools.pairwise(said)]
    assert pauses[:4] == [first, 2 * first, 4 * first, 8 * first]
    assert max(pauses) == pauses[-1] == MAX_REMINDER_MS / second_ms
    now = Instant(4_000 * second_ms)
    assert trouble.is_worth_saying("another model", now)
    assert not trouble.is_worth_saying("another model", now)
    assert trouble.end(now) == now
    assert trouble.end(now) is None
    said = [at for at in range(40) if trouble.is_worth_saying("away", Instant(now + at * 1e3))]
    assert said == [0, first, 3 * first], "new trouble"


@bench_test
async def test_a_feed_that_begins_to_learn_is_no_warning_and_one_that_is_lost_is(
    bench: Bench,
) -> None:
    await bench.joined(answers=with_events(0))
    await until(lambda: W0 in bench.feed_actions)
    tell = bench.feed_actions[W0]
    tell(FeedUntrusted(worker=W0, reason="learning what the worker holds"))
    tell(FeedTrusted(worker=W0))
    bench.feeds[W0].reason = "batches are lost"
    tell(FeedUntrusted(worker=W0, reason="batches are lost"))
    levels = [level for name, level in bench.log.levels if name == "feed.untrusted"]
    assert levels == [logging.INFO, logging.WARNING]
