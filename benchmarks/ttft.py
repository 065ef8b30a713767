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

import uvloop

from trunkline.control.probe import fetch
from trunkline.replay.client import Client, ClientOptions, Target
from trunkline.replay.processes import endpoint_of, start_child


async def measure(requests: int) -> dict[str, object]:
    worker = await start_child("worker", ["worker", "--profile", "fifo:5,0.0001,300"])
    await worker.wait_ready()
    words = ["serve", "--worker-urls", worker.ready["url"], "--port", "0", "--admin-port", "0"]
    words += ["--auth", "off"]
    gateway = await start_child("gateway", words)
    await gateway.wait_ready()
    url = gateway.ready["url"]
    for _ in range(100):
        if (await fetch(endpoint_of(url), "GET", "/readiness", timeout_ms=5e3))[0] == 200:
            break
        await asyncio.sleep(0.1)
    clients = {
        "direct": Client(Target.parse(worker.ready["url"]), ClientOptions()),
        "gateway": Client(Target.parse(url), ClientOptions()),
    }
    body = {"model": "trunkline-sim", "stream": True, "max_tokens": 2, "temperature": 0}
    found: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(requests):
        for name, client in clients.items():
            prompt = json.dumps({**body, "prompt": [1_000 + number, 7, 8, 9] * 20}).encode()
            reply = await client.send("/v1/completions", prompt)
            assert reply.first_token_at_ms is not None, reply.lost_reason
            found[name].append(reply.first_token_at_ms - reply.sent_at_ms)
    await gateway.stop()
    await worker.stop()
    medians = {f"{name}_ms": round(statistics.median(times), 3) for name, times in found.items()}
    added_ms = round(medians["gateway_ms"] - medians["direct_ms"], 3)
    return {"benchmark": "ttft", "requests": requests, **medians, "added_ms": added_ms}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = uvloop.run(measure(args.requests))
    print(json.dumps(report, indent=2) if args.json else report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
