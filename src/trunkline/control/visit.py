"""A look at a worker from outside, for `trunkline doctor`: its version and clock, how long it keeps
a connection, and whether it asks for its key.

One idle connection is held open for as long as the data plane would keep it: a worker that closes
it sooner makes requests fail that were sent on it. Must never: judge (`diagnosis.py` does), or send
a worker's key anywhere else. Read `probe.py` for single requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC
from email.utils import parsedate_to_datetime

import httptools
import msgspec

from trunkline.control.engine import MAX_VERSION_CHARS
from trunkline.control.probe import MAX_ANSWER_BYTES, fetch
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.ports.clock import Clock
from trunkline.ports.worker import Endpoint
from trunkline.written import is_loopback

AT_ONCE = 256
"""Workers that are visited at one time: nearly all of it is waiting."""
VISITS_S = 40.0
"""Of all workers together; of those that are left then, nothing is said."""
ANSWER_S = 5.0
MAX_IDLE_S = 10.0
"""No connection is watched for longer, however long the data plane keeps its own."""
_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What was seen. None where nothing could be."""

    version: str = ""
    """Empty where it does not say."""
    clock_off_s: float | None = None
    """How far its clock is before ours; 0.0 where that is less than can be told."""
    closed_after_ms: float | None = None
    """It closed an idle connection before the data plane would have."""
    asks_for_key: bool | None = None
    """None where it has none that we know, or where nobody else reaches it."""


class _Version(msgspec.Struct):
    version: str = ""


async def visit_all(
    endpoints: Sequence[tuple[str, Endpoint]], *, path: str, idle_ms: float, clock: Clock
) -> dict[str, Visit]:
    """By name. `path` is answered by any of them; `idle_ms` is how long the data plane keeps an
    idle connection.
    """
    turns, seen = asyncio.Semaphore(AT_ONCE), dict[str, Visit]()

    async def one(name: str, endpoint: Endpoint) -> None:
        async with turns:
            seen[name] = await _visit(endpoint, path, idle_ms, clock)

    tasks = [asyncio.ensure_future(one(*named)) for named in endpoints]
    if tasks:
        try:
            await asyncio.wait(tasks, timeout=VISITS_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return seen


async def _visit(endpoint: Endpoint, path: str, idle_ms: float, clock: Clock) -> Visit:
    (visit, version, asks) = await asyncio.gather(
        _watched(endpoint, path, min(idle_ms / 1_000.0, MAX_IDLE_S), clock),
        _version(endpoint),
        _asks_for_key(endpoint),
    )
    return replace(visit, version=version, asks_for_key=asks)


async def _version(endpoint: Endpoint) -> str:
    """As vLLM tells it; SGLang's is known from elsewhere."""
    try:
        status, body = await fetch(endpoint, "GET", "/version", timeout_ms=ANSWER_S * 1e3)
        told = msgspec.json.decode(body, type=_Version) if status == 200 else _Version()
    except (WorkerLost, WorkerTimeout, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
    return told.version[:MAX_VERSION_CHARS]


async def _asks_for_key(endpoint: Endpoint) -> bool | None:
    if is_loopback(endpoint.host):
        return None
    bare = replace(endpoint, api_key="")
    try:
        status, _ = await fetch(bare, "GET", "/v1/models", timeout_ms=ANSWER_S * 1e3)
    except (WorkerLost, WorkerTimeout):
        return None
    return status in (401, 403)


# -- one connection --------------------------------------------------------------------------------


class _Head:
    """Callbacks of the parser: the date, and when the answer is whole."""

    def __init__(self) -> None:
        self.date = b""
        self.is_kept = True
        """The worker does not say that it closes the connection."""
        self.is_complete = False
        self.size = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"date":
                self.date = value
            case b"connection":
                self.is_kept = value.strip().lower() != b"close"
            case _:
                pass

    def on_body(self, data: bytes) -> None:
        self.size += len(data)

    def on_message_complete(self) -> None:
        self.is_complete = True


async def _watched(endpoint: Endpoint, path: str, idle_s: float, clock: Clock) -> Visit:
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(
                endpoint.host, endpoint.port, ssl=endpoint.tls
            )
    except (OSError, TimeoutError):
        return Visit()
    try:
        async with asyncio.timeout(ANSWER_S):
            head, asked_at, heard_at = await _asked(reader, writer, endpoint, path, clock)
        off_s = clock_off_s(head.date, asked_at, heard_at)
        if not head.is_kept or not head.is_complete or idle_s <= 0.0:
            return Visit(clock_off_s=off_s)
        idle_from = clock.now()
        closed_after_ms = await _closed(reader, idle_s, lambda: clock.now() - idle_from)
        return Visit(clock_off_s=off_s, closed_after_ms=closed_after_ms)
    except (
        *(OSError, TimeoutError, UnicodeError),
        *(httptools.HttpParserError, httptools.HttpParserUpgrade),
    ):
        return Visit()
    finally:
        writer.close()


async def _asked(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    endpoint: Endpoint,
    path: str,
    clock: Clock,
) -> tuple[_Head, float, float]:
    """One answer, and the wall clock before and after it. Raises what sockets and parsers raise."""
    lines = [f"GET {endpoint.base_path}{path} HTTP/1.1", f"host: {endpoint.host_header}"]
    if endpoint.api_key:
        lines.append(f"authorization: Bearer {endpoint.api_key}")
    asked_at = clock.wall()
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
    head = _Head()
    parser = httptools.HttpResponseParser(head)
    while not head.is_complete:
        data = await reader.read(_READ_BYTES)
        if not data or head.size > MAX_ANSWER_BYTES:
            break
        parser.feed_data(data)
    return head, asked_at, clock.wall()


def clock_off_s(date: bytes, asked_at: float, heard_at: float) -> float | None:
    """What a `Date` that came between these two moments says of the clock there. It has whole
    seconds, and may be one old.
    """
    try:
        told = parsedate_to_datetime(date.decode("ascii"))
    except (ValueError, TypeError):
        return None
    at = (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
    if at > heard_at:
        return at - heard_at
    return min(0.0, at + 2.0 - asked_at)


async def _closed(
    reader: asyncio.StreamReader, idle_s: float, idle_ms: Callable[[], float]
) -> float | None:
    """After how long the idle connection was closed from the other side; None where it was not,
    within the time.
    """
    try:
        async with asyncio.timeout(idle_s):
            await reader.read(1)
    except TimeoutError:
        return None
    except OSError:
        pass
    # Noticed later than that, it says nothing: this loop may have stood still.
    after_ms = idle_ms()
    return after_ms if after_ms < idle_s * 1_000.0 else None
