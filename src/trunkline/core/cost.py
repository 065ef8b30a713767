"""What sending a request to a worker costs, in milliseconds, term by term.

    cost = queue + transfer + miss + imbalance + decode pressure
    miss + imbalance = (1 + k * churn / (mean churn + floor)) * miss beyond what most workers hold

`miss` is the predicted prefill time of what the worker does not hold; `queue` that of all work in
front; the churn factor makes cold prefill dearer where much was inserted lately, which stops cold
prefixes from clustering on whoever wins ties (reference: routing section 2). Transfer is 0 until
workers can pull.

Cost: about 1 us a worker. Must never: know how a match was found. Read `routing.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.core.fleet import WorkerState
from trunkline.core.load import PrefillQueue
from trunkline.core.profiles import Profile
from trunkline.core.records import Instant

DECODE_PRESSURE_SHARE = 0.02
"""One running stream slows a prefill by this share of its own step time: a step of a full batch
spends a few per cent on each sequence. Small on purpose: it orders workers that are otherwise
equal.
"""

_CALIBRATION_STEP = 0.05
_CALIBRATION_LOW, _CALIBRATION_HIGH = 0.1, 10.0
_CALIBRATION_FLOOR_MS = 5.0
"""Predictions below this say more about scheduling noise than about speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostColumns:
    """The terms for each worker, in the order given; all in ms."""

    queue_ms: list[float]
    miss_ms: list[float]
    imbalance_ms: list[float]
    decode_pressure_ms: list[float]
    cost_ms: list[float]


class CostModel:
    """Prices workers from a latency profile, corrected by what was measured on each."""

    def __init__(self, profile: Profile, *, churn_weight: float, time_scale: float = 1.0) -> None:
        """`time_scale` stretches the profile: simulated workers may run slower than what they stand
        for.
        """
        self._fixed_ms = profile.prefill_fixed_ms * time_scale
        self._token_ms = profile.prefill_token_ms * time_scale
        self._context_ms = profile.prefill_context_ms * time_scale
        self._decode_ms = profile.decode_token_ms * time_scale * DECODE_PRESSURE_SHARE
        self._churn_weight = churn_weight

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
    ) -> CostColumns:
        """The terms for sending a prompt of `tokens` to each of `states`, which holds
        `matched_tokens` of it.

        `churn_floor` is what a calm worker may have taken in without being the dearer for it, in
        the scale of the churn clock. What more than half of the workers hold is common property: a
        worker that lacks it will need it anyway, so computing it there is not charged (its
        imbalance is negative). Hot prefixes thus end up everywhere, by load alone.
        """
        common = common_tokens(matched_tokens)
        churn_total = sum([state.queue.churn for state in states])
        churn_price = self._churn_weight / (churn_total / len(states) + churn_floor)
        fixed_ms, token_ms, context_ms = self._fixed_ms, self._token_ms, self._context_ms
        decode_ms = self._decode_ms
        queue_column: list[float] = []
        miss_column: list[float] = []
        imbalance_column: list[float] = []
        decode_column: list[float] = []
        cost_column: list[float] = []
        for state, matched in zip(states, matched_tokens, strict=True):
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
            pressure_ms = decode_ms * queue.stream_count
            queue_column.append(queue_ms)
            miss_column.append(miss_ms)
            imbalance_column.append(imbalance_ms)
            decode_column.append(pressure_ms)
            cost_column.append(queue_ms + miss_ms + imbalance_ms + pressure_ms)
        return CostColumns(
            queue_ms=queue_column,
            miss_ms=miss_column,
            imbalance_ms=imbalance_column,
            decode_pressure_ms=decode_column,
            cost_ms=cost_column,
        )


def common_tokens(matched_tokens: list[int]) -> int:
    """How much of a prompt more than half of the workers hold; 0 for no workers."""
    return sorted(matched_tokens)[(len(matched_tokens) - 1) // 2] if matched_tokens else 0


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
