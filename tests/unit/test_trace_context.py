"""`traceparent`: what is taken, and that nothing else reaches a worker."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.gateway.trace_context import MAX_STATE_BYTES, Parent, lines, parent_in

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01".encode()


def read(told: bytes, state: bytes | None = None) -> Parent | None:
    headers = {b"traceparent": told}
    if state is not None:
        headers[b"tracestate"] = state
    return parent_in(headers)


def test_a_good_one_is_read() -> None:
    assert read(GOOD, b"vendor=1") == Parent(
        trace_id=TRACE, span_id=SPAN, is_sampled=True, state=b"vendor=1"
    )
    unsampled = read(GOOD[:-2] + b"00")
    assert unsampled is not None
    assert not unsampled.is_sampled
    assert parent_in({}) is None


@pytest.mark.parametrize(
    "told",
    [
        b"", b"00", GOOD[:-1], GOOD + b"0", GOOD.upper(), b" " + GOOD, GOOD + b"\n",
        GOOD.replace(TRACE.encode(), b"0" * 32), GOOD.replace(SPAN.encode(), b"0" * 16),
        b"ff" + GOOD[2:], b"0x" + GOOD[2:], GOOD + b"-more", GOOD + b", " + GOOD,
        GOOD.replace(b"-", b"_"), GOOD[:-2] + b"0g", b"01" + GOOD[2:] + b".more",
    ],
)  # fmt: skip
def test_what_is_not_exactly_one_is_none(told: bytes) -> None:
    assert read(told, b"vendor=1") is None


def test_a_later_version_may_say_more() -> None:
    assert read(b"01" + GOOD[2:]) is not None
    assert read(b"cc" + GOOD[2:] + b"-what-comes") is not None


@pytest.mark.parametrize("state", [b"", b"x" * (MAX_STATE_BYTES + 1), b"a=\xff", b"a=\x00"])
def test_a_state_that_is_none_is_dropped_and_the_parent_kept(state: bytes) -> None:
    found = read(GOOD, state)
    assert found is not None
    assert found.state == b""


def test_a_state_at_the_bound_is_kept() -> None:
    found = read(GOOD, b"x" * MAX_STATE_BYTES)
    assert found is not None
    assert len(found.state) == MAX_STATE_BYTES


@given(st.binary(max_size=80), st.binary(max_size=40))
def test_whatever_comes_what_goes_on_is_whole_lines_of_ours(told: bytes, state: bytes) -> None:
    found = read(told, state)
    if found is None:
        return
    out = lines(found.trace_id, found.span_id, found.state, is_sampled=found.is_sampled)
    assert re.fullmatch(
        rb"traceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]\r\n(tracestate: [ -~]+\r\n)?", out
    )


def test_what_is_written_reads_as_it_was() -> None:
    out = lines(TRACE, SPAN, b"v=1", is_sampled=True)
    assert out == b"traceparent: " + GOOD + b"\r\ntracestate: v=1\r\n"
