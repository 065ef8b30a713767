"""A directory that hears nothing, and a gateway of two that is killed: F5, F6."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import ground
from crowd import Ask, Crowd, Outcome
from deaths import resumable_only
from fleet import free_port, processes, until
from links import behind_links
from rows import HEARTBEAT_S, Finding, Row, Stage, at_least, at_most, none_of

CLIENTS = 16
WINDOW_S = 5.0


def deaf_directory(stage: Stage) -> list[Finding]:
    """For 60 s no event reaches the directory from any worker, and what it knew grows old."""
    away_s = stage.phase_s(60.0)

    def short(number: int, turn: int) -> Ask:
        # Families come and go, so that old knowledge is worth little.
        dice = random.Random(f"{stage.seed} {number} {turn}")
        family = int(time.monotonic() / 20.0) * 8 + dice.randrange(8)
        return Ask(prompt=ground.prompt(dice, family), tokens=8)

    with (
        behind_links(3) as (_, gateway, fleet),
        Crowd([gateway.url], short, clients=CLIENTS) as crowd,
    ):
        time.sleep(stage.phase_s(25.0))
        before = _hit_share(crowd.since(time.monotonic() - stage.phase_s(20.0)))
        assert before > 0.0, "nothing was hit before the cut"
        for worker in fleet:
            worker.cut("events")
        time.sleep(away_s)
        meanwhile = _hit_share(crowd.since(time.monotonic() - away_s))
        for worker in fleet:
            worker.heal()
        healed_s, share = time.monotonic(), 0.0
        while share < 0.95 * before and time.monotonic() < healed_s + 60 * HEARTBEAT_S:
            time.sleep(WINDOW_S)
            share = _hit_share(crowd.since(time.monotonic() - WINDOW_S))
            stage.say(f"hit share {before:.3f} before, {meanwhile:.3f} without, {share:.3f} now")
        spent_s = time.monotonic() - healed_s if share >= 0.95 * before else float("inf")
    bad = [outcome for outcome in crowd.outcomes if not outcome.is_whole]
    return [
        none_of("F5", "failed requests", len(bad), len(crowd.outcomes)),
        at_most("F5", "hit tokens at 95 % of before again after", spent_s, 30 * HEARTBEAT_S, "s"),
    ]


def _hit_share(outcomes: Sequence[Outcome]) -> float:
    told = [o.usage for o in outcomes if o.usage]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in told)
    return cached / max(1, sum(usage["prompt_tokens"] for usage in told))


def killed_gateway(stage: Stage) -> list[Finding]:
    """One of two gateways is killed under load and comes back on its port; clients go by a balancer
    that tries the other one where a connection is refused.
    """
    kills = list[tuple[float, float]]()
    """When each began, and when the process was gone: what was sent between was taken, too."""
    with processes() as started:
        fleet = ground.workers(started, 3)
        urls = [worker.url for worker in fleet]
        ports = [("--port", str(free_port()), "--admin-port", str(free_port())) for _ in range(2)]
        pair = [ground.gateway(started, urls, *port) for port in ports]
        addresses = [gateway.url for gateway in pair]

        away = set[str]()

        def balanced(turn: int) -> Sequence[str]:
            """In turn; one that its readiness takes out comes last."""
            in_turn = addresses if turn % 2 else addresses[::-1]
            return sorted(in_turn, key=lambda url: url in away)

        with Crowd(
            balanced, lambda number, turn: resumable_only(number + 1_000 * turn), clients=32
        ) as crowd:
            for trial in stage.rounds(20):
                until(lambda: len(crowd.flowing()) > 10, "streams run")
                at = trial % 2
                kill_s = time.monotonic()
                pair[at].process.kill()
                kills.append((kill_s, time.monotonic()))
                away.add(addresses[at])
                pair[at] = ground.gateway(started, urls, *ports[at])
                away.clear()
                stage.say(f"gateway {trial + 1} killed: {len(crowd.outcomes)} answers")
        finished = sum(ground.worker_metric(worker, "vllm:request_success_total")
                       for worker in fleet)  # fmt: skip
    bad = [o for o in crowd.outcomes if not o.is_whole]
    in_flight = [o for o in bad if any(o.sent_s < gone and o.ended_s >= at for at, gone in kills)]
    told = {id(outcome) for outcome in in_flight}
    new = [outcome for outcome in bad if id(outcome) not in told]
    for outcome in new[:5]:
        stage.say(f"failed: {outcome.words()}")
    unseen = finished - sum(o.is_whole for o in crowd.outcomes)
    return [
        none_of("F6", "new requests that failed at the balancer", len(new), len(crowd.outcomes)),
        at_least("F6", "requests in flight at a kill, reset and counted", len(in_flight), 1, ""),
        at_most("F6", "answers finished by workers that no client got", unseen, len(in_flight), ""),
    ]


ROWS = (
    Row(fault="F5", title="no event reaches the directory for 60 s", run=deaf_directory),
    Row(fault="F6", title="one of two gateways is killed under load", run=killed_gateway),
)
