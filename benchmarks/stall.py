"""How long the gateway's event loop is held while it serves 500 streams and reads huge prompts.

    python benchmarks/stall.py [--streams 500] [--prompts 16] [--json]

A gateway with its real picker runs in a process of its own and notes by how much a 2 ms timer comes
late. A simulated worker keeps 500 streams open, an event each 200 ms; meanwhile text prompts of
100,000 tokens arrive, two at a time. Bar: p99 of the lateness below 50 ms. The machine's own noise
is in the figure: the row `idle` is the same loop before anything arrives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from pathlib import Path

import uvloop

import trunkline
from trunkline.control.probe import fetch
from trunkline.replay.client import Client, ClientOptions, Target
from trunkline.replay.counters import percentile
from trunkline.replay.processes import endpoint_of, start_child

TICK_S = 0.002
PROMPT_TOKENS = 100_000


async def gateway(worker_url: str) -> None:
    """`trunkline serve` with a watch on its loop; SIGTERM prints what the watch saw."""
    from trunkline import wiring
    from trunkline.config import Config, ListenConfig, UpstreamConfig

    late_ms: list[tuple[float, float]] = []
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            late_ms.append((loop.time(), (loop.time() - due_s) * 1_000.0))

    task = asyncio.create_task(watch())
    config = Config(
        worker_urls=(worker_url,),
        listen=ListenConfig(port=0, admin_port=0),
        upstream=UpstreamConfig(),
    )
    await wiring.run_gateway(config, lambda secret: None)
    task.cancel()
    sys.stdout.write(json.dumps(late_ms) + "\n")


def prompt_text(seed: int) -> str:
    """About 100,000 tokens of words that the tokenizer knows, in an order of their own."""
    model = Path(trunkline.__file__).parent / "worker" / "model" / "tokenizer.json"
    vocabulary: dict[str, int] = json.loads(model.read_text())["model"]["vocab"]
    words = [word[1:] for word in vocabulary if word[0] == "\u0120" and word[1:].isalpha()]
    draw = random.Random(seed)
    return " ".join(draw.choice(words) for _ in range(PROMPT_TOKENS))


async def measure(streams: int, prompts: int) -> dict[str, object]:
    words = [
        "worker",
        "--profile",
        "fifo:1,0.0001,200",
        "--blocks",
        "20000",
        "--max-num-seqs",
        "2000",
    ]
    worker = await start_child("worker", words)
    await worker.wait_ready()
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--gateway", worker.ready["url"],
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, limit=1 << 28,
    )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    for _ in range(100):
        if (await fetch(endpoint_of(ready["url"]), "GET", "/readiness", timeout_ms=5e3))[0] == 200:
            break
        await asyncio.sleep(0.1)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1.0)
    began_s = loop.time()
    client = Client(Target.parse(ready["url"]), ClientOptions())
    body = {"model": "trunkline-sim", "stream": True, "max_tokens": 100, "temperature": 0}

    async def stream(number: int) -> bool:
        words = json.dumps({**body, "prompt": [1_000 + number, 7, 8, 9] * 20}).encode()
        return not (await client.send("/v1/completions", words)).lost_reason

    async def huge(number: int) -> bool:
        words = json.dumps({**body, "max_tokens": 1, "prompt": prompt_text(number)}).encode()
        return not (await client.send("/v1/completions", words)).lost_reason

    open_streams = [asyncio.create_task(stream(n)) for n in range(streams)]
    await asyncio.sleep(2.0)
    loaded_s = loop.time()
    answered = 0
    for first in range(0, prompts, 2):
        answered += sum(await asyncio.gather(huge(first), huge(first + 1)))
    ended_s = loop.time()
    complete = sum(await asyncio.gather(*open_streams))
    process.terminate()
    late = json.loads(await process.stdout.readline())
    await process.wait()
    await worker.stop()
    return {
        "benchmark": "stall",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "streams": streams,
        "streams_complete": complete,
        "huge_prompts": prompts,
        "huge_prompts_answered": answered,
        "idle": _spread([ms for at, ms in late if at < began_s]),
        "loaded": _spread([ms for at, ms in late if loaded_s <= at <= ended_s]),
    }


def _spread(late_ms: list[float]) -> dict[str, float]:
    ordered = sorted(late_ms)
    return {
        "samples": len(ordered),
        "p50_ms": round(percentile(ordered, 0.5), 3),
        "p99_ms": round(percentile(ordered, 0.99), 3),
        "max_ms": round(ordered[-1], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gateway:
        uvloop.run(gateway(args.gateway))
        return 0
    report = uvloop.run(measure(args.streams, args.prompts))
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            print(f"{name:22} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
