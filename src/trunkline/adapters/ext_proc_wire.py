"""The few messages of Envoy's external processing (ext_proc v3) that we read and write.

Owns their numbers on the wire, and nothing of what they mean. Read by hand, so that no generated
code and no copied file of others is needed. Every length is checked against what is there. Must
never: trust a message to be well formed. Read `ext_proc_server.py` next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from trunkline.ports.proxy import SUBSET_HEADER, Headed, Said, Send

METHOD = ("envoy.service.ext_proc.v3.ExternalProcessor", "Process")
SUBSET_NAMESPACE = b"envoy.lb.subset_hint"
MAX_FIELDS = 16_384
"""Of one message: more is no message of a proxy."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_OVERWRITE_OR_ADD = 2
_BUFFERED_PARTIAL = 3


class BrokenMessage(Exception):
    """Bytes that are no message of this protocol."""


class Part(IntEnum):
    """Which part of a request or an answer a message is; its field in `ProcessingRequest`."""

    REQUEST_HEADERS = 2
    ANSWER_HEADERS = 3
    REQUEST_BODY = 4
    ANSWER_BODY = 5
    REQUEST_TRAILERS = 6
    ANSWER_TRAILERS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One `ProcessingRequest`."""

    part: Part
    fields: list[tuple[bytes, bytes]] = field(repr=False)
    """Of the parts with headers."""
    body: bytes = field(repr=False)
    is_last: bool
    """Nothing follows in this direction."""
    source: str
    subset: frozenset[str] | None
    """What the proxy's own configuration allows, never what a client wrote."""


def read_message(raw: bytes) -> Message:
    """Raises BrokenMessage."""
    part: Part | None = None
    content, metadata, attributes = b"", b"", b""
    for number, value in _fields(raw):
        if not isinstance(value, bytes):
            continue  # observability_mode
        if number in _PARTS:
            part, content = Part(number), value
        elif number == 8:
            metadata = value
        elif number == 9:
            attributes += _tagged(1, value)  # a map entry each
    if part is None:
        raise BrokenMessage("a message of no part")
    is_body = part in (Part.REQUEST_BODY, Part.ANSWER_BODY)
    is_trailers = part in (Part.REQUEST_TRAILERS, Part.ANSWER_TRAILERS)
    last_number = 2 if is_body else 3
    return Message(
        part=part,
        fields=[] if is_body or is_trailers else list(_headers(_first(content, 1))),
        body=_first(content, 1) if is_body else b"",
        is_last=any(number == last_number and value == 1 for number, value in _fields(content)),
        source=_source(attributes),
        subset=_subset(metadata),
    )


def go_on(part: Part) -> bytes:
    """Let this part through as it is."""
    return _tagged(_ANSWERS[part], b"" if part in _TRAILERS else _tagged(1, b""))


def send_on(part: Part, send: Send) -> bytes:
    """Let the request through, to a worker: at its body, or at its head where it has none."""
    common = _tagged(2, _mutation(send.put, send.drop))
    if part is Part.REQUEST_BODY:
        common += _tagged(3, _tagged(1, send.body))
    return _tagged(_ANSWERS[part], _tagged(1, common))


def answer_on(headed: Headed) -> bytes:
    """Let the head of the worker's answer through, and have its body told where that is wanted."""
    common = _tagged(2, _mutation(headed.put, headed.drop))
    reply = _tagged(_ANSWERS[Part.ANSWER_HEADERS], _tagged(1, common))
    return reply + _tagged(9, _number(4, _BUFFERED_PARTIAL)) if headed.wants_body else reply


def say(said: Said) -> bytes:
    """Answer in place of whoever would."""
    status = _tagged(1, _number(1, said.status))
    return _tagged(7, status + _tagged(2, _mutation(said.put, ())) + _tagged(3, said.body))


# -- what is read ----------------------------------------------------------------------------------


def _headers(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    for number, value in _fields(raw):
        if number != 1 or not isinstance(value, bytes):
            continue
        # The text is in `raw_value` (3); an older proxy puts it into `value` (2).
        yield _first(value, 1), _first(value, 3) or _first(value, 2)


def _source(attributes: bytes) -> str:
    """The client's address, of the attribute `source.address`."""
    for value in _struct_values(attributes, b"source.address"):
        address, _, _ = _first(value, 3).decode("ascii", "replace").rpartition(":")
        return address.strip("[]")
    return ""


def _subset(metadata: bytes) -> frozenset[str] | None:
    spaces = [value for number, value in _fields(metadata) if number == 1]
    for entry in spaces:
        if not isinstance(entry, bytes) or _first(entry, 1) != SUBSET_NAMESPACE:
            continue
        for value in _values(_first(entry, 2), SUBSET_HEADER.encode()):
            texts = [_first(value, 3)] + [
                _first(item, 3)
                for number, item in _fields(_first(value, 6))
                if number == 1 and isinstance(item, bytes)
            ]
            named = b",".join(texts).decode("ascii", "replace").split(",")
            return frozenset(name.strip() for name in named if name.strip())
    return None


def _struct_values(entries: bytes, name: bytes) -> Iterator[bytes]:
    """Of a map from names to structs: the values called `name` in any of them."""
    for number, entry in _fields(entries):
        if number == 1 and isinstance(entry, bytes):
            yield from _values(_first(entry, 2), name)


def _values(struct: bytes, name: bytes) -> Iterator[bytes]:
    for number, entry in _fields(struct):
        if number == 1 and isinstance(entry, bytes) and _first(entry, 1) == name:
            yield _first(entry, 2)


def _first(raw: bytes, wanted: int) -> bytes:
    for number, value in _fields(raw):
        if number == wanted and isinstance(value, bytes):
            return value
    return b""


def _fields(raw: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Number and value of each field; of fixed-size ones the bytes. Raises BrokenMessage."""
    at, end, count = 0, len(raw), 0
    while at < end:
        count += 1
        if count > MAX_FIELDS:
            raise BrokenMessage(f"more than {MAX_FIELDS} fields")
        tag, at = _read_number(raw, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _read_number(raw, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_number(raw, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise BrokenMessage(f"a field of kind {kind}")
        if size > end - at:
            raise BrokenMessage("a field is longer than its message")
        yield number, raw[at : at + size]
        at += size


def _read_number(raw: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(raw) and shift < 70:
        byte = raw[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise BrokenMessage("a number has no end")


# -- what is written -------------------------------------------------------------------------------


def _mutation(put: Iterable[tuple[str, str]], drop: Iterable[str]) -> bytes:
    wanted = b"".join(
        _tagged(
            1,
            _tagged(1, _tagged(1, name.encode("ascii")) + _tagged(3, value.encode("latin-1")))
            + _number(3, _OVERWRITE_OR_ADD),
        )
        for name, value in put
    )
    return wanted + b"".join(_tagged(2, name.encode("latin-1")) for name in drop)


def _tagged(number: int, content: bytes) -> bytes:
    return _written(number << 3 | _BYTES) + _written(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _written(number << 3 | _VARINT) + _written(value)


def _written(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_PARTS = frozenset(Part)
_TRAILERS = frozenset({Part.REQUEST_TRAILERS, Part.ANSWER_TRAILERS})
_ANSWERS: dict[Part, int] = {
    Part.REQUEST_HEADERS: 1,
    Part.ANSWER_HEADERS: 2,
    Part.REQUEST_BODY: 3,
    Part.ANSWER_BODY: 4,
    Part.REQUEST_TRAILERS: 5,
    Part.ANSWER_TRAILERS: 6,
}
"""The field of each in `ProcessingResponse`."""
