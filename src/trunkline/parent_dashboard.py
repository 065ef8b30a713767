"""The dashboard of several processes: the page from here, what it shows from all of them, joined.

Each process is asked for its own snapshot, once a second and watcher, in the name of who watches;
whether they may is for the processes to say. Numbers add up; of times, whose distributions cannot
be joined from their quantiles, the worst process's are told, and the page says so. Must never: send
what no process gave to this caller. Read `parent_admin.py` for all other paths of the port.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trunkline.gateway.listener import DASHBOARD, json_response
from trunkline.gateway.live import Away, Room
from trunkline.gateway.overview import (
    SHOWN_DECISIONS,
    SHOWN_PREFIXES,
    DecisionShown,
    Foregone,
    Integrity,
    Overview,
    PrefixShown,
    Quantiles,
    Traffic,
    WorkerShown,
)
from trunkline.gateway.pages import Pages
from trunkline.parent_admin import ParentAdmin
from trunkline.parent_answers import Heard, first_good

_SNAPSHOT = f"{DASHBOARD}/snapshot"
_EVENTS = f"{DASHBOARD}/events"
_DECISIONS = f"{DASHBOARD}/decisions"


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One process's snapshot."""

    may: list[str]
    actor: str
    has_tenants: bool
    look: Overview | None


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    decisions: list[DecisionShown]


_SEEN = msgspec.json.Decoder(_Seen)
_FOUND = msgspec.json.Decoder(_Found)


class ParentDashboard:
    """An ASGI application before the `ParentAdmin`, which has all other paths."""

    def __init__(self, admin: ParentAdmin, *, wants_key: bool) -> None:
        self._admin = admin
        self._pages = Pages(wants_key=wants_key)
        self._room = Room()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = None
        if scope["method"] in ("GET", "HEAD"):
            response = self._pages.answer(scope["path"])
            response = response or await self._data(Request(scope, receive))
        await (response or self._admin)(scope, receive, send)

    async def _data(self, request: Request) -> Response | None:
        """None for a path that is not about the dashboard."""
        path, query = request.scope["path"], request.scope["query_string"].decode("latin-1")
        if path not in (_SNAPSHOT, _EVENTS, _DECISIONS):
            return None
        target = (_SNAPSHOT if path == _EVENTS else path) + (f"?{query}" if query else "")
        heard = await self._admin.hear(request, target)
        good = [each for each in heard if each.is_good]
        if not good:
            return first_good(heard)
        if path == _EVENTS:
            later = partial(self._seen_later, request)
            sees_fleet = _SEEN.decode(good[0].told.body).look is not None
            return self._room.stream(request, later, sees_fleet=sees_fleet)
        if path == _DECISIONS:
            found = [(each.number, _FOUND.decode(each.told.body).decisions) for each in good]
            wanted = request.query_params.get("limit", str(SHOWN_DECISIONS))
            return json_response({"decisions": _latest(found)[: int(wanted)]})
        return Response(_joined(good), media_type="application/json")

    async def _seen_later(self, request: Request) -> bytes | None:
        heard = await self._admin.hear(request, _SNAPSHOT)
        good = [each for each in heard if each.is_good]
        if good:
            return _joined(good)
        if any(each.told.status in (401, 403) for each in heard):
            return None
        raise Away


def _joined(good: Sequence[Heard]) -> bytes:
    seen = [(each.number, _SEEN.decode(each.told.body)) for each in good]
    first = seen[0][1]
    looks = [(number, one.look) for number, one in seen if one.look is not None]
    whole = joined_overview(looks) if looks else None
    return msgspec.json.encode(
        _Seen(may=first.may, actor=first.actor, has_tenants=first.has_tenants, look=whole)
    )


def joined_overview(looks: Sequence[tuple[int, Overview]]) -> Overview:
    """What several processes see, each by its number."""
    all_of = [look for _, look in looks]
    workers = _workers(all_of)
    return Overview(
        at_ms=max(look.at_ms for look in all_of),
        up_ms=max(look.up_ms for look in all_of),
        processes=len(all_of),
        workers=workers,
        traffic=_traffic([look.traffic for look in all_of]),
        integrity=Integrity(
            false_hits=sum(look.integrity.false_hits for look in all_of),
            leaking=max(look.integrity.leaking for look in all_of),
            tested=max(look.integrity.tested for look in all_of),
            workers=len(workers),
            refused_pulls=sum(look.integrity.refused_pulls for look in all_of),
        ),
        prefixes=_prefixes(all_of),
        decisions=_latest([(number, look.decisions) for number, look in looks])[:SHOWN_DECISIONS],
    )


