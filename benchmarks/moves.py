"""What moves a session to another worker where everything is known: `gateways.py`'s in the model.

    python benchmarks/moves.py [--sessions 500] [--turns 10] [--first-tokens 20-600] [--json]

The sessions of `benchmarks/gateways.py` through the fleet model (docs/routing.md): one gateway, no
noise, each worker's queue known to the millisecond. So each move is what the prices say, and none
is a mistake. Shown for each seed: sessions on one worker, moved turns, how many of them were
`cache-passed` (somebody held more, and waiting there cost more than computing again), how much
less the move cost by the prices, what the turn would have waited, and the tokens it left. No bar:
`benchmarks/gateways.py` has it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from trunkline.core.decision import Decision, Reason
from trunkline.core.records import WorkerId
from trunkline.replay.counters import percentile
from trunkline.replay.traces import PartKind, PromptPart, TraceRequest
from trunkline.replay.workloads import Workload
from trunkline.sim.model import FleetModel, ModelOptions
from trunkline.sim.worker import Job, ModelWorker

WORKERS = 4
BLOCK_TOKENS = 16
STARTS_PER_S = 8.0
THINK_MS = 1_000.0
ANSWER_MS = 100.0
ANSWER_TOKENS = 16
FIRST_TOKENS = (20, 600)
MOST_BLOCKS = 1 << 12
"""Of a session."""


def token_range(text: str) -> tuple[int, int]:
    """`256-600`, for a flag. Raises ValueError."""
    low, _, high = text.partition("-")
    found = int(low), int(high)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


@dataclass(frozen=True, kw_only=True)
class Move:
    is_passed: bool
    gain_ms: float
    """Cost at the session's worker, less that where it went."""
    wait_ms: float
    """Queue at the session's worker."""
    left_tokens: int
    """That it held."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    seed: int
    one_worker: float
    moved_turns: int
    moved_for_less: int
    gain_ms: list[float]
    """Of each move, least first."""
    wait_ms_p50: float
    left_tokens_p50: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    hit_tokens: float


class Watched(FleetModel):
    """Remembers where each session went, and what its moves were worth."""

    def __init__(self, workload: Workload, options: ModelOptions) -> None:
        super().__init__(workload, options, lambda: 0.0)
        self.chosen: dict[str, list[WorkerId]] = defaultdict(list)
        self.moves: list[Move] = []

    def _start(self, job: Job, worker: ModelWorker, decision: Decision, now_ms: float) -> None:
        self._note(job.request.session or "", decision)
        super()._start(job, worker, decision, now_ms)

    def _note(self, session: str, decision: Decision) -> None:
        before = self.chosen[session]
        if before and before[-1] != decision.worker:
            costs, was = decision.candidates, decision.candidates.workers.index(before[-1])
            self.moves.append(
                Move(
                    is_passed=decision.reason is Reason.CACHE_PASSED,
                    gain_ms=costs.cost_ms[was] - costs.cost_ms[decision.choice],
                    wait_ms=costs.queue_ms[was],
                    left_tokens=costs.matched_tokens[was],
                )
            )
        before.append(decision.worker)


def sessions(
    count: int,
    turns: int,
    seed: int,
    *,
    think_ms: float = THINK_MS,
    starts_per_s: float = STARTS_PER_S,
    first_tokens: tuple[int, int] = FIRST_TOKENS,
) -> list[TraceRequest]:
    """In order of time. A turn waits for the answer before it, too: without a time to think it
    follows that at once. `first_tokens`: least and most of a first prompt.
    """
    draw = random.Random(seed)
    made: list[TraceRequest] = []
    start_ms = 0.0
    for number in range(count):
        start_ms += draw.expovariate(starts_per_s / 1_000.0)
        at_ms, tokens, parts = start_ms, 0, list[PromptPart]()
        for turn in range(turns):
            key = number * turns + turn
            if turn:
                parts.append(PromptPart(kind=PartKind.ANSWER, key=key, tokens=ANSWER_TOKENS))
            said = draw.randint(*first_tokens) if turn == 0 else draw.randint(10, 120)
            parts.append(PromptPart(kind=PartKind.USER, key=key, tokens=said))
            tokens += said + (ANSWER_TOKENS if turn else 0)
            made.append(
                TraceRequest(
                    arrival_ms=at_ms,
                    input_tokens=tokens,
                    output_tokens=ANSWER_TOKENS,
                    block_tokens=BLOCK_TOKENS,
                    session=f"s{number}",
                    parts=tuple(parts),
                )
            )
            if think_ms > 0.0:
                at_ms += ANSWER_MS + draw.expovariate(1.0 / think_ms)
    return sorted(made, key=lambda request: request.arrival_ms)


def with_blocks(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Ids of their full blocks, a session's own."""
    made: list[TraceRequest] = []
    for request in requests:
        assert request.session is not None, "all are of sessions"
        first = int(request.session.removeprefix("s")) * MOST_BLOCKS
        count = request.input_tokens // BLOCK_TOKENS
        assert count < MOST_BLOCKS, "of two sessions no blocks are alike"
        made.append(replace(request, block_ids=tuple(range(first, first + count)), parts=()))
    return made


def measured(words: argparse.Namespace, seed: int) -> Figures:
    workload = Workload(
        name="sessions",
        sentence="the sessions of benchmarks/gateways.py",
        trace_file=None,
        workers=WORKERS,
        capacity_blocks=40_000,
        block_tokens=BLOCK_TOKENS,
        prefill_fixed_ms=1.0,
        prefill_token_ms=0.1,
        decode_token_ms=1.0,
    )
    model = Watched(workload, ModelOptions(event_delay_ms=words.event_delay_ms, seed=seed))
    requests = sessions(words.sessions, words.turns, seed, first_tokens=words.first_tokens)
    outcome = model.run(with_blocks(requests))
    moves, ttft_ms = model.moves, sorted(outcome.ttft_ms)
    return Figures(
        seed=seed,
        one_worker=round(statistics.mean(len(set(of)) == 1 for of in model.chosen.values()), 4),
        moved_turns=len(moves),
        moved_for_less=sum(move.is_passed for move in moves),
        gain_ms=sorted(round(move.gain_ms, 1) for move in moves),
        wait_ms_p50=statistics.median([move.wait_ms for move in moves] or [0.0]),
        left_tokens_p50=statistics.median([move.left_tokens for move in moves] or [0]),
        ttft_ms_p50=percentile(ttft_ms, 0.5),
        ttft_ms_p95=percentile(ttft_ms, 0.95),
        hit_tokens=round(outcome.hit_tokens / outcome.input_tokens, 4),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument(
        "--first-tokens", type=token_range, default=FIRST_TOKENS, metavar="LOW-HIGH"
    )
    parser.add_argument("--seeds", default="1,2,3,4")
    parser.add_argument("--event-delay-ms", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    found = [measured(words, int(seed)) for seed in words.seeds.split(",")]
    if words.json:
        print(json.dumps([asdict(one) for one in found]))
        return 0
    for one in found:
        print(
            f"seed {one.seed}: {one.one_worker:.2%} on one worker; {one.moved_turns} turns moved,"
            f" {one.moved_for_less} for less: {', '.join(map(str, one.gain_ms))} ms"
        )
        ttft = f"TTFT p50 {one.ttft_ms_p50:.1f}, p95 {one.ttft_ms_p95:.1f} ms"
        print(
            f"  waits of {one.wait_ms_p50:.1f} ms, {one.left_tokens_p50:.0f} tokens left (p50);"
            f" {ttft}; hits {one.hit_tokens:.2%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
