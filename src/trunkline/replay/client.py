"""The replay's own HTTP client: one streamed completion over one bounded pool of connections.

Owns sockets to the targets, and the times of sending, first token and end. A request that does not
end in a complete answer is a `Reply` with a reason, never an exception: replay counts what is
lost. Must never retry: what the gateway lost has to show. Read `run.py` next.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from trunkline.core.sse import EventSplitter, EventTooLong
from trunkline.replay.answer import Answer
from trunkline.replay.records import Reply

MAX_IDLE_CONNECTIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One address that requests are sent to."""

    host: str
    port: int
    host_header: str
    base_path: str
    is_tls: bool

    @classmethod
    def parse(cls, url: str) -> Target:
        """Raises ValueError for what is no http or https URL with a host."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address")
        is_tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if is_tls else 80),
            host_header=parts.netloc.rpartition("@")[2],
            base_path=parts.path.rstrip("/").removesuffix("/v1"),
            is_tls=is_tls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Deadlines of one request."""

    connect_timeout_ms: float = 5_000.0
    idle_timeout_ms: float = 600_000.0
    """Longest silence, before the first token as well as between tokens."""
    keepalive_idle_ms: float = 3_000.0
    """A connection idle for longer is not used again: the other side may be closing it just now."""
    api_key: str = ""


class _Connection(asyncio.Protocol):
    """One keep-alive connection; carries one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._ended: asyncio.Future[str] | None = None
        self._heard_at_s = loop.time()
        self._new_message()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def idle_ms(self) -> float:
        """Since the last byte came."""
        return (self._loop.time() - self._heard_at_s) * 1_000.0

    async def exchange(self, request: bytes, idle_timeout_ms: float) -> Reply:
        """Send a request, wait for the end of its answer. Closes the connection on any trouble."""
        assert self._ended is None, "one request at a time"
        self._new_message()
        self._heard_at_s = self._loop.time()
        answer = self._answer = Answer(self._heard_at_s * 1_000.0)
        if self._transport is None:
            return answer.reply(self._heard_at_s * 1_000.0, "connection closed at once")
        self._ended = self._loop.create_future()
        self._transport.write(request)
        try:
            problem = await self._until_ended(self._ended, idle_timeout_ms)
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = self._ended = None
        if problem:
            self.close()
        return answer.reply(self._heard_at_s * 1_000.0, problem)

    async def _until_ended(self, ended: asyncio.Future[str], idle_timeout_ms: float) -> str:
        while not ended.done():
            left_s = self._heard_at_s + idle_timeout_ms / 1_000.0 - self._loop.time()
            if left_s <= 0.0:
                return f"no byte for {idle_timeout_ms:.0f} ms"
            await asyncio.wait((ended,), timeout=left_s)
        return ended.result()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not derived from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard_at_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {str(error)[:60]}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._message_runs_to_close():
            self._end("")
        else:
            self._end("connection reset" if exc is not None else "connection closed in mid-answer")

    def _message_runs_to_close(self) -> bool:
        """A body without length or chunks ends with the connection; [DONE] then shows that it is
        whole.
        """
        return self._answer is not None and self._answer.is_done and not self._is_framed

    # --- what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"x-trunkline-decision" and self._answer is not None:
            self._answer.decision = value.decode("latin-1")[:1_024]
        elif lowered in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        if answer.status != 200:
            answer.add_error_body(body)
            return
        try:
            found = self._splitter.feed(body)
        except EventTooLong as error:
            self._end(str(error))
            return
        for data in found:
            answer.event(data, self._heard_at_s * 1_000.0)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._end("")

    def _new_message(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._splitter = EventSplitter()
        self._is_framed = False

    def _end(self, problem: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(problem)


class Client:
    """Sends requests to one target. The caller bounds how many at a time."""

    def __init__(self, target: Target, options: ClientOptions | None = None) -> None:
        self._target = target
        self._options = options or ClientOptions()
        self._idle: deque[_Connection] = deque()
        self._tls = ssl.create_default_context() if target.is_tls else None

    async def send(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Reply:
        """One exchange on an idle or a new connection."""
        loop = asyncio.get_running_loop()
        began_at_ms = loop.time() * 1_000.0
        try:
            connection = self._idle_connection() or await self._connect(loop)
        except (OSError, TimeoutError) as error:
            reason = f"cannot connect: {_named(error)}"
            return Answer(began_at_ms).reply(loop.time() * 1_000.0, reason)
        request = self._head(path, len(body), headers or {}) + body
        reply = await connection.exchange(request, self._options.idle_timeout_ms)
        if connection.is_open and len(self._idle) < MAX_IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    def close(self) -> None:
        """Close idle connections. Requests on the way keep theirs."""
        while self._idle:
            self._idle.pop().close()

    def _idle_connection(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_ms() < self._options.keepalive_idle_ms:
                return connection
            connection.close()
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        async with asyncio.timeout(self._options.connect_timeout_ms / 1_000.0):
            _, connection = await loop.create_connection(
                lambda: _Connection(loop), self._target.host, self._target.port, ssl=self._tls
            )
        return connection

    def _head(self, path: str, body_bytes: int, headers: dict[str, str]) -> bytes:
        lines = [
            f"POST {self._target.base_path}{path} HTTP/1.1",
            f"host: {self._target.host_header}",
            "content-type: application/json",
            "accept: text/event-stream",
            f"content-length: {body_bytes}",
        ]
        if self._options.api_key:
            lines.append(f"authorization: Bearer {self._options.api_key}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _named(error: BaseException) -> str:
    return "time-out" if isinstance(error, TimeoutError) else type(error).__name__
