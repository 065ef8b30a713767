"""What the load book that gateways exchange costs, in CPU of one gateway.

    python benchmarks/book.py [--workers 16] [--gateways 3] [--rate 100] [--json]

Ten times a second a gateway says what waits at each worker, and takes in what the others say. All
workers have work, which is the most there is to say. The wire is a call: what NATS itself costs is
not in it. Bar: 30 us a request at the given rate of requests a second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import msgspec

from trunkline.adapters.clock import SystemClock
from trunkline.control.load_sync import BEAT_MS, LoadSync
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.records import Slot, WorkerId

BAR_US = 30.0
BEATS = 500
ROUNDS = 5


class Nowhere:
    async def send(self, body: bytes) -> None: ...
    def hear(self, on_body: Callable[[bytes], None]) -> None: ...


def us_per_beat(workers: int, gateways: int) -> tuple[float, int]:
    """CPU of one beat and of what the others say in its time; bytes of one word."""
    clock = SystemClock()
    fleet = Fleet(virtual_nodes=64, now=clock.now())
    for number in range(workers):
        name = WorkerId(f"10.0.0.{number}:8000")
        state = WorkerState(worker=name, slot=Slot(number), block_tokens=16)
        fleet.add(state)
        for ticket in range(8):
            state.queue.start(ticket, 1e6, clock.now())
    sync = LoadSync("g0", Nowhere(), clock)
    sync._fleets = [fleet]
    queued = {state.worker: 123.4 for state in fleet.states()}
    words = [msgspec.msgpack.encode([f"g{n}", queued]) for n in range(1, gateways)]
    size = 0
    began_ns = time.process_time_ns()
    for _ in range(BEATS):
        size = len(sync.word(clock.now()) or b"")
        sync.settle(clock.boot())
        for word in words:
            sync.take(word)
    return (time.process_time_ns() - began_ns) / 1e3 / BEATS, size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    found = sorted(us_per_beat(words.workers, words.gateways) for _ in range(ROUNDS))
    beat_us, size = found[len(found) // 2]
    request_us = beat_us * 1_000.0 / BEAT_MS / words.rate
    shown = {
        "workers": words.workers,
        "gateways": words.gateways,
        "beat_us": round(beat_us, 1),
        "beat_us_spread": [round(found[0][0], 1), round(found[-1][0], 1)],
        "request_us": round(request_us, 2),
        "word_bytes": size,
    }
    if words.json:
        print(json.dumps(shown))
    else:
        print(f"{beat_us:.1f} us a beat of {BEAT_MS:.0f} ms, a word of {size} bytes")
        print(f"{request_us:.2f} us a request at {words.rate:.0f} requests/s; bar {BAR_US:.0f} us")
    return int(request_us > BAR_US)


if __name__ == "__main__":
    sys.exit(main())
