"""The one grammar of an HTTP/1 head, for clients' requests and for workers' answers.

Owns what a well-formed head is. The grammar is closed: a head is taken whole or refused whole, and
nothing is repaired, so that no byte can mean one thing here and another thing behind us. Must never
pass a head on; requests and answers are rebuilt from the parts. Read `framing.py` next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trunkline.gateway.contracts import ClientError, Refusal

_REQUEST = re.compile(
    rb"([A-Z]{1,16}+) ([!-~]++) HTTP/1\.([01])\r\n"
    rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t !-~\x80-\xff]*+\r\n)*+)\r\n"
)
_ANSWER = re.compile(
    rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t !-~\x80-\xff]*+))?\r\n"
    rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t !-~\x80-\xff]*+\r\n)*+)\r\n"
)
_FIELD = re.compile(rb"([^:\r\n]++):[\t ]*+([^\r]*+)\r\n")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,=-]++|\[[0-9A-Fa-f:.]++\])(?::[0-9]{1,5})?")

# A second line of any of these has no sound meaning, or two readers may choose differently.
_SINGLE = frozenset({
    b"host", b"content-length", b"transfer-encoding", b"content-type", b"content-encoding",
    b"authorization", b"expect", b"x-request-id", b"x-session-id", b"x-cache-scope",
})  # fmt: skip


@dataclass(slots=True, kw_only=True)
class RequestHead:
    """A client's head. Header names are in lower case; repeated lines are joined with a comma."""

    method: str
    target: bytes
    minor: int
    headers: dict[bytes, bytes]
    content_length: int
    """0 where the head announces no body or a chunked one."""
    is_chunked: bool
    keeps_alive: bool


@dataclass(slots=True, kw_only=True)
class AnswerHead:
    """A worker's head, framing worked out for the request it answers."""

    minor: int
    status: int
    reason: bytes
    fields: list[tuple[bytes, bytes]]
    content_length: int | None
    """None where the head gives no length that counts."""
    is_chunked: bool
    keeps_alive: bool
    connection_options: frozenset[bytes]
    """Further fields that the worker declares to be of its connection only."""


class BrokenAnswer(Exception):
    """A worker's bytes are not an HTTP answer; the caller treats the worker as failed."""


def parse_request(raw: bytes, max_headers: int, max_header_bytes: int) -> RequestHead:
    """The head in `raw`, which ends with its blank line. Raises ClientError for everything else."""
    match = _REQUEST.fullmatch(raw)
    if match is None:
        raise ClientError(_why_broken(raw))
    method, target, minor, block = match.groups()
    found = _FIELD.findall(block)
    if len(found) > max_headers:
        text = f"the request has {len(found)} headers; the limit is {max_headers}"
        raise ClientError(Refusal(status=431, code="too_many_headers", message=text))
    if b" \r\n" in block or b"\t\r\n" in block:
        found = [(name, value.rstrip(b"\t ")) for name, value in found]
    headers = {name.lower(): value for name, value in found}
    if len(block) > max_header_bytes:
        _check_header_bytes(found, max_header_bytes)
    if len(headers) != len(found):
        headers = _joined(found)
    return _framed(method.decode(), target, int(minor), headers)


def _framed(method: str, target: bytes, minor: int, headers: dict[bytes, bytes]) -> RequestHead:
    length_text = headers.get(b"content-length")
    coding = headers.get(b"transfer-encoding")
    length = 0
    if coding is not None:
        if length_text is not None:
            raise _bad_framing("content-length and transfer-encoding in one request")
        if coding.lower() != b"chunked" or minor == 0:
            raise _bad_framing("transfer-encoding other than a plain `chunked` of HTTP/1.1")
    elif length_text is not None:
        if _LENGTH.fullmatch(length_text) is None:
            raise _bad_framing("content-length is not a decimal number")
        length = int(length_text)
    host = headers.get(b"host")
    if host is None:
        if minor == 1:
            text = "the request has no Host header"
            raise ClientError(Refusal(code="invalid_host", message=text))
    elif _HOST.fullmatch(host) is None:
        text = "the Host header is not a host name with an optional port"
        raise ClientError(Refusal(code="invalid_host", message=text))
    connection = headers.get(b"connection")
    keeps_alive = minor == 1
    if connection is not None:
        wishes = connection.lower()
        keeps_alive = b"close" not in wishes and (minor == 1 or b"keep-alive" in wishes)
    return RequestHead(
        method=method, target=target, minor=minor, headers=headers, content_length=length,
        is_chunked=coding is not None, keeps_alive=keeps_alive,
    )  # fmt: skip


