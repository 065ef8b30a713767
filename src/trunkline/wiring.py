"""Puts a gateway together, readable from top to bottom: `trunkline serve`.

Few of the modules at the top of the package name adapters (`tests/unit/test_tree.py` has the list),
and nobody else does. Read `docs/architecture.md` for the picture.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trunkline.adapters.clock import SystemClock
from trunkline.config import Config
from trunkline.config_discovery import DiscoveryConfig
from trunkline.discovery_side import followed, named_roster, worker_sources
from trunkline.fleet_side import member_parts, memberships
from trunkline.leaf import read_key, read_root_key
from trunkline.lifetime import raise_descriptors, until_stopped
from trunkline.model_tables import configs_of
from trunkline.proxy_side import decides_for_envoy
from trunkline.texts import Texts, load_texts
from trunkline.worker_specs import named_specs, spec_reader

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from trunkline.adapters.zmq_events import EventContext
    from trunkline.assembly import Books, Core
    from trunkline.authority import Authority
    from trunkline.control.fleets import Members
    from trunkline.control.roster import SpecOf
    from trunkline.control.views import WorkerSpec
    from trunkline.core.principals import Principal
    from trunkline.core.records import WorkerId
    from trunkline.effects import Running
    from trunkline.gateway.admin import Reload
    from trunkline.gateway.counters import AccessRecord
    from trunkline.gateway.front import Front, FrontParts, Readiness
    from trunkline.gateway.span_queue import SpanQueue
    from trunkline.gateway.tenancy import Tenancy
    from trunkline.gateway.tracing import Tracer
    from trunkline.model_half import Half
    from trunkline.operations import Operations
    from trunkline.overview_side import Overviews
    from trunkline.reload import Again, Reloader
    from trunkline.reload_record import ReloadRecord
    from trunkline.seat import Alone, Seat


# -- trunkline serve -------------------------------------------------------------------------------


def serve(config: Config, again: Again | None = None) -> int:
    """`trunkline serve`: until SIGINT or SIGTERM. `again` reads the settings anew."""
    import uvloop

    from trunkline import observe
    from trunkline.settings import secret_values

    raise_descriptors()  # further processes inherit it
    if config.listen.processes > 1:
        from trunkline.parent import serve_several

        return serve_several(config, again)
    level: Any = config.observe.log_level  # both are checked against their choices already
    shape: Any = config.observe.log_format
    redactor = observe.configure(
        level, shape, secrets=secret_values(config), folder=config.observe.log_dir
    )
    return uvloop.run(run_gateway(config, redactor.add, again=again))


@dataclass(slots=True, kw_only=True)
class _Gateway:
    """One that is put together, and does nothing yet."""

    front: Front
    cores: list[Core]
    admin: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    """Serves the admin port until the event is set."""
    beside: list[Coroutine[Any, Any, None]]
    """What runs as long as it serves."""
    announce: Callable[[], None]


async def run_gateway(
    config: Config,
    hide: Callable[[str], None],
    place: Alone | Seat | None = None,
    again: Again | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, on the running loop. `hide` keeps a secret out of logs;
    without a `place` the process is alone.
    """
    from trunkline import observe
    from trunkline.adapters.zmq_events import event_context
    from trunkline.control.membership import MAX_WORKERS
    from trunkline.seat import Alone

    context = event_context(MAX_WORKERS)
    place = place or Alone(config)
    if place.is_first:
        _say_what_is_open(config)
    async with AsyncExitStack() as stack:
        stack.callback(place.close)
        await place.open()
        made = await _put_together(config, hide, place, again, stack, context)
        await until_stopped(made.announce, made.front, made.beside, made.admin)
    for core in made.cores:
        core.prompts.close()
    context.term()
    served = sum(made.front.counters.requests.values())
    observe.log.info("gateway.stopped", served_requests=served)
    return 0


