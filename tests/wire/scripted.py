"""Raw-socket workers and clients for tests of the gateway, and a picker that keeps strict books.

A `ScriptedWorker` does to each connection exactly what its script says, byte by byte: that is how
broken, slow and odd workers are made. `Client` does the same from the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import socket
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop

from trunkline.adapters.clock import SystemClock
from trunkline.config import LimitsConfig, ListenConfig, RetryConfig, UpstreamConfig
from trunkline.core.records import WorkerId
from trunkline.errors import NoWorker
from trunkline.gateway.client import ClientConnection
from trunkline.gateway.contracts import AttemptEnd, Endpoint, InferenceRequest, Pick
from trunkline.gateway.counters import AccessRecord
from trunkline.gateway.front import Front, FrontParts, Readiness, serve_front

TEST_S = 120.0
"""No wire test may take longer, on however loaded a machine."""


def wire(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Make a plain test of a coroutine: on uvloop, as in production, with a deadline."""

    @functools.wraps(test)
    def run() -> None:
        uvloop.run(asyncio.wait_for(test(), TEST_S))

    del run.__wrapped__  # pytest would look for fixtures of the coroutine
    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what can only be looked at. The deadline is the test's."""
    while not condition():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.005)


# -- workers -------------------------------------------------------------------------------------


Request = tuple[str, dict[str, str], bytes]
"""First line, headers, body."""


class Served:
    """One connection that the gateway opened to a worker."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: deque[Request]
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.seen = seen

    async def request(self) -> Request:
        """The next request. EOFError where none comes."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        self.seen.append((first, headers, body))
        return self.seen[-1]

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Return when the gateway has closed this connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65_536):
                pass

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Close with RST, as a killed process does while data is under way."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Served], Awaitable[None]]


@dataclass(slots=True)
class ScriptedWorker:
    """A listening worker. `seen` has the latest requests that its scripts read."""

    name: WorkerId
    endpoint: Endpoint
    server: asyncio.Server
    connections: list[int]
    seen: deque[Request]

    @property
    def connection_count(self) -> int:
        return self.connections[0]


@contextlib.asynccontextmanager
async def worker(script: Script, name: str = "w0") -> AsyncIterator[ScriptedWorker]:
    """A worker that runs `script` for each connection and then closes it."""
    counted, seen = [0], deque[Request](maxlen=100)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted[0] += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(Served(reader, writer, seen))
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint(host="127.0.0.1", port=port, host_header=f"{name}.test:{port}")
    try:
        yield ScriptedWorker(WorkerId(name), endpoint, server, counted, seen)
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answering(answer: bytes | Callable[[str, dict[str, str], bytes], bytes]) -> Script:
    """Answer every request on a connection with the same bytes, or with what a function makes."""

    async def script(served: Served) -> None:
        while True:
            request = await served.request()
            await served.send(answer if isinstance(answer, bytes) else answer(*request))

    return script


def staying(first: bytes = b"", gone: asyncio.Event | None = None) -> Script:
    """Answer one request with `first` and no more; `gone` is set when the gateway has closed."""

    async def script(served: Served) -> None:
        await served.request()
        await served.send(first)
        await served.gone()
        if gone is not None:
            gone.set()

    return script


def in_two(first: bytes, go_on: asyncio.Event, then: bytes) -> Script:
    """Answer one request in two parts, the second when the test says so."""

    async def script(served: Served) -> None:
        await served.request()
        await served.send(first)
        await go_on.wait()
        await served.send(then)

    return script


