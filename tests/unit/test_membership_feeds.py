"""Workers with cache events: their ranks, feeds that fail, and feeds that stay silent."""

from __future__ import annotations

from member_bench import (
    W0,
    Answers,
    Bench,
    bench_test,
    metrics,
    some_chain,
    stored_batch,
    until,
    with_events,
)

from trunkline.config import RoutingConfig
from trunkline.control.views import Mode
from trunkline.core.actions import FeedFailed
from trunkline.core.events import EventBatch
from trunkline.core.records import WorkerId
from trunkline.core.repair import FeedState
from trunkline.ports.worker import AttemptEnd, EventSource


@bench_test
async def test_c31_each_rank_is_an_entry_of_its_own_and_is_asked_for_by_header(
    bench: Bench,
) -> None:
    bench.add(answers=with_events(0, 1))
    names = [WorkerId("w0:1@0"), WorkerId("w0:1@1")]
    await until(lambda: [s.worker for s in bench.fleet.states()] == names)
    headers = [bench.table.targets[name].headers for name in names]
    assert headers == [(("x-data-parallel-rank", "0"),), (("x-data-parallel-rank", "1"),)]
    assert bench.directory.slot(names[0]) != bench.directory.slot(names[1])


@bench_test
async def test_c103_a_feed_that_cannot_be_followed_makes_the_worker_approximate_and_unknown(
    bench: Bench,
) -> None:
    bench.add(answers=with_events(0, 3))
    second = WorkerId("w0:1@3")
    await until(lambda: second in bench.feed_actions)
    bench.directory.predict(second, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    bench.feed_actions[second](FeedFailed(worker=second, reason="no socket"))
    assert bench.mode() is Mode.APPROXIMATE
    assert bench.directory.predicted_count(second) == 0, "what can no longer be corrected is gone"
    target = bench.table.targets[second]
    assert target.headers == (("x-data-parallel-rank", "3"),)
    assert target.predicted_ttl_ms == RoutingConfig().approximate_ttl_ms


@bench_test
async def test_a_mistake_of_ours_with_one_worker_is_logged_and_ends_nobody_else(
    bench: Bench,
) -> None:
    await bench.joined(2)
    other = bench.state(WorkerId("w1:2"))
    bench.feed_error = KeyError("a bug")
    bench.add(answers=with_events(0))
    await until(lambda: bench.log.count("worker.follow_failed"))
    await until(lambda: bench.log.count("worker.joined") == 3)
    assert bench.mode() is Mode.EXACT
    assert bench.state(WorkerId("w1:2")) is other


@bench_test
async def test_c26_a_recovery_that_takes_its_time_keeps_no_worker_from_being_chosen(
    bench: Bench,
) -> None:
    await bench.joined(answers=with_events(0))
    feed = bench.feeds[W0]
    assert feed.joined(bench.clock.now()), "a replay was asked for"
    feed.live(stored_batch(7, some_chain(), 1), bench.clock.now())
    assert feed.state is FeedState.REPLAYING
    assert bench.view().ranks[0].feed_state == "replaying", "how far it is can be seen"
    usable, _ = bench.fleet.usable(bench.clock.boot())
    assert [state.worker for state in usable] == [W0]


# -- silence ---------------------------------------------------------------------------------------


def answer(bench: Bench, count: int, worker: WorkerId = W0) -> None:
    target = bench.table.targets[worker]
    for _ in range(count):
        target.on_sent()
        target.on_ended(AttemptEnd.COMPLETE)


@bench_test
async def test_c57_announced_events_that_never_come_make_a_worker_approximate_until_they_do(
    bench: Bench,
) -> None:
    await bench.joined(answers=with_events(0))
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answer(bench, 2)
    assert bench.mode() is Mode.EXACT
    answer(bench, 2)
    view = bench.membership.view("w0:1")
    assert view is not None
    assert (view.mode, view.degraded) == (Mode.APPROXIMATE, ("events",))
    assert view.reason.startswith("no events since start")
    assert view.ranks[0].feed_stats["batches"] == 0
    assert bench.table.targets[W0].predicted_ttl_ms == RoutingConfig().approximate_ttl_ms
    assert bench.log.count("worker.no_events") == 1
    bench.feeds[W0].live(EventBatch(seq=0, events=(), fingerprint=1), bench.clock.now())
    await until(lambda: bench.mode() is Mode.EXACT)
    assert bench.table.targets[W0].predicted_ttl_ms == RoutingConfig().predicted_ttl_ms
    answer(bench, 9)
    assert bench.mode() is Mode.EXACT


@bench_test
async def test_c57_short_prompts_and_failures_are_no_reason_to_expect_events(bench: Bench) -> None:
    await bench.joined(answers=with_events(0))
    answer(bench, 9)
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    for _ in range(9):
        bench.table.targets[W0].on_ended(AttemptEnd.CLIENT_GONE)
    assert bench.mode() is Mode.EXACT


@bench_test
async def test_events_that_only_the_operator_knows_of_are_followed(bench: Bench) -> None:
    source = EventSource(endpoint="tcp://w0:5557")
    await bench.joined(answers=Answers(metrics=metrics()), event_sources=(source,))
    assert bench.mode() is Mode.EXACT
    assert bench.followed == [source]
