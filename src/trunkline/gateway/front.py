"""The client listener: accepts connections, owns what they share, and ends them in good order.

Owns the server socket, the sweep that enforces every deadline, and the drain. No request has a
timer of its own: one sweep, a few times a second, looks at all that is open. Read `client.py` next.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from trunkline import observe
from trunkline.config import LimitsConfig, ListenConfig, RetryConfig, UpstreamConfig
from trunkline.core.principals import Principal
from trunkline.core.records import Instant
from trunkline.errors import GatewayError, NoWorker
from trunkline.gateway.answers import SCOPE_WIDENING, Answer, unknown_model
from trunkline.gateway.authenticate import credential
from trunkline.gateway.browsers import Browsers, permitted
from trunkline.gateway.claims import wished_scope
from trunkline.gateway.client import ClientConnection
from trunkline.gateway.contracts import (
    EVERYBODY,
    ClientError,
    InferenceRequest,
    Picker,
    Refusal,
    Route,
)
from trunkline.gateway.counters import AccessRecord, Counters
from trunkline.gateway.head import RequestHead
from trunkline.gateway.intake import Intake
from trunkline.gateway.line import Line
from trunkline.gateway.places import Places
from trunkline.gateway.retention import Retention
from trunkline.gateway.retry import RetryBudget
from trunkline.gateway.routes import Local, allowed_methods, model_in, unknown_path
from trunkline.gateway.tenancy import Tenancy
from trunkline.gateway.tracing import Trace, Tracer
from trunkline.gateway.upstream import WorkerPool
from trunkline.gateway.wishes import wishes_in
from trunkline.ports.clock import Clock

SWEEP_MS = 250
LAST_WORDS_S = 0.25
"""How long a client may take to fetch the error that ends its stream."""
_BACKLOG = 4_096


class Guest(Protocol):
    """Whoever is open at a front: a client's connection, or a request that another proxy carries
    (`delegated.py`).
    """

    def check(self, now_s: float) -> None: ...
    def close_if_idle(self) -> None: ...
    def stop(self, error: GatewayError) -> None:
        """Finish what is open, with this error."""
        ...

    def abort(self) -> None: ...
    def fence(self) -> bool:
        """The epochs moved: end it, if it has to; whether it had."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What `/readiness` says."""

    is_ready: bool
    is_reuse_on: bool = False
    detail: str = ""
    unready_status: Literal["starting", "no_workers"] = "starting"
    """What it is called while it is not ready and does not drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontParts:
    """What a front is built from."""

    picker: Picker
    models: Callable[[Principal], Sequence[Mapping[str, object]]]
    """What `/v1/models` lists for one caller."""
    readiness: Callable[[], Readiness]
    clock: Clock
    """For what is reported. Deadlines go by the loop's own, coarser time."""
    dice: random.Random
    """For request ids and the jitter of pauses."""
    limits: LimitsConfig
    upstream: UpstreamConfig
    retry: RetryConfig
    max_model_len: int
    version: str
    vocab_size_of: Callable[[str], int] = lambda _model: 1 << 32
    """Token ids of prompts for a model are below it."""
    knows_model: Callable[[str], bool] | None = None
    """Whether a worker serves the model of this name; asked for each request that names one. None,
    and a fleet of which nothing is known yet, take every name.
    """
    tenancy: Tenancy | None = None
    """Who callers are and what they may; None serves everybody as one tenant."""
    listen: ListenConfig = ListenConfig()
    """Of it what is of single requests: whose pages may ask, where their ids are."""
    tenant_paths: frozenset[str] = frozenset()
    """Paths beside those of the API that are proxied for tenants."""
    on_finished: Callable[[AccessRecord], None] | None = None
    is_debugging: bool = True
    """Whether it is told now."""
    tracer: Tracer | None = None
    """None makes no spans, and passes good `traceparent`s on."""
    """For workers reached by https; None takes the system's authorities."""
    sweep_ms: int = SWEEP_MS


