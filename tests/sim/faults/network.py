"""The ways between machines: late, cut in one direction, torn, reset; and the two ends of each.

    FaultyNet ── a `NetLoop` whose connections lie between two machines and know the way
    Way       ── from one machine to another: what is sent there now is delayed, or stuck

TCP loses nothing: a packet that is dropped is sent again, so that what a cut holds back arrives
when it is over, in order. A connection breaks only where it is reset, or where a machine dies.
A machine that vanishes says nothing more, and whoever asks it waits; one that is killed leaves a
kernel that resets its connections.
Read `machines.py` for what runs at both ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from faults.machines import Machine, MachineLoop, current_machine
from memory_net import LATENCY_S, Factory, Listener, NetLoop, Pipe

FOREVER_S = 1e9
WRITE_HIGH_BYTES = 64 << 10
"""asyncio's own: a writer with more unsent than this is told to pause."""


@dataclass(slots=True)
class Way:
    """One direction between two machines."""

    latency_s: float = LATENCY_S
    jitter_s: float = 0.0
    cut_until_s: float = 0.0
    """What is sent before then arrives after it."""

    def arrives_at(self, now_s: float, dice: random.Random) -> float:
        jitter_s = dice.random() * self.jitter_s if self.jitter_s else 0.0
        return max(now_s, self.cut_until_s) + self.latency_s + jitter_s


@dataclass(frozen=True, slots=True)
class Port:
    """Who listens at an address: its machine's own code."""

    factory: Factory
    machine: Machine | None


@dataclass(slots=True)
class Ground:
    """The addresses and ways there are."""

    seed: int
    ways: dict[tuple[str, str], Way] = field(default_factory=dict[tuple[str, str], Way])
    pipes: dict[FaultyPipe, None] = field(default_factory=dict["FaultyPipe", None])
    """Open connections, both ends."""
    vanished: set[str] = field(default_factory=set[str])
    """Hosts that are gone without a word: nothing is answered there, not even a refusal."""
    made_count: int = 0
    resets: int = 0
    torn: int = 0

    def way(self, source: str, target: str) -> Way:
        return self.ways.setdefault((source, target), Way())


class FaultyNet(MachineLoop, NetLoop):
    """See the module."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.listeners: dict[tuple[str, int], Any] = {}
        self.ground = Ground(seed)
        self.on_arrival: Callable[[FaultyPipe, bytes | None], None] = lambda _pipe, _data: None
        """Told of all that arrives, before it does."""

    async def create_server(  # pyright: ignore[reportIncompatibleMethodOverride] - what is used
        self, protocol_factory: Factory, host: str, port: int, **_: Any
    ) -> Any:
        machine = current_machine()
        host = machine.name if machine is not None else host
        self.listen(host, port or 80, protocol_factory)
        return Listener(self, (host, port or 80))

    def listen(self, host: str, port: int, factory: Factory) -> None:
        """As a part of the machine that calls it."""
        self.listeners[host, port] = Port(factory, current_machine())

    async def create_connection(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, protocol_factory: Factory, host: str, port: int, **_: Any
    ) -> Any:
        here = _name_of(current_machine())
        ground = self.ground
        dice = self._new_dice()
        out, back = ground.way(here, host), ground.way(host, here)
        await self._asked(host, out, dice)
        found: Port | None = self.listeners.get((host, port))
        await asyncio.sleep(back.arrives_at(self.time(), dice) - self.time())
        if found is None or (found.machine is not None and found.machine.is_dead):
            raise ConnectionRefusedError(f"{host}:{port}")
        near = FaultyPipe(self, here, current_machine(), out, dice)
        far = FaultyPipe(self, host, found.machine, back, dice)
        near.number = far.number = ground.made_count
        near.peer, far.peer = far, near
        ground.pipes[near] = ground.pipes[far] = None
        asked = protocol_factory()
        near.begin(asked)
        # The kernel accepts; a machine that is stopped learns of it when it goes on.
        self.call_soon(far.accept, found.factory, context=far.context)
        return near, asked

    async def _asked(self, host: str, way: Way, dice: random.Random) -> None:
        """The first packet's way; it is sent again until it arrives."""
        while True:
            await asyncio.sleep(way.arrives_at(self.time(), dice) - self.time())
            if host not in self.ground.vanished:
                return
            await asyncio.sleep(1.0)

    def _new_dice(self) -> random.Random:
        """Its own for each connection: the order in which others draw does not matter to it."""
        self.ground.made_count += 1
        return random.Random(f"connection {self.ground.seed} {self.ground.made_count}")

    # -- what happens to it ------------------------------------------------------------------------

    def cut(self, source: str, target: str, secs: float) -> None:
        """Nothing gets from one to the other until then. What is on its way already arrives."""
        way = self.ground.way(source, target)
        way.cut_until_s = max(way.cut_until_s, self.time() + secs)

    def heal_ways(self) -> None:
        for way in self.ground.ways.values():
            way.cut_until_s = min(way.cut_until_s, self.time())
            way.latency_s, way.jitter_s = LATENCY_S, 0.0
        for pipe in list(self.ground.pipes):
            pipe.hurry()

    def reset(self, pipe: FaultyPipe, *, is_torn: bool = False) -> None:
        """Both ends lose it. Torn: the receiver still gets a part of what is on its way to it."""
        self.ground.resets += 1
        if is_torn and pipe.tear():
            self.ground.torn += 1
        for end in (pipe, pipe.far):
            end.break_off(ConnectionResetError("reset"))

    def die(self, machine: Machine, *, is_silent: bool = False) -> None:
        """Its code runs no more. Where it is not silent, its kernel resets its connections."""
        self.kill_machine(machine)
        for address, port in list(self.listeners.items()):
            if port.machine is machine:
                del self.listeners[address]
        if is_silent:
            self.ground.vanished.add(machine.name)
        for pipe in [pipe for pipe in self.ground.pipes if pipe.machine is machine]:
            if not is_silent:
                pipe.far.break_off(ConnectionResetError("its process ended"))
            self.ground.pipes.pop(pipe, None)


