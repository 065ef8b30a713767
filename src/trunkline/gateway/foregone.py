"""What the least queue would have done with the same requests: an estimate, from their receipts.

A decision keeps every candidate's terms, so for the same request, at the same moment, the worker
with the least queue has a predicted time to its first token, too: its queue, transfer and miss. The
two predictions are compared; what was observed stands beside them. It says nothing of how caches
and queues of a fleet that always went by the least queue would have developed (its hits would be
fewer): a replay does (`trunkline replay --policies`). Where decisions pull, the least-queue choice
is priced with the pull that it was offered, which favours it.

Costs a decision one append, and only while it ends; the rest is done when somebody looks, for the
last `MAX_ENDED` that ended since. Must never: keep a decision beyond those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trunkline.core.decision import Candidates, Decision, Outcome
from trunkline.core.records import Instant
from trunkline.gateway.overview import Foregone, Quantiles

MAX_ENDED = 64
"""Decisions that ended since the last look, the latest: at 200 workers 50 kB each."""
MAX_SAMPLES = 4_096
"""A minute's at `MAX_ENDED` a second: some 4 ms a look."""
WINDOW_MS = 300_000.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at: Instant
    chosen_ms: float
    least_queue_ms: float
    observed_ms: float | None


class Ended:
    """Decisions of which the outcome has just come, the latest of them."""

    def __init__(self) -> None:
        self._latest: deque[tuple[Decision, Outcome]] = deque(maxlen=MAX_ENDED)

    def add(self, decision: Decision, outcome: Outcome) -> None:
        self._latest.append((decision, outcome))

    def take(self) -> list[tuple[Decision, Outcome]]:
        taken = list(self._latest)
        self._latest.clear()
        return taken


class Comparison:
    """The last minutes' samples."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)

    def look(self, now: Instant) -> Foregone:
        """Take in what ended since the last look; the comparison as it stands."""
        for decision, outcome in self._ended.take():
            if decision.prompt_tokens:  # else nothing was predicted of its prefill
                self._samples.append(_sample(decision, outcome, now))
        while self._samples and now - self._samples[0].at > WINDOW_MS:
            self._samples.popleft()
        return _compared(self._samples, now)


def least_queue_index(candidates: Candidates) -> int:
    """The first of those with the least queue."""
    queues = candidates.queue_ms
    return queues.index(min(queues))


def first_token_ms(candidates: Candidates, index: int) -> float:
    """When a candidate's prefill was expected to be over."""
    waits_ms = candidates.queue_ms[index] + candidates.transfer_ms[index]
    return waits_ms + candidates.miss_ms[index]


def _sample(decision: Decision, outcome: Outcome, now: Instant) -> _Sample:
    candidates = decision.candidates
    return _Sample(
        at=now,
        chosen_ms=first_token_ms(candidates, decision.choice),
        least_queue_ms=first_token_ms(candidates, least_queue_index(candidates)),
        observed_ms=outcome.first_byte_ms if outcome.is_stream else None,
    )


def _compared(samples: Iterable[_Sample], now: Instant) -> Foregone:
    kept = list(samples)
    seen = [one for one in kept if one.observed_ms is not None]
    saved = [one.least_queue_ms - one.chosen_ms for one in kept]
    total_ms = sum(saved)
    dearer = sum(ms < 0.0 for ms in saved)
    return Foregone(
        looked_at=len(kept),
        span_ms=round(now - kept[0].at) if kept else 0.0,
        streamed=len(seen),
        chosen=quantiles([one.chosen_ms for one in kept]),
        least_queue=quantiles([one.least_queue_ms for one in kept]),
        observed=quantiles([one.observed_ms for one in seen if one.observed_ms is not None]),
        predicted_of_observed=quantiles([one.chosen_ms for one in seen]),
        saved_ms=round(total_ms, 1),
        saved_ms_each=round(total_ms / len(kept), 2) if kept else 0.0,
        dearer_share=round(dearer / len(kept), 4) if kept else 0.0,
    )


def quantiles(times_ms: Sequence[float]) -> Quantiles | None:
    """By nearest rank; None of nothing."""
    if not times_ms:
        return None
    ordered = sorted(times_ms)
    last = len(ordered) - 1

    def at(share: float) -> float:
        return round(ordered[min(last, int(share * len(ordered)))], 2)

    return Quantiles(p50=at(0.50), p95=at(0.95), p99=at(0.99))
