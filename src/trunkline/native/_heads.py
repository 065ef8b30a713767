"""The Python twins of the compiled readers of HTTP/1 heads, and the contract of both.

Owns the grammar: it is closed, so a head is taken whole or not at all. What a field means is
`gateway/head.py`'s, the only user. Must never: answer otherwise than the compiled ones;
`tests/model/test_head_twins.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REPORTED = 1
"""Role of a field of an answer: the caller is told its value."""
DROPPED = 2
"""Role of a field of an answer: it is not passed on."""

_FIELDS = rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t !-~\x80-\xff]*+\r\n)*+)\r\n"
_REQUEST = re.compile(rb"([A-Z]{1,16}+) ([!-~]++) HTTP/1\.([01])\r\n" + _FIELDS)
_ANSWER = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t !-~\x80-\xff]*+))?\r\n" + _FIELDS)
_FIELD = re.compile(rb"([^:\r\n]++):[\t ]*+([^\r]*+)\r\n")

RequestParts = tuple[str, bytes, int, dict[bytes, bytes], int, int]
AnswerParts = tuple[int, int, bytes, dict[bytes, bytes], bool, bytes]


def fields_of(raw: bytes) -> list[tuple[bytes, bytes]]:
    """Names in lower case and values of a head that is known to keep the grammar, in order."""
    start = raw.find(b"\r\n") + 2
    return [(name.lower(), value.rstrip(b"\t ")) for name, value in _FIELD.findall(raw, start)]


def split_request(raw: bytes) -> RequestParts | None:
    """Method, target, minor version, fields (of a name given twice the last), how many lines there
    were, and the bytes of name and value of the longest. None for what is no head.
    """
    match = _REQUEST.fullmatch(raw)
    if match is None:
        return None
    method, target, minor, _ = match.groups()
    found = fields_of(raw)
    longest = max((len(name) + len(value) for name, value in found), default=0)
    return method.decode(), target, int(minor), dict(found), len(found), longest


def split_answer(raw: bytes, roles: Mapping[bytes, int]) -> AnswerParts | None:
    """Minor version, status, reason, the fields whose role says REPORTED, whether each of these is
    there once, and the lines of all fields that are not DROPPED, rebuilt. None for what is no head.
    """
    match = _ANSWER.fullmatch(raw)
    if match is None:
        return None
    minor, status, reason, _ = match.groups()
    told: dict[bytes, bytes] = {}
    lines: list[bytes] = []
    is_plain = True
    for field in fields_of(raw):
        name, value = field
        role = roles.get(name, 0)
        if role & REPORTED:
            is_plain = is_plain and name not in told
            told[name] = value
        if not role & DROPPED:
            lines.append(b"%b: %b\r\n" % field)
    return int(minor), int(status), reason or b"", told, is_plain, b"".join(lines)
