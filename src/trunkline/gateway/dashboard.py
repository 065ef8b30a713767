"""The dashboard's data: `GET /dashboard/events`, `/dashboard/snapshot`, `/dashboard/decisions`.

Whoever has any role at the admin port may watch; what of a snapshot they are given goes by their
roles, and with it goes which other paths they may ask. The part that is about the fleet is made and
written once a second for all who watch, and not at all while nobody does: O(workers + rows shown)
a second, and a second time that in bytes for each watcher; `benchmarks/dashboard.py` measures it.
Nothing is done for a decision but what `Accounts` and `Ended` add up. Must never: send the fleet's
part to a caller who may not read workers, decisions and metrics. Read `live.py` for the stream.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trunkline.gateway.admin_tenancy import Handler
from trunkline.gateway.backend import Caller, TenancyBackend
from trunkline.gateway.listener import (
    AdminKey,
    call_of,
    is_bearer,
    json_response,
    query_of,
    whole_number,
)
from trunkline.gateway.live import TICK_S, Room
from trunkline.gateway.overview import SHOWN_DECISIONS, DecisionFilter, OverviewSource
from trunkline.gateway.permissions import Act, extent_of

MAX_FOUND = 200
_MAX_FILTER_CHARS = 256
_FLEET = (Act.WORKERS_READ, Act.DECISIONS_READ, Act.METRICS_READ)
_TENANCY = (Act.TENANTS_READ, Act.RECEIPTS_READ, Act.AUDIT_READ)


class Dashboard:
    """The handlers, one for each route."""

    def __init__(
        self, source: OverviewSource, key: AdminKey, tenancy: TenancyBackend | None
    ) -> None:
        self._source = source
        self._key = key
        self._tenancy = tenancy
        self._room = Room()
        self._made: tuple[int, bytes] = (-1, b"")
        """The tick and what was made in it."""

    def routes(self) -> list[tuple[str, str, Act, Handler]]:
        return [
            ("GET", "/dashboard/events", Act.DASHBOARD_READ, self.events),
            ("GET", "/dashboard/snapshot", Act.DASHBOARD_READ, self.snapshot),
            ("GET", "/dashboard/decisions", Act.DECISIONS_READ, self.decisions),
        ]

    async def events(self, request: Request) -> Response:
        query_of(request)
        caller = call_of(request).caller
        later = partial(self._seen_later, request, caller)
        return self._room.stream(request, later, sees_fleet=_sees_fleet(caller))

    async def snapshot(self, request: Request) -> Response:
        query_of(request)
        body = self._seen_by(call_of(request).caller)
        return Response(body, 200, {"cache-control": "no-store"}, "application/json")

    async def decisions(self, request: Request) -> Response:
        query = query_of(request, "text", "reason", "end", "limit")
        if any(len(value) > _MAX_FILTER_CHARS for value in query.values()):
            raise HTTPException(400, f"a filter has at most {_MAX_FILTER_CHARS} characters")
        wanted = DecisionFilter(
            text=query.get("text", ""),
            reason=query.get("reason", ""),
            end=query.get("end", ""),
            limit=whole_number(query, "limit", SHOWN_DECISIONS, 1, MAX_FOUND),
        )
        return json_response({"decisions": self._source.chosen(wanted)})

    async def _seen_later(self, request: Request, caller: Caller) -> bytes | None:
        """What the caller sees now; None where their key is good no more."""
        if caller.principal is None:
            return self._seen_by(caller) if is_bearer(request.headers, self._key.text) else None
        assert self._tenancy is not None, "a caller with a key, and nobody who knows keys"
        authorization = request.headers.get("authorization", "").encode("latin-1")
        principal = self._tenancy.principal(authorization, caller.source)
        if principal is None or extent_of(principal.roles, Act.DASHBOARD_READ) is None:
            return None
        return self._seen_by(replace(caller, principal=principal))

    def _seen_by(self, caller: Caller) -> bytes:
        acts = _FLEET if self._tenancy is None else (*_FLEET, *_TENANCY)
        may = [act.value for act in acts if extent_of(caller.roles, act) is not None]
        head = {"may": may, "actor": caller.actor, "has_tenants": self._tenancy is not None}
        look = self._look() if _sees_fleet(caller) else b"null"
        return msgspec.json.encode(head)[:-1] + b',"look":' + look + b"}"

    def _look(self) -> bytes:
        """The same bytes for all within one tick."""
        tick = int(asyncio.get_running_loop().time() // TICK_S)
        if self._made[0] != tick:
            self._made = (tick, msgspec.json.encode(self._source.overview()))
        return self._made[1]


def _sees_fleet(caller: Caller) -> bool:
    return all(extent_of(caller.roles, act) is not None for act in _FLEET)
