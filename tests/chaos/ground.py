"""Fleets for the rows: simulated workers and a gateway under its default settings, but for H = 1 s.

Owns how they are started and looked at. Must never start what is not in the caller's `Processes`,
which end it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from crowd import Ask
from fleet import Gateway, Process, Processes, until
from rows import HEARTBEAT_S

SHARED_TOKENS = 96
OWN_TOKENS = 32
FAMILIES = 24
PROFILE = "fifo:10,0.02,50"
"""A prompt takes 10 ms and 0.02 ms a token, then a token comes each 50 ms."""
INTER_TOKEN_S = 0.05
PREFILL_S = 0.2
"""Of prompt and generated tokens, with those in front of it that fail over at the same time."""
PATIENCE_S = 150.0
"""Longer than a breaker stays open (60 s), and its trials take."""
PROBES = (
    "--health-check-interval-secs", str(0.4 * HEARTBEAT_S),
    "--health-check-timeout-secs", str(0.5 * HEARTBEAT_S),
)  # fmt: skip
"""A probe that fails takes 0.9 H with the pause before it. Three in a row take a worker out, within
2.7 H, so that the goal of 3 H is not one for timers that are never late.
"""


def workers(started: Processes, count: int, *flags: str) -> list[Process]:
    return started.workers(count, "--profile", PROFILE, *flags)


def again(started: Processes, dead: Process) -> Process:
    """The next life of a worker: the same words, the same port."""
    return started.workers(1, *dead.words[1:])[0]


def gateway(
    started: Processes, urls: Sequence[str], *flags: str, under: Sequence[str] = ()
) -> Gateway:
    named = ("--worker-urls", *urls) if urls else ()
    if not {"--auth", "--state-dir"} & set(flags):
        flags = ("--auth", "off", *flags)
    ports = () if "--port" in flags else ("--port", "0", "--admin-port", "0")
    process = started.begin(
        "serve", *named, *ports, *PROBES,
        "--profile", PROFILE, "--disable-self-test", "--decision-header", *flags,
        under=under,
    )  # fmt: skip
    process.wait_ready()
    made = Gateway(process)
    made.wait_ready(len(urls))
    return made


def prompt(dice: random.Random, family: int, own_tokens: int = OWN_TOKENS) -> tuple[int, ...]:
    """Behind one of few shared beginnings, an end of its own."""
    shared = random.Random(f"family {family}")
    ids = [shared.randrange(500, 4_000) for _ in range(SHARED_TOKENS)]
    return (*ids, *(dice.randrange(500, 4_000) for _ in range(own_tokens)))


def mixed(seed: object, tokens: int = 40) -> tuple[Ask, ...]:
    """Two streams that can go on elsewhere, one that cannot, one answer that is no stream."""
    dice = random.Random(str(seed))
    made: list[Ask] = []
    for is_stream, is_resumable in ((True, True), (True, True), (True, False), (False, True)):
        ids = prompt(dice, dice.randrange(FAMILIES))
        count = tokens + dice.randrange(tokens)
        made.append(Ask(prompt=ids, tokens=count, is_stream=is_stream, is_resumable=is_resumable))
    return tuple(made)


def worker_metric(process: Process, name: str, *labels: str) -> float:
    """What a worker says of itself, summed over the series with these labels."""
    lines = httpx.get(f"{process.url}/metrics", timeout=30).text.splitlines()
    series = [line for line in lines if line.startswith((name + "{", name + " "))]
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in series if all(word in line for word in labels)
    )


def chosen(looked_at: Gateway, process: Process) -> float:
    """How often a decision took this worker."""
    return looked_at.metric("worker_selection_total", worker=process.name)


def wait_back(looked_at: Gateway, count: int) -> float:
    """Until so many are ready with what they hold known, and none has an open breaker. How many
    seconds that took.
    """
    began_s = time.monotonic()
    looked_at.wait_ready(count, PATIENCE_S)  # who has an open breaker is not ready

    def are_closed() -> bool:
        return all(row["breaker"] == "closed" for row in looked_at.workers().values())

    until(are_closed, "all breakers are closed", PATIENCE_S)
    return time.monotonic() - began_s


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
