"""Who is to know that a pull left a copy: what a fleet hits when one end's eviction does, or both.

    python benchmarks/copies.py [--traces DIR] [--share 0.05] [--seeds 3] [TRACE ...]

Four workers, each with a cache of that share of the trace's distinct full blocks and the default
policy. Half of the prompts go to the worker that has most of them, half to one that is drawn. What
another worker has more of is pulled, which leaves a copy there. A prompt hits what any worker has.
Figures are shares of full blocks hit: the mean over seeds of the draw, and the lowest and highest.

    nobody       copies count like any block
    destination  what was pulled is discounted where it was pulled to
    both         at its source, too, for as long as it stays
    turnover     both, until as many blocks came in as there is room for

No bar: it is why a source's store is not told of what it lent (docs/eviction.md).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from statistics import fmean

from eviction import Trace, leading_run, load
from trunkline.core.eviction import DEFAULT_POLICY, make_evictor

TRACES = ("conversation", "synthetic", "agentic, first 5,000")
WAYS = ("nobody", "destination", "both", "turnover")
WORKERS = 4


class Worker:
    """One cache, and which of its blocks it believes to be elsewhere."""

    def __init__(self, capacity_blocks: int, way: str) -> None:
        self._evictor = make_evictor(DEFAULT_POLICY.value, capacity_bytes=capacity_blocks)
        self._capacity_blocks = capacity_blocks
        self._way = way
        self._arrivals = 0
        self._told: dict[bytes, int] = {}
        """How many blocks had come in when it was told; told longest ago first."""
        self.resident: set[bytes] = set()

    def use(self, keys: list[bytes]) -> None:
        self._evictor.touch(keys)

    def lend(self, keys: list[bytes]) -> None:
        self.use(keys)
        if self._way in ("both", "turnover"):
            for key in keys:
                self._evictor.set_copies(key, 1)
                self._tell(key)

    def take(self, keys: list[bytes], first: int, pulled_to: int) -> None:
        """Blocks from `first` on come in, those before `pulled_to` from another worker."""
        for index in range(first, len(keys)):
            if self._way == "turnover":
                self._fade()
            is_copy = index < pulled_to and self._way != "nobody"
            parent = keys[index - 1] if index else b""
            self._evictor.add(keys[index], parent, size_bytes=1, saved_ms=1.0, copies=int(is_copy))
            if is_copy:
                self._tell(keys[index])
        self.resident.update(keys[first:])
        for _ in range(len(self.resident) - self._capacity_blocks):
            victim = self._evictor.victim()
            assert victim is not None, "nothing is held, so something may go"
            self._evictor.remove(victim)
            self.resident.remove(victim)
            self._told.pop(victim, None)

    def _tell(self, key: bytes) -> None:
        self._told.pop(key, None)
        self._told[key] = self._arrivals

    def _fade(self) -> None:
        self._arrivals += 1
        while self._told:
            key, told_at = next(iter(self._told.items()))
            if self._arrivals - told_at < self._capacity_blocks:
                return
            del self._told[key]
            self._evictor.set_copies(key, 0)


def hit_share(trace: Trace, capacity_blocks: int, way: str, seed: int) -> float:
    rng = random.Random(seed)
    workers = [Worker(capacity_blocks, way) for _ in range(WORKERS)]
    hits = wanted = 0
    for keys in trace.prompts:
        runs = [leading_run(keys, worker.resident) for worker in workers]
        best = max(range(WORKERS), key=lambda index: (runs[index], -index))
        here = rng.randrange(WORKERS) if rng.random() < 0.5 else best
        hits += runs[best]
        wanted += len(keys)
        workers[here].use(keys[: runs[here]])
        if runs[best] > runs[here]:
            workers[best].lend(keys[: runs[best]])
        workers[here].take(keys, runs[here], runs[best])
    return hits / wanted


def main() -> None:
    parser = argparse.ArgumentParser(description="Who is to know that a pull left a copy.")
    parser.add_argument("trace", nargs="*", default=list(TRACES), help=f"of {', '.join(TRACES)}")
    parser.add_argument("--traces", type=Path, default=Path(__file__).parents[1] / "traces")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for name in options.trace:
        trace = load(options.traces, name)
        capacity_blocks = int(trace.distinct_blocks * options.share)
        print(f"{name}: {WORKERS} x {capacity_blocks} blocks")
        for way in WAYS:
            found = [hit_share(trace, capacity_blocks, way, seed) for seed in range(options.seeds)]
            print(f"  {way:12s} {fmean(found):.4f}  ({min(found):.4f} to {max(found):.4f})")


if __name__ == "__main__":
    main()
