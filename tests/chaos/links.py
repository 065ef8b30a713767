"""Links that are cut, one way or both, and workers that take work and never answer: F3, F4."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ground
import httpx
from crowd import Ask, Crowd, Outcome
from deaths import mixed_crowd
from fleet import Gateway, Process, Processes, processes, until
from rows import HEARTBEAT_S, Finding, Row, Stage, at_most, none_of, percentile
from toxic import Link, Toxic

WORKERS = 3
CLIENTS = 24
CUT_S = 5.0 * HEARTBEAT_S
"""Longer than a lease."""
CONVERGED_S = 10.0 * HEARTBEAT_S
MARKS = 8
"""Prompts that a worker computes while it is cut off, behind the gateway's back."""

CUTS = ("both", "to-worker", "to-gateway", "events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """A worker that is reached through links alone."""

    process: Process
    http: Link
    events: Link
    replay: Link

    @property
    def name(self) -> str:
        return self.http.url.removeprefix("http://")

    def cut(self, how: str) -> None:
        if how == "events":
            self.events.cut()
            self.replay.cut()
            return
        for link in (self.http, self.events, self.replay):
            link.cut(up=how != "to-gateway", down=how != "to-worker")

    def heal(self) -> None:
        for link in (self.http, self.events, self.replay):
            link.heal()


@contextlib.contextmanager
def behind_links(count: int, *flags: str) -> Iterator[tuple[Processes, Gateway, list[Behind]]]:
    with processes() as started, Toxic() as toxic:
        fleet = [
            Behind(
                process=process,
                http=toxic.link(process.url),
                events=toxic.link(process.ready["events"]),
                replay=toxic.link(process.ready["replay"]),
            )
            for process in ground.workers(started, count)
        ]
        gateway = ground.gateway(started, [one.http.url for one in fleet], *flags)
        for one in fleet:
            assert one.events.accepted, "events come another way"
        yield started, gateway, fleet


def partition(stage: Stage) -> list[Finding]:
    """Cuts of 5 H between the gateway and one of three workers, all four kinds in turn."""
    dice = stage.dice()
    wanted = stage.rounds(100 * len(CUTS))
    late, healed, back, tried = 0, list[float](), list[float](), 0
    with (
        behind_links(WORKERS) as (_, gateway, fleet),
        mixed_crowd(gateway, CLIENTS) as crowd,
    ):
        for trial in wanted:
            if stage.is_late:
                break
            until(lambda: len(crowd.flowing()) > CLIENTS // 4, "streams run")
            victim, how = dice.choice(fleet), CUTS[trial % len(CUTS)]
            victim.cut(how)
            cut_s = time.monotonic()
            marks = _marks_heard(gateway, victim) + MARKS
            _compute_unheard(victim, dice)
            time.sleep(max(0.0, cut_s + 3 * HEARTBEAT_S - time.monotonic()))
            before = gateway.metric("worker_selection_total", worker=victim.name)
            time.sleep(max(0.0, cut_s + CUT_S - time.monotonic()))
            after = gateway.metric("worker_selection_total", worker=victim.name)
            late += int(after - before) if how != "events" else 0
            if how in ("both", "events"):
                assert _marks_heard(gateway, victim) < marks, "the cut lets something through"
            victim.heal()
            healed.append(_converged_s(gateway, victim, marks))
            back.append(healed[-1] + ground.wait_back(gateway, len(fleet)))
            tried += 1
            heard = f"heard in {healed[-1]:.1f} s, chosen in {back[-1]:.1f} s"
            stage.say(f"cut {trial + 1} ({how}): {late} late choices, {heard}")
    return [*_partition_findings(stage, crowd.outcomes, healed, back, late),
            at_most("F3", "cuts that were not tried", len(wanted) - tried, 0, "cuts")]  # fmt: skip


def _partition_findings(
    stage: Stage, outcomes: Sequence[Outcome], healed: list[float], back: list[float], late: int
) -> list[Finding]:
    lost = [outcome for outcome in outcomes if outcome.is_lost]
    for outcome in lost[:3]:
        stage.say(f"lost: {outcome.words()}")
    return [
        none_of("F3", "false hits: other tokens than the model's",
                sum(o.is_wrong for o in outcomes), len(outcomes)),
        none_of("F3", "choices of a worker cut off for over 3 H", late, len(healed)),
        none_of("F3", "lost: neither answered nor told", len(lost), len(outcomes)),
        at_most("F3", "all that happened meanwhile is heard after", max(healed, default=0.0),
                CONVERGED_S, "s"),
        at_most("F3", "the worker may be chosen again after", max(back, default=0.0),
                CONVERGED_S, "s"),
    ]  # fmt: skip


def _compute_unheard(victim: Behind, dice: random.Random) -> None:
    """Prompts that the worker now holds, of which only its events can tell. They have no salt of
    the gateway's, so that it counts them, and does nothing else about them.
    """
    with httpx.Client(base_url=victim.process.url, timeout=60) as direct:
        for _ in range(MARKS):
            prompt = [dice.randrange(500, 4_000) for _ in range(48)]
            said = direct.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert said.status_code == 200, said.text


def _marks_heard(gateway: Gateway, victim: Behind) -> int:
    [rank] = gateway.workers()[victim.name]["detail"]["ranks"]
    return rank["feed_stats"]["unknown_salt"]


def _converged_s(gateway: Gateway, victim: Behind, marks: int) -> float:
    """Until so many events of the time of the cut were heard; events come in order."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + 3 * CONVERGED_S:
        if _marks_heard(gateway, victim) >= marks:
            return time.monotonic() - began_s
        time.sleep(0.05)
    return math.inf


def never_answers(stage: Stage) -> list[Finding]:
    """The same load on three workers, without and with a fourth that accepts and says nothing. What
    is no stream is given up there after 30 s, not after 10 min, for which no client here waits.
    """
    seconds = stage.phase_s(30.0)
    alone, beside = list[float](), list[float]()
    with processes() as started:
        fleet = ground.workers(started, 3)
        [hanging] = started.workers(1, "--profile", ground.PROFILE, "--fault", "hang")
        given_up = ("--first-byte-timeout-ms", "30000")
        gateway = ground.gateway(started, [worker.url for worker in fleet], *given_up)

        def short(number: int, turn: int) -> Ask:
            ids = ground.prompt(stage.dice(number, turn), (number + turn) % ground.FAMILIES)
            return Ask(prompt=ids, tokens=2, is_stream=False)

        with Crowd([gateway.url], short, rate_per_s=20.0) as crowd:
            for _ in stage.rounds(3):
                alone += _times(crowd, seconds, hanging)
                gateway.admin("/workers", "POST", json={"url": hanging.url})
                gateway.wait_ready(4)
                beside += _times(crowd, seconds, hanging)
                gateway.admin(f"/workers/{hanging.name}", "DELETE")
                until(lambda: hanging.name not in gateway.workers(), "it is forgotten", 120)
                ratio = percentile(beside, 0.99) / percentile(alone, 0.99)
                stage.say(f"p99 {ratio:.3f} times that without it, {len(beside)} answers")
    for outcome in [o for o in crowd.outcomes if o.is_lost][:5]:
        stage.say(
            f"lost: {outcome.words()} of {outcome.worker}, {outcome.ended_s - outcome.sent_s:.1f} s"
        )
    stage.say(f"medians {statistics.median(alone):.3f} s and {statistics.median(beside):.3f} s")
    ratio = percentile(beside, 0.99) / percentile(alone, 0.99)
    return [
        at_most("F4", "p99 of the other workers, over that without the hanging one", ratio, 1.1,
                "times"),
        none_of("F4", "lost: neither answered nor told", sum(o.is_lost for o in crowd.outcomes),
                len(crowd.outcomes)),
    ]  # fmt: skip


def _times(crowd: Crowd, seconds: float, hanging: Process) -> list[float]:
    """How long answers of the workers that work took."""
    began_s = time.monotonic()
    time.sleep(seconds)
    seen = crowd.since(began_s)
    return [o.ended_s - o.sent_s for o in seen if o.status == 200 and o.worker != hanging.name]


ROWS = (
    Row(fault="F3", title="cut links between gateway and worker", run=partition, limit_s=3_600),
    Row(fault="F4", title="a worker accepts and never answers", run=never_answers),
)
