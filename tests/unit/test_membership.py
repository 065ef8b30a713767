"""Workers as the membership sees them: who joins, who is shown with a reason, who is forgotten."""

from __future__ import annotations

import asyncio
import functools

import pytest
from member_bench import (
    W0,
    Answers,
    Bench,
    bench_test,
    metrics,
    named,
    play,
    refused,
    some_chain,
    stored_batch,
    until,
    with_events,
)

from trunkline.config import RoutingConfig
from trunkline.control.parts import HELD_SLACK_BLOCKS
from trunkline.control.views import Mode
from trunkline.core.decision import Exclusion
from trunkline.core.directory import Directory
from trunkline.core.records import WorkerId
from trunkline.errors import ConfigError

# -- joining ---------------------------------------------------------------------------------------


@bench_test
async def test_a_worker_joins_with_what_it_says_of_itself(bench: Bench) -> None:
    await bench.joined(answers=Answers(metrics=metrics(block_tokens=32)))
    view = bench.membership.view("w0:1")
    assert view is not None
    assert (view.mode, view.model_id, view.block_tokens) == (Mode.APPROXIMATE, "m", 32)
    assert view.capacity_blocks == 100
    assert bench.table.targets[W0].predicted_ttl_ms == RoutingConfig().approximate_ttl_ms
    assert bench.membership.served_models() == ["m"]


@bench_test
async def test_c10_adding_the_same_worker_again_keeps_counter_breaker_and_index(
    bench: Bench,
) -> None:
    await bench.joined()
    state, slot = bench.state(), bench.directory.slot(W0)
    state.queue.start(1, 5.0, bench.clock.now())
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    for _ in range(20):
        bench.membership.add(named(1))
        await asyncio.sleep(0.005)
    assert bench.state() is state
    assert bench.directory.slot(W0) == slot
    assert bench.state().queue.in_flight_count == 1
    assert bench.directory.predicted_count(W0) == 20
    assert bench.log.count("worker.joined") == 1


@bench_test
async def test_another_spec_of_the_same_name_replaces_the_worker(bench: Bench) -> None:
    await bench.joined()
    before = bench.state()
    bench.membership.add(named(1, block_tokens=64))
    await until(lambda: (s := bench.fleet.get(W0)) is not None and s is not before)
    assert bench.state().block_tokens == 64


@bench_test
async def test_a_worker_that_is_not_there_is_shown_with_the_reason_and_tried_again(
    bench: Bench,
) -> None:
    answers = Answers()
    answers.failure = refused
    bench.add(answers=answers)
    await until(lambda: bench.log.count("worker.unreachable"))
    view = bench.membership.view("w0:1")
    assert view is not None
    assert (view.mode, view.reason, view.ranks) == (Mode.CONNECTING, "refused", ())
    answers.failure = None
    await until(lambda: bench.fleet.get(W0))


@bench_test
async def test_a_worker_above_the_bound_is_refused(bench: Bench) -> None:
    from trunkline.control import membership

    bench.add()
    for number in range(membership.MAX_WORKERS - 1):
        bench.membership._members[f"other{number}"] = bench.membership._members["w0:1"]
    with pytest.raises(ConfigError, match="no more are taken"):
        bench.membership.add(named(2))
    bench.membership._members = {"w0:1": bench.membership._members["w0:1"]}


def test_an_error_inside_an_open_membership_goes_through_as_it_is() -> None:
    async def scenario() -> None:
        bench = Bench()
        async with bench.membership:
            await bench.joined()
            raise ConfigError("a taken port")

    with pytest.raises(ConfigError, match="a taken port"):
        play(scenario)


@bench_test
async def test_removing_a_worker_forgets_it_everywhere_and_its_lease_too(bench: Bench) -> None:
    await bench.joined()
    assert bench.beat(7) is None
    assert bench.membership.remove("w0:1")
    assert not bench.membership.remove("w0:1")
    assert (bench.fleet.states(), bench.table.targets) == ([], {})
    assert not bench.directory.knows(W0)
    await bench.joined()
    assert bench.beat(1) is None, "a heartbeat after removal starts afresh"


@bench_test
async def test_c90_random_orders_of_adding_and_removing_end_as_the_source_says(
    bench: Bench,
) -> None:
    import random

    dice, wanted = random.Random(9), set[int]()
    for port in range(1, 9):
        bench.answers[port] = Answers(metrics=metrics())
    for step in range(1_000):
        port = dice.randrange(1, 9)
        if dice.random() < 0.5:
            bench.membership.add(named(port))
            wanted.add(port)
        else:
            bench.membership.remove(named(port).name)
            wanted.discard(port)
        if step % 50 == 0:
            await asyncio.sleep(0)
    names = {named(port).name for port in wanted}
    await until(lambda: {state.worker for state in bench.fleet.states()} == names)
    assert set(bench.table.targets) == names
    assert {view.name for view in bench.membership.views()} == names


