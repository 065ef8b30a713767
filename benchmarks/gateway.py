"""What one request and one streamed chunk cost the gateway, beside nginx in the same run.

    python benchmarks/gateway.py [--json] [--seconds 3] [--rounds 3] [--connections 32]

CPU time of the serving process (utime + stime from /proc) over requests or chunks served, medians
over rounds that alternate between the servers. `gateway_load.cpp` is client and worker at once:
  raw   16 kB of bytes on an unread path, an answer of 190 bytes: picked and forwarded only
  post  16 kB of JSON on /v1/chat/completions, the same answer: strictly checked, too
  sse   200 events of 190 bytes in lock-step: the next is sent when the last was received
  full  chat prompts of 4,000 tokens, all different behind a shared beginning, 16 workers: template,
        tokens, block keys, directory, decision and books are in it
In the first three the front has a picker that always takes the one worker, so they show the data
plane alone. Needs g++; nginx is left out with a reason where it is not installed.
Compare the ratios, not the microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

import trunkline
from trunkline.adapters.clock import SystemClock
from trunkline.config import Config, LimitsConfig, ListenConfig, RetryConfig, UpstreamConfig
from trunkline.core.fleet import WorkerState
from trunkline.core.records import WorkerId
from trunkline.gateway.contracts import AttemptEnd, Endpoint, InferenceRequest, Pick, Picker
from trunkline.gateway.fair_line import FairPicker
from trunkline.gateway.front import FrontParts, Readiness, serve_front
from trunkline.ports.worker import Target
from trunkline.wiring import build_core

HERE = Path(__file__).resolve().parent
BODY_BYTES = 16_000
FULL_WORKERS = 16
FULL_WORDS = 3_950
"""Each is one token; the template adds some."""
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class OneWorker:
    """The cheapest picker there can be."""

    def __init__(self, port: int) -> None:
        self._endpoint = Endpoint(host="127.0.0.1", port=port, host_header="worker")

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick:
        return Pick(worker=WorkerId("w"), endpoint=self._endpoint, body=request.body)

    def pulled(self, pick: Pick, told: bytes) -> None:
        pass

    def first_byte(self, pick: Pick) -> None:
        pass

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        pass


def real_picker(worker_port: int) -> Picker:
    """The gateway's own picker with the line before it, as everybody who serves has it, over 16
    workers that all are the one load process.
    """
    clock = SystemClock()
    core = build_core(Config(), clock)
    endpoint = Endpoint(host="127.0.0.1", port=worker_port, host_header="worker")
    for index in range(FULL_WORKERS):
        worker = WorkerId(f"w{index}")
        slot = core.directory.join(worker, block_tokens=16)
        core.fleet.add(WorkerState(worker=worker, slot=slot, block_tokens=16))
        core.picker.add_target(Target(worker=worker, endpoint=endpoint, predicted_ttl_ms=5_000.0))
    return FairPicker(core.picker, fleet=core.fleet, clock=clock)


def full_bodies(count: int = 500) -> str:
    """Chat bodies of about 4,000 tokens, one a line: a quarter shared, the rest their own."""
    model = Path(trunkline.__file__).parent / "worker" / "model" / "tokenizer.json"
    vocabulary: dict[str, int] = json.loads(model.read_text())["model"]["vocab"]
    words = [word[1:] for word in vocabulary if word[0] == "\u0120" and word[1:].isalpha()]
    draw = random.Random(2)
    shared = " ".join(draw.choice(words) for _ in range(FULL_WORDS // 4))
    lines: list[str] = []
    for _ in range(count):
        own = " ".join(draw.choice(words) for _ in range(FULL_WORDS * 3 // 4))
        messages = [{"role": "system", "content": shared}, {"role": "user", "content": own}]
        lines.append(json.dumps({"model": "m", "stream": False, "messages": messages}))
    return "\n".join(lines) + "\n"


async def serve(worker_port: int, *, is_full: bool) -> None:
    """The front under test, in a process of its own. Prints its port."""
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
    sys.stdout.write(f"{front.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def build_load(folder: Path) -> Path:
    binary = folder / "gateway_load"
    source = HERE / "gateway_load.cpp"
    subprocess.run(["g++", "-O2", "-std=c++20", "-o", binary, source], check=True)
    return binary


@contextmanager
def front(worker_port: int, folder: Path) -> Iterator[tuple[int, int]]:
    """A running front: its port and its process id."""
    command = [sys.executable, __file__, "--serve", str(worker_port)]
    if (folder / "bodies").exists():
        command.append("--full")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


NGINX = """
daemon off; master_process off; worker_processes 1;
pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_buffer_size 64k; keepalive_requests 1000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream worker {{ server 127.0.0.1:{worker_port}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://worker; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@contextmanager
def nginx(worker_port: int, folder: Path) -> Iterator[tuple[int, int]]:
    """A running nginx with one process: its port and its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, worker_port=worker_port, port=port))
    command = ["nginx", "-c", str(config), "-e", str(folder / "error.log")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            _await_port(port)
            yield port, process.pid
        finally:
            process.kill()


def _await_port(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"nothing listens on port {port} after 4 s")


def cpu_s(process_id: int) -> float:
    """User and system time of one process so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def resident_kib(process_id: int) -> int:
    """Memory of one process."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


SERVERS = {"trunkline": front, "nginx": nginx}


def measure(
    server: str, mode: str, connections: int, seconds: float, load: Path
) -> dict[str, float]:
    """One run of one server under one load."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(load), mode, str(connections), str(seconds), str(BODY_BYTES)]
        if mode == "full":
            bodies = Path(folder) / "bodies"
            bodies.write_text(full_bodies())
            command[1], command[5:] = "post", [str(bodies)]
        return _measure(server, mode, command, Path(folder))


def _measure(server: str, mode: str, command: list[str], folder: Path) -> dict[str, float]:
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        worker_port = int(process.stdout.readline())
        with SERVERS[server](worker_port, folder) as (port, process_id):
            process.stdin.write(f"{port}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "begin\n", "the load did not get going"
            before_s, before_kib = cpu_s(process_id), resident_kib(process_id)
            seen = json.loads(process.stdout.readline())
            spent_s = cpu_s(process_id) - before_s
            grown_kib = resident_kib(process_id) - before_kib
    assert seen["failed"] == 0, f"{server} failed {seen['failed']} requests"
    units = seen["chunks"] if mode == "sse" else seen["requests"]
    return {
        "cpu_us": spent_s / units * 1e6,
        "rate_per_s": units / seen["seconds"],
        "p50_us": seen["p50_us"],
        "p99_us": seen["p99_us"],
        "requests": seen["requests"],
        "grown_kib": grown_kib,
    }


def run(args: argparse.Namespace) -> dict[str, object]:
    servers = ["trunkline"]
    skipped = ""
    if shutil.which("nginx") is None:
        skipped = "nginx is not installed (Debian: apt-get install nginx-light)"
    else:
        servers.append("nginx")
    many = args.connections
    loads = [("raw", many), ("raw", 1), ("post", many), ("post", 1), ("sse", many), ("full", many)]
    table: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        load = build_load(Path(folder))
        for mode, connections in loads:
            runs: dict[str, list[dict[str, float]]] = {server: [] for server in servers}
            for _ in range(args.rounds):
                for server in servers:
                    runs[server].append(measure(server, mode, connections, args.seconds, load))
            table[f"{mode}-{connections}"] = {s: _summary(found) for s, found in runs.items()}
    return {
        "benchmark": "gateway", "machine": platform.platform(), "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0], "body_bytes": BODY_BYTES, "skipped": skipped,
        "results": table,
    }  # fmt: skip


def _summary(runs: list[dict[str, float]]) -> dict[str, float]:
    summary = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    cpu = [run["cpu_us"] for run in runs]
    return {**summary, "cpu_us_low": min(cpu), "cpu_us_high": max(cpu)}


def show(report: dict[str, object]) -> str:
    titles = f"{'CPU us':>8} {'(low-high)':>15} {'per s':>9} {'p50 us':>9} {'grown KiB':>9}"
    lines = [f"{'load':10} {'server':10} {titles}"]
    results = report["results"]
    assert isinstance(results, dict)
    for name, servers in results.items():
        for server, found in servers.items():
            spread = f"{found['cpu_us_low']:.1f}-{found['cpu_us_high']:.1f}"
            lines.append(
                f"{name:10} {server:10} {found['cpu_us']:8.1f} {spread:>15} "
                f"{found['rate_per_s']:9.0f} {found['p50_us']:9.0f} {found['grown_kib']:9.0f}"
            )
        if "nginx" in servers:
            ratio = servers["trunkline"]["cpu_us"] / servers["nginx"]["cpu_us"]
            lines.append(f"{name:10} trunkline / nginx = {ratio:.2f}")
    if report["skipped"]:
        lines.append(f"nginx left out: {report['skipped']}")
    return "\n".join(lines)


def command(
    title: str | None,
    counted: str,
    serve: Callable[..., Coroutine[Any, Any, None]],  # Any: as asyncio types them
    run: Callable[[argparse.Namespace], dict[str, object]],
    show: Callable[[dict[str, object]], str],
) -> int:
    """The command line of a benchmark of gateways. `counted`: what has `--rounds` runs a load.
    `serve(port, is_full=)` is the gateway itself, in a process of its own.
    """
    parser = argparse.ArgumentParser(description=(title or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one run")
    parser.add_argument("--rounds", type=int, default=3, help=f"runs of {counted} under each load")
    parser.add_argument("--connections", type=int, default=32, help="clients at a time")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        uvloop.run(serve(args.serve, is_full=args.full))
        return 0
    report = run(args)
    sys.stdout.write((json.dumps(report, indent=2) if args.json else show(report)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(command(__doc__, "each server", serve, run, show))
