"""A page that is kept up to date: one snapshot a second, as server-sent events, until it ends.

Costs a watcher one write a second, whatever happens in between. A watcher that is slow is told less
often, since there is no queue: the next snapshot is taken when the last has gone out. One that
takes nothing for `SLOW_S` is cut off, and beyond `MAX_WATCHERS` nobody is let in (503); who does
not see the fleet has half of the places, so that no tenant shuts the operator out. Must never:
keep a gateway from ending, or go on for a caller whose key is good no more. Read `dashboard.py` for
what is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from trunkline.gateway.lasting import Lasting, lasting_of
from trunkline.gateway.listener import problem_response

TICK_S = 1.0
SLOW_S = 10.0
MAX_WATCHERS = 32

Snapshot: TypeAlias = Callable[[], Awaitable[bytes | None]]
"""JSON on one line; None where the caller may not see it any more. Raises Away."""


class Away(Exception):
    """Nobody is there now who could say what is to be seen."""


class Room:
    """Places for watchers."""

    def __init__(self, places: int = MAX_WATCHERS, *, slow_s: float = SLOW_S) -> None:
        self._places = places
        self.slow_s = slow_s
        self.taken = 0
        self.taken_below = 0
        """Of these, by watchers who do not see the fleet."""

    def stream(self, request: Request, snapshot: Snapshot, *, sees_fleet: bool = True) -> Response:
        """The answer to somebody who wants to watch."""
        if request.method == "HEAD":
            return Response(headers=_HEADERS, media_type=_EVENTS)
        is_full = not sees_fleet and self.taken_below >= self._places // 2
        if is_full or self.taken >= self._places:
            open_count = self.taken_below if is_full else self.taken
            text = f"{open_count} dashboards are open already: close one"
            response = problem_response(503, text, "too_many_watchers")
            response.headers["retry-after"] = "5"
            return response
        return _Stream(self, lasting_of(request), snapshot, sees_fleet=sees_fleet)


class _Stream(StreamingResponse):
    """To one watcher. Its place is taken as it is made, and free when its call is over."""

    def __init__(
        self, room: Room, lasting: Lasting, snapshot: Snapshot, *, sees_fleet: bool
    ) -> None:
        super().__init__((), headers=_HEADERS, media_type=_EVENTS)
        self._room = room
        self._lasting = lasting
        self._snapshot = snapshot
        self._below = int(not sees_fleet)
        room.taken += 1
        room.taken_below += self._below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)  # which ends when the watcher leaves
        finally:
            self._room.taken -= 1
            self._room.taken_below -= self._below

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            while not self._lasting.stop.is_set():
                body = await self._snapshot()
                if body is None:
                    await self._say(send, b"event: over\ndata: {}\n\n")
                    break
                await self._say(send, b"event: look\ndata: " + body + b"\n\n")
                await self._until_next_tick()
        except TimeoutError:
            self._lasting.cut()
            return
        except Away:
            pass  # the watcher tries again, and is told then
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _say(self, send: Send, frame: bytes) -> None:
        """Raises TimeoutError for a watcher that takes nothing."""
        async with asyncio.timeout(self._room.slow_s):
            await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _until_next_tick(self) -> None:
        left_s = TICK_S - asyncio.get_running_loop().time() % TICK_S
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._lasting.stop.wait()


_EVENTS = "text/event-stream"
# Proxies on the way are asked not to gather what is to come at once.
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