async def _put_together(
    config: Config,
    hide: Callable[[str], None],
    place: Alone | Seat,
    again: Again | None,
    stack: AsyncExitStack,
    context: EventContext,
) -> _Gateway:
    from trunkline import observe
    from trunkline.authority import open_authority
    from trunkline.effects import Running
    from trunkline.gateway.listener import serve_admin
    from trunkline.trace_side import trace_side

    spec_of, clock = spec_reader(config), SystemClock()
    specs, sources = named_specs(config, spec_of), worker_sources(config.discovery)
    root_key = place.root_key or read_root_key(config.model.root_key_file)
    opening = open_authority(config, clock, root_key, observe.log)
    authority = await stack.enter_async_context(opening)
    halves = await _halves(config, clock, context, authority)
    cores = [half.core for half in halves]
    members = await memberships(config, halves, stack)
    tracer, spans = trace_side(config, clock, observe.log)
    front_parts = _front_parts(config, halves, members, clock, authority.tenancy, tracer)
    front = await _front(front_parts, place, authority, cores)
    listener = place.bind_admin()
    bound = place.bound(front.port, admin_port := listener.getsockname()[1])
    operations = _operations(authority, members, halves, front, spec_of, hide, specs)
    named = named_roster(config.discovery, members, spec_of, hide, specs)
    running = Running(
        bound, front=front, halves=halves, authority=authority, named=named, hide=hide
    )
    reloader = _reloader(config, again, running, spec_of)
    record = _reload_record(authority, clock)
    reload = place.reloading(reloader, record)
    app = _admin(running, operations, front, reload, members, clock, spans)
    admin = place.guarded(app, partial(_catch_up, authority), running.apply, record.keep)
    await stack.enter_async_context(decides_for_envoy(config, front, cores))
    beside = _works(config, halves, members, clock, spans)
    beside += followed(sources, config.discovery, members, spec_of, hide)
    beside += place.beside(front, front_parts.readiness)
    beside += place.share_load(cores)
    beside += place.heeds(reloader, record)
    return _Gateway(
        front=front,
        cores=cores,
        admin=lambda stop: serve_admin(admin, listener, stop),
        beside=beside,
        announce=lambda: place.announce(bound, admin_port),
    )


async def _front(
    parts: FrontParts, place: Alone | Seat, authority: Authority, cores: Sequence[Core]
) -> Front:
    """Where clients are told to come; it has what it is to ask of the authority."""
    from trunkline.gateway.front import Front

    front = Front(parts)
    await place.take(front)
    authority.attach(front, cores)
    _put_widenings_on_record(front, authority)
    _listen_for_pulls(authority, cores)
    return front


def _works(
    config: Config,
    halves: Sequence[Half],
    members: Members,
    clock: SystemClock,
    spans: SpanQueue | None,
) -> list[Coroutine[Any, Any, None]]:
    """What models, watches and traces have to do as long as it serves."""
    from trunkline import observe
    from trunkline.model_half import watches_of

    works = [work for half in halves for work in half.beside(config, clock)]
    works += watches_of(halves, members, clock, observe.log)
    return works if spans is None else [*works, spans.run()]


def _reloader(config: Config, again: Again | None, running: Running, spec_of: SpecOf) -> Reloader:
    from trunkline import observe
    from trunkline.reload import Reloader

    return Reloader(
        config,
        again=again,
        check=partial(named_specs, spec_of=spec_of),
        apply=running.apply,
        log=observe.log,
    )


def _reload_record(authority: Authority, clock: SystemClock) -> ReloadRecord:
    from trunkline.reload_record import ReloadRecord, in_audit_log

    tenants = authority.tenants
    return ReloadRecord(in_audit_log(tenants and tenants.administration), clock.wall)


def _operations(
    authority: Authority,
    members: Members,
    halves: Sequence[Half],
    front: Front,
    spec_of: SpecOf,
    hide: Callable[[str], None],
    specs: Sequence[WorkerSpec],
) -> Operations:
    """With these workers in it."""
    from trunkline.model_half import preview_of
    from trunkline.operations import Operations

    operations = Operations(
        membership=members,
        cores=[half.core for half in halves],
        counters=front.counters,
        spec_of=spec_of,
        hide=hide,
        holdings=authority.holdings,
        preview=preview_of(halves, members, front.intake, authority),
        refused_credentials=authority.authenticator.refusals,
    )
    for spec in specs:
        operations.add(spec)
    return operations


