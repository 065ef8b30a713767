"""Overload: when a queue is, who is refused, and what is left of the others' service (F8, F10)."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from fair_world import LONG, Desk, Policy, Served, World, asks, fresh, prefill_ms, turns
from picker_bench import COMPLETE, W0, W1

from trunkline.core.overload import INTERVAL_MS, TARGET_MS, Outflow, Overload, Priority
from trunkline.core.records import Instant, WorkerId
from trunkline.errors import DeadlineUnmet
from trunkline.gateway.fair_line import Overloaded

# -- when a queue is overloaded --------------------------------------------------------------------


def test_a_queue_that_comes_below_the_target_within_each_interval_is_not_overloaded() -> None:
    overload = Overload()

    for at_ms in range(0, 60_000, 100):
        wait_ms = 0.0 if at_ms % 1_900 == 0 else 5_000.0
        assert not overload.look(wait_ms, Instant(at_ms))


def test_a_queue_above_the_target_through_an_interval_is_overloaded() -> None:
    overload = Overload()
    overload.look(TARGET_MS, Instant(1_000.0))

    assert not overload.look(TARGET_MS + 1.0, Instant(1_000.0 + INTERVAL_MS - 1.0))
    assert overload.look(TARGET_MS + 1.0, Instant(1_000.0 + INTERVAL_MS))


def test_it_is_over_when_nobody_had_to_be_refused_for_an_interval() -> None:
    overload = Overload()
    overload.look(TARGET_MS + 1.0, Instant(INTERVAL_MS))

    overload.refused(Instant(3_000.0))
    assert overload.look(0.0, Instant(3_000.0 + INTERVAL_MS - 1.0))
    assert overload.look(TARGET_MS + 1.0, Instant(3_000.0 + INTERVAL_MS))  # it still waits
    assert not overload.look(TARGET_MS, Instant(3_001.0 + INTERVAL_MS))


def test_without_a_target_nothing_is_overload() -> None:
    overload = Overload(target_ms=0.0)

    assert not any(overload.look(1e6, Instant(at_ms)) for at_ms in range(0, 100_000, 1_000))


def test_what_a_class_may_wait_rises_with_it() -> None:
    overload = Overload()
    allowed_ms = [overload.allowed_ms(priority) for priority in Priority]

    assert allowed_ms == [250.0, 500.0, 1_000.0]
    assert allowed_ms[-1] < overload.slough_ms


def test_a_worker_has_at_most_half_of_the_target_in_front_of_it_while_there_is_overload() -> None:
    overload = Overload(target_ms=500.0, interval_ms=2_000.0)
    assert overload.room_ms(600.0) == 600.0
    overload.look(600.0, Instant(2_000.0))
    assert overload.is_on
    assert (overload.room_ms(600.0), overload.room_ms(100.0)) == (250.0, 100.0)


@pytest.mark.parametrize("gap_ms", [0.1, 10.0, 1_000.0, 30_000.0])
def test_an_outflow_is_that_at_which_entries_leave(gap_ms: float) -> None:
    outflow = Outflow()
    outflow.resume(Instant(0.0))
    assert outflow.wait_ms(5.0, Instant(gap_ms / 2)) == 5.0 * gap_ms / 2  # none has left yet
    for number in range(1, 200):
        outflow.left(Instant(number * gap_ms))

    now = Instant(199 * gap_ms)
    assert 0.5 * 7 * gap_ms <= outflow.wait_ms(7.0, now) <= 1.5 * 7 * gap_ms


def test_an_outflow_forgets_what_was_before_a_pause_in_which_nobody_waited() -> None:
    outflow = Outflow()
    outflow.resume(Instant(0.0))
    for number in range(100):
        outflow.left(Instant(number * 10.0))

    outflow.resume(Instant(1e9))
    outflow.left(Instant(1e9 + 10.0))

    assert outflow.wait_ms(1.0, Instant(1e9 + 10.0)) == pytest.approx(10.0, rel=0.2)


def test_a_stalled_outflow_lets_what_is_ahead_take_longer_and_longer() -> None:
    outflow = Outflow()
    outflow.resume(Instant(0.0))
    outflow.left(Instant(10.0))

    waits_ms = [outflow.wait_ms(1.0, Instant(at_ms)) for at_ms in (10.0, 1_000.0, 5_000.0)]

    assert waits_ms == sorted(waits_ms)
    assert waits_ms[-1] >= 5_000.0


# -- the line under three times what the fleet serves (F10) ----------------------------------------

WORKERS = 2
PER_S = WORKERS * 1_000.0 / prefill_ms(LONG)
"""Requests a second that the workers serve."""


def _load(
    world: Counting, tenant: str, share: float, start_ms: float, end_ms: float
) -> list[Served]:
    """Requests at random times, `share` of what the fleet serves."""
    dice = random.Random(f"{tenant}{start_ms}")
    at_ms, asked = start_ms, list[Served]()
    while (at_ms := at_ms + dice.expovariate(share * PER_S / 1_000.0)) < end_ms:
        world.number += 1
        asked.append(world.ask(tenant, fresh(world.number), at_ms))
    return asked


def _p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def _ttft_p99_ms(asked: list[Served], since_ms: float = 0.0) -> float:
    return _p99([one.ttft_ms for one in asked if one.error is None and one.came_ms >= since_ms])


def _goodput(asked: list[Served], start_ms: float, end_ms: float) -> float:
    """Share of what the fleet serves that came to its first token in this time."""
    good = sum(start_ms <= one.begun_ms < end_ms for one in asked)
    return good / (PER_S * (end_ms - start_ms) / 1_000.0)


class Counting(World):
    """The most that waited at one time, and a number for each prompt."""

    def __init__(self) -> None:
        super().__init__(WORKERS, room_ms=500.0)
        self.number = 0
        self.most_waiting = 0

    def _come(self, served: Served, asked: object) -> None:
        super()._come(served, asked)  # type: ignore[arg-type] - as the base has it
        self.most_waiting = max(self.most_waiting, self.line.waiting_count)


def test_f10_three_times_the_load_leaves_the_goodput_and_the_latency_of_who_is_served() -> None:
    async def run(share: float) -> tuple[Counting, list[Served]]:
        world = Counting()
        asked = _load(world, "a", share, 1_000.0, 30_000.0)
        await world.run()
        world.assert_clean()
        return world, asked

    _, calm = asyncio.run(run(1.0))
    world, asked = asyncio.run(run(3.0))

    assert _goodput(asked, 5_000.0, 30_000.0) >= 0.9 * _goodput(calm, 5_000.0, 30_000.0)
    assert _p99([one.waited_ms for one in asked if one.error is None]) <= 2_500.0
    assert _ttft_p99_ms(asked, 5_000.0) <= 2.0 * _ttft_p99_ms(calm, 5_000.0)
    refused = [one for one in asked if one.error is not None]
    assert len(refused) > len(asked) / 2
    assert all(isinstance(one.error, Overloaded) for one in refused)
    # But for the backlog of the first interval, they are told at once.
    assert _p99([one.refused_ms - one.came_ms for one in refused if one.came_ms > 5_000.0]) == 0.0
    assert world.line.accounts.shed[Priority.NORMAL] == len(refused)
    assert world.most_waiting <= 3.5 * PER_S * (TARGET_MS + INTERVAL_MS) / 1_000.0


def test_f10_what_waits_here_and_then_at_its_worker_waits_no_longer_than_the_target() -> None:
    async def run() -> list[Served]:
        world = Counting()
        asked = _load(world, "a", 3.0, 1_000.0, 20_000.0)
        await world.run()
        return asked

    asked = asyncio.run(run())

    # Its own prefill, and of the one before it what a turn came late.
    assert _ttft_p99_ms(asked, 5_000.0) <= TARGET_MS + 2.0 * prefill_ms(LONG)


def test_f10_an_overload_that_ends_leaves_nothing_behind() -> None:
    async def run() -> tuple[list[Served], list[Served]]:
        world = Counting()
        before = _load(world, "a", 0.7, 1_000.0, 15_000.0)
        _load(world, "a", 3.0, 15_000.0, 25_000.0)
        after = _load(world, "a", 0.7, 30_000.0, 45_000.0)
        await world.run()
        assert not world.line.is_overloaded
        return before, after

    before, after = asyncio.run(run())
    assert all(one.error is None for one in before + after)
    assert _ttft_p99_ms(after) <= 1.2 * _ttft_p99_ms(before)


def test_f8_half_of_a_fleet_lost_sheds_what_capacity_requires_and_heals_by_itself() -> None:
    lost, back = 15_000.0, 35_000.0

    async def run() -> tuple[list[Served], list[Served], list[Served]]:
        world = Counting()
        gone = WorkerId("w0")
        world.at(lost, lambda: world.bench.fleet.update(gone, is_healthy=False))
        world.at(back, lambda: world.bench.fleet.update(gone, is_healthy=True))
        before = _load(world, "a", 0.6, 1_000.0, lost)
        during = _load(world, "a", 0.6, lost, back)
        after = _load(world, "a", 0.6, back + 10_000.0, back + 25_000.0)
        await world.run()
        return before, during, after

    before, during, after = asyncio.run(run())
    shed = sum(one.error is not None for one in during) / len(during)
    assert 0.0 < shed <= 1.0 - 0.5 / 0.6 + 0.1
    assert _goodput(during, lost + 5_000.0, back) >= 0.9 * 0.5
    assert all(one.error is None for one in before + after)
    assert _ttft_p99_ms(after) <= 1.2 * _ttft_p99_ms(before)


def test_the_lowest_priority_is_shed_first_and_a_quiet_tenant_is_not_shed_at_all() -> None:
    async def run() -> dict[str, list[Served]]:
        world = Counting()
        world.policies["low"] = Policy(priority=Priority.LOW)
        world.policies["high"] = Policy(priority=Priority.HIGH)
        loads = {"low": 1.0, "normal": 1.0, "high": 0.3, "quiet": 0.05}
        asked = {name: _load(world, name, load, 1_000.0, 30_000.0) for name, load in loads.items()}
        await world.run()
        assert world.line.accounts.shed[Priority.HIGH] == 0
        return asked

    asked = asyncio.run(run())

    def shed(name: str) -> float:
        late = [one for one in asked[name] if one.came_ms > 5_000.0]
        return sum(one.error is not None for one in late) / len(late)

    assert shed("quiet") == shed("high") == 0.0
    assert shed("low") > 0.8
    assert shed("normal") < shed("low") / 2


# -- single answers --------------------------------------------------------------------------------


def test_a_burst_that_comes_at_once_is_not_thrown_away_whole() -> None:
    async def run() -> tuple[Counting, list[Served]]:
        world = Counting()
        burst = [world.ask("a", fresh(number), 1_000.0) for number in range(1_000)]
        await world.run()
        return world, burst

    world, burst = asyncio.run(run())
    served = [one for one in burst if one.error is None]
    # What left the queue before it was overloaded, what was left for a target then, and the room.
    most_ms = TARGET_MS + INTERVAL_MS + TARGET_MS + 500.0 + prefill_ms(LONG)
    assert len(served) >= 0.9 * PER_S * (INTERVAL_MS + TARGET_MS) / 1_000.0
    assert max(one.ttft_ms for one in served) <= 1.1 * most_ms
    last_ms = max(one.begun_ms for one in served)
    assert len(served) >= 0.95 * PER_S * (last_ms - 1_000.0) / 1_000.0  # no worker ran dry
    assert not world.line.is_overloaded or world.bench.clock.ms < last_ms + INTERVAL_MS


def test_who_is_refused_for_overload_is_told_when_to_come_again() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=20.0, target_ms=50.0, interval_ms=100.0)
        first = desk.pick(asks("a", fresh(1)))
        waiting = [await desk.wait(asks("a", fresh(n))) for n in range(2, 6)]
        desk.bench.clock.ms += 120.0
        desk.timers.fire()
        await turns()
        desk.line.first_byte(first)
        await turns()

        with pytest.raises(Overloaded) as refused:
            desk.line.pick(asks("a", fresh(9)), frozenset())

        assert (refused.value.status, refused.value.code) == (429, "overloaded")
        assert refused.value.retry_after_s == 1
        assert desk.line.is_overloaded
        for task in waiting:
            task.cancel()
        await turns()
        desk.line.ended(first, COMPLETE, None)

    asyncio.run(run())


def test_where_one_prompt_takes_longer_than_all_may_wait_one_waits_for_each_worker() -> None:
    async def run() -> None:
        desk = Desk(W0, W1, room_ms=1e6)
        for number in range(6):
            desk.pick(asks("a", fresh(number)))
        desk.line._room_ms = 1.0
        waiting = [await desk.wait(asks("a", fresh(6)))]
        desk.bench.clock.ms += 60_000.0
        desk.line._tick()
        assert desk.line.is_overloaded
        assert not waiting[0].done()

        waiting.append(await desk.wait(asks("a", fresh(7))))
        with pytest.raises(Overloaded):
            desk.line.pick(asks("a", fresh(8)), frozenset())

        for task in waiting:
            task.cancel()
        await turns()

    asyncio.run(run())


def test_a_request_that_would_wait_beyond_its_deadline_does_not_wait() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=20.0)
        first = desk.pick(asks("a", fresh(1)))
        waiting = [await desk.wait(asks("a", fresh(n))) for n in range(2, 6)]
        desk.bench.clock.ms += 100.0
        desk.line.first_byte(first)  # one goes: three times 100 ms are in front of the next
        await turns()

        late = asks("a", fresh(9))
        late.deadline = Instant(desk.bench.clock.ms + 150.0)
        with pytest.raises(DeadlineUnmet):
            desk.line.pick(late, frozenset())

        patient = asks("a", fresh(10))
        patient.deadline = Instant(desk.bench.clock.ms + 1_000.0)
        waiting.append(await desk.wait(patient))
        for task in waiting:
            task.cancel()
        await turns()

    asyncio.run(run())