class Front:
    """A running listener; made by `serve_front`."""

    def __init__(self, parts: FrontParts) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._parts = parts
        self._servers: list[asyncio.Server] = []
        self._clients: dict[Guest, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self.is_draining = False
        self._places = Places()
        self.begin = self._places.begin
        """One more request of this caller's tenant runs, until `end`."""
        self.end = self._places.end
        self.port = 0
        """Where it listens, as the kernel chose; 0 before that."""
        self.counters = Counters()
        self._retention = Retention()
        self.on_widening: Callable[[Principal, str, str], None] = _nobody_told
        """Told who asked for a wider sharing of its cache, whence, and in which request."""
        self.limits = parts.limits
        self._tenant_paths = parts.tenant_paths
        self._heed(parts.listen)
        self._on_finished = parts.on_finished if parts.is_debugging else None
        self.now_s = loop.time
        self.now_ms = parts.clock.now
        self.call_soon = loop.call_soon
        self.tracer = parts.tracer or Tracer(
            dice=parts.dice, now_ms=parts.clock.now, wall=parts.clock.wall, sink=None
        )
        self.pool = WorkerPool(parts.upstream, self.counters)
        self.intake = Intake(
            max_json_depth=parts.limits.max_json_depth,
            strict_fields=parts.limits.strict_fields,
            max_model_len=parts.max_model_len,
            vocab_size_of=parts.vocab_size_of,
            counters=self.counters,
        )
        self.line = self._line(parts, loop)

    def _line(self, parts: FrontParts, loop: asyncio.AbstractEventLoop) -> Line:
        tenancy = parts.tenancy
        return Line(
            picker=parts.picker,
            pool=self.pool,
            budget=RetryBudget(parts.retry),
            objection=tenancy.objection if tenancy else _no_objection,
            is_current=tenancy.is_current if tenancy else _always,
            renew=tenancy.renew if tenancy else _nothing_to_renew,
            upstream=parts.upstream,
            retry=parts.retry,
            counters=self.counters,
            dice=parts.dice,
            now_s=loop.time,
            now_ms=parts.clock.now,
            spawn=self._spawn,
            call_later=loop.call_later,
        )

    async def listen(self, listen: ListenConfig, sockets: Sequence[socket.socket] = ()) -> None:
        """On these sockets where they are given: they listen already."""

        def connect() -> ClientConnection:
            return ClientConnection(self)

        create = partial(self._loop.create_server, connect, backlog=_BACKLOG)
        if sockets:
            self._servers = [await create(sock=one) for one in sockets]
        else:
            self._servers = [await create(listen.host, listen.port)]
        self.port = self._servers[0].sockets[0].getsockname()[1]
        self._sweep()
        if self.is_draining:  # told to end while it was told to begin
            await self.close()

    def take(
        self,
        *,
        listen: ListenConfig,
        limits: LimitsConfig,
        upstream: UpstreamConfig,
        retry: RetryConfig,
        tenant_paths: frozenset[str],
        is_debugging: bool,
    ) -> None:
        """Other settings from here on. What runs goes on under those that it began with."""
        self._heed(listen)
        self.limits = limits
        self.intake.take(limits)
        self.pool.configure(upstream)
        self.line.budget.take(retry)
        self.line = replace(self.line, upstream=upstream, retry=retry)
        self._tenant_paths = tenant_paths
        self._on_finished = self._parts.on_finished if is_debugging else None

    def _heed(self, listen: ListenConfig) -> None:
        self.browsers = Browsers(listen.cors_allowed_origins)
        self.request_id_headers = [name.encode("ascii") for name in listen.request_id_headers]

    async def drain(self, grace_ms: float) -> None:
        """Take nothing new, let what runs come to its end, then force the rest."""
        self.is_draining = True
        for server in self._servers:
            server.close()
        for client in list(self._clients):
            client.close_if_idle()
        await self._clients_gone(grace_ms / 1_000.0)
        await self.close()

    async def close(self) -> None:
        """End everything now. Streams get an error event, waiting requests a 503."""
        self.is_draining = True
        for server in self._servers:
            server.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for client in list(self._clients):
            client.stop(NoWorker("the gateway is shutting down"))
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.pool.close()
        await self._clients_gone(LAST_WORDS_S)
        for client in list(self._clients):
            client.abort()

    # -- what connections ask for ----------------------------------------------------------------

    def admit(self, client: Guest) -> bool:
        self._clients[client] = None
        self.counters.open_clients += 1
        return len(self._clients) <= self.limits.max_connections

    def forget(self, client: Guest) -> None:
        self.counters.open_clients -= 1
        del self._clients[client]
        if not self._clients:
            self._quiet.set()

    def is_full(self, principal: Principal) -> bool:
        """Whether there is no room for one more of this caller's tenant. Work for a client that
        left counts until it has ended.
        """
        busy = self.counters.active_requests + self.counters.late_picks
        return self._places.is_full(principal, busy, self.limits.max_concurrent_requests)

    def let_in(self, head: RequestHead, route: Route | Local, source: str) -> Principal:
        """Who asks for what is at this route, as far as it matters there. Raises ClientError."""
        if head.method not in allowed_methods(route):
            text = f"allowed here: {', '.join(allowed_methods(route))}"
            raise ClientError(Refusal(status=405, code="method_not_allowed", message=text))
        if isinstance(route, Local) and not route.is_for_callers:
            return EVERYBODY
        principal = self.principal(head.headers, source)
        if route is Route.OTHER and not self._serves(principal, head.target):
            raise ClientError(unknown_path(head.target))
        return principal

    def principal(self, headers: dict[bytes, bytes], source: str) -> Principal:
        """Who is asking. Raises ClientError."""
        tenancy = self._parts.tenancy
        if tenancy is None:
            return EVERYBODY
        return tenancy.principal(credential(headers), source)

    def admit_request(
        self,
        principal: Principal,
        headers: dict[bytes, bytes],
        request: InferenceRequest,
        source: str = "",
    ) -> None:
        """Give the request its grant. Raises ClientError for what it may not ask for."""
        try:
            self._admit(principal, headers, request)
        except ClientError as error:
            if error.refusal.code == SCOPE_WIDENING.code:
                self.on_widening(principal, source, request.request_id)
            raise

    def _admit(
        self, principal: Principal, headers: dict[bytes, bytes], request: InferenceRequest
    ) -> None:
        tenancy = self._parts.tenancy
        if tenancy is not None:
            tenancy.charge(principal)
        knows = self._parts.knows_model
        if knows is not None and request.model and not knows(request.model):
            raise ClientError(unknown_model(request.model))
        if request.outlives_answer and principal.auth_method != "off":
            text = "background is not offered: what outlives its answer could not be revoked"
            raise ClientError(Refusal(code="invalid_value", message=text, param="background"))
        wishes = wishes_in(headers, is_stream=request.is_stream)
        request.max_retries = wishes.max_retries
        if wishes.timeout_ms is not None:
            request.deadline = Instant(self.now_ms() + wishes.timeout_ms)
        request.browser_headers = self.browsers.lines(headers)
        if request.keep_ms:
            wished_ms, now_ms = request.keep_ms, self.now_ms()
            request.keep_ms = self._retention.granted_ms(principal.tenant, wished_ms, now_ms)
        if self._tenant_paths:
            request.is_vouched_for = self._is_vouched_for(request.path)
        wish = wished_scope(headers)
        if tenancy is not None:
            tenancy.admit_request(principal, request, wish, headers.get(b"x-trunkline-session"))
        elif wish is not None:
            text = "x-cache-scope is not offered: this gateway serves one tenant"
            raise ClientError(Refusal(code="scope_not_available", message=text))

    def _serves(self, principal: Principal, target: bytes) -> bool:
        """Whether a path that is proxied unread is served to this caller. To tenants only those of
        which the operator says that the engines keep the salt there.
        """
        return principal.auth_method == "off" or self._is_vouched_for(target.decode("ascii"))

    def _is_vouched_for(self, target: str) -> bool:
        return target.partition("?")[0].rstrip("/") in self._tenant_paths

    def objection(self, request: InferenceRequest) -> GatewayError | None:
        return self.line.objection(request)

    def fence(self) -> int:
        """The epochs moved: end what runs under what was revoked, before anything more goes out.
        How many requests these were.
        """
        return sum(client.fence() for client in list(self._clients))

    def new_request_id(self) -> str:
        return self._parts.dice.randbytes(16).hex()

    def wants_record(self, trace: Trace | None) -> bool:
        """Whether anybody reads the access record: making one costs 3 us."""
        is_recorded = trace is not None and trace.record is not None
        return is_recorded or self._on_finished is not None

    def finished(self, record: AccessRecord, trace: Trace | None) -> None:
        if trace is not None:
            self.tracer.end(trace, record)
        if self._on_finished is not None:
            self._on_finished(record)

    def bug(self, error: Exception, request_id: str) -> GatewayError:
        """Put on record what nobody foresaw; returns what the client is told of it."""
        self.counters.bugs += 1
        observe.log.error("exchange.bug", cause=error, request_id=request_id)
        return GatewayError("the gateway failed to serve this request")

    def local_answer(self, local: Local, principal: Principal, head: RequestHead) -> Answer:
        """Raises ClientError."""
        match local:
            case Local.PREFLIGHT:
                return permitted(head.headers)
            case Local.MODELS:
                rows = self._models(principal)
                body = msgspec.json.encode({"object": "list", "data": rows})
                return Answer(status=200, body=body)
            case Local.MODEL:
                name = model_in(head.target)
                for row in self._models(principal):
                    if row["id"] == name:
                        return Answer(status=200, body=msgspec.json.encode(row))
                raise ClientError(unknown_model(name))
            case Local.HEALTH | Local.LIVENESS:
                return Answer(status=200, body=b'{"status":"ok"}')
            case Local.VERSION:
                return Answer(
                    status=200, body=msgspec.json.encode({"version": self._parts.version})
                )
            case Local.READINESS:
                return self._readiness()

    def _models(self, principal: Principal) -> Sequence[Mapping[str, object]]:
        if self._parts.tenancy is not None:
            self._parts.tenancy.require_access(principal)
        return self._parts.models(principal)

    def _readiness(self) -> Answer:
        seen = self._parts.readiness()
        is_ready = seen.is_ready and not self.is_draining
        unready = "draining" if self.is_draining else seen.unready_status
        body = {
            "status": "ready" if is_ready else unready,
            "reuse": "on" if seen.is_reuse_on else "off",
            "detail": seen.detail,
        }
        return Answer(status=200 if is_ready else 503, body=msgspec.json.encode(body))

    # -- inside ----------------------------------------------------------------------------------

    async def _clients_gone(self, limit_s: float) -> None:
        """Until the last byte of the last client went, or the limit; the caller ends the rest."""
        if not self._clients:
            return
        self._quiet.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._quiet.wait()
        except TimeoutError:
            pass  # the limit is the ordinary end of a slow client

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is ours until it is done; `close` cancels and awaits it."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sweep(self) -> None:
        now_s = self._loop.time()
        for client in list(self._clients):
            client.check(now_s)
        self.pool.sweep(now_s)
        self._sweep_timer = self._loop.call_later(self._parts.sweep_ms / 1_000.0, self._sweep)


def _nobody_told(_principal: Principal, _source: str, _request_id: str) -> None:
    """Where everybody is one tenant, there is nothing wider to ask for."""


def _no_objection(_request: InferenceRequest) -> None:
    """Where everybody is one tenant, nothing is ever revoked."""


def _always(_request: InferenceRequest) -> bool:
    return True


def _nothing_to_renew(_request: InferenceRequest) -> None:
    pass


async def serve_front(
    listen: ListenConfig, parts: FrontParts, sockets: Sequence[socket.socket] = ()
) -> Front:
    """Listen for clients. The caller ends it with `drain` or `close`."""
    front = Front(parts)
    await front.listen(listen, sockets)
    return front
