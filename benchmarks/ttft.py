"""What the gateway adds to the first token of a single slow stream.

    python benchmarks/ttft.py [--requests 60] [--json]

One stream at a time from a simulated worker whose second token comes 300 ms behind the first,
straight and through `trunkline serve` in turns. Medians of the time to the first token event. Bar:
within 3 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from contextlib import AsyncExitStack

import uvloop

from trunkline.control.probe import fetch
from trunkline.replay.client import Client, ClientOptions, Target
from trunkline.replay.processes import Child, endpoint_of, start_child

BAR_MS = 3.0
READY_S = 10.0


async def started(stack: AsyncExitStack, name: str, words: list[str]) -> Child:
    """A child that has said where it listens, and is stopped whatever happens next."""
    child = await start_child(name, words)
    stack.push_async_callback(child.stop)
    await child.wait_ready()
    return child


async def measure(requests: int) -> dict[str, object]:
    async with AsyncExitStack() as stack:
        worker = await started(stack, "worker", ["worker", "--profile", "fifo:5,0.0001,300"])
        words = ["serve", "--worker-urls", worker.ready["url"], "--port", "0", "--admin-port", "0"]
        gateway = await started(stack, "gateway", [*words, "--auth", "off"])
        url = gateway.ready["url"]
        async with asyncio.timeout(READY_S):
            await _ready(url)
        found = await _first_tokens_ms(requests, {"direct": worker.ready["url"], "gateway": url})
    medians = {f"{name}_ms": round(statistics.median(times), 3) for name, times in found.items()}
    added_ms = round(medians["gateway_ms"] - medians["direct_ms"], 3)
    figures = {**medians, "added_ms": added_ms, "bar_ms": BAR_MS}
    is_within_bar = added_ms <= BAR_MS
    return {"benchmark": "ttft", "requests": requests, **figures, "is_within_bar": is_within_bar}


async def _ready(url: str) -> None:
    while True:
        status, *_ = await fetch(endpoint_of(url), "GET", "/readiness", timeout_ms=5e3)
        if status == 200:
            return
        await asyncio.sleep(0.1)


async def _first_tokens_ms(requests: int, urls: dict[str, str]) -> dict[str, list[float]]:
    """The time to the first token of each request, at each of these in turns."""
    clients = {name: Client(Target.parse(url), ClientOptions()) for name, url in urls.items()}
    body = {"model": "trunkline-sim", "stream": True, "max_tokens": 2, "temperature": 0}
    found: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(requests):
        for name, client in clients.items():
            prompt = json.dumps({**body, "prompt": [1_000 + number, 7, 8, 9] * 20}).encode()
            reply = await client.send("/v1/completions", prompt)
            assert reply.first_token_at_ms is not None, reply.lost_reason
            found[name].append(reply.first_token_at_ms - reply.sent_at_ms)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = uvloop.run(measure(args.requests))
    print(json.dumps(report, indent=2) if args.json else report)
    return 0 if report["is_within_bar"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
