"""A light model of a fleet, to rank ways of routing: docs/planning.md says what it leaves out.

Each worker has a FIFO prefill server (missed tokens at one speed, plus a fixed time) and an LRU of
blocks that are usable as soon as a prompt is placed; decoding counts as load only. What each worker
holds is a bit in one number a block, so one walk over a prompt answers for all workers. Read
`peers.py` for who decides.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from trunkline.plan.window import Stretch
from trunkline.replay.counters import percentile

FIXED_MS = 5.0
"""Of each prefill, however short."""
DECODE_MS = 20.0
"""A token of an answer."""
MAX_WORKERS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """The fleet that is planned."""

    workers: int
    cache_tokens: int
    """Of each worker."""
    token_ms: float
    """Prefill of one token."""
    is_pooled: bool = False
    """One cache for all, of their size together: what no routing can beat."""


@dataclass(slots=True, kw_only=True)
class Moment:
    """What a router sees when a call arrives; lists are by worker."""

    now_ms: float = 0.0
    ticket: int = 0
    tokens: int = 0
    blocks: list[int] = field(default_factory=list[int])
    block_tokens: int = 1
    matched: list[int] = field(default_factory=list[int])
    """Leading tokens that are there."""
    queue_ms: list[float] = field(default_factory=list[float])
    waiting: list[int] = field(default_factory=list[int])
    """Calls without a first token."""
    running: list[int] = field(default_factory=list[int])
    """Calls without an end."""
    fill: list[float] = field(default_factory=list[float])
    """Share of the cache that is in use."""


class Chooser(Protocol):
    """A way of routing."""

    def choose(self, moment: Moment) -> int: ...
    def placed(self, moment: Moment, worker: int) -> None: ...
    def first_token(self, ticket: int, worker: int, now_ms: float) -> None: ...
    def ended(self, ticket: int, worker: int, now_ms: float) -> None: ...


@dataclass(slots=True, kw_only=True)
class Routed:
    """What came of it."""

    tokens: int = 0
    hit_tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list[float])
    work_ms: list[float] = field(default_factory=list[float])
    lead_tokens: list[int] = field(default_factory=list[int])
    """How much more another worker held, of each call for which one did."""

    def ttft(self, share: float) -> float:
        return percentile(sorted(self.ttft_ms), share) if self.ttft_ms else 0.0

    @property
    def mean_ms(self) -> float:
        return sum(self.ttft_ms) / max(1, len(self.ttft_ms))

    @property
    def busiest_over_mean(self) -> float:
        mean = sum(self.work_ms) / max(1, len(self.work_ms))
        return max(self.work_ms, default=0.0) / mean if mean else 1.0


class QueueModel:
    """One run of one stretch."""

    def __init__(self, shape: FleetShape, stretch: Stretch) -> None:
        self._shape = shape
        self._stretch = stretch
        caches = 1 if shape.is_pooled else shape.workers
        blocks = max(1, shape.cache_tokens // stretch.block_tokens)
        self._capacity = blocks * (shape.workers if shape.is_pooled else 1)
        self._caches = [OrderedDict[int, None]() for _ in range(caches)]
        self._holders = [0] * stretch.names
        self._busy_ms = [0.0] * shape.workers
        self._events: list[tuple[float, int, int, bool]] = []
        self._moment = Moment(
            block_tokens=stretch.block_tokens,
            waiting=[0] * shape.workers,
            running=[0] * shape.workers,
        )

    def run(self, chooser: Chooser, step: Callable[[], None] | None = None) -> Routed:
        """All calls to their first tokens."""
        stretch, moment, shape = self._stretch, self._moment, self._shape
        routed = Routed(work_ms=[0.0] * shape.workers)
        for ticket, now_ms in enumerate(stretch.at_ms):
            self._happen(chooser, now_ms)
            tokens, blocks = stretch.tokens[ticket], stretch.blocks[ticket]
            moment.now_ms, moment.ticket = now_ms, ticket
            moment.tokens, moment.blocks = tokens, blocks
            moment.matched = self._matched(blocks, max(0, tokens - 1) // stretch.block_tokens)
            moment.queue_ms = [max(0.0, busy_ms - now_ms) for busy_ms in self._busy_ms]
            moment.fill = [len(cache) / self._capacity for cache in self._caches]
            worker = chooser.choose(moment)
            chooser.placed(moment, worker)
            hit_tokens = moment.matched[worker]
            prefill_ms = FIXED_MS + (tokens - hit_tokens) * shape.token_ms
            first_ms = now_ms + moment.queue_ms[worker] + prefill_ms
            self._busy_ms[worker] = first_ms
            self._begin(ticket, worker, first_ms)
            self._insert(0 if shape.is_pooled else worker, blocks)
            routed.tokens += tokens
            routed.hit_tokens += hit_tokens
            routed.ttft_ms.append(first_ms - now_ms)
            routed.work_ms[worker] += prefill_ms
            lead = max(moment.matched) - hit_tokens
            if lead > 0:
                routed.lead_tokens.append(lead)
            if step is not None:
                step()
        return routed

    def _matched(self, blocks: list[int], most: int) -> list[int]:
        """Leading tokens at each worker: whoever lacks a block drops out there."""
        holders, size = self._holders, self._stretch.block_tokens
        there = (1 << len(self._caches)) - 1
        matched = [0] * len(self._caches)
        depth = 0
        for depth, block in enumerate(blocks[:most]):
            still = there & holders[block]
            if still != there:
                _mark(matched, there & ~still, depth * size)
                there = still
                if not there:
                    break
        else:
            _mark(matched, there, min(most, len(blocks)) * size)
        return matched * self._shape.workers if self._shape.is_pooled else matched

    def _insert(self, at: int, blocks: list[int]) -> None:
        """The root last, so that a prefix is always evicted from its end."""
        cache, holders, bit = self._caches[at], self._holders, 1 << at
        for block in reversed(blocks):
            if block in cache:
                cache.move_to_end(block)
            else:
                cache[block] = None
                holders[block] |= bit
        while len(cache) > self._capacity:
            holders[cache.popitem(last=False)[0]] &= ~bit

    def _begin(self, ticket: int, worker: int, first_ms: float) -> None:
        moment = self._moment
        moment.waiting[worker] += 1
        moment.running[worker] += 1
        end_ms = first_ms + DECODE_MS * self._stretch.outputs[ticket]
        heapq.heappush(self._events, (first_ms, ticket, worker, False))
        heapq.heappush(self._events, (end_ms, ticket, worker, True))

    def _happen(self, chooser: Chooser, upto_ms: float) -> None:
        events, moment = self._events, self._moment
        while events and events[0][0] <= upto_ms:
            at_ms, ticket, worker, is_end = heapq.heappop(events)
            if is_end:
                moment.running[worker] -= 1
                chooser.ended(ticket, worker, at_ms)
            else:
                moment.waiting[worker] -= 1
                chooser.first_token(ticket, worker, at_ms)


def _mark(matched: list[int], bits: int, tokens: int) -> None:
    while bits:
        low = bits & -bits
        matched[low.bit_length() - 1] = tokens
        bits ^= low
