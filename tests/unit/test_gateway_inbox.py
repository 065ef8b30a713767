"""The bytes a client sent ahead: taken in order, each looked at once."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from trunkline.gateway.inbox import Inbox

STEPS = st.lists(
    st.one_of(st.binary(min_size=1, max_size=9), st.integers(0, 12), st.just("back")), max_size=40
)


@given(STEPS)
def test_what_is_taken_is_what_came_in_order(steps: list[bytes | int | str]) -> None:
    inbox, expected, last = Inbox(), b"", b""
    for step in steps:
        if isinstance(step, bytes):
            inbox.add(step)
            expected, last = expected + step, b""
        elif isinstance(step, int):
            last = inbox.take(step)
            assert last == expected[:step]
            expected = expected[step:]
        else:
            inbox.put_back(last[len(last) // 2 :])
            expected, last = last[len(last) // 2 :] + expected, b""
        assert inbox.left == len(expected)
    assert inbox.take(1 << 20) == expected


@given(st.lists(st.sampled_from([b"\r", b"\n", b"x", b"\r\n"]), max_size=24), st.data())
def test_a_head_and_a_bare_lf_are_found_wherever_the_pieces_are_cut(
    parts: list[bytes], data: st.DataObject
) -> None:
    text = b"".join(parts)
    inbox, seen = Inbox(), b""
    while text:
        cut = data.draw(st.integers(1, len(text)))
        inbox.add(text[:cut])
        seen, text = seen + text[:cut], text[cut:]
        assert inbox.head_size() == seen.find(b"\r\n\r\n") + 4 * (b"\r\n\r\n" in seen) + (
            b"\r\n\r\n" not in seen
        )
        if inbox.head_size():
            return
        has_bare = b"\n" in seen.replace(b"\r\n", b"")
        assert inbox.has_bare_lf() is has_bare
        if has_bare:
            return


def test_a_head_in_single_bytes_costs_no_more_than_its_size() -> None:
    """A quarter of a mebibyte; looking again from the start each time takes minutes."""
    inbox = Inbox()
    began = time.process_time()
    for _ in range(1 << 18):
        inbox.add(b"x")
        assert not inbox.head_size()
        assert not inbox.has_bare_lf()
    assert time.process_time() - began < 30.0, "minutes, on any machine"
    inbox.add(b"\r\n\r\n")
    assert inbox.head_size() == (1 << 18) + 4


def test_many_small_messages_are_taken_without_copying_the_rest() -> None:
    inbox, one = Inbox(), b"GET / HTTP/1.1\r\n\r\n"
    inbox.add(b"x")
    inbox.take(1)
    inbox.add(one * 200_000)
    began = time.process_time()
    for _ in range(200_000):
        assert inbox.take(inbox.head_size()) == one
    assert time.process_time() - began < 30.0, "minutes, on any machine"
    assert inbox.left == 0
