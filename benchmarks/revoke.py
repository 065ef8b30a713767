"""How long a revocation takes until it is in force on every worker.

    python benchmarks/revoke.py [--workers 8] [--rounds 200] [--streams 50] [--json]

Real workers on real sockets, each with streams running; the revoker, its leases and a registry that
is written to the disk with fsync are in this process. First all workers are alive: the time from
the command until its receipt, p50 and p99, bar 100 ms at p99. Then one is stopped (SIGSTOP): its
lease has to run out, bar 3.2 s. Every receipt is checked: who was to ack has acked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvloop

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.sqlite_store import SqliteStore
from trunkline.control.changes import Intent
from trunkline.control.holders import HolderParts, WorkerHolder
from trunkline.control.probe import fetch, post
from trunkline.control.receipts import Erasure, HolderAck, Receipt
from trunkline.control.registry import Registry
from trunkline.control.revocation import HERE, Revoker, RevokerParts
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.freshness import LeaseGrants
from trunkline.observe import EventLog
from trunkline.replay.client import Client, ClientOptions, Target
from trunkline.replay.counters import percentile
from trunkline.replay.processes import Child, endpoint_of, start_child

BAR_ALIVE_MS = 100.0
BAR_STOPPED_MS = 3_200.0
STOPPED_ROUNDS = 3
SUBJECT = Subject(kind=SubjectKind.MODEL, path="benchmark")
ME = Intent(actor="benchmark", reason="benchmark")


class Unwritten:
    """No audit log: its own benchmark tells what it costs."""

    async def intent(self, action: str, subject: Subject, intent: Intent) -> None: ...
    async def outcome(self, receipt: Receipt, intent: Intent) -> None: ...
    async def erased(self, erasure: Erasure, intent: Intent) -> None: ...


@asynccontextmanager
async def revoking(workers: list[Child], folder: Path) -> AsyncGenerator[Revoker]:
    clock, log = SystemClock(), EventLog("benchmark")
    store = await SqliteStore.open(folder / "registry.db")
    registry = await Registry.load(store, clock)
    grants = LeaseGrants(clock.boot(), has_earlier_life=False)
    shared = HolderParts(
        table=lambda: registry.table, grants=grants, fetch=fetch, post=post, clock=clock, log=log
    )
    holders = [
        WorkerHolder(child.name, endpoint_of(child.ready["url"]), shared) for child in workers
    ]
    parts = RevokerParts(
        registry=registry,
        grants=grants,
        holders=lambda: holders,
        here=lambda order: HolderAck(life=HERE),
        audit=Unwritten(),
        clock=clock,
        log=log,
    )
    async with Revoker(parts) as revoker, asyncio.TaskGroup() as group:
        loops = [group.create_task(holder.run()) for holder in holders]
        async with asyncio.timeout(10.0):
            while not all(holder.is_granted() for holder in holders):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield revoker
        for task in loops:
            task.cancel()
    await store.close()


async def stream(url: str, number: int, stop: asyncio.Event) -> None:
    """One client after the other, so that the worker is never idle."""
    client = Client(Target.parse(url), ClientOptions())
    body = {"model": "trunkline-sim", "stream": True, "max_tokens": 50, "temperature": 0}
    while not stop.is_set():
        words = json.dumps({**body, "prompt": [1_000 + number, 7, 8, 9] * 20}).encode()
        await client.send("/v1/completions", words)


@asynccontextmanager
async def streaming(workers: list[Child], streams: int) -> AsyncGenerator[None]:
    """So many streams at a time, spread over the workers."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            url = workers[number % len(workers)].ready["url"]
            group.create_task(stream(url, number, stop))
        try:
            yield
        finally:
            stop.set()


async def alive_receipts_ms(revoker: Revoker, worker_count: int, rounds: int) -> list[float]:
    """Sorted."""
    taken_ms: list[float] = []
    for _ in range(rounds):
        receipt = await revoker.invalidate(SUBJECT, ME)
        assert len(receipt.acked) == worker_count + 1, receipt
        taken_ms.append(receipt.ms)
        await asyncio.sleep(0.02)
    return sorted(taken_ms)


async def stopped_receipts_ms(revoker: Revoker, workers: list[Child]) -> list[float]:
    """With the first worker stopped each time, and going on in between."""
    taken_ms: list[float] = []
    for _ in range(STOPPED_ROUNDS):
        workers[0].process.send_signal(signal.SIGSTOP)
        try:
            receipt = await revoker.invalidate(SUBJECT, ME)
        finally:
            workers[0].process.send_signal(signal.SIGCONT)
        assert len(receipt.acked) == len(workers), receipt
        assert len(receipt.fenced) == 1, receipt
        taken_ms.append(receipt.ms)
        await asyncio.sleep(2.5)
    return taken_ms


async def measure(worker_count: int, rounds: int, streams: int) -> dict[str, object]:
    flags = ["--profile", "fifo:1,0.0001,50", "--blocks", "20000"]
    async with AsyncExitStack() as stack:
        workers: list[Child] = []
        for n in range(worker_count):
            child = await start_child(f"w{n}", ["worker", *flags])
            stack.push_async_callback(child.stop)
            workers.append(child)
        for child in workers:
            await child.wait_ready()
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        revoker = await stack.enter_async_context(revoking(workers, Path(folder)))
        async with streaming(workers, streams):
            alive_ms = await alive_receipts_ms(revoker, worker_count, rounds)
        stopped_ms = await stopped_receipts_ms(revoker, workers)
    p99_ms = percentile(alive_ms, 0.99)
    return {
        "benchmark": "revoke",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "workers": worker_count,
        "streams": streams,
        "rounds": rounds,
        "alive_ms_p50": percentile(alive_ms, 0.5),
        "alive_ms_p99": p99_ms,
        "alive_ms_max": alive_ms[-1],
        "alive_bar_ms": BAR_ALIVE_MS,
        "stopped_ms": stopped_ms,
        "stopped_bar_ms": BAR_STOPPED_MS,
        "is_good": p99_ms <= BAR_ALIVE_MS and max(stopped_ms) <= BAR_STOPPED_MS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = uvloop.run(measure(options.workers, options.rounds, options.streams))
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{result['workers']} workers, {result['streams']} streams: acknowledged in "
            f"{result['alive_ms_p50']:.1f} ms (p50), {result['alive_ms_p99']:.1f} ms (p99, bar "
            f"{BAR_ALIVE_MS:.0f}), {result['alive_ms_max']:.1f} ms at most"
        )
        shown = ", ".join(f"{ms:.0f}" for ms in stopped(result))
        print(f"with one of them stopped: {shown} ms (bar {BAR_STOPPED_MS:.0f})")
    return 0 if result["is_good"] else 1


def stopped(result: dict[str, object]) -> list[float]:
    found = result["stopped_ms"]
    assert isinstance(found, list)
    return found


if __name__ == "__main__":
    sys.exit(main())
