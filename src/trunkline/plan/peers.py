"""Ways of routing: ours, which is the code that runs in production, and short versions of the usual
ones, made from their published formulae.

They are given exact knowledge of queues and caches, which their originals approximate, so each is
shown at its best. None is a port, and defaults are those that were published
(docs/planning.md names the differences). To add one: write a function over a `Moment`, and put it
in `ROUTERS`.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator

from trunkline.core.cost import CostModel
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.placement import HashRing
from trunkline.core.profiles import Profile, Scheduling
from trunkline.core.records import BootInstant, Instant, Slot, WorkerId
from trunkline.core.routing import Router, RouteRequest
from trunkline.plan.queueing import DECODE_MS, FIXED_MS, Chooser, FleetShape, Moment

KEY_TOKENS = 1_024
"""Hashes go by the block that ends here, or the last one before."""
HOME_TOKENS = 256
CHURN_WEIGHT = 1.5
OURS, LEAST_QUEUE, ROUND_ROBIN = "trunkline", "least queue", "round robin"

Choose = Callable[[Moment], int]


class Blind:
    """A rule that keeps no book."""

    def __init__(self, rule: Choose) -> None:
        self._rule = rule

    def choose(self, moment: Moment) -> int:
        return self._rule(moment)

    def placed(self, moment: Moment, worker: int) -> None:
        pass

    def first_token(self, ticket: int, worker: int, now_ms: float) -> None:
        pass

    def ended(self, ticket: int, worker: int, now_ms: float) -> None:
        pass


class Ours:
    """The production router over a fleet of its own books."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        self._fleet = Fleet(virtual_nodes=128, now=Instant(0.0))
        self._states: list[WorkerState] = []
        self._index: dict[WorkerId, int] = {}
        for index in range(shape.workers):
            state = WorkerState(worker=WorkerId(f"w{index}"), slot=Slot(index), block_tokens=1)
            self._fleet.add(state)
            self._states.append(state)
            self._index[state.worker] = index
        profile = Profile(
            name="plan",
            prefill_fixed_ms=FIXED_MS,
            prefill_token_ms=shape.token_ms,
            prefill_context_ms=0.0,
            decode_token_ms=DECODE_MS,
            kv_bytes_per_token=1,
            max_batch_tokens=1,
            scheduling=Scheduling.FIFO,
            source="what the plan was asked for",
        )
        self._router = Router(
            fleet=self._fleet,
            cost=CostModel(profile, churn_weight=CHURN_WEIGHT),
            policy="cache_aware",
            rng=random.Random(seed),
        )
        self._miss_ms = 0.0

    def choose(self, moment: Moment) -> int:
        home = _key_block(moment, HOME_TOKENS)
        decision = self._router.route(
            RouteRequest(
                request_id="",
                prompt_tokens=moment.tokens,
                matched_tokens=moment.matched,
                home_key=None if home is None else _digest(home, 32),
            ),
            now=Instant(moment.now_ms),
            boot=BootInstant(moment.now_ms),
        )
        assert decision is not None, "all workers are usable"
        self._miss_ms = decision.miss_ms
        return self._index[decision.worker]

    def placed(self, moment: Moment, worker: int) -> None:
        queue, now = self._states[worker].queue, Instant(moment.now_ms)
        queue.start(moment.ticket, self._miss_ms, now)
        self._fleet.churn.add(queue, moment.tokens - moment.matched[worker], now)

    def first_token(self, ticket: int, worker: int, now_ms: float) -> None:
        self._states[worker].queue.first_token(ticket, Instant(now_ms))

    def ended(self, ticket: int, worker: int, now_ms: float) -> None:
        self._states[worker].queue.end(ticket, Instant(now_ms))


class Dynamo(Blind):
    """Blocks to compute, those in front included, and blocks in use by what runs: each once,
    however many calls have it in common.
    """

    def __init__(self, shape: FleetShape, seed: int) -> None:
        super().__init__(self._choose)
        self._token_ms = shape.token_ms
        self._draw = random.Random(seed)
        self._in_use = [Counter[int]() for _ in range(shape.workers)]
        self._calls: dict[int, list[int]] = {}

    def _choose(self, moment: Moment) -> int:
        size = moment.block_tokens
        costs = [
            queue_ms / self._token_ms
            + (moment.tokens - matched)
            + size * (len(in_use) + sum(block not in in_use for block in moment.blocks))
            for queue_ms, matched, in_use in zip(
                moment.queue_ms, moment.matched, self._in_use, strict=True
            )
        ]
        return _least(costs, self._draw)

    def placed(self, moment: Moment, worker: int) -> None:
        self._calls[moment.ticket] = moment.blocks
        self._in_use[worker].update(moment.blocks)

    def ended(self, ticket: int, worker: int, now_ms: float) -> None:
        in_use = self._in_use[worker]
        for block in self._calls.pop(ticket):
            in_use[block] -= 1
            if not in_use[block]:
                del in_use[block]


