"""Half of what the fleet can do, for hours, with faults now and then: L2. Runs only where named.

Nothing of the gateway may grow: memory, descriptors, threads, connections. Where a run is short,
its slopes are the noise of its samples; the row says how long it was.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ground
from deaths import mixed_crowd
from fleet import Gateway, Process, Processes, processes, until
from rows import Finding, Row, Stage, at_most, growth, none_of

HOURS = 8.0
CLIENTS = 24
SAMPLE_S = 5.0
FAULT_EVERY_S = 20.0
WARM_UP_SHARE = 0.1
MAX_GROWTH = 1.0
"""Percent an hour."""


def soak(stage: Stage) -> list[Finding]:
    """`--seconds` sets how long; a fault every 20 s: a kill, a stop, or a restart in order."""
    seconds = stage.seconds or HOURS * 3_600.0
    samples: list[tuple[float, dict[str, float]]] = []
    asked = lost = wrong = 0
    with processes() as started:
        fleet = ground.workers(started, 4)
        gateway = ground.gateway(started, [worker.url for worker in fleet])
        with mixed_crowd(gateway, CLIENTS) as crowd:
            began_s = fault_s = time.monotonic()
            while (spent_s := time.monotonic() - began_s) < seconds:
                if time.monotonic() > fault_s + FAULT_EVERY_S:
                    fault_s = time.monotonic()
                    _fault(started, gateway, fleet, stage.dice(len(samples)))
                samples.append((spent_s, _sample(gateway)))
                ended = crowd.taken()
                asked += len(ended)
                lost += sum(o.is_lost for o in ended)
                wrong += sum(o.is_wrong for o in ended)
                if len(samples) % 60 == 1:
                    stage.say(f"{spent_s / 60:.0f} min: {asked} answers, {samples[-1][1]}")
                time.sleep(SAMPLE_S)
        gateway.wait_quiet()
        at_rest = gateway.metric("requests_active")
    kept = samples[int(len(samples) * WARM_UP_SHARE) :]
    minutes = (kept[-1][0] - kept[0][0]) / 60.0
    return [
        none_of("L2", "lost: neither answered nor told", lost, asked),
        none_of("L2", "wrong, repeated or missing tokens", wrong, asked),
        at_most("L2", "requests in flight at rest", at_rest, 0, ""),
        *(
            at_most("L2", f"{name}: growth over {minutes:.0f} min",
                    growth([(at, seen[name]) for at, seen in kept]), MAX_GROWTH, "%/h")
            for name in kept[0][1]
        ),
    ]  # fmt: skip


def _sample(gateway: Gateway) -> dict[str, float]:
    pid = gateway.process.child.pid
    return {
        "memory, MiB": round(ground.resident_mib(pid), 1),
        "descriptors": float(ground.descriptors(pid)),
        "threads": float(len(list(Path(f"/proc/{pid}/task").iterdir()))),
        "connections": gateway.metric("connections_active")
        + gateway.metric("upstream_connections_active"),
    }


def _fault(started: Processes, gateway: Gateway, fleet: list[Process], dice: random.Random) -> None:
    at = dice.randrange(len(fleet))
    kinds: Sequence[Callable[[], None]] = (
        lambda: _stop_for(fleet[at], 0.5 + 3 * dice.random()),
        lambda: _replace(started, fleet, at, Process.kill),
        lambda: _replace(started, fleet, at, Process.stop),
    )
    dice.choice(kinds)()
    until(lambda: gateway.worker(fleet[at])["state"] == "ready", "it is back", 120)


def _stop_for(worker: Process, seconds: float) -> None:
    worker.send(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        worker.send(signal.SIGCONT)


def _replace(
    started: Processes, fleet: list[Process], at: int, end: Callable[[Process], object]
) -> None:
    end(fleet[at])
    started.forget(fleet[at])
    fleet[at] = ground.again(started, fleet[at])


ROWS = (
    Row(fault="L2", title="half load for hours with faults", run=soak, is_only_when_named=True),
)
