"""One small HTTP request to a worker, for discovery, health and load.

Not the data plane: a fresh connection each time, the whole answer in memory, a bound on its size
and one deadline for all of it. Read `membership.py` next.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from dataclasses import dataclass, field

import httptools

from trunkline.errors import AnswerTooLong, WorkerLost, WorkerTimeout
from trunkline.ports.worker import Endpoint

MAX_ANSWER_BYTES = 8 << 20
"""A metrics page of a large engine has about 200 kB."""

_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One whole answer. `headers` are as they came, but for their case."""

    status: int
    headers: list[tuple[bytes, bytes]] = field(repr=False)
    body: bytes = field(repr=False)


class _Answer:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_begun = False
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_begun = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


async def fetch(
    endpoint: Endpoint, method: str, path: str, *, timeout_ms: float
) -> tuple[int, bytes]:
    """Status and body of one request without a body.

    Raises WorkerTimeout past the deadline, WorkerLost when the worker refuses, breaks off, answers
    nonsense, or more than 8 MiB (AnswerTooLong).
    """
    told = await exchange(endpoint, _request(endpoint, method, path, b""), path, timeout_ms)
    return told.status, told.body


async def post(
    endpoint: Endpoint,
    path: str,
    body: bytes,
    *,
    timeout_ms: float,
    headers: tuple[tuple[str, str], ...] = (),
) -> tuple[int, bytes]:
    """Status and body of one POST of JSON. Raises as `fetch` does."""
    request = _request(endpoint, "POST", path, body, headers)
    told = await exchange(endpoint, request, path, timeout_ms)
    return told.status, told.body


async def exchange(
    endpoint: Endpoint,
    request: bytes,
    path: str,
    timeout_ms: float,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> Told:
    """The answer to a request as it stands, which asks that the connection be closed; `path` is for
    errors alone. Raises as `fetch` does.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1_000.0):
            return await _fetch(request, endpoint, path, max_bytes)
    except TimeoutError as error:
        raise WorkerTimeout(
            f"{endpoint.host_header}{path} did not answer within {timeout_ms:.0f} ms"
        ) from error
    except ssl.SSLCertVerificationError as error:
        raise WorkerLost(
            f"{endpoint.host_header}{path}: its certificate is not trusted"
            f" ({error.verify_message}); --worker-ca-file names authorities"
        ) from error
    except (OSError, UnicodeError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        # UnicodeError: a host that no name system knows, or a URL or key that is no ASCII.
        reason = type(error).__name__
        raise WorkerLost(f"{endpoint.host_header}{path} failed: {reason}") from error


def is_refusal(error: BaseException | None) -> bool:
    """Whether nobody listens there. Where a name has several addresses, asyncio raises one error
    with a text of all.
    """
    if isinstance(error, ConnectionRefusedError):
        return True
    return isinstance(error, OSError) and f"[Errno {errno.ECONNREFUSED}]" in str(error)


async def _fetch(request: bytes, endpoint: Endpoint, path: str, max_bytes: int) -> Told:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=endpoint.tls)
    try:
        writer.write(request)
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.is_complete:
            data = await reader.read(_READ_BYTES)
            if not data:
                if not answer.is_begun:
                    raise WorkerLost(f"{endpoint.host_header}{path} closed without an answer")
                break  # the close is the end of a body without a length
            parser.feed_data(data)
            if len(answer.body) > max_bytes:
                raise AnswerTooLong(
                    f"{endpoint.host_header}{path} answered more than {max_bytes} bytes"
                )
        return Told(
            status=parser.get_status_code(), headers=answer.headers, body=bytes(answer.body)
        )
    finally:
        writer.close()


def _request(
    endpoint: Endpoint,
    method: str,
    path: str,
    body: bytes,
    headers: tuple[tuple[str, str], ...] = (),
) -> bytes:
    lines = [
        f"{method} {endpoint.base_path}{path} HTTP/1.1",
        f"host: {endpoint.host_header}",
        "accept: */*",
        "connection: close",
        f"content-length: {len(body)}",
    ]
    if body:
        lines.append("content-type: application/json")
    if endpoint.api_key:
        lines.append(f"authorization: Bearer {endpoint.api_key}")
    lines += [f"{name}: {value}" for name, value in headers]
    if any("\r" in line or "\n" in line for line in lines):
        # Checked where it came in as well; a header too many is never sent.
        raise WorkerLost(f"{endpoint.host_header}: a line break in its URL or key")
    try:
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + body
    except UnicodeError as error:  # a URL or key that is no ASCII
        raise WorkerLost(f"{endpoint.host_header}{path} cannot be asked: {error}") from error
