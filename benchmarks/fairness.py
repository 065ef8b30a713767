"""What the line in front of the picker and the rates of tenants cost one request.

    python benchmarks/fairness.py [--json] [--rounds 150]

CPU time (process time) of pick, first byte and end of one request among 16 workers, medians over
rounds that alternate between:
  bare     the picker alone
  line     with the line in front and room in the fleet: everything passes
  open     with tenants' rates too, for a tenant that has no limit
  limited  for one with a limit of requests and of tokens, which it keeps: admission, charge and the
           headers of its answer
  turns    no room: each request waits as a task behind 63 others of 16 tenants until it is its turn
Prompts have 256 tokens: what a request costs elsewhere is to be small here. Bars: line at most 3 us
over bare, open at most 4.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from array import array
from collections.abc import Awaitable
from dataclasses import dataclass, replace

from trunkline.adapters.clock import SystemClock
from trunkline.assembly import Core
from trunkline.config import Config
from trunkline.core.fleet import WorkerState
from trunkline.core.overload import Priority
from trunkline.core.records import WorkerId
from trunkline.gateway.allowance import Allowance
from trunkline.gateway.contracts import (
    OPEN_GRANT,
    AttemptEnd,
    Endpoint,
    InferenceRequest,
    Pick,
    Picker,
    Route,
)
from trunkline.gateway.fair_line import FairPicker, LineLimits
from trunkline.gateway.picker import FleetPicker
from trunkline.ports.worker import Target
from trunkline.wiring import build_core

WORKERS = 16
TOKENS = 256
BATCH = 200
TENANTS = 16
WAITING = 64
BARS_US = {"line": 3.0, "open": 4.0}
NOBODY_TRIED = frozenset[WorkerId]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    weight: float = 1.0
    priority: Priority = Priority.NORMAL


def fleet() -> Core:
    """A gateway's own core over workers that nobody ever connects to."""
    core = build_core(Config(), SystemClock())
    for index in range(WORKERS):
        worker = WorkerId(f"w{index}")
        slot = core.directory.join(worker, block_tokens=16)
        core.fleet.add(WorkerState(worker=worker, slot=slot, block_tokens=16))
        endpoint = Endpoint(host="127.0.0.1", port=1, host_header="worker")
        core.picker.add_target(Target(worker=worker, endpoint=endpoint, predicted_ttl_ms=5_000.0))
    return core


def requests(draw: random.Random) -> list[InferenceRequest]:
    """One of each tenant in turn, all different."""
    grants = [
        replace(OPEN_GRANT, principal=replace(OPEN_GRANT.principal, tenant=f"t{n}"))
        for n in range(TENANTS)
    ]
    return [
        InferenceRequest(
            request_id=str(number),
            route=Route.COMPLETION,
            method="POST",
            path="/v1/completions",
            body=b'{"a":1}',
            grant=grants[number % TENANTS],
            is_stream=True,
            prompt=array("I", [draw.randrange(30_000) for _ in range(TOKENS)]),
        )
        for number in range(BATCH)
    ]


def passing_us(picker: Picker, asked: list[InferenceRequest], allowance: Allowance | None) -> float:
    """CPU microseconds of one request that passes straight through."""
    started = time.process_time_ns()
    for request in asked:
        if allowance is not None:
            allowance.admit(request.grant.principal.tenant)
        pick = picker.pick(request, NOBODY_TRIED)
        assert isinstance(pick, Pick)
        picker.first_byte(pick)
        picker.ended(pick, AttemptEnd.COMPLETE, 0)
    return (time.process_time_ns() - started) / 1_000.0 / len(asked)