_OF_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection"})


def parse_answer(raw: bytes) -> AnswerHead:
    """The head in `raw`, which ends with its blank line."""
    match = _ANSWER.fullmatch(raw)
    if match is None:
        raise BrokenAnswer("the worker's answer is not HTTP/1")
    minor, status_text, reason, block = match.groups()
    status = int(status_text)
    fields: list[tuple[bytes, bytes]] = []
    length: int | None = None
    is_chunked = False
    keeps_alive = minor == b"1"
    options: frozenset[bytes] = frozenset()
    found = _FIELD.findall(block)
    if b" \r\n" in block or b"\t\r\n" in block:
        found = [(name, value.rstrip(b"\t ")) for name, value in found]
    for name, value in found:
        name = name.lower()
        fields.append((name, value))
        if name not in _OF_FRAMING:
            continue
        if name == b"content-length":
            if _LENGTH.fullmatch(value) is None or (length is not None and length != int(value)):
                raise BrokenAnswer("the worker's content-length is not one decimal number")
            length = int(value)
        elif name == b"transfer-encoding":
            if is_chunked or value.lower() != b"chunked":
                raise BrokenAnswer("the worker's transfer-encoding is not a plain `chunked`")
            is_chunked = True
        elif name == b"connection":
            wishes = value.lower()
            keeps_alive = b"close" not in wishes and (keeps_alive or b"keep-alive" in wishes)
            options = options.union(option.strip() for option in wishes.split(b","))
    if is_chunked:
        length = None
    if status < 200 or status in {204, 304}:
        length, is_chunked = 0, False
    return AnswerHead(
        minor=int(minor), status=status, reason=reason or b"", fields=fields,
        content_length=length, is_chunked=is_chunked, keeps_alive=keeps_alive,
        connection_options=options,
    )  # fmt: skip


def _check_header_bytes(found: list[tuple[bytes, bytes]], max_header_bytes: int) -> None:
    for name, value in found:
        if len(name) + len(value) > max_header_bytes:
            text = f"one header has {len(name) + len(value)} bytes; the limit is {max_header_bytes}"
            raise ClientError(Refusal(status=431, code="header_too_large", message=text))


def _joined(found: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in found:
        name = name.lower()
        if name not in headers:
            headers[name] = value
        elif name in _SINGLE:
            text = f"the header {name.decode('latin-1')[:64]} is given more than once"
            raise ClientError(Refusal(code="duplicate_header", message=text))
        else:
            headers[name] += b", " + value
    return headers


def _bad_framing(text: str) -> ClientError:
    return ClientError(Refusal(code="invalid_framing", message=text))


_FIRST_LINE = re.compile(rb"[A-Z]{1,16} [!-~]+ HTTP/1\.[01]\r\n")
_OTHER_VERSION = re.compile(rb"[^\r\n]* HTTP/(?!1\.[01]\r)[0-9.]+\r?\n")


def _why_broken(raw: bytes) -> Refusal:
    """The reason for a refusal already decided; only the wording depends on it."""
    if _OTHER_VERSION.match(raw) is not None:
        text = "only HTTP/1.0 and HTTP/1.1 are spoken here"
        return Refusal(status=505, code="http_version", message=text)
    if _FIRST_LINE.match(raw) is None:
        return Refusal(code="invalid_request_line", message="the request line is malformed")
    if re.search(rb"[^\r]\n|\r[^\n]", raw) is not None:
        return Refusal(code="bare_cr_or_lf", message="a header line ends in a bare CR or LF")
    if re.search(rb"\r\n[\t ]", raw) is not None:
        return Refusal(code="folded_header", message="a header line is folded")
    return Refusal(code="invalid_header", message="a header line is malformed")
