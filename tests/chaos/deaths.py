"""Workers that die, stand still and are replaced under running streams: F1, F2, F7."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence

import ground
from crowd import Ask, Crowd, Outcome
from fleet import Gateway, Process, Processes, processes, until
from rows import (
    HEARTBEAT_S,
    Finding,
    Row,
    Stage,
    all_of,
    at_most,
    none_of,
    percentile,
)

STREAMS = 64
WORKERS = 4
HISTORY_S = 3.0
INTER_TOKEN_DEADLINE_S = 5.0
"""max(5 s, 20 times the worker's median), which is 20 times 50 ms here."""


def a_mix(seed: int) -> Ask:
    return ground.mixed(seed)[seed % 4]


def mixed_crowd(gateway: Gateway, clients: int = STREAMS) -> Crowd:
    return Crowd([gateway.url], lambda number, turn: a_mix(number + 1_000 * turn), clients=clients)


def kill_nine(stage: Stage) -> list[Finding]:
    """kill -9 of one of four workers while 64 requests run, again and again."""
    dice = stage.dice()
    kills, hit = 0, 0
    with processes() as started:
        fleet = ground.workers(started, WORKERS)
        gateway = ground.gateway(started, [worker.url for worker in fleet])
        with mixed_crowd(gateway) as crowd:
            for trial in stage.rounds(200):
                if stage.is_late:
                    break
                hit += _kill_one(started, gateway, fleet, crowd, dice)
                kills += 1
                stage.say(f"kill {trial + 1}: {hit} requests were at a victim so far")
    return [
        at_most("F1", "kills that were not tried", len(stage.rounds(200)) - kills, 0, "kills"),
        *judged(stage, "F1", crowd.outcomes),
        _gap("F1", crowd.outcomes, 1 * HEARTBEAT_S + ground.PREFILL_S),
    ]


def _kill_one(
    started: Processes, gateway: Gateway, fleet: list[Process], crowd: Crowd, dice: random.Random
) -> int:
    """How many requests were at the victim. Each kill stands alone: who was hit has ended when it
    returns, so that nobody runs out of attempts.
    """
    until(lambda: len(crowd.flowing()) > STREAMS // 3, "streams run")
    time.sleep(dice.random() * 0.5)
    at = dice.randrange(len(fleet))
    victim = fleet[at]
    until(lambda: _kinds_at(victim, crowd) == {True, False}, "streams of both kinds are there")
    hit = int(gateway.worker(victim)["requests_active"])
    touched = crowd.running()
    victim.kill()
    fleet[at] = ground.again(started, victim)
    ground.wait_back(gateway, len(fleet))
    until(lambda: all(outcome.ended_s for outcome in touched), "all that was hit has ended", 120)
    return hit


def _kinds_at(worker: Process, crowd: Crowd) -> set[bool]:
    """Whether streams that can go on run at a worker, and whether others do."""
    streams = [o for o in crowd.flowing() if o.ask.is_stream and o.worker == worker.name]
    return {o.ask.is_resumable for o in streams}


def judged(
    stage: Stage, fault: str, outcomes: Sequence[Outcome], *, title: str = ""
) -> list[Finding]:
    """What the mid-stream contract promises, over all that was asked."""
    resumable = [o for o in outcomes if o.ask.is_stream and o.ask.is_resumable]
    others = [o for o in outcomes if o.ask.is_stream and not o.ask.is_resumable]
    whole = [o for o in outcomes if not o.ask.is_stream]
    lost = [o for o in outcomes if o.is_lost]
    cut = [o for o in others if not o.is_whole]
    shown = [o for o in (*resumable, *whole) if not o.is_whole] + lost
    for outcome in shown[:5]:
        stage.say(f"not as it should be: {outcome.words()}")
    return [
        none_of(fault, title + "lost: neither answered nor told", len(lost), len(outcomes)),
        none_of(fault, title + "wrong, repeated or missing tokens",
                sum(o.is_wrong for o in outcomes), len(outcomes)),
        all_of(fault, title + "streams that can go on: complete and exact",
               sum(o.is_whole for o in resumable), len(resumable)),
        all_of(fault, title + "answers that are no streams: complete",
               sum(o.is_whole for o in whole), len(whole)),
        none_of(fault, title + "streams that cannot go on: cut without an error frame",
                sum(not o.is_told for o in cut), len(cut)),
        none_of(fault, title + "usage of resumed streams that counts wrongly",
                sum(not counts_right(o) for o in resumable if o.resumes and o.is_whole),
                sum(1 for o in resumable if o.resumes and o.is_whole)),
    ]  # fmt: skip


def counts_right(outcome: Outcome) -> bool:
    """The prompt once, each generated token once, and how often it was resumed."""
    usage = outcome.usage or {}
    return (
        usage.get("prompt_tokens") == len(outcome.ask.prompt)
        and usage.get("completion_tokens") == outcome.ask.tokens
        and usage.get("x_resumes") == outcome.resumes
    )


def _gap(fault: str, outcomes: Sequence[Outcome], limit_s: float) -> Finding:
    gaps = [o.gap_s for o in outcomes if o.resumes or o.gap_s > HEARTBEAT_S]
    return at_most(
        fault,
        f"gap in {len(gaps)} streams that were hit, p95",
        percentile(gaps, 0.95),
        limit_s,
        "s",
    )


def stop_and_go_on(stage: Stage) -> list[Finding]:
    """SIGSTOP of one of four workers: it says nothing, and its kernel still takes connections."""
    dice = stage.dice()
    stops, late_choices, stuck = 0, 0, 0
    with processes() as started:
        fleet = ground.workers(started, WORKERS)
        gateway = ground.gateway(started, [worker.url for worker in fleet])
        with mixed_crowd(gateway) as crowd:
            for trial in stage.rounds(100):
                if stage.is_late:
                    break
                until(lambda: len(crowd.flowing()) > STREAMS // 3, "streams run")
                # Without a history of the victim its silence is judged by the idle time-out alone.
                time.sleep(HISTORY_S + dice.random())
                victim = dice.choice(fleet)
                came_late, hung = _stop_one(gateway, victim, crowd)
                late_choices, stuck, stops = late_choices + came_late, stuck + hung, stops + 1
                ground.wait_back(gateway, len(fleet))
                stage.say(f"stop {trial + 1}: {late_choices} choices too late, {stuck} stuck")
    # A request of the first 3 H may be sent to it: told or moved like a stream in flight.
    limit_s = INTER_TOKEN_DEADLINE_S + 1 * HEARTBEAT_S + ground.PREFILL_S
    return [
        at_most("F2", "stops that were not tried", len(stage.rounds(100)) - stops, 0, "stops"),
        none_of("F2", "choices of the stopped worker after 3 H", late_choices, stops),
        none_of("F2", "streams that stand still after their deadline", stuck, stops),
        *judged(stage, "F2", crowd.outcomes),
        _gap("F2", crowd.outcomes, limit_s),
    ]


def _stop_one(gateway: Gateway, victim: Process, crowd: Crowd) -> tuple[int, int]:
    """How often it was chosen too late, and how many streams were not moved or failed in time."""
    flowing = crowd.flowing()
    victim.send(signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        time.sleep(3 * HEARTBEAT_S)
        chosen = ground.chosen(gateway, victim)
        time.sleep(stopped_s + INTER_TOKEN_DEADLINE_S + 2 * HEARTBEAT_S - time.monotonic())
        late = ground.chosen(gateway, victim) - chosen
        running = {id(outcome) for outcome in crowd.flowing()}
        stuck = [o for o in flowing if id(o) in running and o.heard_s[-1] < stopped_s + 0.1]
    finally:
        victim.send(signal.SIGCONT)
    return int(late), len(stuck)


def rolling_restart(stage: Stage) -> list[Finding]:
    """Each worker is told to end (SIGTERM) and started anew, one after the other."""
    with processes() as started:
        fleet = ground.workers(started, WORKERS)
        gateway = ground.gateway(started, [worker.url for worker in fleet])
        with Crowd(
            [gateway.url], lambda number, turn: resumable_only(number + 1_000 * turn), clients=32
        ) as crowd:
            for trial in stage.rounds(3):
                for at, worker in enumerate(fleet):
                    until(lambda: len(crowd.flowing()) > 10, "streams run")
                    worker.stop()
                    fleet[at] = ground.again(started, worker)
                    ground.wait_back(gateway, len(fleet))
                stage.say(f"round {trial + 1} of all workers: {len(crowd.outcomes)} answers")
    bad = [outcome for outcome in crowd.outcomes if not outcome.is_whole]
    for outcome in bad[:5]:
        stage.say(f"not as it should be: {outcome.words()}")
    return [none_of("F7", "requests without their whole answer", len(bad), len(crowd.outcomes))]


def resumable_only(seed: int) -> Ask:
    return ground.mixed(seed)[0 if seed % 3 else 3]


ROWS = (
    Row(fault="F1", title="kill -9 of a worker under 64 streams", run=kill_nine, limit_s=2_400),
    Row(fault="F2", title="SIGSTOP of a worker under 64 streams", run=stop_and_go_on,
        limit_s=2_400),
    Row(fault="F7", title="rolling restart of all workers", run=rolling_restart),
)  # fmt: skip
