"""The machine's clocks keep their promises."""

from __future__ import annotations

import time

from trunkline.adapters.clock import SystemClock
from trunkline.ports.clock import Clock


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
