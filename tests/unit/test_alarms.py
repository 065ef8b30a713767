"""Alarms at their bounds: when each begins, when it ends, and that a healthy fleet has none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from member_bench import Lines

from trunkline.control.alarm_watch import watch_alarms
from trunkline.core.alarms import (
    MIN_ANSWERS,
    OFF_FLOOR_MS,
    SILENT_BEGIN_MS,
    SILENT_END_MS,
    WINDOW_ANSWERS,
    WINDOW_MS,
    Alarm,
    AlarmBook,
    AlarmEnd,
    AlarmKind,
)
from trunkline.core.cost import calibrate
from trunkline.core.decision import Candidates, Decision, Gain, Reason
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.load import PrefillQueue
from trunkline.core.records import Instant, Slot, WorkerId
from virtual_loop import LoopClock, VirtualLoop

W = WorkerId("w")
AT = Instant(1_000.0)


def decision(expected_tokens: int, worker: WorkerId = W) -> Decision:
    zero = [0.0]
    return Decision(
        request_id="r",
        policy="cache_aware",
        prompt_tokens=2 * expected_tokens + 1,
        choice=0,
        reason=Reason.CACHE_HIT,
        gain=Gain(saved_prefill_ms=0.0, queue_ms=0.0, transfer_ms=0.0, imbalance_ms=0.0),
        candidates=Candidates(
            workers=[worker],
            matched_tokens=[expected_tokens],
            pulled_tokens=[0],
            queue_ms=zero,
            transfer_ms=zero,
            miss_ms=zero,
            imbalance_ms=zero,
            decode_pressure_ms=zero,
            cost_ms=zero,
        ),
    )


def looked(
    book: AlarmBook,
    now: Instant = AT,
    *,
    here: Sequence[WorkerId] = (W,),
    silent: str = "",
    is_unheeding: bool = False,
) -> list[tuple[AlarmKind, bool]]:
    """What changed: the kind, and whether it began."""
    unheard = {W: silent} if silent else {}
    changes = book.look(here, unheard, [W] if is_unheeding else [], now)
    return [
        (one.kind, True) if isinstance(one, Alarm) else (one.alarm.kind, False) for one in changes
    ]


def promise(book: AlarmBook, broken: int, kept: int, now: Instant = AT) -> None:
    for number in range(broken + kept):
        book.promised(decision(100), 75 if number < broken else 76, now)


def time_all(book: AlarmBook, off: int, good: int, now: Instant = AT) -> None:
    for number in range(off + good):
        book.timed(W, 100.0, 200.0 if number < off else 199.0, now)


def test_broken_promises_begin_an_alarm_at_a_quarter_and_end_it_at_a_tenth() -> None:
    book = AlarmBook()
    promise(book, broken=7, kept=25)
    assert looked(book) == []
    promise(book, broken=3, kept=1)
    assert looked(book) == [(AlarmKind.OVER_CLAIMS, True)], "10 of 36"
    assert looked(book) == [], "it is said once"
    promise(book, broken=0, kept=WINDOW_ANSWERS - 7)
    assert looked(book) == [(AlarmKind.OVER_CLAIMS, False)], "3 of 64"
    promise(book, broken=7, kept=0)
    assert looked(book) == [], "between the two nothing begins"


def test_an_alarm_goes_on_between_its_two_bounds() -> None:
    book = AlarmBook()
    promise(book, broken=16, kept=48)
    assert looked(book) == [(AlarmKind.OVER_CLAIMS, True)]
    promise(book, broken=0, kept=9)
    assert looked(book) == [], "7 of 64 is above a tenth"
    promise(book, broken=0, kept=1)
    assert looked(book) == [(AlarmKind.OVER_CLAIMS, False)]


def test_a_prompt_of_which_nothing_was_promised_breaks_no_promise() -> None:
    book = AlarmBook()
    for _ in range(100):
        book.promised(decision(0), 0, AT)
    assert (looked(book), len(book)) == ([], 0)


@pytest.mark.parametrize("count", [MIN_ANSWERS - 1, MIN_ANSWERS])
def test_too_few_answers_say_nothing(count: int) -> None:
    book = AlarmBook()
    promise(book, broken=count, kept=0)
    time_all(book, off=count, good=0)
    is_enough = count >= MIN_ANSWERS
    assert len(looked(book)) == 2 * is_enough


def test_what_is_older_than_the_window_counts_no_more_and_ends_what_it_began() -> None:
    book = AlarmBook()
    promise(book, broken=MIN_ANSWERS, kept=0)
    assert looked(book) == [(AlarmKind.OVER_CLAIMS, True)]
    assert looked(book, Instant(AT + WINDOW_MS - 1)) == []
    assert looked(book, Instant(AT + WINDOW_MS)) == [(AlarmKind.OVER_CLAIMS, False)]


def test_times_that_are_twice_off_begin_an_alarm_at_a_half_and_end_it_at_a_quarter() -> None:
    book = AlarmBook()
    time_all(book, off=31, good=33)
    assert looked(book) == []
    book.timed(W, 200.0, 100.0, AT)
    assert looked(book) == [], "the oldest, an off one, has gone"
    book.timed(W, 200.0, 100.0, AT)
    time_all(book, off=32, good=32)
    assert looked(book) == [(AlarmKind.DRIFT, True)]
    time_all(book, off=0, good=47)
    assert looked(book) == [(AlarmKind.DRIFT, False)], "none of 64"


def test_short_times_are_never_off() -> None:
    book = AlarmBook()
    for _ in range(WINDOW_ANSWERS):
        book.timed(W, 1.0, OFF_FLOOR_MS, AT)
    assert looked(book) == []
    for _ in range(WINDOW_ANSWERS):
        book.timed(W, 1.0, OFF_FLOOR_MS + 1.0, AT)
    assert looked(book) == [(AlarmKind.DRIFT, True)]


def test_silence_has_to_last_and_so_has_its_end() -> None:
    book = AlarmBook()
    assert looked(book, silent="nothing") == []
    early = Instant(AT + SILENT_BEGIN_MS - 1)
    assert looked(book, early, silent="nothing") == []
    begun = Instant(AT + SILENT_BEGIN_MS)
    assert looked(book, begun, silent="nothing") == [(AlarmKind.SILENT, True)]
    assert [one.why for one in book.of([W])] == ["nothing"]
    assert looked(book, begun) == []
    assert looked(book, Instant(begun + SILENT_END_MS - 1), silent="again") == []
    heard = Instant(begun + SILENT_END_MS)
    assert looked(book, heard) == []
    assert looked(book, Instant(heard + SILENT_END_MS - 1)) == []
    assert looked(book, Instant(heard + SILENT_END_MS)) == [(AlarmKind.SILENT, False)]


def test_a_silence_that_was_broken_begins_anew() -> None:
    book = AlarmBook()
    looked(book, silent="nothing")
    looked(book, Instant(AT + 9_000.0))
    assert looked(book, Instant(AT + 9_500.0), silent="nothing") == []
    assert looked(book, Instant(AT + 10_500.0), silent="nothing") == []
    assert looked(book, Instant(AT + 19_500.0), silent="nothing") == [(AlarmKind.SILENT, True)]


def test_c109_a_worker_that_heeds_no_pulls_is_alarmed_until_it_does() -> None:
    book = AlarmBook()
    assert looked(book, is_unheeding=True) == [(AlarmKind.UNHEEDED, True)]
    assert looked(book, is_unheeding=True) == []
    assert looked(book) == [(AlarmKind.UNHEEDED, False)]


def test_of_a_worker_that_left_nothing_is_kept_and_its_alarms_end() -> None:
    book = AlarmBook()
    promise(book, broken=MIN_ANSWERS, kept=0)
    looked(book)
    assert looked(book, here=()) == [(AlarmKind.OVER_CLAIMS, False)]
    assert (len(book), book.of([W])) == (0, ())


def test_a_new_life_begins_without_the_answers_of_the_old_one() -> None:
    book = AlarmBook()
    promise(book, broken=WINDOW_ANSWERS, kept=0)
    assert looked(book) == [(AlarmKind.OVER_CLAIMS, True)]
    book.forget(W)
    assert looked(book) == [(AlarmKind.OVER_CLAIMS, False)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60_000)), max_size=200))
def test_the_window_says_what_a_list_of_all_answers_would(steps: list[tuple[bool, int]]) -> None:
    book, kept, is_on, now = AlarmBook(), list[tuple[float, bool]](), False, 0.0
    for is_broken, pause_ms in steps:
        now += pause_ms
        book.promised(decision(100), 0 if is_broken else 100, Instant(now))
        kept.append((now, is_broken))
        looked(book, Instant(now))
        recent = [bad for at, bad in kept[-WINDOW_ANSWERS:] if at > now - WINDOW_MS]
        share = sum(recent) / len(recent) if len(recent) >= MIN_ANSWERS else 0.0
        is_on = share > 0.10 if is_on else share >= 0.25
        assert bool(book.of([W])) is is_on


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_fleet_raises_none_over_a_day(seed: int) -> None:
    """Its times scatter, each twentieth promise is broken by an eviction, and each of its workers
    is three times as slow as its profile at first.
    """
    dice, book, now = random.Random(seed), AlarmBook(), 0.0
    workers = [WorkerId(f"w{number}") for number in range(8)]
    queues = {worker: PrefillQueue() for worker in workers}
    for _ in range(20_000):
        now += dice.expovariate(1.0) * 4_320.0
        worker = dice.choice(workers)
        true_ms = 300.0 * dice.lognormvariate(0.0, 1.0)
        predicted_ms = true_ms / 3.0 * queues[worker].scale
        observed_ms = true_ms * dice.lognormvariate(0.0, 0.25)
        calibrate(queues[worker], predicted_ms=predicted_ms, observed_ms=observed_ms)
        book.timed(worker, predicted_ms, observed_ms, Instant(now))
        reused = 0 if dice.random() < 0.05 else 1_000
        book.promised(decision(1_000, worker), reused, Instant(now))
        silent = {worker: "a blink"} if dice.random() < 0.1 else {}
        assert book.look(workers, silent, (), Instant(now)) == []
        now += 1_000.0
        assert book.look(workers, {}, (), Instant(now)) == []
    assert len(book) == len(workers)


def test_a_worker_that_calibration_cannot_follow_is_found_by_its_times() -> None:
    book, queue, now = AlarmBook(), PrefillQueue(), 0.0
    for _ in range(WINDOW_ANSWERS):
        now += 1_000.0
        predicted_ms, observed_ms = 100.0 * queue.scale, 10_000.0
        calibrate(queue, predicted_ms=predicted_ms, observed_ms=observed_ms)
        book.timed(W, predicted_ms, observed_ms, Instant(now))
    assert looked(book, Instant(now)) == [(AlarmKind.DRIFT, True)]


def test_a_line_is_written_when_an_alarm_begins_and_one_when_it_ends() -> None:
    async def watched() -> Lines:
        clock = LoopClock(asyncio.get_running_loop())
        fleet, log = Fleet(virtual_nodes=8, now=clock.now()), Lines()
        fleet.add(WorkerState(worker=W, slot=Slot(0), block_tokens=16))
        unheard = {W: "no heartbeats"}
        watch = asyncio.ensure_future(
            watch_alarms(fleet, lambda: unheard, lambda: [W] if unheard else [], clock, log)
        )
        await asyncio.sleep(60.5)
        unheard.clear()
        await asyncio.sleep(60.0)
        watch.cancel()
        return log

    loop = VirtualLoop()
    log = loop.run_until_complete(watched())
    loop.close()
    names = [(name, fields.get("kind")) for name, fields in log.events]
    assert names == [
        ("alarm.silent", None),
        ("alarm.ended", "unheeded-pulls"),
        ("alarm.ended", "silent"),
    ]
    [(_, fields), _, (_, ended)] = log.events
    assert fields["worker"] == W
    assert "heartbeat" in str(fields["remedy"])
    assert ended["lasted_ms"] == 55_000


def test_what_ends_says_how_long_it_lasted() -> None:
    book = AlarmBook()
    book.look([W], {}, [W], AT)
    [ended] = book.look([W], {}, [], Instant(AT + 5.0))
    assert isinstance(ended, AlarmEnd)
    assert ended.lasted_ms == 5.0
