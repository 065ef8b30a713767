"""Connections to workers: one protocol object each, and a pool of idle ones for every endpoint.

Owns sockets towards workers. A connection goes back to the pool only where the end of its answer
was seen and nothing is left to send. Must never decide anything about requests; that is
`exchange.py`, to read next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, cast

from trunkline.config import UpstreamConfig
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.gateway.contracts import Endpoint, InferenceRequest, Pick
from trunkline.gateway.counters import Counters

_JOINED_BYTES = 64 << 10
"""Up to here head and body are copied into one buffer, which costs less than a second system
call.
"""


# What of a client's head may reach a worker, beside its place in a trace. Everything else stays
# here: credentials, identities, routing wishes and whatever is invented next.
FORWARDED = frozenset({
    b"accept", b"accept-encoding", b"accept-language", b"content-type", b"user-agent",
    b"x-correlation-id", b"x-trace-id", b"x-session-id",
    b"anthropic-version", b"anthropic-beta", b"openai-beta",
})  # fmt: skip


class AnswerSink(Protocol):
    """Who waits for the bytes of a worker."""

    def received(self, data: bytes) -> None: ...

    def lost(self, error: Exception | None) -> None:
        """The worker closed the connection, or it broke (`error`)."""
        ...


class WorkerConnection(asyncio.Protocol):
    """One connection. It serves one attempt at a time; bytes that nobody waits for close it."""

    __slots__ = ("_pool", "_sink", "idle_since_s", "is_open", "key", "transport", "uses")

    def __init__(self, pool: WorkerPool, key: EndpointKey) -> None:
        self._pool = pool
        self._sink: AnswerSink | None = None
        self.key = key
        self.transport: asyncio.Transport | None = None
        self.is_open = False
        self.uses = 0
        self.idle_since_s = 0.0

    def attach(self, sink: AnswerSink) -> None:
        assert self._sink is None, "two attempts on one worker connection"
        self._sink = sink
        self.uses += 1

    def hand_on(self, sink: AnswerSink) -> None:
        """What comes from here on is for somebody else, in the same attempt."""
        assert self._sink is not None, "handed on behind its end"
        self._sink = sink

    def send(self, head: bytes, body: bytes) -> None:
        assert self.transport is not None, "sent before it was connected"
        if len(body) <= _JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines([head, body])

    def pause(self) -> None:
        if self.is_open and self.transport is not None:
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.is_open and self.transport is not None:
            self.transport.resume_reading()

    def abort(self) -> None:
        """Close at once; the worker learns that nobody wants the answer."""
        self._sink = None
        self.is_open = False
        if self.transport is not None:
            self.transport.abort()

    def release(self, *, is_reusable: bool) -> None:
        """The attempt is over. Kept for the next one where that is safe."""
        self._sink = None
        transport = self.transport
        if (
            is_reusable
            and self.is_open
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() == 0
        ):
            transport.resume_reading()
            self._pool.put(self)
        else:
            self.abort()

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # asyncio's signature is wider
        self.is_open = True
        self._pool.opened()

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is not None:
            sink.received(data)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._pool.closed(self)
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.lost(exc)


EndpointKey = tuple[str, int, bool]


class WorkerPool:
    """Idle connections by endpoint, newest last. Bound: `max_idle_connections` each; the oldest
    goes.
    """

    def __init__(self, config: UpstreamConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._idle: dict[EndpointKey, deque[WorkerConnection]] = {}
        self._loop = asyncio.get_running_loop()

    def configure(self, config: UpstreamConfig) -> None:
        """Other bounds from here on."""
        self._config = config

    def take(self, endpoint: Endpoint) -> WorkerConnection | None:
        """An idle connection young enough that the worker has not closed it yet."""
        key = (endpoint.host, endpoint.port, endpoint.tls is not None)
        idle = self._idle.get(key)
        if not idle:
            return None
        oldest_s = self._loop.time() - self._config.keepalive_idle_ms / 1_000.0
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since_s >= oldest_s:
                break
            connection.abort()
        else:
            del self._idle[key]
            return None
        if not idle:
            del self._idle[key]
        return connection

    async def connect(self, endpoint: Endpoint) -> WorkerConnection:
        """A fresh connection. Raises WorkerLost and WorkerTimeout."""
        key = (endpoint.host, endpoint.port, endpoint.tls is not None)
        connection = WorkerConnection(self, key)
        self._counters.connects += 1
        try:
            async with asyncio.timeout(self._config.connect_timeout_ms / 1_000.0):
                await self._loop.create_connection(
                    lambda: connection,
                    endpoint.host,
                    endpoint.port,
                    ssl=endpoint.tls,
                )
        except TimeoutError as error:
            text = f"no connection to the worker within {self._config.connect_timeout_ms} ms"
            raise WorkerLost(text) from error
        except OSError as error:  # ssl.SSLError is one
            raise WorkerLost("no connection to the worker") from error
        return connection

    def put(self, connection: WorkerConnection) -> None:
        if self._config.max_idle_connections == 0:
            connection.abort()
            return
        connection.idle_since_s = self._loop.time()
        idle = self._idle.get(connection.key)
        if idle is None:
            idle = self._idle[connection.key] = deque()
        elif len(idle) >= self._config.max_idle_connections:
            idle.popleft().abort()
        idle.append(connection)

    def sweep(self, now_s: float) -> None:
        """Close what has idled for too long."""
        oldest_s = now_s - self._config.keepalive_idle_ms / 1_000.0
        for key, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since_s < oldest_s or not idle[0].is_open):
                idle.popleft().abort()
            if not idle:
                del self._idle[key]

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()

    def idle_count(self) -> int:
        return sum(len(idle) for idle in self._idle.values())

    def opened(self) -> None:
        self._counters.open_upstreams += 1

    def closed(self, connection: WorkerConnection) -> None:
        self._counters.open_upstreams -= 1
        idle = self._idle.get(connection.key)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.key]


def timed_out(what: str, limit_ms: int) -> WorkerTimeout:
    return WorkerTimeout(f"the worker {what} for more than {limit_ms} ms")


def request_head(request: InferenceRequest, headers: dict[bytes, bytes], pick: Pick) -> bytes:
    """The head of the request to a worker: made anew, from the few things that may go there."""
    endpoint = pick.endpoint
    lines = (
        f"{request.method} {endpoint.base_path}{request.path} HTTP/1.1\r\n"
        f"host: {endpoint.host_header}\r\nx-request-id: {request.request_id}\r\n"
    )
    if endpoint.api_key:
        lines += f"authorization: Bearer {endpoint.api_key}\r\n"
    for name, value in pick.headers:
        lines += f"{name}: {value}\r\n"
    if pick.body or request.method != "GET":
        lines += f"content-length: {len(pick.body)}\r\n"
        if b"content-type" not in headers:
            lines += "content-type: application/json\r\n"
    theirs = [b"%b: %b\r\n" % field for field in headers.items() if field[0] in FORWARDED]
    trace = b"" if request.trace is None else request.trace.lines
    return b"".join((lines.encode("latin-1"), *theirs, trace, b"\r\n"))