async def waiting_us(core: Core, asked: list[InferenceRequest]) -> float:
    """CPU microseconds of one request that waits behind `WAITING` others; its task is in it."""
    line = FairPicker(
        core.picker, fleet=core.fleet, clock=SystemClock(), limits=LineLimits(room_ms=0.001)
    )
    fillers = [core.picker.pick(request, NOBODY_TRIED) for request in asked[:WORKERS]]
    open_picks = [pick for pick in fillers if isinstance(pick, Pick)]
    for state in core.fleet.states():
        state.queue.foreign_ms = 1.0
    started = time.process_time_ns()
    ends: list[Pick] = []

    async def serve(choice: Awaitable[Pick]) -> None:
        ends.append(await choice)

    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(asked):
            choice = line.pick(request, NOBODY_TRIED)
            assert not isinstance(choice, Pick)
            group.create_task(serve(choice))
            if number % WAITING == WAITING - 1 or number == len(asked) - 1:
                await asyncio.sleep(0)
                _let_go(core, line, open_picks)
                await asyncio.sleep(0)
        while line.waiting_count:
            await asyncio.sleep(0)
            _let_go(core, line, open_picks)
    for pick in ends:
        line.first_byte(pick)
        line.ended(pick, AttemptEnd.COMPLETE, 0)
    took_us = (time.process_time_ns() - started) / 1_000.0 / len(asked)
    for pick in open_picks:
        core.picker.ended(pick, AttemptEnd.COMPLETE, 0)
    for state in core.fleet.states():
        state.queue.foreign_ms = 0.0
    return took_us


def _let_go(core: Core, line: FairPicker, open_picks: list[Pick]) -> None:
    """All that wait find room at once, as where a fleet has just grown."""
    for state in core.fleet.states():
        state.queue.foreign_ms = -1e9
    if open_picks:
        line.ended(open_picks.pop(), AttemptEnd.COMPLETE, 0)
    for state in core.fleet.states():
        state.queue.foreign_ms = 1.0


def measure(rounds: int) -> dict[str, float]:
    draw = random.Random(3)
    core, clock = fleet(), SystemClock()
    picker: FleetPicker = core.picker
    # Rates that are kept, and so slow that no bucket is full again before its next request.
    none, wide = Policy(), Policy(requests_per_s=500.0, tokens_per_s=100_000.0)
    free, limited = Allowance(lambda _: none, clock), Allowance(lambda _: wide, clock)

    def line(allowance: Allowance | None) -> FairPicker:
        # Room for all: what a batch sends falls due within it, and is not waited for.
        return FairPicker(picker, fleet=core.fleet, clock=clock, allowance=allowance)

    ways: dict[str, tuple[Picker, Allowance | None]] = {
        "bare": (picker, None),
        "line": (line(None), None),
        "open": (line(free), free),
        "limited": (line(limited), limited),
    }
    samples: dict[str, list[float]] = {name: [] for name in [*ways, "turns"]}
    for number in range(rounds + 5):
        asked = requests(draw)
        names = list(ways)
        draw.shuffle(names)
        for name in names:
            samples[name].append(passing_us(ways[name][0], asked, ways[name][1]))
        if number < rounds // 5 + 5:
            samples["turns"].append(asyncio.run(waiting_us(core, requests(draw))))
    return {name: statistics.median(taken[5:]) for name, taken in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=150)
    args = parser.parse_args()
    medians = measure(args.rounds)
    bare_us = medians["bare"]
    rows = {
        name: {"us": us, "over_us": us - bare_us, "ratio": us / bare_us}
        for name, us in medians.items()
    }
    missed = [name for name, bar_us in BARS_US.items() if rows[name]["over_us"] > bar_us]
    if args.json:
        report = {"rows": rows, "bars_us": BARS_US, "is_within_bars": not missed}
        print(json.dumps(report, indent=2))
        return 1 if missed else 0
    print("way         us a request  over bare us  ratio")
    for name, row in rows.items():
        print(f"{name:10s}  {row['us']:12.1f}  {row['over_us']:12.2f}  {row['ratio']:5.2f}")
    for name, bar_us in BARS_US.items():
        word = "MISSED" if name in missed else "kept"
        print(f"bar: {name} at most {bar_us} us over bare: {word}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