def _overviews(
    members: Members, halves: Sequence[Half], front: Front, clock: SystemClock
) -> Overviews:
    from trunkline.overview_side import overviews_of

    return overviews_of(members, halves, front, clock)


def _admin(
    running: Running,
    operations: Operations,
    front: Front,
    reload: Reload,
    members: Members,
    clock: SystemClock,
    spans: SpanQueue | None,
) -> Starlette:
    from trunkline import cli
    from trunkline.checkup import Checkup
    from trunkline.control.probe import fetch
    from trunkline.engines import FleetEngines
    from trunkline.gateway.admin import Beside, admin_app
    from trunkline.gateway.metrics import Exposition, MetricsSource, Summed
    from trunkline.native import IMPLEMENTATION
    from trunkline.tenant_side import TenantMetrics

    authority, halves = running.authority, running.halves
    checkup = Checkup(lambda: running.config, members, halves, authority, clock)
    sources: list[MetricsSource] = [operations, Summed(halves)]
    if authority.tenants is not None:
        sides = [half.side for half in halves if half.side is not None]
        sources.append(TenantMetrics(sides, authority.tenants))
    if spans is not None:
        sources.append(spans)
    return admin_app(
        operations,
        Exposition(sources, version=cli.version(), native=IMPLEMENTATION),
        settings=running.shown,
        key=running.admin_key,
        tenancy=authority.tenants.administration if authority.tenants else None,
        beside=Beside(
            reload=reload,
            checkup=checkup.look,
            engines=FleetEngines(members, fetch=fetch, hide=running.hide),
            overview=_overviews(members, halves, front, clock),
        ),
    )


def _say_what_is_open(config: Config) -> None:
    """What an operator should know before the first request."""
    from trunkline import observe
    from trunkline.native import STALE_CORE

    if STALE_CORE:
        remedy = "install it again (`make setup`); until then Python does its work, slower"
        observe.log.warning("core.stale", meaning=STALE_CORE, remedy=remedy)
    if not config.worker_urls and config.discovery == DiscoveryConfig():
        observe.log.warning("workers.none", remedy="--worker-urls, or POST /workers")
    if config.auth.auth == "off":
        observe.log.warning(
            "auth.off",
            meaning="everybody who reaches the port is one tenant, and shares one cache",
            remedy="--auth keys, and `trunkline keys create`",
        )
    if config.is_one_tenant and not config.model.root_key_file:
        observe.log.info("root_key.made", meaning="caches are not recognised after a restart")


async def _catch_up(authority: Authority) -> None:
    """Take in what other gateways have changed. Raises RegistryDown."""
    if authority.tenants is not None:
        await authority.tenants.registry.catch_up()


def build_core(
    config: Config,
    clock: SystemClock,
    authority: Authority | None = None,
    *,
    books: Books | None = None,
    also_named: tuple[str, ...] = (),
    texts: Texts | None = None,
) -> Core:
    """Directory, fleet, prompts and picker of a gateway; nothing listens, no worker is in it yet.

    `texts`: what `load_texts` gave, where it was called before. Raises ConfigError for a profile
    that is unknown or a root key that is none.
    """
    from trunkline.assembly import Given, assemble

    model = config.model
    texts = texts or load_texts(model, clock.wall)
    given = Given(
        tokenizer=texts.tokenizer,
        template=texts.template,
        root_key=authority.root_key if authority else secrets.token_bytes(32),
        directory_seed=secrets.randbits(64),
        clock=clock,
        draw=secrets.token_bytes,
        quota_of=authority.quota_of if authority else lambda _tenant: None,
        transfer_key=read_key(config.routing.transfer_key_file, "transfer_key_file"),
        is_model_given=bool(model.model_path or model.tokenizer_path),
        doubt=texts.doubt,
        books=books,
        also_named=also_named,
        on_ignored=_say_ignored,
    )
    return assemble(config, given)


