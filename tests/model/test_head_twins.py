"""The compiled and the Python reader of heads see the same in whatever bytes they are given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from twins import compiled, needs_compiled

from trunkline.native import DROPPED, REPORTED, _heads

ROLES = {b"a": REPORTED, b"b": DROPPED, b"c": REPORTED | DROPPED, b"date": 0}
SOUND = [
    b"a: 1", b"A:2", b"b:\t x \t", b"c:", b"C: \xff", b"date: now", b"d: e: f", b"a:  ",
    b"x!#$%&'*+-.^_`|~9: y",
]  # fmt: skip
UNSOUND = [
    b" a: b", b"a : b", b": x", b"a", b"", b"x(: y", b"a: \x00", b"a: \x7f", b"\xe9: x",
]  # fmt: skip
FIRSTS = [
    b"GET / HTTP/1.1", b"POST /a?b HTTP/1.0", b"A" * 16 + b" / HTTP/1.1",
    b"HTTP/1.1 200 OK", b"HTTP/1.0 404", b"HTTP/1.1 500 ", b"HTTP/1.1 200 a\tb\xe9",
]  # fmt: skip
UNSOUND_FIRSTS = [
    b"GET / HTTP/1.2", b"get / HTTP/1.1", b"GET  / HTTP/1.1", b"GET /a b HTTP/1.1",
    b"GET /\xe9 HTTP/1.1", b"A" * 17 + b" / HTTP/1.1", b"HTTP/1.1 099 x", b"HTTP/1.1 20 x",
    b"HTTP/1.1 2000", b"HTTP/1.1 200 a\x01", b"HTTP/2 200 OK", b"",
]  # fmt: skip
ENDS = [b"\r\n"] * 20 + [b"\n", b"\r", b"\r\r\n"]


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Sound heads, and heads with a fault or a changed byte."""
    is_sound = draw(st.booleans())
    firsts = FIRSTS if is_sound else FIRSTS + UNSOUND_FIRSTS
    fields = SOUND if is_sound else SOUND + UNSOUND
    ends = st.just(b"\r\n") if is_sound else st.sampled_from(ENDS)
    lines = [
        draw(st.sampled_from(firsts)),
        *draw(st.lists(st.sampled_from(fields), max_size=6)),
        b"",
    ]
    raw = b"".join(line + draw(ends) for line in lines)
    if not is_sound and draw(st.booleans()):
        at = draw(st.integers(0, len(raw)))
        cut = draw(st.integers(0, 2))
        raw = raw[:at] + draw(st.binary(max_size=2)) + raw[at + cut :]
    return raw


@needs_compiled
@given(heads())
@example(b"")
@example(b"\r\n\r\n")
@example(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n")
def test_both_twins_see_the_same_request(raw: bytes) -> None:
    assert compiled.split_request(raw) == _heads.split_request(raw)


@needs_compiled
@given(heads())
@example(b"HTTP/1.1 200 OK\r\na: 1\r\nA: 2\r\n\r\n")
@example(b"HTTP/1.1 200 OK\r\nc: 1\r\nb: 2\r\nx: 3 \r\n\r\n")
def test_both_twins_see_the_same_answer(raw: bytes) -> None:
    assert compiled.split_answer(raw, ROLES) == _heads.split_answer(raw, ROLES)


@needs_compiled
@pytest.mark.parametrize("wrong", ["text", None, 7])
def test_both_twins_refuse_what_is_no_bytes(wrong: Any) -> None:
    for twin in (compiled, _heads):
        with pytest.raises(TypeError):
            twin.split_request(wrong)
        with pytest.raises(TypeError):
            twin.split_answer(wrong, ROLES)


def test_roles_decide_what_is_told_and_what_goes_on() -> None:
    raw = b"HTTP/1.1 200 OK\r\nA: 1\r\nB: 2\r\nC: 3\r\nX-D:  4 \r\n\r\n"

    assert _heads.split_answer(raw, ROLES) == (
        1, 200, b"OK", {b"a": b"1", b"c": b"3"}, True, b"a: 1\r\nx-d: 4\r\n",
    )  # fmt: skip