def _workers(looks: Sequence[Overview]) -> list[WorkerShown]:
    """One row a worker, as they are met."""
    by_name: dict[str, list[WorkerShown]] = {}
    for row in chain.from_iterable(look.workers for look in looks):
        by_name.setdefault(row.worker, []).append(row)
    return [_worker(rows) for rows in by_name.values()]


def _worker(rows: Sequence[WorkerShown]) -> WorkerShown:
    """The first that may not choose it, else the first; with the requests of all."""
    shown = next((row for row in rows if row.state != "ready"), rows[0])
    return msgspec.structs.replace(
        shown,
        alarms=sorted({alarm for row in rows for alarm in row.alarms}),
        load_ms=max(row.load_ms for row in rows),
        active=sum(row.active for row in rows),
        chosen=sum(row.chosen for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        hit_tokens=sum(row.hit_tokens for row in rows),
        believed=min((row.believed for row in rows if row.believed is not None), default=None),
    )


def _traffic(parts: Sequence[Traffic]) -> Traffic:
    def summed(number: Callable[[Traffic], Any]) -> Any:  # an int or a float, as the field is
        return sum(number(part) for part in parts)

    return Traffic(
        requests=_counted(part.requests for part in parts),
        active=summed(lambda part: part.active),
        waiting=summed(lambda part: part.waiting),
        refused=summed(lambda part: part.refused),
        decisions=summed(lambda part: part.decisions),
        reasons=_counted(part.reasons for part in parts),
        prompt_tokens=summed(lambda part: part.prompt_tokens),
        promised_tokens=summed(lambda part: part.promised_tokens),
        hit_tokens=summed(lambda part: part.hit_tokens),
        saved_prefill_ms=summed(lambda part: part.saved_prefill_ms),
        net_saved_ms=summed(lambda part: part.net_saved_ms),
        over_claims=summed(lambda part: part.over_claims),
        ttft=_worst(part.ttft for part in parts),
        ttft_count=summed(lambda part: part.ttft_count),
        foregone=_foregone([part.foregone for part in parts]),
    )


def _foregone(parts: Sequence[Foregone]) -> Foregone:
    looked_at = sum(part.looked_at for part in parts)
    saved_ms = sum(part.saved_ms for part in parts)
    dearer = sum(part.dearer_share * part.looked_at for part in parts)
    return Foregone(
        looked_at=looked_at,
        span_ms=max(part.span_ms for part in parts),
        streamed=sum(part.streamed for part in parts),
        chosen=_worst(part.chosen for part in parts),
        least_queue=_worst(part.least_queue for part in parts),
        observed=_worst(part.observed for part in parts),
        predicted_of_observed=_worst(part.predicted_of_observed for part in parts),
        saved_ms=saved_ms,
        saved_ms_each=round(saved_ms / looked_at, 2) if looked_at else 0.0,
        dearer_share=round(dearer / looked_at, 4) if looked_at else 0.0,
    )


def _worst(parts: Iterable[Quantiles | None]) -> Quantiles | None:
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Quantiles(
        p50=max(part.p50 for part in known),
        p95=max(part.p95 for part in known),
        p99=max(part.p99 for part in known),
    )


def _counted(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    whole = Counter[str]()
    for part in parts:
        whole.update(part)
    return dict(whole)


def _prefixes(looks: Sequence[Overview]) -> list[PrefixShown]:
    by_name: dict[str, list[PrefixShown]] = {}
    for row in chain.from_iterable(look.prefixes for look in looks):
        by_name.setdefault(row.prefix, []).append(row)
    joined = [
        PrefixShown(
            prefix=name,
            tokens=rows[0].tokens,
            requests=round(sum(row.requests for row in rows), 1),
            holders=max((row.holders for row in rows if row.holders is not None), default=None),
        )
        for name, rows in by_name.items()
    ]
    return sorted(joined, key=lambda row: (-row.requests * row.tokens, row.prefix))[:SHOWN_PREFIXES]


def _latest(found: Sequence[tuple[int, list[DecisionShown]]]) -> list[DecisionShown]:
    marked = [
        msgspec.structs.replace(row, process=number) for number, rows in found for row in rows
    ]
    return sorted(marked, key=lambda row: -row.at_ms)