def _put_widenings_on_record(front: Front, authority: Authority) -> None:
    """Who asks on the client port for a wider sharing than it has is in the audit log."""
    from trunkline.administration import SCOPE_WIDEN
    from trunkline.gateway.backend import Caller

    if authority.tenants is None:
        return
    administration = authority.tenants.administration

    def widening(principal: Principal, source: str, request_id: str) -> None:
        caller = Caller(principal=principal, source=source, request_id=request_id)
        why = "a request may only narrow the scope of its key"
        administration.refused(caller, SCOPE_WIDEN, source, why)

    front.on_widening = widening


def _listen_for_pulls(authority: Authority, cores: Sequence[Core]) -> None:
    """What leases say of pulls is told to all models' pickers, as each knows its own by name."""

    def told(worker: str, ended: Sequence[tuple[str, bytes]], lost: int) -> None:
        for number, core in enumerate(cores):  # which share one book: what was lost counts once
            core.picker.told_of_pulls(worker, ended, 0 if number else lost)

    if authority.holdings is not None:
        authority.holdings.listen(told)


def _say_ignored(worker: WorkerId) -> None:
    from trunkline import observe

    observe.log.warning(
        "worker.ignores_pulls",
        worker=worker,
        remedy="is its connector loaded, and of this version? It computes what it was to pull",
    )


async def _halves(
    config: Config, clock: SystemClock, context: EventContext, authority: Authority
) -> list[Half]:
    """What there is of each model, together with the rest of the gateway; one where there is one.

    Raises ConfigError as `build_core` does.
    """
    from trunkline import observe
    from trunkline.assembly import open_books
    from trunkline.model_half import half_of

    books = open_books(config, secrets.token_bytes)
    configs = configs_of(config)
    also = [table.served_names for table in config.models] or [()]
    cores = [
        build_core(
            one,
            clock,
            authority,
            books=books,
            also_named=names,
            texts=await asyncio.to_thread(load_texts, one.model, clock.wall),
        )
        for one, names in zip(configs, also, strict=True)
    ]
    authority.know_fleet(cores, clock)
    halves: list[Half] = []
    for one, core in zip(configs, cores, strict=True):
        parts = member_parts(one, core, clock, context, authority)
        half = half_of(one, core, parts, authority, clock, secrets.token_bytes, observe.log)
        halves.append(half)
    return halves


def _front_parts(
    config: Config,
    halves: Sequence[Half],
    members: Members,
    clock: SystemClock,
    tenancy: Tenancy,
    tracer: Tracer,
) -> FrontParts:
    from trunkline import cli, observe
    from trunkline.gateway.front import FrontParts
    from trunkline.model_half import served_by
    from trunkline.operations import readiness_of

    def log_request(record: AccessRecord) -> None:
        observe.log.debug("request.finished", **asdict(record))

    fleets = {half.core.model.name: half.core.fleet for half in halves}

    def readiness() -> Readiness:
        return readiness_of(fleets, members, clock.boot(), may_reuse=tenancy.may_reuse())

    picker, vocab_size_of = served_by(halves, members, tenancy)
    return FrontParts(
        picker=picker,
        tenancy=tenancy,
        tracer=tracer,
        models=partial(_models, config, members, tenancy),
        readiness=readiness,
        clock=clock,
        dice=random.Random(secrets.randbits(64)),
        listen=config.listen,
        limits=config.limits,
        upstream=config.upstream,
        retry=config.retry,
        max_model_len=config.model.max_model_len,
        vocab_size_of=vocab_size_of,
        knows_model=members.knows_model,
        version=cli.version(),
        tenant_paths=frozenset(config.auth.tenant_paths),
        # A line costs some 12 us of the hot path: only for those who asked for all there is.
        on_finished=log_request,
        is_debugging=config.observe.log_level == "debug",
    )


def _models(
    config: Config, members: Members, tenancy: Tenancy, principal: Principal
) -> list[dict[str, object]]:
    """What is served, to this caller."""
    row = {"object": "model", "created": 0, "owned_by": "trunkline"}
    return [
        {"id": name, **row, "max_model_len": length}
        for name, length in members.lengths(config.model.max_model_len)
        if principal.may_use_model(name) and not tenancy.is_barred(name)
    ]
