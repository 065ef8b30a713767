"""When a worker is tested, and what the outcome leaves of it: mode, place in the fleet, word to
operators.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from member_bench import (
    W0,
    Answers,
    Bench,
    bench_test,
    metrics,
    play,
    some_chain,
    until,
    with_events,
)

from trunkline.control.selftest import HOLD_MS
from trunkline.control.views import Mode
from trunkline.core.actions import WorkerRestarted
from trunkline.core.alignment import Belief, Examination, Finding, State, Topic
from trunkline.core.decision import Exclusion
from trunkline.core.records import Incarnation

WELL = Examination(
    findings=(Finding(topic=Topic.TEXT, state=State.OK, expected="ours", found="ours"),)
)


def wrong(topic: Topic, leaves: Belief) -> Examination:
    return Examination(
        findings=(
            Finding(
                topic=topic, state=State.WRONG, expected="this", found="that", remedy="do so",
                leaves=leaves,
            ),
        )
    )  # fmt: skip


LEAK = wrong(Topic.ISOLATION, Belief.BLIND)
OTHER_TOKENS = wrong(Topic.TEXT, Belief.APPROXIMATE)
BUSY = Examination(unfinished="busy")


def expected_blocks(bench: Bench) -> int:
    """What routing would count on there, of a prompt that was just sent."""
    chain = some_chain()
    bench.directory.predict(W0, chain, now=bench.clock.now(), ttl_ms=60_000.0)
    return bench.directory.match(chain).expected[bench.directory.slot(W0)]


def exclusion(bench: Bench) -> Exclusion | None:
    return bench.fleet.usable(bench.clock.boot())[1].get(W0)


async def looked(bench: Bench, count: int = 1) -> None:
    await until(lambda: len(bench.examined) >= count)
    await asyncio.sleep(0)


@bench_test
async def test_a_worker_is_tested_when_it_joins_and_not_again_while_all_is_well(
    bench: Bench,
) -> None:
    bench.examinations = [WELL]
    await bench.joined(answers=with_events(0))
    await looked(bench)
    await asyncio.sleep(8.0)
    assert bench.examined == [([W0], [])]
    assert bench.mode() is Mode.EXACT
    assert bench.log.count("worker.aligned") == 1


@bench_test
async def test_a_leak_under_one_tenant_leaves_the_worker_blind_and_in_use(bench: Bench) -> None:
    bench.examinations = [LEAK]
    await bench.joined(answers=with_events(0))
    await until(lambda: bench.mode() is Mode.BLIND)
    assert exclusion(bench) is None
    assert expected_blocks(bench) == 0, "nothing is counted on there"
    assert bench.view().reason == "isolation: expected this, found that; do so"
    assert bench.log.count("alignment.isolation") == 1


@bench_test
async def test_a_leak_where_tenants_are_kept_apart_takes_the_worker_out_until_a_test_passes(
    bench: Bench,
) -> None:
    bench.parts.keeps_apart = True
    bench.examinations = [LEAK]
    await bench.joined()
    await until(lambda: exclusion(bench) is Exclusion.ISOLATION)
    assert bench.view().exclusion is Exclusion.ISOLATION
    assert bench.view().reason.startswith("isolation: expected this")
    bench.examinations = [WELL]
    checked = await bench.membership.check("w0:1")
    assert checked is not None
    assert checked.examination == WELL
    assert exclusion(bench) is None
    assert expected_blocks(bench) == 20


@bench_test
async def test_a_worker_that_has_just_come_waits_for_its_test_where_tenants_are_kept_apart(
    bench: Bench,
) -> None:
    bench.parts.keeps_apart = True
    bench.examiner_waits = asyncio.Event()
    await bench.joined()
    assert exclusion(bench) is Exclusion.CHECKING
    bench.examiner_waits.set()
    await until(lambda: exclusion(bench) is None)
    assert bench.clock.now() < HOLD_MS


@bench_test
async def test_a_test_that_hangs_holds_nobody_up_for_longer_than_the_bound(bench: Bench) -> None:
    bench.parts.keeps_apart = True
    bench.examiner_waits = asyncio.Event()
    began = bench.clock.now()
    await bench.joined()
    await until(lambda: exclusion(bench) is None)
    assert HOLD_MS <= bench.clock.now() - began < HOLD_MS + 100.0
    assert bench.log.count("worker.unchecked") == 1


@bench_test
async def test_one_tenant_waits_for_no_test(bench: Bench) -> None:
    bench.examiner_waits = asyncio.Event()
    await bench.joined()
    assert exclusion(bench) is None


@bench_test
async def test_an_unfinished_test_neither_trusts_nor_condemns_and_is_repeated(
    bench: Bench,
) -> None:
    bench.parts.keeps_apart = True
    bench.examinations = [BUSY, LEAK, BUSY, WELL]
    await bench.joined(answers=with_events(0))
    await looked(bench)
    await until(lambda: exclusion(bench) is None)
    assert bench.mode() is Mode.EXACT
    assert bench.view().check.unfinished == "busy"
    await until(lambda: exclusion(bench) is Exclusion.ISOLATION)  # repeated within seconds
    found = await bench.membership.check("w0:1")
    assert found is not None
    assert (found.unfinished, found.examination) == ("busy", LEAK)
    assert exclusion(bench) is Exclusion.ISOLATION, "what was found before still holds"


def test_what_is_wrong_is_tested_again_by_itself_later() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.examinations = [OTHER_TOKENS, WELL]
        async with asyncio.timeout(120.0), bench.membership:
            await bench.joined(answers=with_events(0))
            await until(lambda: bench.mode() is Mode.APPROXIMATE)
            target = bench.table.targets[W0]
            assert target.predicted_ttl_ms == bench.parts.routing.approximate_ttl_ms
            began = bench.clock.now()
            await until(lambda: bench.mode() is Mode.EXACT)
            assert bench.clock.now() - began > 50_000.0

    play(scenario)


@bench_test
async def test_a_new_life_is_tested_anew_and_owes_nothing_to_the_last_one(bench: Bench) -> None:
    bench.examinations = [LEAK, BUSY]
    answers = await bench.joined()
    await until(lambda: bench.mode() is Mode.BLIND)
    answers.pages["/metrics"] = metrics(block_tokens=32)
    await until(lambda: bench.log.count("worker.joined") == 2)
    await looked(bench, 2)
    assert bench.mode() is Mode.APPROXIMATE
    assert bench.view().check.examination is None


@bench_test
async def test_a_restart_that_events_tell_of_is_tested_and_condemned_until_then(
    bench: Bench,
) -> None:
    bench.examinations = [LEAK, WELL]
    await bench.joined(answers=with_events(0))
    await until(lambda: bench.mode() is Mode.BLIND)
    gate = bench.examiner_waits = asyncio.Event()
    bench.feed_actions[W0](WorkerRestarted(worker=W0, incarnation=Incarnation(7)))
    await looked(bench, 2)
    assert bench.mode() is Mode.BLIND
    gate.set()
    await until(lambda: bench.mode() is Mode.EXACT)


@bench_test
async def test_c54_the_block_size_that_events_tell_is_taken_over(bench: Bench) -> None:
    odd = replace(wrong(Topic.BLOCK_SIZE, Belief.APPROXIMATE), block_tokens=64)
    bench.examinations = [odd, WELL]
    await bench.joined(answers=with_events(0))
    await until(lambda: bench.view().block_tokens == 64)
    assert bench.log.count("worker.block_size_changed") == 1
    await until(lambda: len(bench.examined) == 2)
    assert bench.mode() is Mode.EXACT


@bench_test
async def test_adapters_that_a_worker_lists_are_tested_with_it(bench: Bench) -> None:
    answers = Answers(metrics=metrics())
    answers.pages["/v1/models"] = b'{"data":[{"id":"m"},{"id":"fr","parent":"m"},{"id":"x"}]}'
    await bench.joined(answers=answers)
    await looked(bench)
    assert bench.examined == [([W0], ["fr"])]


@bench_test
async def test_c57_a_worker_that_cannot_be_reached_has_no_test(bench: Bench) -> None:
    bench.add(answers=Answers())
    assert await bench.membership.check("nobody:1") is None


def without_self_tests(bench: Bench) -> None:
    bench.parts.health = replace(bench.parts.health, disable_self_test=True)


@bench_test
async def test_tests_that_are_switched_off_still_answer_an_operator(bench: Bench) -> None:
    without_self_tests(bench)
    bench.parts.keeps_apart = True
    bench.examinations = [LEAK]
    await bench.joined()
    assert exclusion(bench) is None
    await asyncio.sleep(1.0)
    assert not bench.examined
    found = await bench.membership.check("w0:1")
    assert found is not None
    assert found.examination == LEAK


@pytest.mark.parametrize(
    ("told", "leaves", "shown"),
    [
        (Mode.EXACT, Belief.APPROXIMATE, Mode.APPROXIMATE),
        (Mode.APPROXIMATE, Belief.EXACT, Mode.APPROXIMATE),
        (Mode.BLIND, Belief.APPROXIMATE, Mode.BLIND),
        (Mode.DIGEST, Belief.BLIND, Mode.BLIND),
        (Mode.CONNECTING, Belief.BLIND, Mode.CONNECTING),
    ],
)
def test_a_test_only_ever_takes_belief_away(told: Mode, leaves: Belief, shown: Mode) -> None:
    @bench_test
    async def scenario(bench: Bench) -> None:
        from trunkline.control.entries import Entries
        from trunkline.control.selftest import SelfTest

        bench.examinations = [wrong(Topic.KEYS, leaves)]
        test: Any = SelfTest("w", Entries(bench.fleet), bench.parts)
        test.begin()
        running = asyncio.create_task(test.run(list, list, lambda: None))
        await looked(bench)
        assert test.mode(told) is shown
        running.cancel()

    scenario()
