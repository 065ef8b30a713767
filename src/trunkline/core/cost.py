"""What sending a request to a worker costs, in milliseconds, term by term.

    cost = queue + transfer + miss + imbalance + decode pressure
    miss + imbalance = (1 + k * churn / (mean churn + floor)) * miss beyond what most workers hold

`miss` is the predicted prefill time of what the worker does not hold; `queue` that of all work in
front, which counts more than once at a worker that has come with an empty cache (slow start, in the
imbalance term); the churn factor makes cold prefill dearer where much was inserted lately, which
stops cold prefixes from clustering on whoever wins ties (reference: routing section 2). Where
another worker holds more, or will when it has computed what it was sent, pulling that is a second
price for each worker, and the lower one counts; a pull waits for its source and runs while the
request queues, so transfer is what of both the queue does not hide.

Cost: about 1 us a worker. Must never: know how a match was found. Read `routing.py` next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.core.fleet import WorkerState
from trunkline.core.links import Links
from trunkline.core.load import PrefillQueue
from trunkline.core.profiles import Profile
from trunkline.core.records import Instant, WorkerId

DECODE_PRESSURE_SHARE = 0.02
"""One running stream slows a prefill by this share of its own step time: a step of a full batch
spends a few per cent on each sequence. Small on purpose: it orders workers that are otherwise
equal.
"""

COPY_SHARE = 0.5
"""What a copied token crowds out, in computed ones. Both push out what was there, but of a copy
another worker has the original, and it goes first where tiers know that. 0.3 to 0.7 did alike on
four traces; 0 let copies cost mixed long prompts 2 points of hits, and 1 no longer paid on short
ones (benchmarks/pulls.py).
"""

_CALIBRATION_STEP = 0.05
_CALIBRATION_LOW, _CALIBRATION_HIGH = 0.1, 10.0
_CALIBRATION_FLOOR_MS = 5.0
"""Predictions below this say more about scheduling noise than about speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostColumns:
    """The terms for each worker, in the order given; all in ms but the last two."""

    queue_ms: list[float]
    transfer_ms: list[float]
    miss_ms: list[float]
    imbalance_ms: list[float]
    decode_pressure_ms: list[float]
    cost_ms: list[float]
    churn_price: float
    """What churn makes of a ms of inserting prefill, a token of churn."""
    pulled_tokens: list[int]
    """Leading tokens beyond its own that it would take from a source; 0 where it would not."""
    sources: list[Source | None]
    """From whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Who could be asked for the leading `tokens` of a prompt."""

    worker: WorkerId
    tokens: int
    ready_ms: float = 0.0
    """How long until it has computed all of them; 0 where they are there."""
    by_slot: list[int]
    """What each worker could be asked for; below 0 for those that cannot pull either."""
    most_tokens: int
    """Of one pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One prompt before the workers, in the order of the columns."""

    tokens: int
    matched: list[int]
    common: int
    """`common_tokens` of them."""
    churn_price: float


