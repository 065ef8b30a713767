"""What following a worker costs: decoding and applying events, and how work on odd streams grows.

    python benchmarks/feed.py [--json]

CPU time, medians. `decode_us` and `apply_us` are per 16-token block, by blocks a batch. `growth` is
the CPU time of eight times the work over that of the work, for what a broken worker can make a feed
do: 8 is linear, 64 would be the square.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Callable

from trunkline.adapters.event_publisher import encode_batch
from trunkline.adapters.vllm_events import decode_batch
from trunkline.core.directory import Directory
from trunkline.core.events import BlocksStored, EventBatch
from trunkline.core.feed import WorkerFeed
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.orphans import Orphans
from trunkline.core.records import EngineHash, Instant, Tier, WorkerId
from trunkline.core.sequence import Sequence
from trunkline.native import IMPLEMENTATION
from trunkline.ports.publisher import RunStored

BLOCK = 16
NOW = Instant(0.0)
SMALL, FACTOR = 7_500, 8


def event_costs(blocks_a_batch: int, blocks: int = 20_000) -> dict[str, float]:
    """CPU microseconds a block to decode a stream and to apply it."""
    scope = Scope(kind=ScopeKind.TENANT, org="o", tenant="t")
    namespace = derive_namespace(bytes(32), scope, ModelIdentity(model_id="m", block_tokens=BLOCK))
    payloads = [
        encode_batch(
            1.0,
            [
                RunStored(
                    hashes=tuple((first + i).to_bytes(32, "big") for i in range(blocks_a_batch)),
                    parent=None,
                    tokens=array("I", range(first, first + blocks_a_batch * BLOCK)),
                    block_tokens=BLOCK,
                    salt=namespace.salt,
                )
            ],
            0,
        )
        for first in range(1, blocks, blocks_a_batch)
    ]
    started = time.process_time()
    batches = [decode_batch(seq, payload) for seq, payload in enumerate(payloads)]
    decoded = time.process_time()
    directory = Directory(max_blocks=blocks + blocks_a_batch)
    directory.join(WorkerId("w"), block_tokens=BLOCK)
    directory.admit_namespace(namespace)
    feed = WorkerFeed(WorkerId("w"), directory, can_replay=False)
    applied_from = time.process_time()
    for batch in batches:
        feed.live(batch, NOW)
    applied = time.process_time()
    count = len(payloads) * blocks_a_batch
    assert directory.held_count(WorkerId("w")) == count, "every block was taken in"
    return {
        "decode_us": (decoded - started) / count * 1e6,
        "apply_us": (applied - applied_from) / count * 1e6,
    }


def run_of(count: int, first: int = 1) -> BlocksStored:
    return BlocksStored(
        hashes=array("Q", range(first, first + count)),
        parent=EngineHash(0),
        tokens=array("I", bytes(4 * count)),
        block_tokens=1,
        tier=Tier.DEVICE,
        salt=None,
    )


def remove_parked(count: int) -> None:
    parked = Orphans(max_parked_runs=1_024, parked_ttl_ms=5_000.0)
    parked.park(run_of(count), NOW)
    for engine_hash in range(count, 0, -1):
        parked.remove(engine_hash, Tier.DEVICE)


def wait_for_one_parent(count: int) -> None:
    parked = Orphans(max_parked_runs=1 << 20, parked_ttl_ms=5_000.0)
    for number in range(1, count + 1):
        parked.park(run_of(1, number), NOW)
    for number in range(1, count + 1):
        parked.remove(number, Tier.DEVICE)


def keep_newest(count: int) -> None:
    sequence = Sequence()
    for seq in range(count):
        sequence.hold(seq, seq, EventBatch(seq=seq, events=()))
    sequence.keep_newest()


def growth(work: Callable[[int], None]) -> float:
    def cpu_s(count: int) -> float:
        started = time.process_time()
        work(count)
        return time.process_time() - started

    return min(cpu_s(SMALL * FACTOR) for _ in range(3)) / min(cpu_s(SMALL) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    costs = {}
    for blocks_a_batch in (1, 16, 64):
        rounds = [event_costs(blocks_a_batch) for _ in range(5)]
        costs[blocks_a_batch] = {
            name: round(statistics.median(found[name] for found in rounds), 3) for name in rounds[0]
        }
    report = {
        "benchmark": "feed",
        "native": IMPLEMENTATION,
        "by_blocks_a_batch": costs,
        "growth_of_8_times_the_work": {
            work.__name__: round(growth(work), 1)
            for work in (remove_parked, wait_for_one_parent, keep_newest)
        },
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return
    for blocks_a_batch, found in costs.items():
        print(
            f"{blocks_a_batch:3} blocks a batch: decode {found['decode_us']:.2f} us a block,"
            f" apply {found['apply_us']:.2f} us ({IMPLEMENTATION} core)"
        )
    for name, ratio in report["growth_of_8_times_the_work"].items():
        print(f"{name}: 8 times the work takes {ratio} times the time")


if __name__ == "__main__":
    main()
