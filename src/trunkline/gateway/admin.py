"""The admin port: workers, decisions, metrics, settings, heartbeats; tenants in `admin_tenancy.py`.

Owns paths and shapes: checks what came in, asks the `AdminBackend`, writes what it said. Each path
is tied to an act of `permissions.py`, and there is no way to add one without. Must never show a
key, and never serve a client: those have another listener. `listener.py` is the door, `backend.py`
what stands behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trunkline.core.ailment import Ailment
from trunkline.core.digest import MAX_CHECKPOINTS_PER_HEARTBEAT
from trunkline.core.records import BlockKey, WorkerId
from trunkline.errors import ConfigError, GatewayError
from trunkline.gateway import metrics
from trunkline.gateway.admin_engines import Engines, WorkerWords, check_words, engine_routes
from trunkline.gateway.admin_tenancy import Handler, tenancy_routes
from trunkline.gateway.backend import (
    AdminBackend,
    Call,
    FleetChange,
    Heartbeat,
    Refused,
    TenancyBackend,
    WorkerJob,
    WorkerOrder,
)
from trunkline.gateway.dashboard import Dashboard
from trunkline.gateway.listener import (
    AdminKey,
    Guard,
    call_of,
    caller_of,
    decode,
    is_bearer,
    json_response,
    missing,
    problem_response,
    query_of,
    read_body,
    unauthorized,
    whole_number,
)
from trunkline.gateway.overview import OverviewSource
from trunkline.gateway.pages import Pages
from trunkline.gateway.permissions import Act, extent_of
from trunkline.gateway.preview import PreviewOrder
from trunkline.worker_url import worker_url_problem

_MAX_DECISIONS = 10_000
_MAX_GRACE_SECS = 86_400
MAX_PREVIEW_BYTES = 8 << 20
"""Of a request that is not sent; the admin port takes no other body of that size."""
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Reload = Callable[[Call], Awaitable[object]]
"""What came of it, as JSON has it. Raises ConfigError."""

Checkup = Callable[[], Awaitable[Sequence[Ailment]]]
"""What is wrong, or may be, with workers, settings and registry; takes seconds."""

_Label = Annotated[str, Meta(max_length=256)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class _WorkerBody(WorkerWords, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: str


class _PreviewBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request: msgspec.Raw
    path: Literal["/v1/chat/completions", "/v1/completions"] = "/v1/chat/completions"
    tenant: _Label = ""
    user: _Label = ""


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


async def _nothing_ails() -> Sequence[Ailment]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What else the port can offer; what is None is not there."""

    engines: Engines | None = None
    overview: OverviewSource | None = None
    """Without it there is no dashboard."""
    reload: Reload | None = None
    """Reads the settings again."""
    checkup: Checkup = _nothing_ails


_NOTHING = Beside()


