"""Time-outs and numbers of retries that a client wishes, and what they do to a choice."""

from __future__ import annotations

import pytest
from picker_bench import COMPLETE, W0, W1, Bench, ids, request

from trunkline.core.records import Instant
from trunkline.errors import DeadlinePassed, DeadlineUnmet
from trunkline.gateway.contracts import ClientError, InferenceRequest, Pick
from trunkline.gateway.wishes import NO_WISHES, Wishes, wishes_in

PATIENT = 1e9


def test_who_wishes_nothing_gets_what_the_settings_say() -> None:
    assert wishes_in({b"x-litellm-tags": b"a"}, is_stream=True) is NO_WISHES


def test_a_stream_goes_by_its_own_time_out_and_else_by_the_common_one() -> None:
    both = {b"x-litellm-timeout": b"30", b"x-litellm-stream-timeout": b"2.5"}

    assert wishes_in(both, is_stream=True) == Wishes(timeout_ms=2_500.0)
    assert wishes_in(both, is_stream=False) == Wishes(timeout_ms=30_000.0)
    one = {b"x-litellm-timeout": b"30", b"x-litellm-num-retries": b"0"}
    assert wishes_in(one, is_stream=True) == Wishes(timeout_ms=30_000.0, max_retries=0)
    only_streams = {b"x-litellm-stream-timeout": b"2.5"}
    assert wishes_in(only_streams, is_stream=False) is NO_WISHES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((b"x-litellm-timeout", value) for value in (b"0", b"-1", b"nan", b"1e3", b"", b"86401")),
        *((b"x-litellm-num-retries", value) for value in (b"-1", b"1.5", b"101", b"9" * 5_000)),
    ],
)
def test_a_wish_that_is_no_number_in_its_bounds_is_refused_by_name(
    name: bytes, value: bytes
) -> None:
    with pytest.raises(ClientError) as refused:
        wishes_in({name: value}, is_stream=False)

    assert refused.value.refusal.param == name.decode()
    assert refused.value.refusal.status == 400


# -- never begun where it would be too late --------------------------------------------------------


def _asks(bench: Bench, first: int, within_ms: float) -> InferenceRequest:
    asked = request(ids(4_000, first * 5_000))
    asked.deadline = Instant(bench.clock.now() + within_ms)
    return asked


def test_a_request_that_can_be_in_time_is_sent() -> None:
    bench = Bench(W0)

    picked = bench.picker.pick(_asks(bench, 0, 30.0), frozenset())

    assert isinstance(picked, Pick)  # its prompt takes 21 ms
    bench.picker.ended(picked, COMPLETE, None)
    bench.assert_clean()


def test_a_request_behind_more_than_it_may_wait_is_not_begun_and_told_when_to_come() -> None:
    bench = Bench(W0, W1)
    running = [bench.picker.pick(_asks(bench, n, PATIENT), frozenset()) for n in range(8)]

    with pytest.raises(DeadlineUnmet) as refused:
        bench.picker.pick(_asks(bench, 9, 30.0), frozenset())

    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    assert (bench.in_flight(W0), bench.in_flight(W1)) == (4, 4)
    for picked in running:
        assert isinstance(picked, Pick)
        bench.picker.ended(picked, COMPLETE, None)
    bench.assert_clean()


def test_a_time_out_that_no_worker_could_keep_is_no_matter_of_coming_again() -> None:
    bench = Bench(W0)

    with pytest.raises(DeadlinePassed) as refused:
        bench.picker.pick(_asks(bench, 0, 5.0), frozenset())

    assert (refused.value.status, refused.value.kind) == (504, "timeout")
    bench.assert_clean()


def test_a_deadline_that_has_passed_begins_nothing() -> None:
    bench = Bench(W0)
    asked = _asks(bench, 0, 30.0)
    bench.clock.ms += 30.0

    with pytest.raises(DeadlinePassed):
        bench.picker.pick(asked, frozenset())

    bench.assert_clean()
