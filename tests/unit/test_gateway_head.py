"""The grammar of heads is closed, and no reader of HTTP sees in it what we do not."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.gateway.contracts import ClientError
from trunkline.gateway.head import BrokenAnswer, RequestHead, parse_answer, parse_request

FIRST = "POST /v1/completions HTTP/1.1\r\n"
HOST = "host: h\r\n"


def parse(text: str | bytes) -> RequestHead:
    raw = text.encode("latin-1") if isinstance(text, str) else text
    return parse_request(raw, max_headers=100, max_header_bytes=8_192)


REFUSED: list[tuple[str, str, int, str]] = [
    ("both framings", f"{FIRST}{HOST}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400,
     "invalid_framing"),
    ("two lengths", f"{FIRST}{HOST}content-length: 5\r\ncontent-length: 6\r\n\r\n", 400,
     "duplicate_header"),
    ("the same length twice", f"{FIRST}{HOST}content-length: 5\r\ncontent-length: 5\r\n\r\n", 400,
     "duplicate_header"),
    ("a list of lengths", f"{FIRST}{HOST}content-length: 5, 5\r\n\r\n", 400, "invalid_framing"),
    ("a negative length", f"{FIRST}{HOST}content-length: -5\r\n\r\n", 400, "invalid_framing"),
    ("a signed length", f"{FIRST}{HOST}content-length: +5\r\n\r\n", 400, "invalid_framing"),
    ("a hexadecimal length", f"{FIRST}{HOST}content-length: 0x5\r\n\r\n", 400, "invalid_framing"),
    ("a length of 19 digits", f"{FIRST}{HOST}content-length: {'9' * 19}\r\n\r\n", 400,
     "invalid_framing"),
    ("an empty length", f"{FIRST}{HOST}content-length:\r\n\r\n", 400, "invalid_framing"),
    ("chunked, identity", f"{FIRST}{HOST}transfer-encoding: chunked, identity\r\n\r\n", 400,
     "invalid_framing"),
    ("identity", f"{FIRST}{HOST}transfer-encoding: identity\r\n\r\n", 400, "invalid_framing"),
    ("xchunked", f"{FIRST}{HOST}transfer-encoding: xchunked\r\n\r\n", 400, "invalid_framing"),
    ("gzip, chunked", f"{FIRST}{HOST}transfer-encoding: gzip, chunked\r\n\r\n", 400,
     "invalid_framing"),
    ("two codings", f"{FIRST}{HOST}transfer-encoding: chunked\r\ntransfer-encoding: x\r\n\r\n", 400,
     "duplicate_header"),
    ("chunks in HTTP/1.0", "POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 400,
     "invalid_framing"),
    ("a folded header", f"{FIRST}{HOST}x-a: b\r\n c\r\n\r\n", 400, "folded_header"),
    ("a folded header with a tab", f"{FIRST}{HOST}x-a: b\r\n\tc\r\n\r\n", 400, "folded_header"),
    ("a bare LF", f"{FIRST}{HOST}x-a: b\nx-c: d\r\n\r\n", 400, "bare_cr_or_lf"),
    ("a bare CR", f"{FIRST}{HOST}x-a: b\rx-c: d\r\n\r\n", 400, "bare_cr_or_lf"),
    ("a NUL in a value", f"{FIRST}{HOST}x-a: b\0c\r\n\r\n", 400, "invalid_header"),
    ("a space before the colon", f"{FIRST}{HOST}content-length : 5\r\n\r\n", 400, "invalid_header"),
    ("a tab before the colon", f"{FIRST}{HOST}content-length\t: 5\r\n\r\n", 400, "invalid_header"),
    ("a space in front of a name", f"{FIRST} x: y\r\n\r\n", 400, "folded_header"),
    ("no colon", f"{FIRST}{HOST}nothing\r\n\r\n", 400, "invalid_header"),
    ("an empty name", f"{FIRST}{HOST}: x\r\n\r\n", 400, "invalid_header"),
    ("a name beyond ASCII", f"{FIRST}{HOST}x-\xe9: x\r\n\r\n", 400, "invalid_header"),
    ("a bracket in a name", f"{FIRST}{HOST}x[a]: x\r\n\r\n", 400, "invalid_header"),
    ("no host", f"{FIRST}\r\n", 400, "invalid_host"),
    ("two hosts", f"{FIRST}{HOST}{HOST}\r\n", 400, "duplicate_header"),
    ("a host with a path", f"{FIRST}host: h/x\r\n\r\n", 400, "invalid_host"),
    ("a host with a query", f"{FIRST}host: h?x\r\n\r\n", 400, "invalid_host"),
    ("a host with a fragment", f"{FIRST}host: h#x\r\n\r\n", 400, "invalid_host"),
    ("a host with user information", f"{FIRST}host: u@h\r\n\r\n", 400, "invalid_host"),
    ("a host with a blank", f"{FIRST}host: a b\r\n\r\n", 400, "invalid_host"),
    ("an empty host", f"{FIRST}host:\r\n\r\n", 400, "invalid_host"),
    ("two authorizations", f"{FIRST}{HOST}authorization: a\r\nAuthorization: b\r\n\r\n", 400,
     "duplicate_header"),
    ("101 headers", FIRST + HOST + "x-a: b\r\n" * 100 + "\r\n", 431, "too_many_headers"),
    ("a header of 8193 bytes", f"{FIRST}{HOST}x-a: {'b' * 8_190}\r\n\r\n", 431, "header_too_large"),
    ("HTTP/2", "PRI * HTTP/2.0\r\n\r\n", 505, "http_version"),
    ("HTTP/0.9", "GET /\r\n\r\n", 400, "invalid_request_line"),
    ("HTTP/1.2", "GET / HTTP/1.2\r\n\r\n", 505, "http_version"),
    ("a small method", "get / HTTP/1.1\r\n\r\n", 400, "invalid_request_line"),
    ("two blanks", "GET  / HTTP/1.1\r\n\r\n", 400, "invalid_request_line"),
    ("a target with a blank", "GET /a b HTTP/1.1\r\n\r\n", 400, "invalid_request_line"),
    ("a target beyond ASCII", "GET /\xe9 HTTP/1.1\r\n\r\n", 400, "invalid_request_line"),
    ("a TLS hello", "\x16\x03\x01\x02\0\r\n\r\n", 400, "invalid_request_line"),
    ("an empty line in front", f"\r\n{FIRST}{HOST}\r\n", 400, "invalid_request_line"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "status", "code"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_a_head_outside_the_grammar_is_refused(text: str, status: int, code: str) -> None:
    with pytest.raises(ClientError) as caught:
        parse(text)

    assert (caught.value.refusal.status, caught.value.refusal.code) == (status, code)


def test_a_sound_head_is_read_in_full() -> None:
    head = parse(
        f"{FIRST}HOST: [::1]:80\r\nContent-Length:\t7 \r\naccept: a\r\nAccept: b\r\nx-empty:\r\n"
        "Connection: Keep-Alive\r\n\r\n"
    )

    assert (head.method, head.target, head.minor) == ("POST", b"/v1/completions", 1)
    assert head.content_length == 7
    assert head.headers[b"accept"] == b"a, b"
    assert head.headers[b"x-empty"] == b""
    assert head.keeps_alive
    assert not head.is_chunked


@pytest.mark.parametrize(
    ("minor", "connection", "keeps_alive"),
    [(1, "", True), (1, "close", False), (1, "Close, x", False), (0, "", False),
     (0, "keep-alive", True), (0, "keep-alive, close", False)],
)  # fmt: skip
def test_a_connection_is_kept_as_its_version_and_header_say(
    minor: int, connection: str, keeps_alive: bool
) -> None:
    line = f"connection: {connection}\r\n" if connection else ""

    assert parse(f"GET / HTTP/1.{minor}\r\n{HOST}{line}\r\n").keeps_alive is keeps_alive


class Witness:
    """What the C parser of another project sees."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