def admin_app(
    backend: AdminBackend,
    exposition: metrics.Exposition,
    *,
    settings: Mapping[str, Any],
    key: str | AdminKey,
    tenancy: TenancyBackend | None = None,
    beside: Beside = _NOTHING,
) -> Starlette:
    """The application to give to `listener.serve_admin`. `settings` is shown as it is: redacted.

    Without `tenancy` the gateway serves a single tenant, and paths about tenants say so (409).
    """
    engines, overview = beside.engines, beside.overview
    key = key if isinstance(key, AdminKey) else AdminKey(key)
    admin = _Admin(
        backend,
        exposition,
        settings=settings,
        key=key,
        tenancy=tenancy,
        reload=beside.reload,
        checkup=beside.checkup,
    )
    engine_paths = engine_routes(backend, engines, admin.carry) if engines else ()
    shown = [] if overview is None else Dashboard(overview, key, tenancy).routes()
    pages = None if overview is None else Pages(wants_key=bool(key.text))
    open_paths = () if pages is None else pages.paths()
    permitted = [
        Route(path, _permitted(act, handler, tenancy), methods=[method])
        for method, path, act, handler in (
            *_fleet_routes(admin),
            *engine_paths,
            *shown,
            *tenancy_routes(tenancy),
        )
    ]
    app = Starlette(
        routes=[
            Route("/health", admin.health),
            Route("/heartbeat", admin.heartbeat, methods=["POST"]),
            *(Route(path, partial(_page, pages), methods=["GET"]) for path in open_paths),
            *permitted,
        ],
        middleware=[Middleware(Guard, key=key, door=tenancy, open_paths=open_paths)],
        exception_handlers={
            HTTPException: _on_http_problem,
            GatewayError: _on_gateway_error,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False  # a redirect would repeat the Host the client made up
    return app


def _fleet_routes(admin: _Admin) -> tuple[tuple[str, str, Act, Handler], ...]:
    return (
        ("GET", "/metrics", Act.METRICS_READ, admin.metrics),
        ("GET", "/config", Act.CONFIG_READ, admin.config),
        ("POST", "/reload", Act.CONFIG_RELOAD, admin.reload),
        ("POST", "/workers", Act.WORKERS_CHANGE, admin.add_worker),
        ("GET", "/workers", Act.WORKERS_READ, admin.list_workers),
        ("POST", "/workers/{worker:path}/drain", Act.WORKERS_CHANGE, admin.drain_worker),
        ("POST", "/workers/{worker:path}/undrain", Act.WORKERS_CHANGE, admin.undrain_worker),
        ("POST", "/workers/{worker:path}/check", Act.WORKERS_CHANGE, admin.check_worker),
        ("POST", "/workers/{worker:path}/reset", Act.WORKERS_CHANGE, admin.reset_worker),
        ("DELETE", "/workers/{worker:path}", Act.WORKERS_CHANGE, admin.remove_worker),
        ("GET", "/workers/{worker:path}", Act.WORKERS_READ, admin.show_worker),
        ("POST", "/add_worker", Act.WORKERS_CHANGE, admin.add_worker_url),
        ("POST", "/remove_worker", Act.WORKERS_CHANGE, admin.remove_worker_url),
        ("GET", "/list_workers", Act.WORKERS_READ, admin.list_worker_urls),
        ("GET", "/doctor", Act.WORKERS_READ, admin.doctor),
        ("GET", "/decisions", Act.DECISIONS_READ, admin.list_decisions),
        ("POST", "/decisions", Act.DECISIONS_READ, admin.preview),
        ("GET", "/decisions/{request_id:path}", Act.DECISIONS_READ, admin.show_decision),
    )


async def _page(pages: Pages | None, request: Request) -> Response:
    found = None if pages is None else pages.answer(request.scope["path"])
    return missing() if found is None else found


def _permitted(
    act: Act, handler: Handler, tenancy: TenancyBackend | None
) -> Callable[[Request], Awaitable[Response]]:
    """The handler, for those who may; before anything of the request was looked at."""

    async def endpoint(request: Request) -> Response:
        caller = caller_of(request)
        extent = extent_of(caller.roles, act)
        if extent is None:
            if tenancy is not None:
                tenancy.refused(caller, act.value, caller.source, "no role for it")
            return problem_response(403, f"this key has no role for {act.value}")
        request.scope["trunkline.call"] = Call(caller=caller, act=act, extent=extent)
        return await handler(request)

    return endpoint


class _Admin:
    """The handlers, one for each route."""

    def __init__(
        self,
        backend: AdminBackend,
        exposition: metrics.Exposition,
        *,
        settings: Mapping[str, Any],
        key: AdminKey,
        tenancy: TenancyBackend | None,
        reload: Reload | None,
        checkup: Checkup,
    ) -> None:
        self._reload = reload
        self._tenancy = tenancy
        self._checkup = checkup
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

    async def reload(self, request: Request) -> Response:
        """Of a file that is wrong nothing is taken: its error says what to mend."""
        if self._reload is None:
            return problem_response(409, "there are no settings to read again", "config_refused")
        try:
            return json_response(await self._reload(call_of(request)))
        except ConfigError as error:
            return problem_response(409, str(error), "config_refused")

    async def list_workers(self, request: Request) -> Response:
        query_of(request)
        views = await self._backend.workers()
        return json_response({"workers": views, "total": len(views)})

    async def show_worker(self, request: Request) -> Response:
        view = await self._backend.worker(_worker_named(request))
        return missing() if view is None else json_response(view)

    async def add_worker(self, request: Request) -> Response:
        body = decode(_WORKER_DECODER, await read_body(request))
        check_words(body)
        order = WorkerOrder(
            url=body.url,
            model_id=body.model_id or "",
            labels=body.labels or {},
            api_key=body.api_key or "",
        )
        return await self._add(request, order)

    async def add_worker_url(self, request: Request) -> Response:
        return await self._add(request, WorkerOrder(url=query_of(request, "url").get("url", "")))

    async def _add(self, request: Request, order: WorkerOrder) -> Response:
        problem = worker_url_problem(order.url)
        if problem:
            raise HTTPException(400, f"url {problem}")
        change = FleetChange(verb="add", worker=order.url)
        return await self._change(request, change, partial(self._backend.add_worker, order))

    async def remove_worker(self, request: Request) -> Response:
        return await self._remove(request, _worker_named(request))

    async def remove_worker_url(self, request: Request) -> Response:
        url = query_of(request, "url").get("url", "")
        return await self._remove(request, WorkerId(url))

    async def _remove(self, request: Request, worker: WorkerId) -> Response:
        change = FleetChange(verb="remove", worker=worker)
        return await self._change(request, change, partial(self._backend.remove_worker, worker))

    async def drain_worker(self, request: Request) -> Response:
        worker, query = _worker_named(request), query_of(request, "grace_secs")
        grace_secs = whole_number(query, "grace_secs", 0, 0, _MAX_GRACE_SECS) if query else None
        change = FleetChange(verb="drain", worker=worker)
        drain = partial(self._backend.drain_worker, worker, grace_secs)
        return await self._change(request, change, drain)

    async def undrain_worker(self, request: Request) -> Response:
        worker = _worker_named(request)
        change = FleetChange(verb="undrain", worker=worker)
        return await self._change(request, change, partial(self._backend.undrain_worker, worker))

    async def reset_worker(self, request: Request) -> Response:
        worker = _worker_named(request)
        change = FleetChange(verb="reset", worker=worker)
        return await self._change(request, change, partial(self._backend.reset_worker, worker))

    async def check_worker(self, request: Request) -> Response:
        """Changes nothing that anybody would ask after: it is on no record."""
        outcome = await self._backend.check_worker(_worker_named(request))
        if isinstance(outcome, Refused):
            return problem_response(outcome.status, outcome.message, outcome.code)
        return missing() if outcome is None else json_response(outcome)

    async def doctor(self, request: Request) -> Response:
        query_of(request)
        found = [one.as_dict() for one in await self._checkup()]
        return json_response({"findings": found, "total": len(found)})

    async def _change(
        self,
        request: Request,
        change: FleetChange,
        carry_out: Callable[[], Awaitable[WorkerJob | Refused | None]],
    ) -> Response:
        """Where there are tenants, on record: a worker sees what all of them say."""
        return _job(await self.carry(request, change, carry_out))

    async def carry(
        self,
        request: Request,
        change: FleetChange,
        carry_out: Callable[[], Awaitable[WorkerJob | Refused | None]],
    ) -> WorkerJob | Refused | None:
        if self._tenancy is None:
            return await carry_out()
        return await self._tenancy.change_fleet(call_of(request), change, carry_out)

    async def list_worker_urls(self, request: Request) -> Response:
        query_of(request)
        return json_response({"urls": [view.url for view in await self._backend.workers()]})

    async def list_decisions(self, request: Request) -> Response:
        query = query_of(request, "limit", "worker")
        limit = whole_number(query, "limit", 100, 1, _MAX_DECISIONS)
        worker = WorkerId(query["worker"]) if "worker" in query else None
        return json_response(
            {"decisions": await self._backend.decisions(limit=limit, worker=worker)}
        )

    async def show_decision(self, request: Request) -> Response:
        decision = await self._backend.decision(request.path_params["request_id"])
        return missing() if decision is None else json_response(decision)

    async def preview(self, request: Request) -> Response:
        """Where a request would go; nothing is sent."""
        body = decode(_PREVIEW_DECODER, await read_body(request, MAX_PREVIEW_BYTES))
        order = PreviewOrder(
            tenant=body.tenant,
            user=body.user,
            is_chat=body.path == "/v1/chat/completions",
            body=bytes(body.request),
        )
        look = partial(self._backend.preview, order)
        if self._tenancy is None:
            found = await look()
        else:
            found = await self._tenancy.look(call_of(request), body.tenant, look)
        if isinstance(found, Refused):
            return problem_response(found.status, found.message, found.code)
        return json_response(found)

    async def heartbeat(self, request: Request) -> Response:
        is_operator = is_bearer(request.headers, self._key.text)
        raw = await read_body(request)
        try:
            body = decode(_HEARTBEAT_DECODER, raw)
        except HTTPException:
            if is_operator:
                raise
            return unauthorized()
        worker_key = await self._backend.heartbeat_key(WorkerId(body.worker))
        # With the operator's key, or the worker's own; with none at all where none was agreed.
        is_trusted = is_operator if self._key.text else not worker_key
        if not is_trusted and not (worker_key and is_bearer(request.headers, worker_key)):
            return unauthorized()
        if worker_key is None:
            return missing()
        refusal = await self._backend.heartbeat(_heartbeat(body))
        if refusal is not None:
            return problem_response(400, refusal, "heartbeat_refused")
        return json_response({"worker": body.worker, "counter": body.counter})


_WORKER_DECODER = msgspec.json.Decoder(_WorkerBody)
_PREVIEW_DECODER = msgspec.json.Decoder(_PreviewBody)
_HEARTBEAT_DECODER = msgspec.json.Decoder(_HeartbeatBody)


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
        return missing()
    if isinstance(outcome, Refused):
        return problem_response(outcome.status, outcome.message, outcome.code)
    return json_response(outcome, 202)


async def _on_http_problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return missing()
    response = problem_response(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    if error.status_code == 408:
        response.headers["connection"] = "close"  # the rest of that body may come at any time
    return response


async def _on_gateway_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    response = problem_response(error.status, str(error), error.code)
    if error.status in (429, 503):
        response.headers["retry-after"] = str(error.retry_after_s)
    return response


async def _on_bug(_request: Request, _error: Exception) -> Response:
    # The server logs it with its traceback; the answer says nothing of our insides. It also closes
    # the connection afterwards, so the client must be told not to use it again.
    response = problem_response(500, "the gateway made a mistake; its log says more")
    response.headers["connection"] = "close"
    return response
