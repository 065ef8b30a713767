"""Trace files -> one stream of `TraceRequest`.

Owns the record that replay and simulator share, and the changes of time a trace may need. The
formats and their parsing are in `formats.py`. Must never hold a whole file: readers are iterators,
a line is bounded. Read `formats.py` next, then `workloads.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Any

TICK_MS = 3_000.0
"""Arrivals of the conversation trace are rounded to ticks of this length."""

TICK_SEED = 7
"""Seed that all published figures on that trace were made with."""


class PartKind(Enum):
    """What a run of prompt tokens is, in a generated workload."""

    SYSTEM = "system"
    USER = "user"
    ANSWER = "answer"
    """The worker's answer to the session's previous turn, which the prompt ends with so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """A run of tokens of a generated prompt. Equal `(kind, key)` means equal tokens."""

    kind: PartKind
    key: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace: when, how long, and what it shares with others.

    `block_ids[i]` names block i *in the context of all blocks before it*; the last block may be
    partial.
    """

    arrival_ms: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] | None = field(default=None, repr=False)
    """None where the trace carries bodies instead of ids."""
    block_tokens: int = 0
    """Tokens a block id stands for; 0 without ids."""
    session: str | None = None
    model: str | None = None
    parts: tuple[PromptPart, ...] | None = field(default=None, repr=False)
    """What the prompt consists of, in generated workloads."""
    body: dict[str, Any] | None = field(default=None, repr=False)
    """The request as a client sent it, for traces of OpenAI requests."""

    @property
    def full_blocks(self) -> int:
        """Blocks that can be reused; a partial last block cannot."""
        if self.block_ids is None:
            return 0
        return min(len(self.block_ids), self.input_tokens // self.block_tokens)


def spread_ticks(
    requests: Iterable[TraceRequest], tick_ms: float = TICK_MS, seed: int = TICK_SEED
) -> list[TraceRequest]:
    """Place each request uniformly inside its tick, in file order, then sort by time (stable)."""
    draw = random.Random(seed)
    spread = [
        replace(request, arrival_ms=request.arrival_ms + draw.uniform(0.0, tick_ms))
        for request in requests
    ]
    spread.sort(key=lambda request: request.arrival_ms)
    return spread


def scale_time(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """Multiply all arrival times: 2.0 is twice as slow, `1 / load` raises the load."""
    if not factor > 0.0:
        raise ValueError(f"time factor {factor} is not above 0")
    for request in requests:
        yield replace(request, arrival_ms=request.arrival_ms * factor)


def pace(requests: Iterable[TraceRequest], per_second: float) -> Iterator[TraceRequest]:
    """Even arrivals at a fixed rate, for traces without times."""
    if not per_second > 0.0:
        raise ValueError(f"rate {per_second} a second is not above 0")
    for index, request in enumerate(requests):
        yield replace(request, arrival_ms=index * 1_000.0 / per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """One prefix becomes hot: for a part of the trace a share of the requests begins with it."""

    share: float
    blocks: int
    begins: float
    """As shares of the trace's requests."""
    ends: float
    seed: int = 11


def heat(requests: Iterable[TraceRequest], how: Heat) -> list[TraceRequest]:
    """The same requests at the same times and of the same lengths, with the hot prefix in front.

    What follows it is other content than without it, so its blocks get names of their own. Raises
    ValueError for requests without block ids.
    """
    cold = list(requests)
    if any(request.block_ids is None for request in cold):
        raise ValueError("only a trace with block ids can be heated")
    first_free = 1 + max((max(r.block_ids or (0,)) for r in cold), default=0)
    hot_ids = tuple(range(first_free, first_free + how.blocks))
    first_moved = first_free + how.blocks
    draw = random.Random(how.seed)
    heated: list[TraceRequest] = []
    for index, request in enumerate(cold):
        ids = request.block_ids or ()
        is_time = how.begins <= index / len(cold) < how.ends
        if is_time and draw.random() < how.share:
            count = min(how.blocks, request.full_blocks)
            moved = tuple(first_moved + block_id for block_id in ids[count:])
            request = replace(request, block_ids=hot_ids[:count] + moved)
        heated.append(request)
    return heated


def take(requests: Iterable[TraceRequest], count: int) -> Iterator[TraceRequest]:
    """The first `count` requests."""
    return islice(requests, count)
