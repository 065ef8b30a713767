"""Heartbeats of digest-mode workers: leases, lives, bounds."""

from __future__ import annotations

import asyncio

from member_bench import W0, Answers, Bench, bench_test, some_chain, until, with_events

from trunkline.control.views import Mode
from trunkline.core.decision import Exclusion
from trunkline.core.records import BlockKey


@bench_test
async def test_a_heartbeat_makes_a_worker_digest_and_its_lease_runs_out_without_the_next(
    bench: Bench,
) -> None:
    await bench.joined()
    assert bench.beat(1) is None
    assert bench.mode() is Mode.DIGEST
    assert bench.table.targets[W0].wants_checkpoints
    assert bench.fleet.usable(bench.clock.boot())[0] == [bench.state()]
    await asyncio.sleep(0.11)
    assert bench.fleet.usable(bench.clock.boot())[1] == {W0: Exclusion.LEASE}
    assert "does not follow" in (bench.beat(1) or ""), "nor does a repeated one revive it"
    assert bench.fleet.usable(bench.clock.boot())[1] == {W0: Exclusion.LEASE}
    assert bench.beat(2) is None, "a heartbeat is a registration too"
    assert bench.fleet.usable(bench.clock.boot())[0] == [bench.state()]


@bench_test
async def test_heartbeats_of_the_past_and_of_strangers_are_refused(bench: Bench) -> None:
    assert "no such worker" in (bench.beat(1) or "")
    await bench.joined()
    assert bench.beat(2) is None
    assert "does not follow" in (bench.beat(2) or "")
    assert bench.beat(1, boot_nonce="b") is None
    assert bench.beat(1, boot_nonce="c") is None
    assert "replaced by a newer one" in (bench.beat(9) or "")


@bench_test
async def test_a_heartbeat_of_a_new_life_drops_what_the_old_one_held(bench: Bench) -> None:
    await bench.joined()
    assert bench.beat(1) is None
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    assert bench.beat(1, boot_nonce="b") is None
    assert bench.directory.predicted_count(W0) == 0
    assert bench.log.count("worker.restarted") == 1


@bench_test
async def test_more_checkpoints_than_are_taken_are_refused_and_change_nothing(
    bench: Bench,
) -> None:
    await bench.joined()
    keys = [BlockKey(number.to_bytes(32, "big")) for number in range(4_097)]
    assert "more than 4096" in (bench.beat(1, checkpoints=frozenset(keys)) or "")
    assert bench.mode() is Mode.APPROXIMATE
    assert bench.beat(1, checkpoints=frozenset(keys[:4_096])) is None


@bench_test
async def test_c24_a_heartbeat_with_another_block_size_has_the_worker_asked_anew(
    bench: Bench,
) -> None:
    await bench.joined(answers=Answers())
    assert "another block size" in (bench.beat(1, block_tokens=64) or "")
    await until(lambda: bench.fleet.block_sizes() == [64])
    assert bench.beat(2, block_tokens=64) is None
    assert bench.mode() is Mode.DIGEST


@bench_test
async def test_heartbeats_of_a_worker_with_events_renew_its_lease_and_leave_it_exact(
    bench: Bench,
) -> None:
    await bench.joined(answers=with_events(0))
    assert bench.beat(1, memory_ratio=0.99) is None
    assert bench.mode() is Mode.EXACT
    assert bench.state().is_full
    seen = bench.answers[1].asked.count("/metrics")
    await until(lambda: bench.answers[1].asked.count("/metrics") > seen + 1)
    assert bench.state().is_full, "what the heartbeat says holds, whatever the metrics do"
    assert not bench.table.targets[W0].wants_checkpoints