class FaultyPipe(Pipe):
    """One end of a connection between two machines."""

    def __init__(
        self,
        loop: FaultyNet,
        host: str,
        machine: Machine | None,
        way: Way,
        dice: random.Random,
    ) -> None:
        super().__init__(loop)
        self.net = loop
        self.host = host
        self.machine = machine
        self.context: contextvars.Context = (
            machine.context.copy() if machine else contextvars.copy_context()
        )
        self.way = way
        self.number = 0
        self.on_written: Callable[[bytes], None] | None = None
        self._dice = dice
        self._arrivals: deque[tuple[float, bytes | None]] = deque()
        self._unread_bytes = 0
        self._high_bytes = WRITE_HIGH_BYTES
        self.is_writer_paused = False
        self._has_begun = False

    @property
    def far(self) -> FaultyPipe:
        assert isinstance(self.peer, FaultyPipe)
        return self.peer

    def accept(self, factory: Factory) -> None:
        self.begin(factory())

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self._has_begun = True
        super().begin(protocol)
        self._drain()

    def break_off(self, error: Exception) -> None:
        """The connection is gone; this end hears of it one latency later."""
        if not self._is_over:
            self._is_closing = True
            at_s = self.net.time() + LATENCY_S
            self.net.call_at(at_s, self._lose, error, context=self.context)

    def tear(self) -> bool:
        """Of what is on its way here, only the beginning arrives; whether anything was."""
        for index, (at_s, data) in enumerate(self._arrivals):
            if data is not None and len(data) > 1:
                part = data[: self._dice.randint(1, len(data) - 1)]
                while len(self._arrivals) > index:
                    self._arrivals.pop()
                self._arrivals.append((at_s, part))
                return True
        return False

    def hurry(self) -> None:
        """The way is as it should be again: what was stuck arrives soon."""
        soon_s = self.net.time() + LATENCY_S
        self._arrivals = deque((min(at_s, soon_s), data) for at_s, data in self._arrivals)
        self.net.call_at(soon_s, self._drain, context=self.context)

    # -- what protocols call -----------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """From a machine that died nothing leaves, also when all is cleared away at the very end
        and what still waits there is cancelled.
        """
        if data and not self._is_closing and self in self.net.ground.pipes:
            if self.on_written is not None:
                self.on_written(bytes(data))
            self._send(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = WRITE_HIGH_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return self.far._unread_bytes if self.is_writer_paused else 0

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.net.call_soon(self._drain, context=self.context)

    def abort(self) -> None:
        """What was not sent never is."""
        if not self._is_closing:
            self._is_closing = True
            self._send(None)
            self.net.call_soon(self._end, context=self.context)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send(None)
            self.net.call_soon(self._end, context=self.context)

    # -- the way -----------------------------------------------------------------------------------

    def _send(self, data: bytes | None) -> None:
        far, now_s = self.far, self.net.time()
        if far not in self.net.ground.pipes:
            return
        at_s = self.way.arrives_at(now_s, self._dice)
        if far._arrivals:
            at_s = max(at_s, far._arrivals[-1][0])
        far._arrivals.append((at_s, data))
        far._unread_bytes += len(data) if data else 0
        self.net.call_at(at_s, far._drain, context=far.context)
        if far._unread_bytes > self._high_bytes and not self.is_writer_paused:
            self.is_writer_paused = True
            if self._protocol is not None:
                self._protocol.pause_writing()

    def _drain(self) -> None:
        if not self._has_begun:
            return
        now_s = self.net.time() + 1e-9
        while self._arrivals and not self._is_paused and not self._is_over:
            at_s, data = self._arrivals[0]
            if at_s > now_s:
                break
            self._arrivals.popleft()
            self.net.on_arrival(self, data)
            assert self._protocol is not None
            if data is None:
                self._protocol.eof_received()
                self.close()
                continue
            self._unread_bytes -= len(data)
            self._let_write()
            if not self._is_closing:
                self._protocol.data_received(data)

    def _let_write(self) -> None:
        """Whoever waits for room here may go on, in a turn of its own."""
        far = self.far
        if far.is_writer_paused and self._unread_bytes <= far._high_bytes // 4:
            far.is_writer_paused = False
            if far._protocol is not None and not far._is_over:
                self.net.call_soon(far._protocol.resume_writing, context=far.context)

    def _end(self) -> None:
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_over and self._has_begun:
            self._is_over = True
            self.net.ground.pipes.pop(self, None)
            assert self._protocol is not None
            self._protocol.connection_lost(error)
        elif not self._has_begun:
            self._is_over = True
            self.net.ground.pipes.pop(self, None)


def _name_of(machine: Machine | None) -> str:
    return machine.name if machine is not None else "client"
