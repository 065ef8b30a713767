"""Where a gateway process stands: alone on its ports, or one of several behind one port.

`wiring.py` asks both kinds the same. Alone, it answers on the client port from the start and says
itself where it is. One of several takes connections when its parent tells it to, has an admin port
of its own that takes requests from the parent alone, and ends in order when the parent is gone.
Must never: answer a client before it is told to. Read `parent.py` for who tells it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.assembly import Core
from trunkline.config import Config, ListenConfig
from trunkline.control.load_sync import LoadSync
from trunkline.errors import AuditDown
from trunkline.gateway.backend import Call
from trunkline.gateway.front import Front, Readiness
from trunkline.gateway.listener import (
    bind_admin,
    json_response,
    problem_response,
    read_body,
)
from trunkline.gateway.shared_port import Address, sockets_at
from trunkline.gateway.waiting_room import WaitingRoom
from trunkline.lifetime import announce, taken_port_named
from trunkline.observe import log
from trunkline.reload import Apply, Hangups, Reloaded, Reloader
from trunkline.reload_record import Asking, Keep, Note, ReloadRecord

READY_S = 10.0
"""So long a process that joins others waits for its first worker before it takes connections."""
TOKEN_HEADER = "x-trunkline-parent"
SOURCE_HEADER = "x-trunkline-source"
"""Who asks the parent, as only the parent may say; without it the parent asks for itself."""
CATCH_UP = "/catch-up"
"""Asked by the parent alone: take in what other processes have changed."""
TAKE_SETTINGS = "/take-settings"
"""Told by the parent alone: these settings are in force from here on."""
NOTE_RELOAD = "/note-reload"
"""Told by the parent alone, to the first: this is to be in the audit log."""
MAX_SETTINGS_BYTES = 16 << 20
MAX_NOTE_BYTES = 64 << 10
SERVE, SERVE_WHEN_READY = b"serve\n", b"serve when ready\n"
_LOOK_S = 0.05


class Handed(msgspec.Struct, frozen=True, kw_only=True):
    """What a parent tells a process as it starts it."""

    number: int
    config: Config
    """What it goes by."""
    shown: Config
    """What operators are shown: as they gave it, with the ports of the parent."""
    addresses: list[Address]
    """Of the client port."""
    root_key: bytes
    """Empty takes the configured one, or that of the state folder."""
    token: str
    ear: int = -1
    mouths: list[int] = []
    """Descriptors of its `adapters.process_wire`; none where the registry's servers carry words."""


class Alone:
    """The only process: both ports are its own."""

    root_key = b""
    is_first = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._room = WaitingRoom(config.listen)
        self._hangups: Hangups | None = None

    async def open(self) -> None:
        self._hangups = Hangups()
        with taken_port_named("--port", self._config.listen.host, self._config.listen.port):
            await self._room.open()

    def close(self) -> None:
        self._room.close()

    async def take(self, front: Front) -> None:
        await front.listen(self._config.listen, self._room.sockets())
        self._room.close()

    def bind_admin(self) -> socket.socket:
        listen = self._config.listen
        with taken_port_named("--admin-port", listen.admin_host, listen.admin_port):
            return bind_admin(listen)

    def bound(self, port: int, admin_port: int) -> Config:
        """The settings as they came out: where the kernel was to pick a port, the one it picked."""
        return replace(
            self._config, listen=replace(self._config.listen, port=port, admin_port=admin_port)
        )

    def guarded(
        self, app: ASGIApp, catch_up: Callable[[], Awaitable[None]], apply: Apply, keep: Keep
    ) -> ASGIApp:
        return app

    def reloading(
        self, reloader: Reloader, record: ReloadRecord
    ) -> Callable[[Call], Awaitable[Reloaded]]:
        """What an operator's wish does."""
        return partial(record.asked, reload=reloader.reload)

    def heeds(self, reloader: Reloader, record: ReloadRecord) -> list[Coroutine[Any, Any, None]]:
        assert self._hangups is not None, "before it was opened"
        return [self._hangups.heed(partial(record.hung_up, reloader.reload, log))]

    def announce(self, bound: Config, admin_port: int) -> None:
        announce(bound)

    def beside(
        self, front: Front, readiness: Callable[[], Readiness]
    ) -> list[Coroutine[Any, Any, None]]:
        return []

    def share_load(self, cores: Sequence[Core]) -> list[Coroutine[Any, Any, None]]:
        return []


