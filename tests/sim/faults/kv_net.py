"""Blocking sockets between machines: what stands where the KV plane has the module `socket`.

    thread ──sendmsg──► room? ──► FaultyPipe ──the way──► FaultyPipe ──► inbox ──recv_into──► thread
               └─waits for it, a tick at most                              └─waits, a tick at most

As the system's, as far as the KV plane uses them: TCP over IPv4 with time-outs, and nothing that
two processes of one host could share. Bytes go the ways of `network.py`, late, cut and torn as all
others; beside that some may arrive with a bit flipped, which nothing below the KV plane notices.
Must never: take or give in an order that is not the way's. Read `fibres.py` for threads.
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket as real
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from faults.fibres import Spots, Threads, wake_all
from faults.machines import Machine, current_machine
from faults.network import FaultyNet, FaultyPipe

PORT = 7_100
"""Of every worker's pull server."""
INBOX_BYTES = 64 << 10
"""With more than this unread, nothing more is taken from the way."""
IDLE_TICK_S = 0.5
"""How often a thread looks that waits for whether anything comes at all. The real one looks ten
times as often, and finds as little."""
_TIMEVAL = struct.Struct("@ll")


def address_of(name: str) -> str:
    """Of worker `w3`: 10.0.0.4."""
    return f"10.0.0.{int(name[1:]) + 1}"


def name_at(address: str) -> str:
    return f"w{int(address.rpartition('.')[2]) - 1}"


class Sockets:
    """Of one run: what product code finds under the names of the module."""

    AF_INET = real.AF_INET
    SOCK_STREAM = real.SOCK_STREAM
    SOL_SOCKET = real.SOL_SOCKET
    SO_RCVTIMEO = real.SO_RCVTIMEO
    SO_SNDTIMEO = real.SO_SNDTIMEO
    IPPROTO_TCP = real.IPPROTO_TCP
    TCP_NODELAY = real.TCP_NODELAY
    MSG_WAITALL = real.MSG_WAITALL
    MSG_PEEK = real.MSG_PEEK
    MSG_DONTWAIT = real.MSG_DONTWAIT
    SHUT_RDWR = real.SHUT_RDWR

    def __init__(self, net: FaultyNet, threads: Threads, seed: int, *, room_bytes: int) -> None:
        """`room_bytes`: what a socket takes that the other end has not read."""
        self.net = net
        self.threads = threads
        self.room_bytes = room_bytes
        self.dice = random.Random(f"sockets {seed}")
        self.flipping: dict[str, float] = {}
        """Worker -> how much of what it sends gets a bit flipped."""
        self.flipped = 0
        self.full_count = 0
        """How often a thread had to wait for room."""
        self.made: list[Socket] = []
        self.on_send: Callable[[Sequence[bytes | memoryview]], None] = lambda _buffers: None
        """Told of all that a thread wants sent, before it is."""

    def open_at(self, machine: Machine) -> int:
        """How many connections that one machine has not closed."""
        self.made = [one for one in self.made if not one.is_closed]
        return sum(one.machine is machine for one in self.made)

    def create_server(self, address: tuple[str, int], *, backlog: int) -> Listener:
        machine = current_machine()
        assert machine is not None
        assert backlog
        return Listener(self, (address[0], address[1] or PORT), machine)

    def create_connection(self, address: tuple[str, int], timeout: float) -> Socket:
        """Raises OSError."""
        connected = Socket(self)
        task = self.net.create_task(
            self.net.create_connection(lambda: connected, name_at(address[0]), address[1]),
            name="kv connect",
        )
        spots: Spots = []

        def is_done(_task: object) -> None:
            if connected.is_closed and connected.pipe is not None:
                connected.pipe.close()
            wake_all(spots)

        task.add_done_callback(is_done)
        self.threads.here().wait(spots, timeout)
        if not task.done():
            connected.is_closed = True
            task.cancel()
            raise TimeoutError("timed out")
        task.result()
        return connected


