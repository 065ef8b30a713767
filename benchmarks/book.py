"""What the book that gateways exchange costs, in CPU of one gateway: queues and expected blocks.

    python benchmarks/book.py [--workers 16] [--gateways 3] [--rate 100] [--blocks 8] [--json]

Ten times a second a gateway says what waits at each worker and which blocks it expects there by its
choices since, and takes in what the others say. All workers have work, which is the most there is
to say; each request brings `--blocks` new blocks behind one that all workers hold, which count for
5 s and are dropped then. The wire is a call: what NATS itself costs is not in it, nor what draws
the choices and keeps the common block. Bar: 30 us a request at the given rate of requests a second
at each gateway; docs/adr/0010 says up to how many blocks it holds, and where the rest goes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence

from trunkline.control.load_sync import BEAT_MS, LoadSync
from trunkline.core.directory import Directory
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.hearsay import Hearsay
from trunkline.core.identity import (
    DIGEST_BYTES,
    ModelIdentity,
    Namespace,
    Scope,
    ScopeKind,
    derive_namespace,
)
from trunkline.core.keys import KeyChain
from trunkline.core.records import BootInstant, Instant, WallTime, WorkerId

BAR_US = 30.0
BEATS = 200
ROUNDS = 5
TTL_MS = 5_000.0
BLOCK_TOKENS = 16


class Nowhere:
    async def send(self, body: bytes) -> None: ...
    def hear(self, on_body: Callable[[bytes], None]) -> None: ...


class BeatClock:
    """Goes on by a beat when told."""

    def __init__(self) -> None:
        self.ms = 0.0

    def now(self) -> Instant:
        return Instant(self.ms)

    def boot(self) -> BootInstant:
        return BootInstant(self.ms)

    def wall(self) -> WallTime:
        return WallTime(self.ms)


class Gateway:
    """As much of one as tells and hears."""

    def __init__(self, life: str, workers: int, namespace: Namespace) -> None:
        self.clock = BeatClock()
        self.directory = Directory(max_blocks=1 << 22)
        self.directory.admit_namespace(namespace)
        self.fleet = Fleet(virtual_nodes=64, now=self.clock.now())
        self.common = KeyChain(namespace=namespace, packed=bytes(DIGEST_BYTES))
        self.workers = [WorkerId(f"10.0.0.{number}:8000") for number in range(workers)]
        for name in self.workers:
            slot = self.directory.join(name, block_tokens=BLOCK_TOKENS)
            state = WorkerState(worker=name, slot=slot, block_tokens=BLOCK_TOKENS)
            self.fleet.add(state)
            for ticket in range(8):
                state.queue.start(ticket, 1e6, self.clock.now())
        self.hearsay = Hearsay(self.directory, lambda _: TTL_MS)
        self.sync = LoadSync(life, Nowhere(), self.clock)
        self.sync.attach([self.fleet], [self.hearsay])
        self.sent = 0
        self.renew()

    def choose(self, choices: Sequence[tuple[WorkerId, KeyChain]]) -> None:
        """What the picker says."""
        for worker, keys in choices:
            self.sent += 1
            self.hearsay.say(self.sent, worker, keys, 1)

    def renew(self) -> None:
        """The common block stays."""
        for worker in self.workers:
            self.directory.predict(worker, self.common, now=self.clock.now(), ttl_ms=TTL_MS)

    def expire(self) -> None:
        """Others go when their time has come."""
        self.directory.expire(self.clock.now())
        self.hearsay.expire(self.clock.now())


def us_per_beat(words: argparse.Namespace) -> tuple[float, int]:
    """CPU of one beat and of what the others say in its time; bytes of one word."""
    draw = random.Random(1)
    scope = Scope(kind=ScopeKind.TENANT, org="o", tenant="t")
    namespace = derive_namespace(
        bytes(32), scope, ModelIdentity(model_id="m", block_tokens=BLOCK_TOKENS)
    )
    here, *others = [
        Gateway(f"g{number}", words.workers, namespace) for number in range(words.gateways)
    ]
    requests, size, spent_ns = round(words.rate * BEAT_MS / 1_000.0), 0, 0
    for _ in range(BEATS):
        for gateway in (here, *others):
            gateway.clock.ms += BEAT_MS
        told: list[bytes] = []
        for gateway in others:
            gateway.choose(made(gateway, requests, words.blocks, draw))
            told.append(gateway.sync.word(gateway.clock.now()) or b"")
        choices = made(here, requests, words.blocks, draw)
        here.renew()
        began_ns = time.process_time_ns()
        here.choose(choices)
        size = len(here.sync.word(here.clock.now()) or b"")
        here.sync.settle(here.clock.boot())
        for word in told:
            here.sync.take(word)
        here.expire()
        spent_ns += time.process_time_ns() - began_ns
    assert here.sync.refused == here.hearsay.stats.loose == here.sync.strange_blocks == 0
    return spent_ns / 1e3 / BEATS, size


def made(
    gateway: Gateway, count: int, blocks: int, draw: random.Random
) -> list[tuple[WorkerId, KeyChain]]:
    """Choices for chains of new keys behind the common one."""
    common = gateway.common
    packed = [common.packed + draw.randbytes(blocks * DIGEST_BYTES) for _ in range(count)]
    chains = [KeyChain(namespace=common.namespace, packed=one) for one in packed]
    return [(draw.choice(gateway.workers), chain) for chain in chains]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--blocks", type=int, default=8, help="new ones of a request")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    found = sorted(us_per_beat(words) for _ in range(ROUNDS))
    beat_us, size = found[len(found) // 2]
    request_us = beat_us * 1_000.0 / BEAT_MS / words.rate
    shown = {
        "workers": words.workers,
        "gateways": words.gateways,
        "blocks": words.blocks,
        "beat_us": round(beat_us, 1),
        "beat_us_spread": [round(found[0][0], 1), round(found[-1][0], 1)],
        "request_us": round(request_us, 2),
        "word_bytes": size,
    }
    if words.json:
        print(json.dumps(shown))
    else:
        print(f"{beat_us:.1f} us a beat of {BEAT_MS:.0f} ms, a word of {size} bytes")
        rate = f"{words.rate:.0f} requests/s at each of {words.gateways} gateways"
        print(f"{request_us:.2f} us a request of {words.blocks} new blocks, {rate}")
        print(f"{'PASS' if request_us <= BAR_US else 'FAIL'}  bar {BAR_US:.0f} us")
    return int(request_us > BAR_US)


if __name__ == "__main__":
    sys.exit(main())
