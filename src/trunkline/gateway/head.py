"""The one grammar of an HTTP/1 head, for clients' requests and for workers' answers.

Owns what the fields of a head mean, and which of a worker's go on. The grammar itself is closed
(`native/_heads.py`): a head is taken whole or refused whole, and nothing is repaired, so that no
byte can mean one thing here and another thing behind us. Must never pass a head on; requests and
answers are rebuilt from the parts. Read `framing.py` next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trunkline.gateway.contracts import ClientError, Refusal
from trunkline.native import DROPPED, REPORTED, fields_of, split_answer, split_request

_LENGTH_DIGITS = 18
"""No more are taken for a length."""
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,=-]++|\[[0-9A-Fa-f:.]++\])(?::[0-9]{1,5})?")

# A second line of any of these has no sound meaning, or two readers may choose differently.
_SINGLE = frozenset({
    b"host", b"content-length", b"transfer-encoding", b"content-type", b"content-encoding",
    b"authorization", b"expect", b"x-request-id", b"x-session-id", b"x-cache-scope",
    b"x-api-key",
})  # fmt: skip


MAX_ANSWER_HEAD_BYTES = 64 << 10
"""Most bytes of a worker's heads, interim ones included."""


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

    status: int
    reason: bytes
    passed: bytes
    """The lines that go on to the client: all but those of the connection and of the framing."""
    content_length: int | None
    """None where the head gives no length that counts."""
    is_chunked: bool
    keeps_alive: bool
    is_event_stream: bool
    """`text/event-stream`, not compressed: we may add an event to it."""
    pulled: bytes = b""
    """What the worker says of a pull that we ordered."""


class BrokenAnswer(Exception):
    """A worker's bytes are not an HTTP answer; the caller treats the worker as failed."""


def parse_request(raw: bytes, max_headers: int, max_header_bytes: int) -> RequestHead:
    """The head in `raw`, which ends with its blank line. Raises ClientError for everything else."""
    parts = split_request(raw)
    if parts is None:
        raise ClientError(_why_broken(raw))
    method, target, minor, headers, count, longest_bytes = parts
    if count > max_headers:
        text = f"the request has {count} headers; the limit is {max_headers}"
        raise ClientError(Refusal(status=431, code="too_many_headers", message=text))
    if longest_bytes > max_header_bytes:
        text = f"one header has {longest_bytes} bytes; the limit is {max_header_bytes}"
        raise ClientError(Refusal(status=431, code="header_too_large", message=text))
    if len(headers) != count:
        headers = _joined(fields_of(raw))
    return _framed(method, target, minor, headers)


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
        if not _is_length(length_text):
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


_OF_CONNECTION = (
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"content-length", b"x-request-id",
    b"request-id",
)  # fmt: skip
_KEPT_ONCE = frozenset({b"date", b"server", b"content-type", b"content-encoding"})
_OURS = b"x-trunkline-"
PULLED = b"x-trunkline-pulled"
_ROLES: dict[bytes, int] = {
    **dict.fromkeys(_OF_CONNECTION, DROPPED),
    **dict.fromkeys(_KEPT_ONCE, REPORTED),
    **dict.fromkeys((b"content-length", b"transfer-encoding", b"connection"), DROPPED | REPORTED),
    PULLED: DROPPED | REPORTED,
}
_USUAL_CONNECTIONS = frozenset({b"close", b"keep-alive"})


def parse_answer(raw: bytes) -> AnswerHead:
    """The head in `raw`, which ends with its blank line. Raises BrokenAnswer."""
    parts = split_answer(raw, _ROLES)
    if parts is None:
        raise BrokenAnswer("the worker's answer is not HTTP/1")
    minor, status, reason, told, is_plain, passed = parts
    connection = told.get(b"connection")
    is_unusual = connection is not None and connection.lower() not in _USUAL_CONNECTIONS
    if not is_plain or is_unusual or _OURS in passed:
        told, passed = _reread(raw)
        connection = told.get(b"connection")
    keeps_alive = minor == 1
    if connection is not None:
        wishes = connection.lower()
        keeps_alive = b"close" not in wishes and (keeps_alive or b"keep-alive" in wishes)
    length, is_chunked = _answer_framing(told)
    if status < 200 or status in {204, 304}:
        length, is_chunked = 0, False
    return AnswerHead(
        status=status, reason=reason, passed=passed, content_length=length, is_chunked=is_chunked,
        keeps_alive=keeps_alive, is_event_stream=_is_event_stream(told),
        pulled=told.get(PULLED, b""),
    )  # fmt: skip


def final_head(raw: bytes) -> tuple[AnswerHead, bytes] | None:
    """The first head in `raw` that is no interim one, and what stands behind it; None while it is
    not whole. Raises BrokenAnswer.
    """
    rest = raw
    while (end := rest.find(b"\r\n\r\n")) >= 0:
        head = parse_answer(rest[: end + 4])
        rest = rest[end + 4 :]
        if head.status == 101:
            raise BrokenAnswer("the worker switched protocols unasked")
        if head.status >= 200:
            return head, rest
    if len(raw) > MAX_ANSWER_HEAD_BYTES:
        raise BrokenAnswer("the worker's answer has no end of its head")
    return None


def _reread(raw: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """What is told and what is passed on where fields are repeated, or where the connection claims
    fields for itself.
    """
    fields = fields_of(raw)
    told: dict[bytes, bytes] = {}
    for name, value in fields:
        if not _ROLES.get(name, 0) & REPORTED:
            continue
        is_same_length = name == b"content-length" and told.get(name) == value
        if name in told and not is_same_length:
            told[name] += b", " + value
        else:
            told[name] = value
    named = {option.strip() for option in told.get(b"connection", b"").lower().split(b",")}
    lines: list[bytes] = []
    seen: set[bytes] = set()
    for field in fields:
        name = field[0]
        if _ROLES.get(name, 0) & DROPPED or name in named or name.startswith(_OURS):
            continue
        if name in _KEPT_ONCE and name in seen:
            continue
        seen.add(name)
        lines.append(b"%b: %b\r\n" % field)
    return told, b"".join(lines)


def _answer_framing(told: dict[bytes, bytes]) -> tuple[int | None, bool]:
    """The length that counts, and whether the body comes in chunks. Raises BrokenAnswer."""
    length_text = told.get(b"content-length")
    coding = told.get(b"transfer-encoding")
    if length_text is not None and not _is_length(length_text):
        raise BrokenAnswer("the worker's content-length is not one decimal number")
    if coding is not None:
        if coding.lower() != b"chunked":
            raise BrokenAnswer("the worker's transfer-encoding is not a plain `chunked`")
        return None, True
    return (None if length_text is None else int(length_text)), False


def _is_length(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _LENGTH_DIGITS


def _is_event_stream(told: dict[bytes, bytes]) -> bool:
    kind = told.get(b"content-type", b"")
    if kind[:17].lower() != b"text/event-stream":
        return False
    return told.get(b"content-encoding", b"identity").lower() == b"identity"


def _joined(found: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in found:
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