class Socket(asyncio.Protocol):
    """One end of a connection."""

    family = real.AF_INET

    def __init__(self, sockets: Sockets) -> None:
        self.machine = current_machine()
        self.pipe: FaultyPipe | None = None
        self.is_closed = False
        self._sockets = sockets
        self._inbox = bytearray()
        self._has_ended = False
        self._error: Exception | None = None
        self._readers: Spots = []
        self._writers: Spots = []
        self._is_full = False
        self._read_tick_s: float | None = None
        self._write_tick_s: float | None = None

    # -- what the way calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, FaultyPipe)
        self.pipe = transport
        transport.set_write_buffer_limits(high=self._sockets.room_bytes)
        self._sockets.made.append(self)

    def data_received(self, data: bytes) -> None:
        self._inbox += data
        if len(self._inbox) > INBOX_BYTES:
            self._known_pipe.pause_reading()
        wake_all(self._readers)

    def eof_received(self) -> None:
        self._has_ended = True
        wake_all(self._readers)
        wake_all(self._writers)

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended, self._error = True, exc
        wake_all(self._readers)
        wake_all(self._writers)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        wake_all(self._writers)

    # -- what threads call -------------------------------------------------------------------------

    def setblocking(self, is_blocking: bool) -> None:
        assert is_blocking

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if level != real.SOL_SOCKET:
            return
        secs, micros = _TIMEVAL.unpack(value)
        if option == real.SO_RCVTIMEO:
            self._read_tick_s = secs + micros / 1e6
        elif option == real.SO_SNDTIMEO:
            self._write_tick_s = secs + micros / 1e6

    def recv_into(self, view: memoryview, _nbytes: int = 0, flags: int = 0) -> int:
        wanted = len(view) if flags & real.MSG_WAITALL else 1
        if not self._await(wanted, self._read_tick_s) and not self._inbox:
            raise BlockingIOError(errno.EAGAIN, "nothing came")
        count = min(len(view), len(self._inbox))
        view[:count] = self._inbox[:count]
        del self._inbox[:count]
        if len(self._inbox) <= INBOX_BYTES:
            self._known_pipe.resume_reading()
        return count

    def recv(self, size: int, flags: int) -> bytes:
        """A look at what is next, which stays."""
        assert flags & real.MSG_PEEK
        tick_s = 0.0 if flags & real.MSG_DONTWAIT else IDLE_TICK_S
        if not self._await(1, tick_s):
            raise BlockingIOError(errno.EAGAIN, "nothing came")
        return bytes(self._inbox[:size])

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        self._sockets.on_send(buffers)
        if self._is_full and not self._has_ended and not self.is_closed:
            self._sockets.full_count += 1
            self._sockets.threads.here().wait(self._writers, self._write_tick_s)
        if self._error is not None:
            raise self._error
        if self._has_ended or self.is_closed:
            raise BrokenPipeError(errno.EPIPE, "it was closed")
        if self._is_full:
            raise BlockingIOError(errno.EAGAIN, "there is no room")
        data = b"".join(buffers)[: self._sockets.room_bytes]
        self._known_pipe.write(self._spoilt(data))
        return len(data)

    def shutdown(self, _how: int) -> None:
        if self._has_ended:
            raise OSError(errno.ENOTCONN, "it has ended")
        self._has_ended = True
        self._known_pipe.close()
        wake_all(self._readers)
        wake_all(self._writers)

    def close(self) -> None:
        self.is_closed = self._has_ended = True
        if self.pipe is not None:
            self.pipe.close()

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _known_pipe(self) -> FaultyPipe:
        assert self.pipe is not None
        return self.pipe

    def _await(self, wanted: int, tick_s: float | None) -> bool:
        """Whether so many bytes are there, or the end is; within a tick. Raises OSError."""
        due_s = self._sockets.net.time() + (tick_s or 0.0)
        while len(self._inbox) < wanted:
            if self.is_closed:
                raise OSError(errno.EBADF, "it is closed")
            if self._has_ended:
                if self._error is not None and not self._inbox:
                    raise self._error
                return True
            left_s = due_s - self._sockets.net.time()
            if left_s <= 0.0 or not self._sockets.threads.here().wait(self._readers, left_s):
                return False
        return True

    def _spoilt(self, data: bytes) -> bytes:
        sockets = self._sockets
        share = sockets.flipping.get(self.machine.name, 0.0) if self.machine else 0.0
        if not share or sockets.dice.random() >= share:
            return data
        sockets.flipped += 1
        flipped = bytearray(data)
        flipped[sockets.dice.randrange(len(flipped))] ^= 1 << sockets.dice.randrange(8)
        return bytes(flipped)


class Listener:
    """Where a machine takes connections in."""

    family = real.AF_INET

    def __init__(self, sockets: Sockets, address: tuple[str, int], machine: Machine) -> None:
        self._sockets = sockets
        self._address = address
        self._timeout_s: float | None = None
        self._waiting: deque[Socket] = deque()
        self._spots: Spots = []
        sockets.net.listen(machine.name, address[1], self._taken)

    def _taken(self) -> Socket:
        made = Socket(self._sockets)
        self._waiting.append(made)
        wake_all(self._spots)
        return made

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def settimeout(self, secs: float) -> None:
        self._timeout_s = secs

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        if not self._waiting:
            self._sockets.threads.here().wait(self._spots, self._timeout_s)
        if not self._waiting:
            raise TimeoutError("nobody came")
        return self._waiting.popleft(), ("0.0.0.0", 0)

    def close(self) -> None:
        self._sockets.net.listeners.pop((name_at(self._address[0]), self._address[1]), None)
