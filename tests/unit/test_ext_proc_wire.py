"""What is read of Envoy's messages and written to it, against a writer and reader of our own."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.adapters.ext_proc_wire import (
    MAX_FIELDS,
    BrokenMessage,
    Part,
    answer_on,
    go_on,
    read_message,
    say,
    send_on,
)
from trunkline.ports.proxy import ENDPOINT_HEADER, Headed, Said, Send


def number(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)


def block(field: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return number(field << 3 | 2) + number(len(content)) + content


def flag(field: int, value: int = 1) -> bytes:
    return number(field << 3) + number(value)


def head(*pairs: tuple[bytes, bytes], is_last: bool = False) -> bytes:
    named = [block(1, block(1, name), block(3, value)) for name, value in pairs]
    return block(1, *named) + (flag(3) if is_last else b"")


def read(raw: bytes, at: int = 0) -> dict[int, list[bytes | int]]:
    """Naively, all fields of a message that is known to be sound."""
    found: dict[int, list[bytes | int]] = {}

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = raw[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(raw):
        tag = varint()
        value: bytes | int = varint()
        if tag & 7 == 2:
            assert isinstance(value, int)
            value, at = raw[at : at + value], at + value
        found.setdefault(tag >> 3, []).append(value)
    return found


def inside(raw: bytes, *path: int) -> bytes:
    for field in path:
        value = read(raw)[field][0]
        assert isinstance(value, bytes)
        raw = value
    return raw


texts = st.binary(max_size=200)


@given(pairs=st.lists(st.tuples(texts.filter(bool), texts), max_size=20), is_last=st.booleans())
def test_headers_are_read_as_they_were_written(
    *, pairs: list[tuple[bytes, bytes]], is_last: bool
) -> None:
    found = read_message(block(2, head(*pairs, is_last=is_last)))
    assert found.part is Part.REQUEST_HEADERS
    assert found.fields == pairs
    assert found.is_last is is_last


@given(body=st.binary(max_size=5_000), is_last=st.booleans())
def test_bodies_are_read_as_they_were_written(*, body: bytes, is_last: bool) -> None:
    found = read_message(block(4, block(1, body), flag(2) if is_last else b""))
    assert (found.part, found.body, found.is_last) == (Part.REQUEST_BODY, body, is_last)


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_are_broken_or_a_message_that_holds_no_more_than_they_do(
    raw: bytes,
) -> None:
    with contextlib.suppress(BrokenMessage):
        message = read_message(raw)
        held = [message.body, *(part for field in message.fields for part in field)]
        assert sum(map(len, held)) <= len(raw)


@given(st.integers(1, 40))
def test_a_message_that_is_cut_short_is_broken_or_says_less(cut: int) -> None:
    whole = block(2, head((b":method", b"POST"), (b":path", b"/v1/models")))
    with pytest.raises(BrokenMessage):
        read_message(whole[: max(1, len(whole) - cut)])


def test_a_message_has_at_most_so_many_fields() -> None:
    some = block(4, block(1, b"x"))
    assert read_message(flag(10) * (MAX_FIELDS - 1) + some).body == b"x"
    with pytest.raises(BrokenMessage, match=f"more than {MAX_FIELDS}"):
        read_message(flag(10) * MAX_FIELDS + some)


def test_a_number_without_end_is_broken() -> None:
    with pytest.raises(BrokenMessage, match="no end"):
        read_message(b"\xff" * 11)


@pytest.mark.parametrize(
    ("text", "address"),
    [(b"10.0.0.7:4711", "10.0.0.7"), (b"[fd00::7]:4711", "fd00::7"), (b"", "")],
)
def test_the_clients_address_is_read_of_the_attributes(text: bytes, address: str) -> None:
    value = block(1, block(1, b"source.address"), block(2, block(3, text)))
    given_ = block(9, block(1, b"filter"), block(2, value))
    assert read_message(block(2, head()) + given_).source == address


def test_a_subset_is_taken_of_the_metadata_alone_and_never_of_a_header() -> None:
    name = f"{ENDPOINT_HEADER}-subset".encode()
    spoofed = block(2, head((name, b"10.0.0.9:1")))
    assert read_message(spoofed).subset is None

    def metadata(value: bytes, space: bytes = b"envoy.lb.subset_hint") -> bytes:
        held = block(2, block(1, block(1, name), block(2, value)))
        return block(8, block(1, block(1, space), held))

    one = metadata(block(3, b"10.0.0.1:8000, 10.0.0.2:8000"))
    several = metadata(block(6, block(1, block(3, b"10.0.0.1:8000")), block(1, block(3, b"h:2"))))
    assert read_message(spoofed + one).subset == {"10.0.0.1:8000", "10.0.0.2:8000"}
    assert read_message(spoofed + several).subset == {"10.0.0.1:8000", "h:2"}
    assert read_message(spoofed + metadata(block(3, b"a:1"), b"other")).subset is None


def test_a_request_that_is_sent_on_bears_its_headers_and_its_body() -> None:
    send = Send(
        endpoint="10.0.0.1:8000", put=((ENDPOINT_HEADER, "10.0.0.1:8000"),), drop=("a", "b"),
        body=b'{"cache_salt": "s"}',
    )  # fmt: skip
    common = inside(send_on(Part.REQUEST_BODY, send), 3, 1)
    option = read(inside(common, 2, 1))
    assert inside(common, 2, 1, 1, 1) == ENDPOINT_HEADER.encode()
    assert inside(common, 2, 1, 1, 3) == b"10.0.0.1:8000"
    assert option[3] == [2], "in place of whatever a client wrote"
    assert read(inside(common, 2))[2] == [b"a", b"b"]
    assert inside(common, 3, 1) == send.body
    assert 3 not in read(inside(send_on(Part.REQUEST_HEADERS, send), 1, 1)), "a head has no body"


def test_an_answer_of_our_own_has_its_status_headers_and_body() -> None:
    said = inside(say(Said(status=401, put=(("x-request-id", "r"),), body=b"{}")), 7)
    assert read(inside(said, 1))[1] == [401]
    assert inside(said, 2, 1, 1, 1) == b"x-request-id"
    assert inside(said, 3) == b"{}"


def test_the_body_of_an_answer_is_asked_for_where_it_is_wanted() -> None:
    for wants_body in (True, False):
        reply = read(answer_on(Headed(put=(), drop=(), wants_body=wants_body)))
        assert (9 in reply) is wants_body


@pytest.mark.parametrize("part", list(Part))
def test_every_part_is_let_through_by_the_answer_to_it(part: Part) -> None:
    wanted = {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}
    assert list(read(go_on(part))) == [wanted[part]]