LINES = st.sampled_from([
    "content-length: 3", "content-length : 3", "content-length:3 ", "Content-Length: 03",
    "content-length: 3, 3", "transfer-encoding: chunked", "transfer-encoding:\tchunked",
    "transfer-encoding: x", "x-a: b", "x-a:\xe9", "x-a:", " x: y", "x\x0b: y", "x-a: b\x00",
    "connection: close", "x-a: b\nx-c: d", "x-a: b\rx-c: d", "expect: 100-continue", "te: trailers",
])  # fmt: skip


@given(st.lists(LINES, max_size=5), st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/1.2"]))
def test_what_we_accept_another_parser_reads_the_same(lines: list[str], version: str) -> None:
    text = f"POST /v1/x?y=z {version}\r\n{HOST}" + "".join(f"{line}\r\n" for line in lines) + "\r\n"
    raw = text.encode("latin-1")
    try:
        head = parse(raw)
    except ClientError:
        return
    witness = Witness()
    parser = httptools.HttpRequestParser(witness)

    parser.feed_data(raw)
    parser.feed_data(b"3\r\nabc\r\n0\r\n\r\n" if head.is_chunked else b"a" * head.content_length)

    assert witness.is_complete
    assert witness.url == head.target
    theirs = dict[bytes, bytes]()
    for name, value in witness.headers:
        value = value.strip(b"\t ")
        theirs[name] = theirs[name] + b", " + value if name in theirs else value
    assert list(theirs) == list(head.headers)
    for name, value in head.headers.items():
        assert theirs[name].strip(b"\t ") == value.strip(b"\t ")
    assert len(witness.body) == (3 if head.is_chunked else head.content_length)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/2 200 OK\r\n\r\n", b"ICY 200 OK\r\n\r\n", b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\nserver: x\r\n\r\n", b"HTTP/1.1 200 OK\r\nx : y\r\n\r\n",
    ],
)  # fmt: skip
def test_a_worker_that_does_not_speak_http_is_told_so(raw: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        parse_answer(raw)


@pytest.mark.parametrize(
    ("raw", "length", "is_chunked"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n", 7, False),
        (b"HTTP/1.1 200\r\ntransfer-encoding: chunked\r\ncontent-length: 7\r\n\r\n", None, True),
        (b"HTTP/1.1 200 \r\n\r\n", None, False),
        (b"HTTP/1.1 204 No Content\r\ncontent-length: 7\r\n\r\n", 0, False),
        (b"HTTP/1.1 304 Not Modified\r\ntransfer-encoding: chunked\r\n\r\n", 0, False),
    ],
)
def test_the_framing_of_an_answer_follows_its_head(
    raw: bytes, length: int | None, is_chunked: bool
) -> None:
    head = parse_answer(raw)

    assert (head.content_length, head.is_chunked) == (length, is_chunked)
