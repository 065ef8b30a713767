"""Event streams come apart the same, wherever the network cut them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.sse import EventSplitter, EventTooLong
from trunkline.replay.answer import Answer

STREAM = (
    b": a comment\ndata: one\n\n"
    b"event: x\r\ndata:two\r\ndata: more\r\n\r\n"
    b"id: 3\rdata: three\r\r"
    b"\n\n\ndata: [DONE]\n\n"
)
EVENTS = [b"one", b"two\nmore", b"three", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_the_stream_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    splitter = EventSplitter()
    events: list[bytes] = []
    for start, end in pairwise(edges):
        events += splitter.feed(STREAM[start:end])
    assert events == EVENTS


def test_a_crlf_cut_in_two_is_one_line_end() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\r") == []
    assert splitter.feed(b"\ndata: b\r") == []
    assert splitter.feed(b"\n\r\n") == [b"a\nb"]


def test_an_unfinished_event_is_held_back() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: half") == []
    assert splitter.feed(b"\n") == []
    assert splitter.feed(b"\n") == [b"half"]


@pytest.mark.parametrize("piece", [b"x" * 100, b"data: " + b"y" * 94 + b"\n"])
def test_an_endless_event_is_refused_at_the_bound(piece: bytes) -> None:
    splitter = EventSplitter(max_event_bytes=1_000)
    for _ in range(10):
        splitter.feed(piece)
    with pytest.raises(EventTooLong, match="longer than 1000 bytes"):
        splitter.feed(piece + piece)


@given(st.binary(max_size=200))
def test_no_event_data_breaks_the_reader(data: bytes) -> None:
    answer = Answer(sent_at_ms=0.0)
    answer.status = 200
    answer.event(data, at_ms=1.0)
    assert answer.reply(2.0).lost_reason or answer.is_done


def test_usage_alone_is_no_first_token() -> None:
    answer = Answer(sent_at_ms=0.0)
    answer.event(b'{"choices":[{"text":""}],"usage":null}', at_ms=1.0)
    answer.event(b'{"choices":[],"usage":{"prompt_tokens":4}}', at_ms=2.0)
    assert answer.first_token_at_ms is None
    answer.event(b'{"choices":[{"text":"","token_ids":[5]}]}', at_ms=3.0)
    answer.event(b'{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}', at_ms=4.0)
    assert answer.first_token_at_ms == 3.0
    assert answer.reply(5.0).text == "x"


def test_it_is_between_events_behind_a_blank_line_alone() -> None:
    splitter = EventSplitter()
    for text, is_between in (
        (b"", True),
        (b"data: a\n", False),
        (b"\n", True),
        (b": a comment\n", False),
        (b"\n", True),
        (b"da", False),
        (b"ta: b\r\n\r", True),
        (b"\n", True),
    ):
        splitter.feed(text)
        assert splitter.is_between_events is is_between, text
