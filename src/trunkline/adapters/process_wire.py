"""From one process to all others under one parent: datagrams over sockets that they inherit.

Each has an ear; all have the mouths of all others. Nothing has a name or a port that anybody else
could find. The parent keeps the pairs, so that a process that is started again has its own. A word
that finds no room is lost. Read `ports/board.py` for what it is to its users.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

MAX_WORD_BYTES = 1 << 18
"""A larger one is lost, whole or its end, and a word without its end makes no sense."""
_AT_ONCE = 256
"""Words read in one go."""


def wire_pair() -> tuple[socket.socket, socket.socket]:
    """An ear, and the mouth that speaks to it."""
    ear, mouth = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for one in (ear, mouth):
        one.setblocking(False)
    # The kernel gives twice that, up to a limit of its own; without, 208 KiB are too large.
    mouth.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_WORD_BYTES)
    return ear, mouth


class ProcessWire:
    """`ports.board.Wire`. Belongs to the running loop from `open` to `close`."""

    def __init__(self, ear: socket.socket, mouths: Sequence[socket.socket]) -> None:
        self._ear = ear
        self._mouths = mouths
        self._on_body: list[Callable[[bytes], None]] = []

    def open(self) -> None:
        """What was said to an earlier life is not heard."""
        while self._words():
            pass
        asyncio.get_running_loop().add_reader(self._ear.fileno(), self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ear.fileno())
        for one in (self._ear, *self._mouths):
            one.close()

    async def send(self, body: bytes) -> None:
        for mouth in self._mouths:
            with contextlib.suppress(OSError):  # it does not listen, or not fast enough
                mouth.send(body)

    def hear(self, on_body: Callable[[bytes], None]) -> None:
        self._on_body.append(on_body)

    def _read(self) -> None:
        for word in self._words():
            for on_body in self._on_body:
                on_body(word)

    def _words(self) -> list[bytes]:
        found: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while len(found) < _AT_ONCE:
                found.append(self._ear.recv(MAX_WORD_BYTES))
        return found
