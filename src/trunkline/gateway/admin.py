"""The admin port: workers, decisions, metrics, settings, heartbeats.

Owns paths and shapes: checks what came in, asks the `AdminBackend`, writes what it said. Must never
show a key, and never serve a client: those have another listener. `listener.py` is the door,
`backend.py` what stands behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trunkline.config import worker_url_problem
from trunkline.core.directory import MAX_CHECKPOINTS_PER_HEARTBEAT
from trunkline.core.records import BlockKey, WorkerId
from trunkline.errors import GatewayError
from trunkline.gateway import metrics
from trunkline.gateway.backend import AdminBackend, Heartbeat, Refused, WorkerJob, WorkerOrder
from trunkline.gateway.listener import (
    Guard,
    is_bearer,
    json_response,
    problem_response,
    read_body,
    unauthorized,
)

_MAX_DECISIONS = 10_000
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Label = Annotated[str, Meta(max_length=256)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class _WorkerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    model_id: _Label = ""
    labels: Annotated[dict[_Label, _Label], Meta(max_length=64)] = {}
    api_key: Annotated[str, Meta(max_length=4_096)] = ""
    worker_type: Literal["regular"] = "regular"


class _HeartbeatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    worker: _Name
    boot_nonce: Annotated[str, Meta(min_length=1, max_length=128)]
    counter: Annotated[int, Meta(ge=0, lt=2**53)]
    checkpoints: Annotated[
        tuple[Annotated[bytes, Meta(min_length=32, max_length=32)], ...],
        Meta(max_length=MAX_CHECKPOINTS_PER_HEARTBEAT),
    ]
    complete: bool
    memory: Annotated[float, Meta(ge=0.0, le=1.0)]
    load: Annotated[float, Meta(ge=0.0, le=1_000.0)]
    block_size: Annotated[int, Meta(ge=1, le=65_536)]


def admin_app(
    backend: AdminBackend,
    exposition: metrics.Exposition,
    *,
    settings: Mapping[str, Any],
    key: str,
) -> Starlette:
    """The application to give to `listener.serve_admin`. `settings` is shown as it is: redacted."""
    admin = _Admin(backend, exposition, settings=settings, key=key)
    app = Starlette(
        routes=[
            Route("/health", admin.health),
            Route("/metrics", admin.metrics),
            Route("/config", admin.config),
            Route("/workers", admin.add_worker, methods=["POST"]),
            Route("/workers", admin.list_workers),
            Route("/workers/{worker:path}/drain", admin.drain_worker, methods=["POST"]),
            Route("/workers/{worker:path}", admin.remove_worker, methods=["DELETE"]),
            Route("/workers/{worker:path}", admin.show_worker),
            Route("/add_worker", admin.add_worker_url, methods=["POST"]),
            Route("/remove_worker", admin.remove_worker_url, methods=["POST"]),
            Route("/list_workers", admin.list_worker_urls),
            Route("/decisions", admin.list_decisions),
            Route("/decisions/{request_id:path}", admin.show_decision),
            Route("/heartbeat", admin.heartbeat, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, key=key)],
        exception_handlers={
            HTTPException: _on_http_problem,
            GatewayError: _on_gateway_error,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False  # a redirect would repeat the Host the client made up
    return app


class _Admin:
    """The handlers, one for each route."""

    def __init__(
        self,
        backend: AdminBackend,
        exposition: metrics.Exposition,
        *,
        settings: Mapping[str, Any],
        key: str,
    ) -> None:
        self._backend = backend
        self._exposition = exposition
        self._settings = settings
        self._key = key

    async def health(self, _request: Request) -> Response:
        return json_response({"status": "ok"})

    async def metrics(self, _request: Request) -> Response:
        # Copied here, written elsewhere: 1,000 workers are 20 ms of text; no request waits for it.
        snapshot = self._exposition.snapshot()
        page = await asyncio.to_thread(metrics.render, snapshot)
        return Response(page, media_type=_METRICS_TYPE)

    async def config(self, _request: Request) -> Response:
        return json_response(self._settings)

    async def list_workers(self, request: Request) -> Response:
        _query(request)
        views = await self._backend.workers()
        return json_response({"workers": views, "total": len(views)})

    async def show_worker(self, request: Request) -> Response:
        view = await self._backend.worker(_worker_named(request))
        return _missing() if view is None else json_response(view)

    async def add_worker(self, request: Request) -> Response:
        body = _decode(_WORKER_DECODER, await read_body(request))
        return await self._add(
            WorkerOrder(
                url=body.url, model_id=body.model_id, labels=body.labels, api_key=body.api_key
            )
        )

    async def add_worker_url(self, request: Request) -> Response:
        return await self._add(WorkerOrder(url=_query(request, "url").get("url", "")))

    async def _add(self, order: WorkerOrder) -> Response:
        problem = worker_url_problem(order.url)
        if problem:
            raise HTTPException(400, f"url {problem}")
        return _job(await self._backend.add_worker(order))

    async def remove_worker(self, request: Request) -> Response:
        return _job(await self._backend.remove_worker(_worker_named(request)))

    async def remove_worker_url(self, request: Request) -> Response:
        url = _query(request, "url").get("url", "")
        return _job(await self._backend.remove_worker(WorkerId(url)))

    async def drain_worker(self, request: Request) -> Response:
        return _job(await self._backend.drain_worker(_worker_named(request)))

    async def list_worker_urls(self, request: Request) -> Response:
        _query(request)
        return json_response({"urls": [view.url for view in await self._backend.workers()]})

    async def list_decisions(self, request: Request) -> Response:
        query = _query(request, "limit", "worker")
        text = query.get("limit", "100")
        limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
        if not 1 <= limit <= _MAX_DECISIONS:
            raise HTTPException(400, f"limit is not a number from 1 to {_MAX_DECISIONS}")
        worker = WorkerId(query["worker"]) if "worker" in query else None
        return json_response(
            {"decisions": await self._backend.decisions(limit=limit, worker=worker)}
        )

    async def show_decision(self, request: Request) -> Response:
        decision = await self._backend.decision(request.path_params["request_id"])
        return _missing() if decision is None else json_response(decision)

    async def heartbeat(self, request: Request) -> Response:
        is_operator = is_bearer(request.headers, self._key)
        raw = await read_body(request)
        try:
            body = _decode(_HEARTBEAT_DECODER, raw)
        except HTTPException:
            if is_operator:
                raise
            return unauthorized()
        worker_key = await self._backend.heartbeat_key(WorkerId(body.worker))
        # With the operator's key, or the worker's own; with none at all where none was agreed.
        is_trusted = is_operator if self._key else not worker_key
        if not is_trusted and not (worker_key and is_bearer(request.headers, worker_key)):
            return unauthorized()
        if worker_key is None:
            return _missing()
        refusal = await self._backend.heartbeat(_heartbeat(body))
        if refusal is not None:
            return problem_response(400, refusal, "heartbeat_refused")
        return json_response({"worker": body.worker, "counter": body.counter})


_Body = TypeVar("_Body")
_WORKER_DECODER = msgspec.json.Decoder(_WorkerBody)
_HEARTBEAT_DECODER = msgspec.json.Decoder(_HeartbeatBody)


def _decode(decoder: msgspec.json.Decoder[_Body], raw: bytes) -> _Body:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"the body is not what is expected: {error}") from error


def _query(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters, none unknown and none twice."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known or name in query:
            names = ", ".join(known) or "none"
            raise HTTPException(400, f"parameter {name[:80]!r} is unknown or twice; known: {names}")
        query[name] = value
    return query


def _worker_named(request: Request) -> WorkerId:
    return WorkerId(request.path_params["worker"])


def _heartbeat(body: _HeartbeatBody) -> Heartbeat:
    return Heartbeat(
        worker=WorkerId(body.worker),
        boot_nonce=body.boot_nonce,
        counter=body.counter,
        checkpoints=tuple(BlockKey(key) for key in body.checkpoints),
        is_complete=body.complete,
        memory=body.memory,
        load=body.load,
        block_tokens=body.block_size,
    )


def _job(outcome: WorkerJob | Refused | None) -> Response:
    if outcome is None:
        return _missing()
    if isinstance(outcome, Refused):
        return problem_response(outcome.status, outcome.message, outcome.code)
    return json_response(outcome, 202)


def _missing() -> Response:
    """One shape for a path, a worker and a decision nobody knows."""
    return problem_response(404, "there is nothing here")


async def _on_http_problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _missing()
    response = problem_response(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    if error.status_code == 408:
        response.headers["connection"] = "close"  # the rest of that body may come at any time
    return response


async def _on_gateway_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return problem_response(error.status, str(error), error.code)


async def _on_bug(_request: Request, _error: Exception) -> Response:
    # The server logs it with its traceback; the answer says nothing of our insides. It also closes
    # the connection afterwards, so the client must be told not to use it again.
    response = problem_response(500, "the gateway made a mistake; its log says more")
    response.headers["connection"] = "close"
    return response
