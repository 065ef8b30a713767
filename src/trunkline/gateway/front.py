"""The client listener: accepts connections, owns what they share, and ends them in good order.

Owns the server socket, the sweep that enforces every deadline, and the drain. No request has a
timer of its own: one sweep, a few times a second, looks at all that is open. Read `client.py` next.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from trunkline.config import LimitsConfig, ListenConfig, RetryConfig, UpstreamConfig
from trunkline.core.principals import Principal
from trunkline.core.records import Instant
from trunkline.errors import GatewayError, NoWorker
from trunkline.gateway.answers import Answer, refused, unknown_model
from trunkline.gateway.claims import wished_scope
from trunkline.gateway.client import ClientConnection
from trunkline.gateway.contracts import (
    EVERYBODY,
    ClientError,
    InferenceRequest,
    Picker,
    Refusal,
)
from trunkline.gateway.counters import AccessRecord, Counters
from trunkline.gateway.intake import Intake
from trunkline.gateway.line import Line
from trunkline.gateway.retry import RetryBudget
from trunkline.gateway.routes import Local
from trunkline.gateway.tenancy import Tenancy
from trunkline.gateway.upstream import WorkerPool
from trunkline.gateway.wishes import wishes_in
from trunkline.ports.clock import Clock

SWEEP_MS = 250
LAST_WORDS_S = 0.25
"""How long a client may take to fetch the error that ends its stream."""
_BACKLOG = 4_096
UNRESERVED = 7 / 8
"""The share of `max_concurrent_requests` that one tenant alone may have: the rest is kept for those
who ask for little.
"""


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
    models: Callable[[Principal], bytes]
    """The body of `/v1/models` for one caller."""
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
    tenant_paths: frozenset[str] = frozenset()
    """Paths beside those of the API that are proxied for tenants."""
    on_finished: Callable[[AccessRecord], None] | None = None
    tls: ssl.SSLContext | None = None
    """For workers reached by https; None takes the system's authorities."""
    sweep_ms: int = SWEEP_MS


class Front:
    """A running listener; made by `serve_front`."""

    def __init__(self, parts: FrontParts) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._parts = parts
        self._servers: list[asyncio.Server] = []
        self._clients: dict[ClientConnection, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self.is_draining = False
        self._running: Counter[str] = Counter()
        """Requests by tenant; those who have none are not in it."""
        self.port = 0
        """Where it listens, as the kernel chose; 0 before that."""
        self.counters = Counters()
        self.limits = parts.limits
        self.now_s = loop.time
        self.now_ms = parts.clock.now
        self.call_soon = loop.call_soon
        self.pool = WorkerPool(parts.upstream, self.counters, parts.tls)
        self.intake = Intake(
            max_json_depth=parts.limits.max_json_depth,
            strict_fields=parts.limits.strict_fields,
            max_model_len=parts.max_model_len,
            vocab_size_of=parts.vocab_size_of,
            counters=self.counters,
        )
        self.line = Line(
            picker=parts.picker,
            pool=self.pool,
            budget=RetryBudget(parts.retry),
            objection=parts.tenancy.objection if parts.tenancy else _no_objection,
            is_current=parts.tenancy.is_current if parts.tenancy else _always,
            renew=parts.tenancy.renew if parts.tenancy else _nothing_to_renew,
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

    def admit(self, client: ClientConnection) -> bool:
        self._clients[client] = None
        self.counters.open_clients += 1
        return len(self._clients) <= self.limits.max_connections

    def forget(self, client: ClientConnection) -> None:
        self.counters.open_clients -= 1
        del self._clients[client]
        if not self._clients:
            self._quiet.set()

    def is_full(self, principal: Principal) -> bool:
        """Whether there is no room for one more of this caller's tenant. Work for a client that
        left counts until it has ended; of the reserve, only those have any who have less than an
        equal share of all.
        """
        counters, limit = self.counters, self.limits.max_concurrent_requests
        busy_count = counters.active_requests + counters.late_picks
        if busy_count < limit * UNRESERVED or principal.auth_method == "off":
            return busy_count >= limit  # where all are one tenant nothing is reserved
        running = self._running
        tenants = len(running) + (principal.tenant not in running)
        share = limit / (tenants + 1)  # one more may come
        return busy_count >= limit or running[principal.tenant] >= share

    def begin(self, principal: Principal) -> None:
        """One more request of this tenant runs, until `end`."""
        self._running[principal.tenant] += 1

    def end(self, principal: Principal) -> None:
        self._running[principal.tenant] -= 1
        if not self._running[principal.tenant]:
            del self._running[principal.tenant]

    def principal(self, headers: dict[bytes, bytes], source: str) -> Principal:
        """Who is asking. Raises ClientError."""
        tenancy = self._parts.tenancy
        if tenancy is None:
            return EVERYBODY
        return tenancy.principal(headers.get(b"authorization", b""), source)

    def admit_request(
        self, principal: Principal, headers: dict[bytes, bytes], request: InferenceRequest
    ) -> None:
        """Give the request its grant. Raises ClientError for what it may not ask for."""
        tenancy = self._parts.tenancy
        if tenancy is not None:
            tenancy.charge(principal)
        knows = self._parts.knows_model
        if knows is not None and request.model and not knows(request.model):
            raise ClientError(unknown_model(request.model))
        wishes = wishes_in(headers, is_stream=request.is_stream)
        request.max_retries = wishes.max_retries
        if wishes.timeout_ms is not None:
            request.deadline = Instant(self.now_ms() + wishes.timeout_ms)
        wish = wished_scope(headers)
        if tenancy is not None:
            tenancy.admit_request(principal, request, wish, headers.get(b"x-trunkline-session"))
        elif wish is not None:
            text = "x-cache-scope is not offered: this gateway serves one tenant"
            raise ClientError(Refusal(code="scope_not_available", message=text))

    def serves(self, principal: Principal, target: bytes) -> bool:
        """Whether a path that is proxied unread is served to this caller. To tenants only those of
        which the operator says that the engines keep the salt there.
        """
        if principal.auth_method == "off":
            return True
        return target.partition(b"?")[0].rstrip(b"/").decode("ascii") in self._parts.tenant_paths

    def objection(self, request: InferenceRequest) -> GatewayError | None:
        return self.line.objection(request)

    def fence(self) -> int:
        """The epochs moved: end what runs under what was revoked, before anything more goes out.
        How many requests these were.
        """
        return sum(client.fence() for client in list(self._clients))

    def new_request_id(self) -> str:
        return self._parts.dice.randbytes(16).hex()

    @property
    def wants_records(self) -> bool:
        """Whether anybody reads access records: making one costs 3 us."""
        return self._parts.on_finished is not None

    def finished(self, record: AccessRecord) -> None:
        if self._parts.on_finished is not None:
            self._parts.on_finished(record)

    def local_answer(self, local: Local, principal: Principal) -> Answer:
        match local:
            case Local.MODELS:
                return self._models(principal)
            case Local.HEALTH | Local.LIVENESS:
                return Answer(status=200, body=b'{"status":"ok"}')
            case Local.VERSION:
                return Answer(
                    status=200, body=msgspec.json.encode({"version": self._parts.version})
                )
            case Local.READINESS:
                return self._readiness()

    def _models(self, principal: Principal) -> Answer:
        try:
            if self._parts.tenancy is not None:
                self._parts.tenancy.require_access(principal)
        except ClientError as error:
            self.counters.count_refusal(error.refusal.code)
            return refused(error.refusal, self.new_request_id())
        return Answer(status=200, body=self._parts.models(principal))

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