class CostModel:
    """Prices workers from a latency profile, corrected by what was measured on each."""

    def __init__(
        self,
        profile: Profile,
        *,
        churn_weight: float,
        time_scale: float = 1.0,
        links: Links | None = None,
    ) -> None:
        """`time_scale` stretches the profile: simulated workers may run slower than what they stand
        for. Without `links` nothing is pulled.
        """
        self._fixed_ms = profile.prefill_fixed_ms * time_scale
        self._token_ms = profile.prefill_token_ms * time_scale
        self._context_ms = profile.prefill_context_ms * time_scale
        self._decode_ms = profile.decode_token_ms * time_scale * DECODE_PRESSURE_SHARE
        self._churn_weight = churn_weight
        self.links = links

    @property
    def fixed_ms(self) -> float:
        """What every prefill costs, however short."""
        return self._fixed_ms

    def prefill_ms(self, uncached_tokens: int, context_tokens: int) -> float:
        """Predicted time to compute `uncached_tokens` behind `context_tokens` that are resident."""
        per_token = self._token_ms + self._context_ms * (context_tokens + 0.5 * uncached_tokens)
        return self._fixed_ms + uncached_tokens * per_token

    def columns(
        self,
        states: list[WorkerState],
        matched_tokens: list[int],
        tokens: int,
        *,
        now: Instant,
        churn_floor: float,
        sources: Sequence[Source] = (),
    ) -> CostColumns:
        """The terms for sending a prompt of `tokens` to each of `states`, which holds
        `matched_tokens` of it.

        `churn_floor` is what a calm worker may have taken in without being the dearer for it, in
        the scale of the churn clock. What half of the workers hold is common property: a worker
        that lacks it will need it anyway, so computing it there is not charged (its
        imbalance is negative). Hot prefixes thus end up everywhere, by load alone. Where a source
        has more than a worker, or will have, pulling that is considered.
        """
        case = self._case(states, matched_tokens, tokens, churn_floor)
        columns = self._local(states, case, now)
        if self.links is not None:
            local_miss_ms = columns.miss_ms[:] if len(sources) > 1 else columns.miss_ms
            for source in sources:
                self._consider_pulls(columns, states, case, source, self.links, local_miss_ms)
        return columns

    def _case(
        self, states: list[WorkerState], matched: list[int], tokens: int, churn_floor: float
    ) -> _Case:
        churn_total = sum([state.queue.churn for state in states])
        return _Case(
            tokens=tokens,
            matched=matched,
            common=common_tokens(matched),
            churn_price=self._churn_weight / (churn_total / len(states) + churn_floor),
        )

    def _local(self, states: list[WorkerState], case: _Case, now: Instant) -> CostColumns:
        """Prices where each worker goes on from what it has."""
        tokens, common, churn_price = case.tokens, case.common, case.churn_price
        fixed_ms, token_ms, context_ms = self._fixed_ms, self._token_ms, self._context_ms
        decode_ms = self._decode_ms
        queue_column: list[float] = []
        miss_column: list[float] = []
        imbalance_column: list[float] = []
        decode_column: list[float] = []
        cost_column: list[float] = []
        for state, matched in zip(states, case.matched, strict=True):
            queue = state.queue
            missed = tokens - matched
            per_token_ms = token_ms + context_ms * (matched + 0.5 * missed)
            miss_ms = (fixed_ms + missed * per_token_ms) * queue.scale
            priced_ms = miss_ms
            if matched < common:
                missed = tokens - common
                per_token_ms = token_ms + context_ms * (common + 0.5 * missed)
                priced_ms = (fixed_ms + missed * per_token_ms) * queue.scale
            # The fixed part of a prefill inserts nothing, so churn does not make it dearer.
            inserting_ms = priced_ms - fixed_ms * queue.scale
            imbalance_ms = priced_ms - miss_ms + churn_price * queue.churn * inserting_ms
            queue_ms = queue.queue_ms(now)
            imbalance_ms += queue.slow_factor * queue_ms
            pressure_ms = decode_ms * queue.stream_count
            queue_column.append(queue_ms)
            miss_column.append(miss_ms)
            imbalance_column.append(imbalance_ms)
            decode_column.append(pressure_ms)
            cost_column.append(queue_ms + miss_ms + imbalance_ms + pressure_ms)
        return CostColumns(
            queue_ms=queue_column,
            transfer_ms=[0.0] * len(states),
            miss_ms=miss_column,
            imbalance_ms=imbalance_column,
            decode_pressure_ms=decode_column,
            cost_ms=cost_column,
            churn_price=churn_price,
            pulled_tokens=[0] * len(states),
            sources=[None] * len(states),
        )

    def _consider_pulls(
        self,
        columns: CostColumns,
        states: list[WorkerState],
        case: _Case,
        source: Source,
        links: Links,
        local_miss_ms: list[float],
    ) -> None:
        """Where taking the rest of what the source has is cheaper than computing it, and than
        another source, that is the worker's price.
        """
        common = case.common
        left_ms = self.prefill_ms(case.tokens - source.tokens, source.tokens)
        for i, state in enumerate(states):
            matched = case.matched[i]
            wanted = source.tokens - matched
            if not 0 < wanted <= source.most_tokens:
                continue
            if source.by_slot[state.slot] < 0 or state.worker == source.worker:
                continue
            scale, queue_ms = state.queue.scale, columns.queue_ms[i]
            moving_ms = links.transfer_ms(source.worker, state.worker, wanted)
            transfer_ms = pull_delay_ms(source.ready_ms, moving_ms, queue_ms)
            miss_ms = left_ms * scale
            # What most workers hold is not charged, however it comes here.
            common_ms, free_ms = 0.0, 0.0
            if common > matched:
                priced_ms = self.prefill_ms(case.tokens - common, common) * scale
                common_ms = local_miss_ms[i] - priced_ms
                free_ms = transfer_ms * min(common - matched, wanted) / wanted
            copied_ms = max(0.0, local_miss_ms[i] - miss_ms - common_ms)
            inserting_ms = miss_ms - self._fixed_ms * scale + COPY_SHARE * copied_ms
            imbalance_ms = case.churn_price * state.queue.churn * inserting_ms
            imbalance_ms += state.queue.slow_factor * queue_ms
            cost_ms = queue_ms + transfer_ms + miss_ms + imbalance_ms
            cost_ms += columns.decode_pressure_ms[i]
            is_first = columns.sources[i] is None
            if cost_ms < columns.cost_ms[i] + (common_ms if is_first else free_ms):
                columns.transfer_ms[i] = transfer_ms
                columns.miss_ms[i] = miss_ms
                columns.imbalance_ms[i] = imbalance_ms - free_ms
                columns.cost_ms[i] = cost_ms - free_ms
                columns.pulled_tokens[i] = wanted
                columns.sources[i] = source


def pull_delay_ms(ready_ms: float, moving_ms: float, queue_ms: float) -> float:
    """What a pull costs its request beyond the queue: KV moves once the source has computed it, and
    both goes on while the request waits for its turn.
    """
    return max(0.0, ready_ms + moving_ms - queue_ms)


def common_tokens(matched_tokens: list[int]) -> int:
    """How much of a prompt half of the workers hold; 0 for no workers. Of a small fleet it takes
    four of them, or more than half: one of two is nobody's common property.
    """
    count = len(matched_tokens)
    if not count:
        return 0
    holders = max((count + 1) // 2, min(4, count // 2 + 1))
    return sorted(matched_tokens)[count - holders]


def calibrate(queue: PrefillQueue, *, predicted_ms: float, observed_ms: float) -> None:
    """Move a worker's time scale a step towards what was just measured.

    Both are times to first token, so a busy queue weighs as the work in it. A geometric step of 5 %
    of the ratio, kept within 0.1 and 10: one stall says little, a slow machine is known after some
    twenty answers.
    """
    if predicted_ms < _CALIBRATION_FLOOR_MS or observed_ms <= 0.0:
        return
    ratio = min(max(observed_ms / predicted_ms, _CALIBRATION_LOW), _CALIBRATION_HIGH)
    scale = queue.scale * ratio**_CALIBRATION_STEP
    queue.scale = min(max(scale, _CALIBRATION_LOW), _CALIBRATION_HIGH)
