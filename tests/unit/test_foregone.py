"""The least queue's choice for the same request, beside ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_receipts import decision, outcome, receipts

from trunkline.core.decision import Candidates, Decision
from trunkline.core.records import Instant, WallTime, WorkerId
from trunkline.gateway.foregone import (
    MAX_ENDED,
    MAX_SAMPLES,
    WINDOW_MS,
    Comparison,
    Ended,
    quantiles,
)

NOW = Instant(10_000.0)
LAST_CHOICE = 2


def of_three() -> Decision:
    """The last one was chosen; the least queue is the second's, which has nothing of the prompt."""
    columns = Candidates(
        workers=[WorkerId(f"w{index}") for index in range(3)],
        matched_tokens=[0, 0, 64],
        pulled_tokens=[0, 0, 0],
        queue_ms=[9.0, 1.0, 5.0],
        transfer_ms=[0.0, 2.0, 0.5],
        miss_ms=[100.0, 100.0, 10.0],
        imbalance_ms=[7.0, 7.0, 7.0],
        decode_pressure_ms=[3.0, 3.0, 3.0],
        cost_ms=[119.0, 113.0, 25.5],
    )
    return replace(decision("r"), candidates=columns, choice=LAST_CHOICE)


def test_both_are_predicted_from_queue_transfer_and_miss_of_one_receipt() -> None:
    ended = Ended()
    ended.add(of_three(), replace(outcome(), is_stream=True, first_byte_ms=21.0))
    seen = Comparison(ended).look(NOW)
    assert seen.chosen is not None
    assert seen.least_queue is not None
    assert seen.observed is not None
    assert (seen.chosen.p50, seen.least_queue.p50, seen.observed.p50) == (15.5, 103.0, 21.0)
    assert (seen.saved_ms, seen.saved_ms_each, seen.dearer_share) == (87.5, 87.5, 0.0)


def test_what_was_not_streamed_has_no_first_token_to_observe() -> None:
    ended = Ended()
    ended.add(of_three(), outcome())
    seen = Comparison(ended).look(NOW)
    assert (seen.looked_at, seen.streamed, seen.observed) == (1, 0, None)


def test_a_choice_that_is_later_than_the_least_queue_counts_against_us() -> None:
    ended, cold = Ended(), replace(of_three(), choice=0)
    ended.add(cold, outcome())
    ended.add(of_three(), outcome())
    seen = Comparison(ended).look(NOW)
    assert (seen.saved_ms, seen.dearer_share) == (103.0 - 109.0 + 87.5, 0.5)


def test_a_prompt_of_which_nothing_is_known_says_nothing() -> None:
    ended = Ended()
    ended.add(replace(of_three(), prompt_tokens=0), outcome())
    assert Comparison(ended).look(NOW).looked_at == 0


def test_only_the_latest_are_looked_at_and_only_minutes_are_kept() -> None:
    ended = Ended()
    comparison = Comparison(ended)
    for _ in range(3 * MAX_ENDED):
        ended.add(of_three(), outcome())
    assert comparison.look(NOW).looked_at == MAX_ENDED
    assert comparison.look(NOW).looked_at == MAX_ENDED, "none was taken twice"
    seen = comparison.look(NOW)
    for _ in range(1 + MAX_SAMPLES // MAX_ENDED):
        for _ in range(MAX_ENDED):
            ended.add(of_three(), outcome())
        seen = comparison.look(NOW)
    assert seen.looked_at == MAX_SAMPLES
    assert comparison.look(Instant(NOW + WINDOW_MS + 1.0)).looked_at == 0


def test_receipts_tell_what_ended_and_keep_nothing_where_none_is_kept() -> None:
    kept, none = receipts(), receipts(kept=0)
    for books in (kept, none):
        books.add(of_three(), WallTime(0.0), 1)
        books.ended(of_three(), outcome())
    assert (len(kept.ended_lately.take()), len(none.ended_lately.take())) == (1, 0)


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [
        ([], None),
        ([7.0], (7.0, 7.0, 7.0)),
        ([float(n) for n in range(100, 0, -1)], (51.0, 96.0, 100.0)),
    ],
)
def test_quantiles_are_times_that_were_seen(
    times_ms: list[float], expected: tuple[float, float, float] | None
) -> None:
    seen = quantiles(times_ms)
    assert (None if seen is None else (seen.p50, seen.p95, seen.p99)) == expected
