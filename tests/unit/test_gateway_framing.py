"""Chunked bodies: the end is found at every split, and nothing malformed is let through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.gateway.framing import BrokenFraming, ChunkReader

MESSAGE = b"5\r\nhello\r\n1A;x=y\r\nabcdefghijklmnopqrstuvwxyz\r\n1\r\n\r\r\n0\r\n\r\n"
PAYLOAD = b"helloabcdefghijklmnopqrstuvwxyz\r"


def read(parts: list[bytes], *, takes_trailers: bool = False) -> tuple[bytes, list[int]]:
    reader = ChunkReader(takes_trailers=takes_trailers, collects=True)
    ends = [reader.feed(part) for part in parts]
    assert reader.pieces is not None
    return b"".join(reader.pieces), ends


@pytest.mark.parametrize("at", range(1, len(MESSAGE)))
def test_the_payload_is_the_same_at_every_split(at: int) -> None:
    payload, ends = read([MESSAGE[:at], MESSAGE[at:]])

    assert payload == PAYLOAD
    assert ends == [-1, len(MESSAGE) - at]


def test_the_payload_is_the_same_byte_by_byte() -> None:
    payload, ends = read([MESSAGE[i : i + 1] for i in range(len(MESSAGE))])

    assert payload == PAYLOAD
    assert ends == [-1] * (len(MESSAGE) - 1) + [1]


def test_the_end_is_told_apart_from_what_follows() -> None:
    assert read([MESSAGE + b"GET / HTTP/1.1\r\n"])[1] == [len(MESSAGE)]


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.data())
def test_the_boundary_is_behind_the_last_whole_chunk(
    payloads: list[bytes], data: st.DataObject
) -> None:
    chunks = [b"%x\r\n%b\r\n" % (len(p), p) for p in payloads]
    edges = {0}
    for chunk in chunks:
        edges.add(max(edges) + len(chunk))
    message = b"".join(chunks)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(message)), max_size=5)) | {len(message)})
    reader = ChunkReader(takes_trailers=True, collects=False)

    at = 0
    for cut in cuts:
        assert reader.feed(message[at:cut]) == -1
        last_edge = max(edge for edge in edges if edge <= cut)
        assert max(reader.boundary, 0) == max(last_edge - at, 0)
        at = cut
    assert reader.chunks == len(payloads)


BROKEN = {
    "no size": b"\r\nhello\r\n",
    "a bad digit": b"5g\r\nhello\r\n",
    "a sign": b"+5\r\nhello\r\n",
    "a prefix": b"0x5\r\nhello\r\n",
    "an underscore": b"1_0\r\nhello\r\n",
    "a blank in front": b" 5\r\nhello\r\n",
    "a size over 60 bits": b"1000000000000000\r\n",
    "a bare LF behind the size": b"5\nhello\r\n",
    "an extension of 257 bytes": b"5;" + b"x" * 257 + b"\r\nhello\r\n",
    "an endless extension": b"5;" + b"x" * 1_000,
    "a control character in an extension": b"5;\x00\r\nhello\r\n",
    "a payload that is too long": b"5\r\nhelloworld\r\n",
    "a payload that ends in LF": b"5\r\nhello\n",
    "a payload that ends in CR CR": b"5\r\nhello\r\r",
    "a trailer": b"0\r\nx-a: b\r\n\r\n",
    "garbage behind the last chunk": b"0\r\nxx",
}


@pytest.mark.parametrize("message", BROKEN.values(), ids=BROKEN.keys())
def test_malformed_chunks_are_refused_whole_and_byte_by_byte(message: bytes) -> None:
    with pytest.raises(BrokenFraming):
        read([message])
    with pytest.raises(BrokenFraming):
        read([message[i : i + 1] for i in range(len(message))])


def test_trailers_are_taken_where_they_are_wanted_and_bounded() -> None:
    message = b"0\r\nx-a: b\r\nx-c: d\r\n\r\n"

    assert read([message], takes_trailers=True)[1] == [len(message)]
    assert read([message[:9], message[9:]], takes_trailers=True)[1] == [-1, len(message) - 9]
    with pytest.raises(BrokenFraming):
        read([b"0\r\nx-a: " + b"b" * 10_000], takes_trailers=True)