def _round_robin(shape: FleetShape, _seed: int) -> Chooser:
    return Blind(lambda moment: moment.ticket % shape.workers)


def _least_queue(_shape: FleetShape, seed: int) -> Chooser:
    draw = random.Random(seed)
    return Blind(lambda moment: _least(moment.queue_ms, draw))


def _consistent_hash(shape: FleetShape, seed: int) -> Chooser:
    homes = _Homes(shape.workers, seed)
    return Blind(lambda moment: next(homes.walk(moment)))


def _bounded_hash(shape: FleetShape, seed: int) -> Chooser:
    """KubeAI: clockwise to the first with at most 1.25 times the mean of calls in flight."""
    homes = _Homes(shape.workers, seed)

    def choose(moment: Moment) -> int:
        bound = 1.25 * (sum(moment.running) + 1) / shape.workers
        first = None
        for worker in homes.walk(moment):
            first = worker if first is None else first
            if moment.running[worker] <= bound:
                return worker
        assert first is not None, "a ring has workers"
        return first

    return Blind(choose)


def _sglang(_shape: FleetShape, seed: int) -> Chooser:
    """Cache-aware: 0.3, 64, 1.5; out of balance it goes by counts alone."""
    draw = random.Random(seed)

    def choose(moment: Moment) -> int:
        most, least = max(moment.running), min(moment.running)
        if most - least > 64 and most > 1.5 * least:
            return _least(moment.running, draw)
        best = max(moment.matched)
        if best > 0.3 * moment.tokens:
            return _least([-matched for matched in moment.matched], draw)
        return _least(moment.fill, draw)  # the smallest tree

    return Blind(choose)


def _llm_d(_shape: FleetShape, seed: int) -> Chooser:
    """A blend: 3 for the prefix, 2 for the queue, 2 for free cache."""
    draw = random.Random(seed)

    def choose(moment: Moment) -> int:
        low, high = min(moment.waiting), max(moment.waiting)
        spread = max(1, high - low)
        scores = [
            -(3.0 * matched / moment.tokens - 2.0 * (waiting - low) / spread - 2.0 * fill)
            for matched, waiting, fill in zip(
                moment.matched, moment.waiting, moment.fill, strict=True
            )
        ]
        return _least(scores, draw)

    return Blind(choose)


def _mooncake(shape: FleetShape, seed: int) -> Chooser:
    """Least predicted time to first token."""
    draw = random.Random(seed)

    def choose(moment: Moment) -> int:
        costs = [
            queue_ms + (moment.tokens - matched) * shape.token_ms
            for queue_ms, matched in zip(moment.queue_ms, moment.matched, strict=True)
        ]
        return _least(costs, draw)

    return Blind(choose)


def _lmetric(shape: FleetShape, seed: int) -> Chooser:
    """Work in front and to do, times calls in flight."""
    draw = random.Random(seed)

    def choose(moment: Moment) -> int:
        costs = [
            (queue_ms / shape.token_ms + moment.tokens - matched) * (running + 1)
            for queue_ms, matched, running in zip(
                moment.queue_ms, moment.matched, moment.running, strict=True
            )
        ]
        return _least(costs, draw)

    return Blind(choose)


class _Homes:
    """Workers in ring order from a prompt's key."""

    def __init__(self, workers: int, seed: int) -> None:
        self._ring = HashRing(256)
        self._index = {WorkerId(f"w{index}"): index for index in range(workers)}
        for worker in self._index:
            self._ring.add(worker)
        self._draw = random.Random(seed)

    def walk(self, moment: Moment) -> Iterator[int]:
        block = _key_block(moment, KEY_TOKENS)
        if block is None:  # too short for a key
            order = list(self._index.values())
            self._draw.shuffle(order)
            yield from order
        else:
            for worker in self._ring.walk(_digest(block, 8)):
                yield self._index[worker]


def _key_block(moment: Moment, tokens: int) -> int | None:
    if not moment.blocks:
        return None
    return moment.blocks[min(len(moment.blocks), max(1, tokens // moment.block_tokens)) - 1]


def _digest(block: int, size: int) -> bytes:
    return hashlib.blake2b(block.to_bytes(8, "big"), digest_size=size).digest()


def _least(values: list[int] | list[float], draw: random.Random) -> int:
    """The index of the least; among equals a seeded draw."""
    low = min(values)
    near = [index for index, value in enumerate(values) if value == low]
    return near[0] if len(near) == 1 else near[draw.randrange(len(near))]


ROUTERS: dict[str, Callable[[FleetShape, int], Chooser]] = {
    OURS: Ours,
    LEAST_QUEUE: _least_queue,
    ROUND_ROBIN: _round_robin,
    "consistent hash": _consistent_hash,
    "bounded hash": _bounded_hash,
    "SGLang": _sglang,
    "llm-d blend": _llm_d,
    "Dynamo": Dynamo,
    "Mooncake": _mooncake,
    "LMetric": _lmetric,
}
