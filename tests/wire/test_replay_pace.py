"""When requests leave: at the trace's times, whatever the server does, and within bounds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from answering import Call, answer_well, replayed, requests

from trunkline.replay.run import ReplayOptions


def test_the_loop_is_open_slow_answers_do_not_hold_up_the_next_request() -> None:
    released = asyncio.Event()
    seen = 0

    async def answer(call: Call) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            released.set()
        await released.wait()
        await answer_well(call)

    result, server = replayed(answer, requests(5, gap_ms=5.0))
    assert not any(record.is_lost for record in result.records)
    assert server.most_open == 5


def test_requests_leave_at_trace_times_stretched_by_speed_and_scale() -> None:
    options = ReplayOptions(speed=2.0, time_scale=4.0)
    result, _ = replayed(answer_well, requests(4, gap_ms=20.0), options)
    arrivals = [record.arrival_ms for record in result.records]
    assert arrivals == pytest.approx([0.0, 40.0, 80.0, 120.0])
    assert result.wall_ms == pytest.approx(120.0)
    assert [record.client_late_ms for record in result.records] == pytest.approx([0.0] * 4, abs=1.0)


def test_at_the_bound_requests_wait_and_the_wait_is_counted_and_warned_of() -> None:
    async def answer(call: Call) -> None:
        await asyncio.sleep(0.08)
        await answer_well(call)

    options = ReplayOptions(max_in_flight=1)
    result, server = replayed(answer, requests(4, gap_ms=0.0), options)
    late = [record.client_late_ms for record in result.records]
    assert server.most_open == 1
    assert late == pytest.approx([0.0, 80.0, 160.0, 240.0], abs=1.0)
    for record in result.records:
        assert record.ttft_ms is not None
        assert record.ttft_ms > record.client_late_ms, "what waits here counts, too"
    assert "the client itself fell behind" in result.warnings[0]


def test_closed_sessions_send_a_turn_only_after_the_one_before() -> None:
    async def answer(call: Call) -> None:
        await asyncio.sleep(0.03)
        await answer_well(call)

    trace = requests(4, gap_ms=1.0)
    trace = [replace(one, session=f"s{index % 2}") for index, one in enumerate(trace)]
    closed = ReplayOptions(is_closed_loop=True)
    result, server = replayed(answer, trace, closed)
    assert server.most_open == 2, "two sessions run side by side"
    assert not any(record.is_lost for record in result.records)
    assert [record.client_late_ms for record in result.records] == pytest.approx([0.0] * 4, abs=1.0)
    _, server = replayed(answer, trace, ReplayOptions())
    assert server.most_open == 4
