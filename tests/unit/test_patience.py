"""When a silent stream is given up, at a worker that is heard and at one that is gone."""

from __future__ import annotations

from trunkline.core.pace import GAP_FLOOR_MS, GONE_MS, HISTORY_GAPS, Pace
from trunkline.core.records import Instant, WorkerId
from trunkline.gateway.contracts import Endpoint, Pick
from trunkline.gateway.patience import lateness
from trunkline.ports.worker import Stay


def picked(
    *,
    is_gone: bool,
    gap_ms: float = 10.0,
    gap_floor_ms: float = GAP_FLOOR_MS,
    first_token_ms: float | None = None,
    ahead_ms: float = 0.0,
    tokens: int = HISTORY_GAPS,
) -> Pick:
    pace = Pace(gap_floor_ms=gap_floor_ms)
    for number in range(tokens):
        pace.moved(1, gap_ms, Instant(number))
    return Pick(
        worker=WorkerId("w0"),
        endpoint=Endpoint(host="w0", port=1, host_header="w0"),
        body=b"",
        stay=Stay(is_gone=lambda: is_gone),
        pace=pace,
        first_token_ms=first_token_ms,
        ahead_ms=lambda: ahead_ms,
    )


def limit_ms(pick: Pick, *, has_first_token: bool = True) -> int | None:
    """After how many whole milliseconds it is late; None for not within a minute."""
    waits = (ms for ms in range(60_000) if lateness(pick, ms, has_first_token=has_first_token))
    first = next(waits, None)
    return None if first is None else first - 1


def test_f1_a_stream_of_a_worker_that_is_gone_is_given_up_after_three_heartbeats() -> None:
    assert limit_ms(picked(is_gone=True)) == GONE_MS == 3_000
    assert limit_ms(picked(is_gone=True, gap_ms=1_000.0)) == 3_000, "however slow it was"
    assert limit_ms(picked(is_gone=True, gap_floor_ms=60_000.0)) == 3_000


def test_a_worker_that_is_heard_keeps_its_five_seconds() -> None:
    assert limit_ms(picked(is_gone=False)) == 5_000
    assert limit_ms(picked(is_gone=False, gap_ms=1_000.0)) == 20_000


def test_what_is_late_sooner_stays_so_at_a_worker_that_is_gone() -> None:
    assert limit_ms(picked(is_gone=True, gap_floor_ms=300.0)) == 300


def test_predicted_prefill_is_waited_for_also_where_nothing_is_heard() -> None:
    """A worker that computes a long prompt may have no time to answer."""
    assert limit_ms(picked(is_gone=True, ahead_ms=1_500.0)) == 4_500
    assert limit_ms(picked(is_gone=True, ahead_ms=9_000.0)) == 12_000
    assert limit_ms(picked(is_gone=False, ahead_ms=9_000.0)) == 14_000


def test_a_first_token_too_is_waited_for_no_longer_at_a_worker_that_is_gone() -> None:
    slow = picked(is_gone=True, first_token_ms=8_000.0, ahead_ms=500.0)
    assert limit_ms(slow, has_first_token=False) == 3_500
    heard = picked(is_gone=False, first_token_ms=8_000.0, ahead_ms=500.0)
    assert limit_ms(heard, has_first_token=False) == 8_000


def test_where_nothing_is_known_the_settings_are_all_there_is() -> None:
    assert limit_ms(picked(is_gone=True, tokens=0)) is None
    assert limit_ms(picked(is_gone=True), has_first_token=False) is None
