"""Every call to a worker fails for a while: F9."""

from __future__ import annotations

import time

import ground
from crowd import Ask, Crowd
from links import behind_links
from rows import HEARTBEAT_S, Finding, Row, Stage, at_least, at_most, none_of

RATE_PER_S = 60.0
STORM_S = 30.0


def retry_storm(stage: Stage) -> list[Finding]:
    """Each connection to each of three workers is reset; then all is well again."""
    seconds = stage.phase_s(STORM_S)

    def short(number: int, turn: int) -> Ask:
        ids = ground.prompt(stage.dice(number, turn), number % ground.FAMILIES)
        return Ask(prompt=ids, tokens=2, is_stream=False)

    with (
        behind_links(3) as (_, gateway, fleet),
        Crowd([gateway.url], short, rate_per_s=RATE_PER_S) as crowd,
    ):
        time.sleep(2 * HEARTBEAT_S)
        attempts, began_s = gateway.metric("attempts_total"), time.monotonic()
        for worker in fleet:
            worker.http.reset(lasts=True)
        time.sleep(seconds)
        ended_s = time.monotonic()
        attempts = gateway.metric("attempts_total") - attempts
        for worker in fleet:
            worker.http.heal()
        stage.say("the storm is over")
        _until_answered(crowd, ended_s)
    asked = crowd.since(began_s, ended_s)
    good = [o.sent_s for o in crowd.since(ended_s) if o.is_whole]
    recovered_s = min(good, default=float("nan")) - ended_s
    after = crowd.since(ended_s + 5 * HEARTBEAT_S)
    share = 100.0 * sum(o.is_whole for o in after) / len(after) if after else float("nan")
    return [
        at_most("F9", "attempts a request while all fail", attempts / max(1, len(asked)), 1.2, ""),
        at_most("F9", "first answer after the end", recovered_s, 5 * HEARTBEAT_S, "s"),
        at_least("F9", "answered, of those sent 5 H after the end", share, 100.0, "%"),
        none_of("F9", "lost: neither answered nor told", sum(o.is_lost for o in crowd.outcomes),
                len(crowd.outcomes), least=int(RATE_PER_S)),
    ]  # fmt: skip


def _until_answered(crowd: Crowd, ended_s: float) -> None:
    """15 H more, or as long as nothing is answered; no longer than the pause of a breaker."""
    while time.monotonic() < ended_s + 90 * HEARTBEAT_S:
        time.sleep(HEARTBEAT_S)
        has_answer = any(o.is_whole for o in crowd.since(ended_s))
        if has_answer and time.monotonic() > ended_s + 15 * HEARTBEAT_S:
            return


ROWS = (Row(fault="F9", title="every upstream call fails for 30 s", run=retry_storm),)
