"""A network in memory under a virtual clock: real protocols, real bytes, and no socket.

A `NetLoop` is a `VirtualLoop` whose servers and connections meet inside the process. Every write
arrives one `LATENCY_S` later, in the order in which it was sent, and at the same virtual time in
every run that does the same things.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from virtual_loop import VirtualLoop

LATENCY_S = 0.0001
Factory = Callable[[], asyncio.BaseProtocol]


class NetLoop(VirtualLoop):
    """Where `create_server` and `create_connection` reach one another."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: dict[tuple[str, int], Factory] = {}

    async def create_server(  # pyright: ignore[reportIncompatibleMethodOverride] - what is used
        self, protocol_factory: Factory, host: str, port: int, **_options: Any
    ) -> Listener:
        port = port or 1 + len(self.listeners)
        self.listeners[host, port] = protocol_factory
        return Listener(self, (host, port))

    async def create_connection(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, protocol_factory: Factory, host: str, port: int, **_options: Any
    ) -> tuple[Pipe, asyncio.BaseProtocol]:
        await asyncio.sleep(LATENCY_S)
        accept = self.listeners.get((host, port))
        if accept is None:
            raise ConnectionRefusedError(f"{host}:{port}")
        here, there = Pipe(self), Pipe(self)
        here.peer, there.peer = there, here
        served, asked = accept(), protocol_factory()
        there.begin(served)
        here.begin(asked)
        return here, asked


@dataclass(slots=True)
class Listener:
    """Stands where asyncio's server would."""

    loop: NetLoop
    address: tuple[str, int]

    @property
    def sockets(self) -> list[Listener]:
        return [self]

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def close(self) -> None:
        self.loop.listeners.pop(self.address, None)


class Pipe(asyncio.Transport):
    """One end of a connection. What is written arrives at the other end, late but in order."""

    def __init__(self, loop: NetLoop) -> None:
        super().__init__()
        self.loop = loop
        self.peer: Pipe | None = None
        self._protocol: asyncio.Protocol | None = None
        self._inbox: deque[bytes | None] = deque()
        self._is_paused = False
        self._is_closing = False
        self._is_over = False

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol
        protocol.connection_made(self)

    # -- what protocols call -----------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._is_closing:
            self._send(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        """Everything written before it arrives first."""
        if not self._is_closing:
            self._is_closing = True
            self._send(None)
            self.loop.call_soon(self._end)

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.loop.call_soon(self._drain)

    def is_reading(self) -> bool:
        return not self._is_paused

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    # -- the way -----------------------------------------------------------------------------------

    def _send(self, data: bytes | None) -> None:
        """None ends it. A place in the inbox, not the timer, keeps the order."""
        assert self.peer is not None
        self.peer._inbox.append(data)
        self.loop.call_later(LATENCY_S, self.peer._drain)

    def _drain(self) -> None:
        assert self._protocol is not None
        while self._inbox and not self._is_paused and not self._is_over:
            data = self._inbox.popleft()
            if data is None:
                self._protocol.eof_received()
                self.close()
            elif not self._is_closing:
                self._protocol.data_received(data)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            assert self._protocol is not None
            self._protocol.connection_lost(None)


@dataclass(slots=True, eq=False)
class Recorder(asyncio.Protocol):
    """A client that writes down every byte it gets and when; it never reuses a connection."""

    loop: asyncio.AbstractEventLoop
    began_s: float
    seen: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    """Virtual seconds since the request, and what came then; an empty one is the end."""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def data_received(self, data: bytes) -> None:
        self.seen.append((self.loop.time() - self.began_s, data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.seen.append((self.loop.time() - self.began_s, b""))
        self.over.set()

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.seen)
