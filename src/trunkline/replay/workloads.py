"""The named workloads that simulator, replay and reports share: W1 to W6, and small cuts of two
for CI.

Owns which trace, which fleet and which speeds a name stands for; the numbers are those of
docs/routing.md. Must never hold requests: `load_workload` makes them. Read `article.py` for W5.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trunkline.errors import TraceError
from trunkline.replay.article import article_requests
from trunkline.replay.formats import ReadOptions, read_trace
from trunkline.replay.traces import Heat, TraceRequest, heat, scale_time, spread_ticks
from trunkline.written import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace, the fleet it is served by, and how fast that fleet is."""

    name: str
    sentence: str
    trace_file: str | None
    """File name under the traces folder; None where the workload is generated."""
    workers: int = 16
    capacity_blocks: int
    """KV blocks of one worker, of `block_tokens` each."""
    block_tokens: int
    prefill_fixed_ms: float = 5.0
    prefill_token_ms: float
    decode_token_ms: float = 20.0
    time_factor: float = 1.0
    """Arrival times are multiplied by this at load 1.0."""
    is_in_ticks: bool = False
    """Arrivals are rounded to 3 s and must be spread before use."""
    directory_delay_ms: float = 1_000.0
    """Age of what the directory knows, in the acceptance runs."""
    heat: Heat | None = None
    """What is done to the trace; None leaves it as it is."""

    def prefill_ms(self, missed_tokens: int) -> float:
        """Time of a prefill of this many tokens that are not resident."""
        return self.prefill_fixed_ms + self.prefill_token_ms * missed_tokens


def _by_name(workloads: Iterable[Workload]) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


WORKLOADS: dict[str, Workload] = _by_name(
    (
        Workload(
            name="W1",
            sentence="chat: an hour of real conversations",
            trace_file="mooncake_conversation.jsonl.gz",
            capacity_blocks=2_000,
            block_tokens=512,
            prefill_token_ms=1_000.0 / 3_500.0,
            is_in_ticks=True,
        ),
        Workload(
            name="W2",
            sentence="agents: 152 coding sessions with sub-agents, twice as slow",
            trace_file="agentic_claude_code_152.jsonl.gz",
            capacity_blocks=1_000,
            block_tokens=512,
            prefill_token_ms=1_000.0 / 16_000.0,
            time_factor=2.0,
        ),
        Workload(
            name="W3",
            sentence="mixed long: multi-turn, long documents, tools",
            trace_file="mooncake_synthetic.jsonl.gz",
            capacity_blocks=1_000,
            block_tokens=512,
            prefill_token_ms=1_000.0 / 4_500.0,
        ),
        Workload(
            name="W4",
            sentence="no harm: a week of question answering over documents, 1,000 times faster",
            trace_file="ragpulse_week.jsonl.gz",
            capacity_blocks=4_000,
            block_tokens=64,
            prefill_token_ms=1_000.0 / 3_500.0,
            time_factor=0.001,
        ),
        Workload(
            name="W5",
            sentence="the article: chat sessions over 64 system prompts, generated",
            trace_file=None,
            capacity_blocks=2_500,
            block_tokens=16,
            prefill_token_ms=0.1,
            decode_token_ms=10.0,
            # The 95th percentile on a real vLLM engine under load; the peers' model had none at
            # all.
            directory_delay_ms=140.0,
        ),
        Workload(
            name="W6",
            sentence="a hot prefix: W1, where one prompt of 8,192 tokens suddenly begins 60 %",
            trace_file="mooncake_conversation.jsonl.gz",
            capacity_blocks=2_000,
            block_tokens=512,
            prefill_token_ms=1_000.0 / 3_500.0,
            is_in_ticks=True,
            heat=Heat(share=0.6, blocks=16, begins=0.25, ends=0.75),
        ),
    )
)

SMOKE_WORKLOADS: dict[str, Workload] = _by_name(
    (
        Workload(
            name="W1-smoke",
            sentence="the first 300 s of W1",
            trace_file="smoke_conversation_300s.jsonl.gz",
            capacity_blocks=2_000,
            block_tokens=512,
            prefill_token_ms=1_000.0 / 3_500.0,
            is_in_ticks=True,
        ),
        Workload(
            name="W2-smoke",
            sentence="16 sessions of W2, 600 requests",
            trace_file="smoke_agentic_16s.jsonl.gz",
            workers=4,
            capacity_blocks=1_000,
            block_tokens=512,
            prefill_token_ms=1_000.0 / 16_000.0,
            time_factor=2.0,
        ),
    )
)


def find_workload(name: str) -> Workload:
    """The workload of that name, in any case. Raises TraceError with the names that exist."""
    known = {**WORKLOADS, **SMOKE_WORKLOADS}
    for candidate, workload in known.items():
        if candidate.lower() == name.lower():
            return workload
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
    raise TraceError(f"no workload {name!r}; {hint}")


def explained() -> str:
    """All workloads for `--help`, one line each."""
    known = {**WORKLOADS, **SMOKE_WORKLOADS}.values()
    return "\n".join(f"{w.name:<9} {w.sentence} ({w.workers} workers)" for w in known)


def load_workload(
    name: str, *, load: float = 1.0, traces_dir: Path, is_calm: bool = False
) -> list[TraceRequest]:
    """The requests of a workload, in order of time. `load` 1.4 sends them 1.4 times as fast;
    `is_calm` leaves out what makes a prefix hot.
    """
    if not load > 0.0:
        raise TraceError(f"load {load} is not above 0")
    workload = find_workload(name)
    requests: Iterable[TraceRequest]
    if workload.trace_file is None:
        requests = article_requests()
    else:
        path = traces_dir / workload.trace_file
        if not path.is_file():
            raise TraceError(
                f"{path}: no such file; workload {workload.name} reads its trace from there"
            )
        requests = read_trace(path, ReadOptions(block_tokens=workload.block_tokens))
    if workload.is_in_ticks:
        requests = spread_ticks(requests)
    factor = workload.time_factor / load
    if factor != 1.0:
        requests = scale_time(requests, factor)
    return list(requests) if workload.heat is None or is_calm else heat(requests, workload.heat)
