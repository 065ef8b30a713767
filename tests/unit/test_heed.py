"""Workers that take no notice of what they are told to pull are found out, and tried again."""

from __future__ import annotations

from trunkline.core.heed import MAX_UNHEEDED, PAUSE_MS, Heed
from trunkline.core.records import Instant, WorkerId

W, OTHER = WorkerId("w"), WorkerId("other")


def at(ms: float) -> Instant:
    return Instant(ms)


def test_c109_an_alarm_comes_once_after_so_many_in_a_row() -> None:
    heed = Heed()
    alarms = [heed.ignored(W, at(0.0)) for _ in range(MAX_UNHEEDED + 2)]
    assert alarms == [False] * (MAX_UNHEEDED - 1) + [True, False, False]
    assert heed.alarmed == (W,)
    assert heed.unheeded == MAX_UNHEEDED + 2


def test_one_that_takes_notice_begins_anew() -> None:
    heed = Heed()
    for _ in range(3):
        for _ in range(MAX_UNHEEDED - 1):
            assert not heed.ignored(W, at(0.0))
        heed.heeded(W)
    assert heed.alarmed == ()


def test_it_is_left_out_for_a_while_and_a_single_order_tries_again() -> None:
    heed = Heed()
    for _ in range(MAX_UNHEEDED):
        heed.ignored(W, at(0.0))
    assert heed.is_left_out(W, at(PAUSE_MS - 1.0))
    assert not heed.is_left_out(W, at(PAUSE_MS))
    assert not heed.is_left_out(OTHER, at(0.0))
    heed.ignored(W, at(PAUSE_MS))
    assert heed.is_left_out(W, at(PAUSE_MS + 1.0))
    heed.heeded(W)
    assert not heed.is_left_out(W, at(PAUSE_MS + 1.0))


def test_a_worker_that_left_is_forgotten() -> None:
    heed = Heed()
    for _ in range(MAX_UNHEEDED):
        heed.ignored(W, at(0.0))
    heed.forget(W)
    assert heed.alarmed == ()
    assert not heed.is_left_out(W, at(0.0))
