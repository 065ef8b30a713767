"""Load near and beyond what the fleet can do: F8, F10, F11, F12.

What it can do is known from the profile: a prompt with its shared part cached takes `WARM_S` of a
worker. Answers count as good when their first token comes within the queue's goal and a prefill.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence

import ground
from crowd import Ask, Crowd, Maker, Outcome, exchange
from fleet import Gateway, Process, Processes, processes, until
from rows import HEARTBEAT_S, Finding, Row, Stage, at_least, at_most, none_of, percentile

PROFILE = "fifo:40,0.5,5"
WARM_S = 0.040 + 0.0005 * ground.OWN_TOKENS
COLD_S = 0.040 + 0.0005 * (ground.OWN_TOKENS + ground.SHARED_TOKENS)
QUEUE_S = 2.5
"""Longest wait in a queue, p99."""
PROFILE_FLAGS = ("--profile", PROFILE)


def _maker(stage: Stage, families: int = ground.FAMILIES) -> Maker:
    def short(number: int, turn: int) -> Ask:
        dice = stage.dice(number, turn)
        return Ask(prompt=ground.prompt(dice, dice.randrange(families)), tokens=2)

    return short


def _fleet(started: Processes, count: int, *flags: str) -> tuple[list[Process], Gateway]:
    fleet = started.workers(count, *PROFILE_FLAGS)
    gateway = ground.gateway(started, [worker.url for worker in fleet], *PROFILE_FLAGS, *flags)
    return fleet, gateway


def _is_good(outcome: Outcome) -> bool:
    return outcome.is_whole and outcome.first_token_s <= QUEUE_S + COLD_S


def _good_per_s(crowd: Crowd, began_s: float, ended_s: float) -> float:
    """By when they ended: what the fleet brought out in that time."""
    seen = [o for o in list(crowd.outcomes) if began_s <= o.ended_s < ended_s and _is_good(o)]
    return len(seen) / (ended_s - began_s)


def _p99_ttft(outcomes: Sequence[Outcome]) -> float:
    return percentile([o.first_token_s for o in outcomes if o.is_whole], 0.99)


def _for(seconds: float) -> tuple[float, float]:
    began_s = time.monotonic()
    time.sleep(seconds)
    return began_s, time.monotonic()


def half_is_gone(stage: Stage) -> list[Finding]:
    """Two of four workers are killed at 60 % load, and come back empty after a while."""
    away_s = stage.phase_s(30.0)
    rate = 0.6 * 4 / WARM_S
    with processes() as started:
        fleet, gateway = _fleet(started, 4)
        with Crowd([gateway.url], _maker(stage), rate_per_s=rate) as crowd:
            time.sleep(5 * HEARTBEAT_S)
            before = crowd.since(*_for(stage.phase_s(20.0)))
            for victim in fleet[:2]:
                victim.child.kill()
            goodput = _good_per_s(crowd, *_for(away_s))
            stage.say(f"half of the fleet brings {goodput:.1f} good answers a second")
            for at in range(2):
                fleet[at].child.wait()
                fleet[at] = ground.again(started, fleet[at])
            back_s = time.monotonic()
            limit = 1.2 * _p99_ttft(before)
            well_s = _until_p99(stage, crowd, limit, back_s)
    lost = [o for o in crowd.outcomes if o.is_lost]
    wanted = 0.9 * min(rate, 2 / WARM_S)
    return [
        at_least("F8", "goodput of the remaining half", goodput, wanted, "per s"),
        at_most("F8", f"p99 TTFT at most {limit:.3f} s again after", well_s, 60 * HEARTBEAT_S, "s"),
        none_of("F8", "lost: neither answered nor told", len(lost), len(crowd.outcomes)),
    ]


def _until_p99(stage: Stage, crowd: Crowd, limit_s: float, back_s: float) -> float:
    """When a window of 5 H began whose p99 was within the limit; infinite after 90 H."""
    while time.monotonic() < back_s + 90 * HEARTBEAT_S:
        began_s, ended_s = _for(5 * HEARTBEAT_S)
        time.sleep(min(2.0, limit_s))  # the last of them may still run
        p99 = _p99_ttft(crowd.since(began_s, ended_s))
        stage.say(f"{ended_s - back_s:.0f} s after: p99 TTFT {p99:.3f} s, wanted {limit_s:.3f} s")
        if p99 <= limit_s:
            return began_s - back_s
    return math.inf


def overload(stage: Stage) -> list[Finding]:
    """Three times of what two workers can do, for five minutes."""
    able = 2 / WARM_S
    with processes() as started:
        _, gateway = _fleet(started, 2)
        pid = gateway.process.child.pid
        with Crowd([gateway.url], _maker(stage), rate_per_s=0.9 * able) as crowd:
            time.sleep(5 * HEARTBEAT_S)
            began_s, ended_s = _for(stage.phase_s(30.0))
            peak = _good_per_s(crowd, began_s, ended_s)
            before = _p99_ttft(crowd.since(began_s, ended_s))
            crowd.rate_per_s = 3 * able
            time.sleep(stage.phase_s(30.0) / 3)
            rss = ground.resident_mib(pid)
            began_s, ended_s = _for(stage.phase_s(300.0))
            grown = ground.resident_mib(pid) / rss
            goodput = _good_per_s(crowd, began_s, ended_s)
            crowd.rate_per_s = 0.5 * able
            stage.say(f"goodput {goodput:.1f} of {peak:.1f} a second; memory times {grown:.2f}")
            time.sleep(5 * HEARTBEAT_S)
    seen = crowd.since(began_s, ended_s)
    admitted = [o for o in seen if o.status == 200]
    refused = [o.ended_s - o.sent_s for o in seen if o.status in (429, 503)]
    waits = [max(0.0, o.first_token_s - WARM_S) for o in admitted]
    stage.say(f"{len(admitted)} admitted, {len(refused)} refused of {len(seen)}")
    return [
        at_least("F10", "goodput at 3 times the load", goodput, 0.9 * peak, "per s"),
        at_most("F10", "wait of the admitted, p99", percentile(waits, 0.99), QUEUE_S, "s"),
        at_most("F10", "TTFT of the admitted, p99", _p99_ttft(admitted), 2 * before, "s"),
        at_most("F10", "memory of the gateway, end over beginning", grown, 1.1, "times"),
        at_most("F10", "time of a refusal, p99", percentile(refused, 0.99), 0.05, "s"),
        none_of("F10", "lost: neither answered nor told", sum(o.is_lost for o in crowd.outcomes),
                len(crowd.outcomes)),
    ]  # fmt: skip


def thundering_herd(stage: Stage) -> list[Finding]:
    """200 equal cold prompts at once, before engines that compute several prompts in one step."""
    tokens, herd = 2_000, 200
    worst, lost = 0.0, 0
    with processes() as started:
        fleet = started.workers(4, "--profile", "llama-3.1-8b-h100")
        flags = ("--profile", "llama-3.1-8b-h100")
        gateway = ground.gateway(started, [worker.url for worker in fleet], *flags)
        for trial in stage.rounds(10):
            dice = stage.dice(trial)
            prompt = tuple(dice.randrange(500, 4_000) for _ in range(tokens))
            before = [_computed(worker) for worker in fleet]
            outcomes = asyncio.run(_all_at_once(gateway, Ask(prompt=prompt, tokens=2), herd))
            spent = [_computed(worker) - was for worker, was in zip(fleet, before, strict=True)]
            assert sum(spent) > 0, "nobody computed the prompt"
            # The last block of a prompt is always computed: a hit leaves that much.
            left = sum(1 for o in outcomes if o.is_whole) * 16 / len(fleet)
            worst = max(worst, *((here - left) / tokens for here in spent))
            lost += sum(o.is_lost for o in outcomes)
            shares = ", ".join(f"{here / tokens:.1f}" for here in spent)
            stage.say(f"herd {trial + 1}: prompts computed at each worker: {shares}")
    return [
        at_most("F11", "times that one worker computed the prompt, most", round(worst, 1), 2, ""),
        none_of("F11", "lost: neither answered nor told", lost, herd * len(stage.rounds(10))),
    ]


def _computed(worker: Process) -> float:
    """Prompt tokens so far."""
    return ground.worker_metric(
        worker, "vllm:prompt_tokens_by_source_total", 'source="local_compute"'
    )


async def _all_at_once(gateway: Gateway, ask: Ask, count: int) -> list[Outcome]:
    return await asyncio.gather(*(exchange(ask, [gateway.url]) for _ in range(count)))


def cold_worker(stage: Stage) -> list[Finding]:
    """A fifth worker joins four warm ones at 60 % load."""
    queues: dict[str, list[float]] = {}
    with processes() as started:
        fleet, gateway = _fleet(started, 4)
        [cold] = started.workers(1, *PROFILE_FLAGS)
        with Crowd([gateway.url], _maker(stage), rate_per_s=0.6 * 4 / WARM_S) as crowd:
            time.sleep(8 * HEARTBEAT_S)
            before = crowd.since(*_for(stage.phase_s(30.0)))
            gateway.admin("/workers", "POST", json={"url": cold.url})
            until(lambda: cold.name in gateway.workers(), "it is known")
            began_s = time.monotonic()
            while time.monotonic() < began_s + stage.phase_s(30.0):
                for name, row in gateway.workers().items():
                    queues.setdefault(name, []).append(row["queue_ms"])
                time.sleep(0.1)
            ended_s = time.monotonic()
    means = {name: statistics.fmean(values) for name, values in queues.items()}
    median = statistics.median(means[worker.name] for worker in fleet)
    ratio = means[cold.name] / median if median else math.inf
    stage.say(f"mean queues, ms: {', '.join(f'{value:.1f}' for value in means.values())}")
    rise = _p99_ttft(crowd.since(began_s, ended_s)) / _p99_ttft(before)
    return [
        at_most("F12", "mean queue of the new worker, over the median of the others", ratio, 1.5,
                "times"),
        at_most("F12", "p99 TTFT, over that before", rise, 1.1, "times"),
    ]  # fmt: skip


ROWS = (
    Row(fault="F8", title="half of the fleet is lost at 60 % load", run=half_is_gone),
    Row(fault="F10", title="three times the load for 5 min", run=overload),
    Row(fault="F11", title="200 equal cold prompts at once", run=thundering_herd),
    Row(fault="F12", title="a cold worker joins under load", run=cold_worker),
)
