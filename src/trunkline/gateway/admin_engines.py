"""Paths of the admin port that are about all engines at once, by the names that other routers have.

Owns their shapes. What they tell is what `/workers` tells, and what engines say themselves. Must
never: change a worker but through the caller's own act, on record. Read `admin.py` for the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trunkline.core.records import WorkerId
from trunkline.gateway.backend import AdminBackend, FleetChange, Refused, WorkerJob, WorkerView
from trunkline.gateway.listener import (
    decode,
    json_response,
    missing,
    problem_response,
    query_of,
    read_body,
)
from trunkline.gateway.metrics_pages import joined_pages
from trunkline.gateway.permissions import Act

Outcome = WorkerJob | Refused | None
Carry = Callable[[Request, FleetChange, Callable[[], Awaitable[Outcome]]], Awaitable[Outcome]]
"""Carries out a change of the fleet, on record where there are tenants."""
Routes = Sequence[tuple[str, str, Act, Callable[[Request], Awaitable[Response]]]]

MAX_FLUSHED_AT_ONCE = 16
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_Label = Annotated[str, Meta(max_length=256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amendment:
    """What a known worker is to be from now on. None leaves it as it is."""

    model_id: str | None = None
    labels: Mapping[str, str] | None = None
    api_key: str | None = None


class Engines(Protocol):
    """All workers behind the admin port. Called on the gateway's event loop."""

    async def pages(self) -> Sequence[tuple[WorkerId, bytes]]:
        """The metrics that each engine has now; of those alone that answer."""
        ...

    async def amend(self, worker: WorkerId, amendment: Amendment) -> Outcome:
        """It joins anew where that makes it another."""
        ...


class WorkerWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be said of a worker beside its address. Other routers' words are taken where they
    ask for what is so in any case.
    """

    model_id: _Label | None = None
    labels: Annotated[dict[_Label, _Label], Meta(max_length=64)] | None = None
    api_key: Annotated[str, Meta(max_length=4_096)] | None = None
    worker_type: str = "regular"
    priority: int | None = None
    cost: float | None = None
    bootstrap_port: int | None = None


_NOT_OFFERED: Mapping[str, str] = {
    "priority": "workers are chosen by their cost in milliseconds",
    "cost": "workers are priced by their latency profile",
    "bootstrap_port": "there is no prefill/decode mode",
}


def check_words(words: WorkerWords) -> None:
    """Raises HTTPException for what would be taken and do nothing."""
    if words.worker_type != "regular":
        raise HTTPException(400, f"worker_type {words.worker_type[:40]!r} is not offered: regular")
    for name, why in _NOT_OFFERED.items():
        if getattr(words, name) is not None:
            raise HTTPException(400, f"{name} is not offered: {why}")


def engine_routes(backend: AdminBackend, engines: Engines, carry: Carry) -> Routes:
    """For `admin.py`, which adds who may."""
    port = _Engines(backend, engines, carry)
    return (
        ("GET", "/engine_metrics", Act.METRICS_READ, port.metrics),
        ("GET", "/get_loads", Act.WORKERS_READ, port.loads),
        ("GET", "/get_server_info", Act.WORKERS_READ, port.server_info),
        ("GET", "/get_model_info", Act.WORKERS_READ, port.model_info),
        ("GET", "/health_generate", Act.WORKERS_CHANGE, port.health_generate),
        ("POST", "/flush_cache", Act.WORKERS_CHANGE, port.flush),
        ("POST", "/finish_session", Act.WORKERS_CHANGE, port.finish_session),
        ("PUT", "/workers/{worker:path}", Act.WORKERS_CHANGE, port.put),
        ("PATCH", "/workers/{worker:path}", Act.WORKERS_CHANGE, port.patch),
    )


class _Engines:
    """The handlers, one for each route."""

    def __init__(self, backend: AdminBackend, engines: Engines, carry: Carry) -> None:
        self._backend = backend
        self._engines = engines
        self._carry = carry
        self._flushing = asyncio.Semaphore(MAX_FLUSHED_AT_ONCE)

    async def metrics(self, request: Request) -> Response:
        query_of(request)
        pages = [(_label(worker), page) for worker, page in await self._engines.pages()]
        return Response(await asyncio.to_thread(joined_pages, pages), media_type=_METRICS_TYPE)

    async def loads(self, request: Request) -> Response:
        query_of(request)
        rows = [
            {"worker": view.url, "load": view.requests_active, "queue_ms": view.queue_ms}
            for view in await self._backend.workers()
        ]
        return json_response({"workers": rows, "total_workers": len(rows)})

    async def server_info(self, request: Request) -> Response:
        query_of(request)
        names = ("engine", "engine_version", "block_tokens", "capacity_blocks", "max_model_len")
        rows = [
            {"worker": view.url, "state": view.state, "model_id": view.model_id}
            | {name: view.detail.get(name) for name in names}
            for view in await self._backend.workers()
        ]
        return json_response({"workers": rows})

    async def model_info(self, request: Request) -> Response:
        query_of(request)
        models: dict[str, list[WorkerView]] = {}
        for view in await self._backend.workers():
            if view.model_id:
                models.setdefault(view.model_id, []).append(view)
        rows: list[dict[str, Any]] = []
        for name, views in models.items():
            lengths = [n for view in views if (n := view.detail.get("max_model_len"))]
            shortest = min(lengths, default=None)
            rows.append({"id": name, "max_model_len": shortest, "workers": len(views)})
        return json_response({"models": rows})

    async def health_generate(self, request: Request) -> Response:
        """Whether a token comes out: the least busy worker is tested, as `trunkline doctor` does
        it.
        """
        query_of(request)
        ready = [view for view in await self._backend.workers() if view.state == "ready"]
        if not ready:
            return problem_response(503, "no worker may be chosen now", "no_worker")
        chosen = min(ready, key=lambda view: (view.requests_active, view.queue_ms))
        seen = await self._backend.check_worker(chosen.worker)
        if isinstance(seen, Refused):
            return problem_response(503, seen.message, seen.code)
        check: Mapping[str, Any] = {} if seen is None else seen.detail.get("check", {})
        if check.get("unfinished") or check.get("status") == "unknown":
            why = str(check.get("unfinished") or "its test told nothing")
            return problem_response(503, f"{chosen.worker}: {why}", "not_generating")
        return json_response({"status": "ok", "worker": chosen.url})

    async def flush(self, request: Request) -> Response:
        """Every engine drops its whole prefix cache. One that keeps it is told of: no success."""
        query_of(request)
        views = await self._backend.workers()
        outcomes = await asyncio.gather(*(self._flush(request, view.worker) for view in views))
        kept = [row for row in outcomes if "reason" in row]
        body: dict[str, Any] = {
            "flushed": [row["worker"] for row in outcomes if "reason" not in row],
            "kept": kept,
        }
        if not kept:
            return json_response(body)
        response = problem_response(409, f"{len(kept)} workers kept their cache", "reset_refused")
        return json_response(msgspec.json.decode(response.body) | body, 409)

    async def _flush(self, request: Request, worker: WorkerId) -> dict[str, str]:
        async with self._flushing:
            change = FleetChange(verb="reset", worker=worker)
            outcome = await self._carry(
                request, change, partial(self._backend.reset_worker, worker)
            )
        why = {"reason": outcome.message} if isinstance(outcome, Refused) else {}
        return {"worker": worker, **why}

    async def finish_session(self, request: Request) -> Response:
        """For clients of other routers, which keep something of a session until they are told."""
        session = query_of(request, "session_id").get("session_id", "")
        if not session:
            raise HTTPException(400, "session_id is missing")
        return json_response({"session_id": session[:256], "released": 0})

    async def put(self, request: Request) -> Response:
        words = await _words(request)
        whole = Amendment(
            model_id=words.model_id or "", labels=words.labels or {}, api_key=words.api_key or ""
        )
        return await self._amend(request, whole)

    async def patch(self, request: Request) -> Response:
        words = await _words(request)
        return await self._amend(
            request,
            Amendment(model_id=words.model_id, labels=words.labels, api_key=words.api_key),
        )

    async def _amend(self, request: Request, amendment: Amendment) -> Response:
        worker = WorkerId(request.path_params["worker"])
        change = FleetChange(verb="change", worker=worker)
        outcome = await self._carry(
            request, change, partial(self._engines.amend, worker, amendment)
        )
        if outcome is None:
            return missing()
        if isinstance(outcome, Refused):
            return problem_response(outcome.status, outcome.message, outcome.code)
        return json_response(outcome, 202)


async def _words(request: Request) -> WorkerWords:
    words = decode(_WORDS, await read_body(request))
    check_words(words)
    return words


_WORDS = msgspec.json.Decoder(WorkerWords)


def _label(worker: WorkerId) -> bytes:
    """A worker's name has neither quotes nor line ends: it is what a URL may be."""
    return f'worker="{worker}"'.encode("ascii", "replace")
