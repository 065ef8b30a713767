"""The client port while the gateway starts: alive, and not ready.

Whoever looks after the process can tell one that loads its tokenizers from one that hangs, and
sends no requests yet. Everything else is told to come again. Must never read a body, or keep a
connection. Read `front.py` for what takes the port over.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from typing import cast

import msgspec

from trunkline.config import ListenConfig
from trunkline.errors import NoWorker
from trunkline.gateway.answers import Answer, encode, failed, refused
from trunkline.gateway.contracts import ClientError
from trunkline.gateway.head import parse_request
from trunkline.gateway.routes import Local, route_of

MAX_HEAD_BYTES = 16 << 10
PATIENCE_S = 10.0
"""How long a client may take to send a head."""
MAX_VISITORS = 256
"""Open connections; further ones are closed without a word."""
_LOADING = b'{"status":"starting","reuse":"off","detail":"the gateway is loading"}'


class WaitingRoom:
    """Open it before what takes long, and `close` it when the front has the sockets."""

    def __init__(self, listen: ListenConfig) -> None:
        self._listen = listen
        self._servers: list[asyncio.Server] = []
        self._visitors: set[_Visitor] = set()

    async def open(self, sockets: Sequence[socket.socket] = ()) -> None:
        """On these where they are given: they are bound already."""
        create = partial(asyncio.get_running_loop().create_server, lambda: _Visitor(self._visitors))
        if sockets:
            self._servers = [await create(sock=one) for one in sockets]
        else:
            self._servers = [await create(self._listen.host, self._listen.port)]

    @property
    def is_open(self) -> bool:
        return bool(self._servers)

    def sockets(self) -> list[socket.socket]:
        """Its listening sockets, for who comes after it."""
        assert self._servers, "asked before it was open"
        return [one.dup() for server in self._servers for one in server.sockets]

    def close(self) -> None:
        """It may be opened again."""
        for server in self._servers:
            server.close()
        self._servers = []
        for visitor in list(self._visitors):
            visitor.leave()


class _Visitor(asyncio.Protocol):
    """One connection: a head, an answer, and gone."""

    def __init__(self, visitors: set[_Visitor]) -> None:
        self._visitors = visitors
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # asyncio's signature is wider
        if len(self._visitors) >= MAX_VISITORS:
            self._transport.abort()
            return
        self._visitors.add(self)
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self.leave)

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end >= 0:
            self._transport.write(_answer(self._head[: end + 4]))
            self._transport.close()
        elif len(self._head) > MAX_HEAD_BYTES:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._visitors.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _answer(raw: bytes) -> bytes:
    has_body = True
    try:
        head = parse_request(raw, max_headers=100, max_header_bytes=MAX_HEAD_BYTES)
        has_body = head.method != "HEAD"
        answer = _answer_to(head.target)
    except ClientError as error:
        answer = refused(error.refusal, "")
    return encode(answer, "", keeps_alive=False, has_body=has_body)


def _answer_to(target: bytes) -> Answer:
    match route_of(target):
        case Local.HEALTH | Local.LIVENESS:
            return Answer(status=200, body=msgspec.json.encode({"status": "ok"}))
        case Local.READINESS:
            return Answer(status=503, body=_LOADING)
        case _:
            return failed(NoWorker("the gateway is starting"), "")