def json_answer(body: bytes = b'{"ok":true}', status: str = "200 OK", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n{extra}\r\n".encode() + body


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(text: str) -> bytes:
    """One event of a chat stream, as a chunk."""
    body = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
    return chunk(f"data: {body}\n\n".encode())


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


# -- the picker ----------------------------------------------------------------------------------

FAILED, COMPLETE, GONE = AttemptEnd.WORKER_FAILED, AttemptEnd.COMPLETE, AttemptEnd.CLIENT_GONE


class FixedPicker:
    """Takes the first worker that was not tried; asserts that the books are kept exactly once."""

    def __init__(self, *workers: ScriptedWorker | tuple[WorkerId, Endpoint]) -> None:
        self.workers: list[tuple[WorkerId, Endpoint]] = [
            (w.name, w.endpoint) if isinstance(w, ScriptedWorker) else w for w in workers
        ]
        self.in_flight: Counter[WorkerId] = Counter()
        self.ends: list[tuple[WorkerId, AttemptEnd, int | None]] = []
        self.first_bytes: list[WorkerId] = []
        self.requests: list[InferenceRequest] = []
        self._open: dict[int, WorkerId] = {}
        self._last = 0
        self.begun = asyncio.Event()

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick | Awaitable[Pick]:
        self.requests.append(request)
        for name, endpoint in self.workers:
            if name not in tried and self.is_usable(name):
                return self.picked(request, name, endpoint)
        raise NoWorker("no worker is usable")

    def is_usable(self, name: WorkerId) -> bool:
        return True

    def picked(self, request: InferenceRequest, name: WorkerId, endpoint: Endpoint) -> Pick:
        self._last += 1
        self._open[self._last] = name
        self.in_flight[name] += 1
        self.begun.set()
        return Pick(worker=name, endpoint=endpoint, body=request.body, ticket=self._last)

    def pulled(self, pick: Pick, told: bytes) -> None:
        pass

    def first_byte(self, pick: Pick) -> None:
        assert pick.ticket in self._open, "a first byte of an attempt that is over"
        self.first_bytes.append(pick.worker)

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        charged = self._open.pop(pick.ticket)  # KeyError: ended twice
        assert charged == pick.worker
        self.in_flight[pick.worker] -= 1
        assert self.in_flight[pick.worker] >= 0
        self.ends.append((pick.worker, end, cached_tokens))

    @property
    def open_count(self) -> int:
        return len(self._open)


# -- the front and its clients -------------------------------------------------------------------

QUIET = LimitsConfig()


def patient(**limits: int) -> UpstreamConfig:
    """These limits on workers, and nobody is given up for a machine that is slow to connect."""
    return UpstreamConfig(**({"connect_timeout_ms": 60_000} | limits))


@dataclass(slots=True)
class Running:
    """A front under test."""

    front: Front
    picker: Any  # any Picker; tests look into their own kind
    log: list[AccessRecord]
    bugs_count: int = 0
    """How many unforeseen errors the test provokes."""

    def connections(self) -> list[ClientConnection]:
        """Those that clients have open."""
        return [one for one in self.front._clients if isinstance(one, ClientConnection)]

    async def client(self, buffer_bytes: int = 1 << 27) -> Client:
        """With a small buffer, what the client does not read stays with the gateway."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.front.port, limit=buffer_bytes
        )
        return Client(reader, writer)

    async def ask(self, raw: bytes) -> Reply:
        """Send `raw` on a connection of its own and read one answer."""
        client = await self.client()
        try:
            await client.send(raw)
            return await client.reply()
        finally:
            client.close()

    async def settled(self) -> None:
        """Until no request is open."""
        await until(lambda: self.front.counters.active_requests == 0)


@contextlib.asynccontextmanager
async def running(
    picker: Any,  # any Picker
    *,
    limits: LimitsConfig = QUIET,
    upstream: UpstreamConfig | None = None,
    retry: RetryConfig | None = None,
    **parts: Any,  # further FrontParts
) -> AsyncIterator[Running]:
    log: list[AccessRecord] = []
    front = await serve_front(
        ListenConfig(port=0),
        FrontParts(
            picker=picker,
            models=parts.pop("models", lambda _principal: []),
            readiness=parts.pop("readiness", lambda: Readiness(is_ready=True)),
            clock=SystemClock(),
            dice=random.Random(7),
            limits=limits,
            upstream=upstream or patient(),
            retry=retry or RetryConfig(retry_initial_backoff_ms=1, retry_max_backoff_ms=2),
            max_model_len=parts.pop("max_model_len", 4_096),
            version="0.0.0-test",
            on_finished=log.append,
            sweep_ms=parts.pop("sweep_ms", 20),
            **parts,
        ),
    )
    gateway = Running(front, picker, log)
    try:
        yield gateway
    finally:
        await front.close()
    assert front.counters.bugs == gateway.bugs_count, "see the log for `exchange.bug`"
    assert front.counters.late_picks == 0


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    fields: list[tuple[str, str]]
    body: bytes
    """Without its chunk framing."""
    is_whole: bool

    @property
    def json(self) -> Any:  # whatever the answer holds
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[str]:
        """The data of each event, as a client's parser sees them."""
        text = self.body.decode().replace("\r\n", "\n").replace("\r", "\n")
        found: list[str] = []
        for block in text.split("\n\n"):
            lines = [line for line in block.split("\n") if line.startswith("data:")]
            if lines:
                found.append("\n".join(line[5:].removeprefix(" ") for line in lines))
        return found


class Client:
    """One client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw.rstrip("\r\n").split("\r\n")
        fields = [(n.lower(), v.strip()) for n, _, v in (line.partition(":") for line in lines)]
        return int(first.split(" ")[1]), fields

    async def reply(self, *, has_body: bool = True) -> Reply:
        status, fields = await self.head()
        while 100 <= status < 200:
            status, fields = await self.head()
        headers = dict(fields)
        body, is_whole = b"", True
        if has_body and status not in {204, 304}:
            body, is_whole = await self._body(headers)
        return Reply(status, headers, fields, body, is_whole)

    async def _body(self, headers: dict[str, str]) -> tuple[bytes, bool]:
        pieces: list[bytes] = []
        try:
            if headers.get("transfer-encoding") == "chunked":
                while True:
                    size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
                    pieces.append((await self.reader.readexactly(size + 2))[:-2])
                    if size == 0:
                        return b"".join(pieces), True
            if "content-length" in headers:
                return await self.reader.readexactly(int(headers["content-length"])), True
            while data := await self.reader.read(1 << 20):
                pieces.append(data)
            return b"".join(pieces), True
        except asyncio.IncompleteReadError as error:
            return b"".join(pieces) + error.partial, False
        except ConnectionError:
            return b"".join(pieces), False

    async def fetch_slowly(self, count: int, pause_s: float) -> None:
        """Read so many bytes, with a pause after each piece."""
        got = 0
        while got < count:
            piece = await self.reader.read(1 << 20)
            assert piece, f"cut after {got} bytes"
            got += len(piece)
            await asyncio.sleep(pause_s)  # the slowness itself

    async def is_closed(self) -> bool:
        """Whether nothing more comes; waits for the end."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    def pause(self) -> None:
        """Take nothing more off the wire."""
        self.writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]

    def resume(self) -> None:
        self.writer.transport.resume_reading()  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**CHAT, "stream": True}
POST = "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"
JSON = "content-type: application/json\r\n"


def post(
    body: object = CHAT,
    *,
    path: str = "/v1/chat/completions",
    extra: str = "",
    version: str = "1.1",
) -> bytes:
    """A well-formed request; `body` is bytes or something to encode."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST {path} HTTP/{version}\r\nhost: gateway.test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n{extra}\r\n"
    ).encode("latin-1") + raw


def get(path: str, extra: str = "", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: gateway.test\r\n{extra}\r\n".encode("latin-1")


def chunked(body: bytes, extra: str = "") -> bytes:
    """A chat request whose `body` is framed as it stands."""
    return f"{POST}{JSON}{extra}transfer-encoding: chunked\r\n\r\n".encode() + body