class Seat:
    """One of several processes. `load` is None where words of load go another way."""

    def __init__(self, handed: Handed, load: LoadSync | None) -> None:
        self._handed = handed
        self._load = load
        self.root_key = handed.root_key
        self.is_first = handed.number == 0
        """Who says what is to be said once."""

    async def open(self) -> None:
        """The parent answers on the client port meanwhile."""

    def close(self) -> None:
        pass

    async def take(self, front: Front) -> None:
        front.port = self._handed.shown.listen.port  # where it will listen

    def bind_admin(self) -> socket.socket:
        return bind_admin(ListenConfig(admin_port=0))

    def bound(self, port: int, admin_port: int) -> Config:
        return self._handed.shown

    def guarded(
        self, app: ASGIApp, catch_up: Callable[[], Awaitable[None]], apply: Apply, keep: Keep
    ) -> ASGIApp:
        return FromParent(app, self._handed.token, catch_up, apply, keep)

    def reloading(
        self, reloader: Reloader, record: ReloadRecord
    ) -> Callable[[Call], Awaitable[Asking]]:
        """The parent reads the sources, when it knows from here that who asks may have it read."""
        return record.asks

    def heeds(self, reloader: Reloader, record: ReloadRecord) -> list[Coroutine[Any, Any, None]]:
        return []

    def announce(self, bound: Config, admin_port: int) -> None:
        _say({"admin_port": admin_port})

    def beside(
        self, front: Front, readiness: Callable[[], Readiness]
    ) -> list[Coroutine[Any, Any, None]]:
        return [self._heed(front, readiness)]

    def share_load(self, cores: Sequence[Core]) -> list[Coroutine[Any, Any, None]]:
        if self._load is None:
            return []
        fleets = [core.fleet for core in cores]
        return [self._load.run(fleets, [core.with_hearsay() for core in cores])]

    async def _heed(self, front: Front, readiness: Callable[[], Readiness]) -> None:
        """Do as the parent says; end in order when it says no more."""
        told = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(told)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        word = await told.readline()
        if word:
            if word == SERVE_WHEN_READY:
                await _until_ready(readiness)
            await front.listen(self._handed.config.listen, sockets_at(self._handed.addresses))
            _say({"serving": True})
            await told.read()
        signal.raise_signal(signal.SIGTERM)


async def _until_ready(readiness: Callable[[], Readiness]) -> None:
    """A worker may be chosen, and reuse is on; or it takes too long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while not (seen := readiness()).is_ready or not seen.is_reuse_on:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class FromParent:
    """Lets in what the parent passes on, in the name of whom it names."""

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        catch_up: Callable[[], Awaitable[None]],
        apply: Apply,
        keep: Keep,
    ) -> None:
        self._apply = apply
        self._keep = keep
        self._app = app
        self._token = token.encode()
        self._catch_up = catch_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get(TOKEN_HEADER, "").encode("latin-1")
        if not hmac.compare_digest(given, self._token):
            text = "this is one of several processes: ask the admin port that they share"
            await problem_response(403, text)(scope, receive, send)
        elif SOURCE_HEADER in headers:
            scope["client"] = (headers[SOURCE_HEADER], 0)
            await self._app(scope, receive, send)
        elif scope["path"] == CATCH_UP:
            await self._catch_up()
            await json_response({})(scope, receive, send)
        elif scope["path"] == TAKE_SETTINGS:
            told = await read_body(Request(scope, receive), MAX_SETTINGS_BYTES)
            await self._apply(msgspec.json.decode(told, type=Config))
            await json_response({})(scope, receive, send)
        elif scope["path"] == NOTE_RELOAD:
            answer = await self._noted(Request(scope, receive))
            await answer(scope, receive, send)
        else:
            scope["client"] = ("", 0)
            await self._app(scope, receive, send)

    async def _noted(self, request: Request) -> Response:
        note = msgspec.json.decode(await read_body(request, MAX_NOTE_BYTES), type=Note)
        try:
            await self._keep(note)
        except AuditDown as error:
            return problem_response(error.status, str(error), error.code)
        return json_response({})
