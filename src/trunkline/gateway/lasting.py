"""Answers that go on for as long as they are wanted: when to stop, and how to cut one off.

The server waits for open answers when it closes, so whoever gives one that has no end must be told;
and of a client that fetches nothing it would keep what is written for ever. Read `live.py` for who
gives such answers, `listener.py` for who tells them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

LASTING = "trunkline.lasting"


@dataclass(frozen=True, slots=True)
class Lasting:
    """What an answer that goes on for long has to know, and may do."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the port closes."""
    cut: Callable[[], None] = lambda: None
    """Ends its connection at once, whatever was not fetched."""


def lasting_of(request: Request) -> Lasting:
    """Of a request that came through `LastingAnswers`; of another one, what never stops."""
    found = request.scope.get(LASTING)
    return found if isinstance(found, Lasting) else Lasting()


class LastingAnswers:
    """Gives each request its `Lasting`."""

    def __init__(self, app: ASGIApp, stop: asyncio.Event) -> None:
        self._app = app
        self._stop = stop
        self.connections: set[Any] = set()  # Any: uvicorn's own, of several kinds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[LASTING] = Lasting(self._stop, partial(self._cut, scope))
        await self._app(scope, receive, send)

    def _cut(self, scope: Scope) -> None:
        for connection in [one for one in self.connections if one.scope is scope]:
            connection.transport.abort()
