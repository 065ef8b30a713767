"""The machine's clocks keep their promises."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from hand_clock import HandClock
from trunkline.adapters.clock import SystemClock
from trunkline.control import clocks
from trunkline.control.clocks import MAX_READING_MS, MIN_JUMP_MS, ClockWatch, Jump, watch_clocks
from trunkline.core.records import BootInstant
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock

DAY_MS = 86_400_000.0


def test_the_system_clock_is_a_clock_in_milliseconds_and_seconds() -> None:
    clock: Clock = SystemClock()
    before = time.monotonic() * 1_000.0, time.time()
    now, wall = clock.now(), clock.wall()
    after = time.monotonic() * 1_000.0, time.time()
    assert before[0] <= now <= after[0]
    assert before[1] <= wall <= after[1]


def test_neither_interval_clock_goes_back() -> None:
    clock = SystemClock()
    for read in (clock.now, clock.boot):
        readings = [read() for _ in range(1_000)]
        assert readings == sorted(readings)


def test_the_boot_clock_is_not_behind_the_monotonic_one() -> None:
    clock = SystemClock()
    now = clock.now()
    assert clock.boot() >= now


@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS, MIN_JUMP_MS, -MIN_JUMP_MS])
def test_f14_a_jump_of_the_wall_clock_is_seen_once(jump_ms: float) -> None:
    clock = HandClock()
    watch = ClockWatch(clock)
    clock.ms += 1_000.0
    assert watch.look() is None
    clock.ms, clock.set_by_ms = clock.ms + 1_000.0, jump_ms
    seen = watch.look()
    assert seen is not None
    assert (seen.wall_ms, seen.slept_ms) == (pytest.approx(jump_ms, abs=1.0), 0.0)
    clock.ms += 1_000.0
    assert watch.look() is None


def test_f14_sleep_is_told_from_a_jump() -> None:
    clock = HandClock()
    watch = ClockWatch(clock)
    clock.slept_ms = 10_000.0
    assert watch.look() == Jump(wall_ms=0.0, slept_ms=10_000.0)


def test_a_clock_that_is_slewed_has_not_jumped() -> None:
    clock = HandClock()
    watch = ClockWatch(clock)
    for _ in range(10_000):
        clock.ms += 1_000.0
        clock.set_by_ms += 0.5
        assert watch.look() is None
    clock.set_by_ms += MIN_JUMP_MS - 1.0
    assert watch.look() is None


class StoppedBetween(HandClock):
    """The process stands still after it has asked for the first of the clocks."""

    pause_ms = 0.0

    def boot(self) -> BootInstant:
        told = super().boot()
        self.ms += self.pause_ms
        return told


def test_a_process_that_stood_still_between_two_readings_has_seen_no_jump() -> None:
    clock = StoppedBetween()
    watch = ClockWatch(clock)
    clock.pause_ms = MIN_JUMP_MS
    assert watch.look() is None
    clock.pause_ms = 0.0
    assert watch.look() is None
    clock.pause_ms = MAX_READING_MS
    assert watch.look() is None, "less than a jump, however it is read"


def test_f14_a_jump_of_the_wall_clock_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = HandClock(), Lines("test-clocks")
    monkeypatch.setattr(clocks, "BEAT_S", 0.0)

    async def play() -> None:
        task = asyncio.create_task(watch_clocks(clock, lines))
        for change in ({}, {"set_by_ms": -DAY_MS}, {}, {"slept_ms": 10_000.0}):
            for name, value in change.items():
                setattr(clock, name, value)
            clock.ms += 1_000.0
            for _ in range(4):
                await asyncio.sleep(0)
        task.cancel()

    asyncio.run(play())
    assert lines.told == [("clock.jumped", -86_400.0), ("clock.slept", 10.0)]


class Lines(EventLog):
    """Keeps what is logged."""

    __slots__ = ("told",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.told: list[tuple[str, Any]] = []

    def warning(self, event: str, /, **fields: object) -> None:
        self.told.append((event, fields["seconds"]))