# -- one worker's trouble is nobody else's ---------------------------------------------------------


@bench_test
async def test_a_worker_whose_answers_break_us_is_shown_tried_again_and_harms_nobody(
    bench: Bench,
) -> None:
    await bench.joined(2)
    other, answers = bench.state(WorkerId("w1:2")), Answers(metrics=metrics())
    answers.failure = functools.partial(RecursionError, "deep")
    bench.add(answers=answers)
    await until(lambda: bench.log.count("worker.join_failed"))
    view = bench.membership.view("w0:1")
    assert view is not None
    assert (view.mode, view.ranks) == (Mode.CONNECTING, ())
    assert view.reason == "cannot be joined: RecursionError"
    answers.failure = None
    await until(lambda: bench.fleet.get(W0))
    assert bench.state(WorkerId("w1:2")) is other


@bench_test
async def test_a_join_that_fails_half_way_leaves_nothing_behind(bench: Bench) -> None:
    bench.make_feed_error = ValueError("a bug")
    bench.add(answers=with_events(0, 1))
    await until(lambda: bench.log.count("worker.join_failed"))
    assert (bench.fleet.states(), bench.table.targets) == ([], {})
    assert not bench.directory.knows(WorkerId("w0:1@0"))
    await until(lambda: len(bench.fleet.states()) == 2)


@bench_test
async def test_a_cache_of_impossible_size_is_an_unknown_one(bench: Bench) -> None:
    for port, sizes in enumerate(
        [
            'block_size="70000",num_gpu_blocks="10"',
            f'block_size="16",num_gpu_blocks="{"9" * 5_000}"',
            'block_size="16",num_gpu_blocks="18446744073709551616"',
        ],
        start=1,
    ):
        page = f"vllm:cache_config_info{{{sizes}}} 1\n".encode()
        await bench.joined(port, Answers(metrics=page))
    shown = [(view.block_tokens, view.capacity_blocks) for view in bench.membership.views()]
    assert shown == [(16, 10), (16, None), (16, None)]


@bench_test
async def test_a_worker_fills_no_more_of_the_directory_than_twice_what_it_can_hold(
    bench: Bench,
) -> None:
    bench.directory = bench.parts.directory = Directory(max_blocks=10_000)
    bench.directory.admit_namespace(some_chain().namespace)
    await bench.joined(answers=with_events(0))
    feed, limit = bench.feeds[W0], 2 * 100 + HELD_SLACK_BLOCKS
    feed.live(stored_batch(0, some_chain(), limit), bench.clock.now())
    assert bench.directory.held_count(W0) == limit
    feed.live(stored_batch(1, some_chain(), 1, first=limit), bench.clock.now())
    assert bench.directory.held_count(W0) == limit


@bench_test
async def test_a_worker_that_is_drained_with_a_grace_leaves_when_nothing_runs_there(
    bench: Bench,
) -> None:
    left: list[str] = []
    bench.parts.on_left = left.append
    await bench.joined()
    stay, queue = bench.table.targets[W0].stay, bench.state().queue
    queue.start(1, 10.0, bench.clock.now())
    assert bench.membership.drain(W0, 3.0)
    await asyncio.sleep(1.0)
    assert (bench.view().exclusion, stay.is_over) == (Exclusion.DRAINING, False)
    queue.end(1, bench.clock.now())
    await until(lambda: bench.membership.view(W0) is None)
    assert (stay.is_over, left) == (True, [W0])
    assert bench.clock.now() < 3_000.0


@bench_test
async def test_at_the_end_of_its_grace_it_leaves_whatever_runs_there(bench: Bench) -> None:
    await bench.joined()
    stay, queue = bench.table.targets[W0].stay, bench.state().queue
    queue.start(1, 10.0, bench.clock.now())
    bench.membership.drain(W0, 1.0)
    bench.membership.drain(W0, 2.0)  # the last word counts
    await asyncio.sleep(1.5)
    assert not stay.is_over
    await until(lambda: stay.is_over)
    assert bench.membership.view(W0) is None


@bench_test
async def test_undrain_keeps_a_worker_that_was_about_to_leave(bench: Bench) -> None:
    await bench.joined()
    queue = bench.state().queue
    queue.start(1, 10.0, bench.clock.now())
    bench.membership.drain(W0, 1.0)
    assert bench.membership.undrain(W0)
    await asyncio.sleep(2.0)
    assert bench.view().exclusion is None
    assert not bench.membership.undrain("other:1")
    bench.membership.drain(W0, 1.0)
    bench.membership.remove(W0)  # and whoever comes in its place is not taken away
    await bench.joined()
    await asyncio.sleep(2.0)
    assert bench.view().exclusion is None
