"""A TCP proxy for links that misbehave: slow, cut one way or both, reset, in small pieces.

Runs in a thread of its own; everything that speaks TCP can be behind it, HTTP as well as ZeroMQ.
What a cut link was given arrives when it is whole again, as after retransmission; who connects
meanwhile is taken and hears nothing. Must never change a byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

HOST = "127.0.0.2"
"""Also this machine alone. A link has the port of what it leads to: a gateway takes the host of a
worker's URL for all that the worker announces, and so comes through links for events, too.
"""

READ_BYTES = 1 << 16
_START_S = 30.0


class Link:
    """An address on `HOST` whose connections go to the same port elsewhere. Changed only through
    its methods, from any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, host: str, port: int) -> None:
        self._loop = loop
        self._target = (host, port)
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._up.set()
        self._down.set()
        self._delay_s = 0.0
        self._piece_bytes = READ_BYTES
        self._is_resetting = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.accepted = 0
        """Connections so far."""

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def cut(self, *, up: bool = True, down: bool = True) -> None:
        """`up` is towards the target. Nothing passes, and nobody is told."""
        if up:
            self._do(self._up.clear)
        if down:
            self._do(self._down.clear)

    def heal(self) -> None:
        def whole() -> None:
            self._is_resetting = False
            self._delay_s, self._piece_bytes = 0.0, READ_BYTES
            self._up.set()
            self._down.set()

        self._do(whole)

    def slow(self, delay_s: float, piece_bytes: int = READ_BYTES) -> None:
        """Each piece of at most so many bytes comes so much later."""

        def slower() -> None:
            self._delay_s, self._piece_bytes = delay_s, piece_bytes

        self._do(slower)

    def reset(self, *, lasts: bool = False) -> None:
        """All open connections at once; where it lasts, new ones, too, until `heal`."""

        def now() -> None:
            self._is_resetting = lasts
            for writer in list(self._writers):
                _reset(writer)

        self._do(now)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self._target[1])

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, what: Callable[[], None]) -> None:
        done = threading.Event()

        def then() -> None:
            what()
            done.set()

        self._loop.call_soon_threadsafe(then)
        assert done.wait(_START_S), "the proxy hangs"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.accepted += 1
        try:
            if self._is_resetting:
                return
            await self._up.wait()
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either side is gone, or the proxy ends
        finally:
            _reset(writer)
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers.add(far_writer)
        try:
            async with asyncio.TaskGroup() as group:
                up = group.create_task(self._pump(reader, far_writer, self._up))
                down = group.create_task(self._pump(far_reader, writer, self._down))
                # Who has gone, has gone: nothing here speaks on half a connection.
                await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
                up.cancel()
                down.cancel()
        finally:
            self._writers.discard(far_writer)
            with contextlib.suppress(OSError):
                far_writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                for at in range(0, len(data), self._piece_bytes):
                    if self._delay_s:
                        await asyncio.sleep(self._delay_s)
                    await gate.wait()
                    writer.write(data[at : at + self._piece_bytes])
                    await writer.drain()
            await gate.wait()  # an end is not heard through a cut either


class Toxic:
    """The thread that carries all links."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            asyncio.run_coroutine_threadsafe(link.close(), self._loop).result(_START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def link(self, address: str) -> Link:
        """To `tcp://host:port` or `http://host:port`."""
        host, _, port = address.rpartition("://")[2].rpartition(":")
        made = Link(self._loop, host, int(port))
        asyncio.run_coroutine_threadsafe(made.open(), self._loop).result(_START_S)
        self._links.append(made)
        return made


def _reset(writer: asyncio.StreamWriter) -> None:
    """So that the other side gets a reset and no orderly end."""
    with contextlib.suppress(OSError):
        owned: socket.socket | None = writer.get_extra_info("socket")
        if owned is not None:
            owned.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
