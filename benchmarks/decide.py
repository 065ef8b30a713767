"""What one whole routing decision costs, the directory's answer given.

    python benchmarks/decide.py [--json] [--rounds 2000]

CPU time (process time) of `Router.route` with policy cache_aware, medians over batches, for 16, 128
and 1,000 workers under load: every worker has a queue, streams and churn, one in four holds part of
the prefix. Beside it stands the cheapest policy of the same code (round_robin pays for the record,
too), and the growth from one size to the next. Bars: 60, 250 and 1,500 us.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from trunkline.core.cost import CostModel
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.profiles import PROFILES
from trunkline.core.records import BootInstant, Instant, Slot, WorkerId
from trunkline.core.routing import Router, RouteRequest

BARS_US = {16: 60.0, 128: 250.0, 1_000: 1_500.0}
BATCH = 20


def decision_us(workers: int, policy: str, rounds: int) -> float:
    """Median CPU microseconds of one decision among so many workers."""
    draw = random.Random(3)
    fleet = Fleet(virtual_nodes=128, now=Instant(0.0))
    for index in range(workers):
        state = WorkerState(worker=WorkerId(f"w{index}"), slot=Slot(index), block_tokens=16)
        fleet.add(state)
        for ticket in range(4):
            state.queue.start(ticket, draw.uniform(1.0, 400.0), Instant(0.0))
        state.queue.first_token(0, Instant(1.0))
        fleet.churn.add(state.queue, draw.randrange(50_000), Instant(1.0))
    cost = CostModel(PROFILES["llama-3.1-8b-h100"], churn_weight=1.0)
    router = Router(fleet=fleet, cost=cost, policy=policy, rng=random.Random(0))
    requests = [
        RouteRequest(
            request_id=str(n),
            prompt_tokens=4_000,
            matched_tokens=[
                draw.choice((0, 0, 0, 16 * draw.randrange(250))) for _ in range(workers)
            ],
            home_key=draw.randbytes(32),
        )
        for n in range(BATCH)
    ]
    samples: list[float] = []
    for round_number in range(max(5, rounds // BATCH)):
        now, boot = Instant(2.0 + round_number), BootInstant(2.0 + round_number)
        started = time.process_time_ns()
        for request in requests:
            router.route(request, now=now, boot=boot)
        samples.append((time.process_time_ns() - started) / 1_000.0 / BATCH)
    return statistics.median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=2_000)
    args = parser.parse_args()
    rows = {
        workers: {
            "cache_aware_us": decision_us(workers, "cache_aware", args.rounds),
            "round_robin_us": decision_us(workers, "round_robin", args.rounds),
            "bar_us": bar_us,
        }
        for workers, bar_us in BARS_US.items()
    }
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print("workers  cache_aware us  round_robin us  bar us  us a worker")
    for workers, row in rows.items():
        print(
            f"{workers:7d}  {row['cache_aware_us']:14.1f}  {row['round_robin_us']:14.1f}"
            f"  {row['bar_us']:6.0f}  {row['cache_aware_us'] / workers:11.2f}"
        )


if __name__ == "__main__":
    main()
