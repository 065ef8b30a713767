"""Puts a gateway together, readable from top to bottom: `trunkline serve`.

Few of the modules at the top of the package name adapters (`tests/unit/test_tree.py` has the list),
and nobody else does. Read `docs/architecture.md` for the picture.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from trunkline.adapters.clock import SystemClock
from trunkline.config import Config, DirectoryConfig
from trunkline.config_discovery import DiscoveryConfig
from trunkline.discovery_side import followed, worker_sources
from trunkline.errors import ConfigError
from trunkline.leaf import read_key, read_root_key
from trunkline.lifetime import until_stopped
from trunkline.model_tables import configs_of, names_of
from trunkline.texts import Texts, load_texts
from trunkline.worker_specs import named_specs, spec_reader

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from trunkline.adapters.zmq_events import EventContext
    from trunkline.assembly import Books, Core
    from trunkline.authority import Authority
    from trunkline.control.discovery import Facts
    from trunkline.control.fleets import Members
    from trunkline.control.parts import MemberParts
    from trunkline.control.roster import SpecOf
    from trunkline.core.actions import Action
    from trunkline.core.feed import FeedLimits, WorkerFeed
    from trunkline.core.principals import Principal
    from trunkline.core.records import WorkerId
    from trunkline.gateway.counters import AccessRecord
    from trunkline.gateway.front import Front, FrontParts, Readiness
    from trunkline.gateway.tenancy import Tenancy
    from trunkline.model_half import Half
    from trunkline.operations import Operations
    from trunkline.ports.worker import EventSource
    from trunkline.seat import Alone, Seat


# -- trunkline serve -------------------------------------------------------------------------------


def serve(config: Config) -> int:
    """`trunkline serve`: until SIGINT or SIGTERM."""
    import uvloop

    from trunkline import observe
    from trunkline.settings import secret_values

    if config.listen.processes > 1:
        from trunkline.parent import serve_several

        return serve_several(config)
    level: Any = config.observe.log_level  # both are checked against their choices already
    shape: Any = config.observe.log_format
    redactor = observe.configure(level, shape, secrets=secret_values(config))
    return uvloop.run(run_gateway(config, redactor.add))


async def run_gateway(
    config: Config, hide: Callable[[str], None], place: Alone | Seat | None = None
) -> int:
    """Serve until SIGINT or SIGTERM, on the running loop. `hide` keeps a secret out of logs;
    without a `place` the process is alone.
    """
    from trunkline import observe
    from trunkline.adapters.zmq_events import event_context
    from trunkline.authority import open_authority
    from trunkline.control.clocks import watch_clocks
    from trunkline.control.membership import MAX_WORKERS
    from trunkline.gateway.front import Front
    from trunkline.gateway.listener import serve_admin
    from trunkline.seat import Alone

    spec_of = spec_reader(config)
    specs = named_specs(config, spec_of)
    sources = worker_sources(config.discovery)
    clock, context = SystemClock(), event_context(MAX_WORKERS)
    place = place or Alone(config)
    if place.is_first:
        _say_what_is_open(config)
    root_key = place.root_key or read_root_key(config.model.root_key_file)
    async with AsyncExitStack() as stack:
        stack.callback(place.close)
        await place.open()
        authority = await stack.enter_async_context(
            open_authority(config, clock, root_key, observe.log)
        )
        halves = await _halves(config, clock, context, authority)
        cores = [half.core for half in halves]
        members = await _members(config, halves, stack)
        front_parts = _front_parts(config, halves, members, clock, authority.tenancy)
        front = Front(front_parts)
        await place.take(front)
        authority.attach(front, cores)
        if authority.holdings is not None:
            authority.holdings.listen(_told_of_pulls(cores))
        listener = place.bind_admin()
        operations = _operations(authority, members, halves, front, spec_of, hide)
        for spec in specs:
            operations.add(spec)
        admin_port = listener.getsockname()[1]
        bound = place.bound(front.port, admin_port)
        app = _admin(bound, operations, authority, halves)
        admin = place.guarded(app, partial(_catch_up, authority))
        beside = [work for half in halves for work in half.beside(config, clock)]
        beside += followed(sources, config.discovery, members, spec_of, hide)
        beside.append(watch_clocks(clock, observe.log))
        beside += place.beside(front, front_parts.readiness)
        beside += place.share_load(cores)
        await until_stopped(
            lambda: place.announce(bound, admin_port),
            front,
            beside,
            lambda stop: serve_admin(admin, listener, stop),
        )
    for core in cores:
        core.prompts.close()
    context.term()
    observe.log.info("gateway.stopped", served_requests=sum(front.counters.requests.values()))
    return 0


def _operations(
    authority: Authority,
    members: Members,
    halves: Sequence[Half],
    front: Front,
    spec_of: SpecOf,
    hide: Callable[[str], None],
) -> Operations:
    from trunkline.model_half import preview_of
    from trunkline.operations import Operations

    return Operations(
        membership=members,
        cores=[half.core for half in halves],
        counters=front.counters,
        spec_of=spec_of,
        hide=hide,
        holdings=authority.holdings,
        preview=preview_of(halves, members, front.intake, authority),
        refused_credentials=authority.authenticator.refusals,
    )


def _admin(
    bound: Config, operations: Operations, authority: Authority, halves: Sequence[Half]
) -> Starlette:
    from trunkline import cli
    from trunkline.gateway.admin import admin_app
    from trunkline.gateway.metrics import Exposition, MetricsSource, Summed
    from trunkline.native import IMPLEMENTATION
    from trunkline.settings import redacted
    from trunkline.tenant_side import TenantMetrics

    sources: list[MetricsSource] = [operations, Summed(halves)]
    if authority.tenants is not None:
        sides = [half.side for half in halves if half.side is not None]
        sources.append(TenantMetrics(sides, authority.tenants))
    return admin_app(
        operations,
        Exposition(sources, version=cli.version(), native=IMPLEMENTATION),
        settings=redacted(bound),
        key=bound.listen.admin_api_key,
        tenancy=authority.tenants.administration if authority.tenants else None,
    )


def _say_what_is_open(config: Config) -> None:
    """What an operator should know of the settings before the first request."""
    from trunkline import observe

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


def _told_of_pulls(
    cores: Sequence[Core],
) -> Callable[[str, Sequence[tuple[str, bytes]], int], None]:
    """Who is told what leases say of pulls: all models' pickers, as each knows its own by name."""

    def told(worker: str, ended: Sequence[tuple[str, bytes]], lost: int) -> None:
        for number, core in enumerate(cores):  # which share one book: what was lost counts once
            core.picker.told_of_pulls(worker, ended, 0 if number else lost)

    return told


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
        parts = _member_parts(one, core, clock, context, authority)
        half = half_of(one, core, parts, authority, clock, secrets.token_bytes, observe.log)
        halves.append(half)
    return halves


async def _members(config: Config, halves: Sequence[Half], stack: AsyncExitStack) -> Members:
    """The workers of all models."""
    from trunkline.control.fleets import Fleets
    from trunkline.control.membership import Membership
    from trunkline.control.probe import fetch

    lease_ms = config.directory.heartbeat_ttl_ms
    memberships = [
        await stack.enter_async_context(Membership(half.parts, heartbeat_ttl_ms=lease_ms))
        for half in halves
    ]
    if not config.models:
        return memberships[0]
    fleets = await stack.enter_async_context(
        Fleets(
            {table.name: home for table, home in zip(config.models, memberships, strict=True)},
            names_of(config.models),
            fetch=fetch,
            timeout_ms=config.health.health_check_timeout_secs * 1_000.0,
        )
    )
    for half in halves:
        half.parts.on_other, half.parts.on_left = fleets.serves_another, fleets.left
    return fleets


def _member_parts(
    config: Config, core: Core, clock: SystemClock, context: EventContext, authority: Authority
) -> MemberParts:
    from trunkline import observe
    from trunkline.adapters.zmq_events import run_feed
    from trunkline.control.parts import MemberParts
    from trunkline.control.probe import fetch

    async def follow(
        source: EventSource, feed: WorkerFeed, on_action: Callable[[Action], None]
    ) -> None:
        await run_feed(source, feed, clock, on_action, context=context)

    def why_not(facts: Facts) -> str:
        return core.parity.why_not(facts.tokenizer_digest)

    return MemberParts(
        fleet=core.fleet,
        directory=core.directory,
        targets=core.picker,
        clock=clock,
        fetch=fetch,
        make_feed=_feed_maker(config.directory, core, authority),
        run_feed=follow,
        find_sources=_sources_in,
        model=core.model,
        health=config.health,
        breaker=config.breaker,
        routing=config.routing,
        default_block_tokens=config.model.block_size,
        log=observe.log,
        inexact=why_not,
        holdings=authority.holdings,
        keeps_apart=authority.tenants is not None,
    )


def _feed_maker(
    bounds: DirectoryConfig, core: Core, authority: Authority
) -> Callable[[WorkerId, EventSource], WorkerFeed]:
    from trunkline.core.feed import WorkerFeed
    from trunkline.core.folding import Folding
    from trunkline.gateway.contracts import OPEN_GRANT

    limits = _feed_limits(bounds)

    def make_feed(worker: WorkerId, source: EventSource) -> WorkerFeed:
        state = core.fleet.get(worker)
        assert state is not None, f"{worker} has a feed before it is in the fleet"
        if authority.tenants is None:
            # Admitted first, so that what the worker's ring still holds is understood in time.
            core.namespaces.namespace(OPEN_GRANT, state.block_tokens)
        pages, folding = source.page_tokens, None
        if pages and pages < state.block_tokens and state.block_tokens % pages == 0:
            folding = Folding(page_tokens=pages, block_tokens=state.block_tokens)
        return core.follow(
            WorkerFeed(
                worker,
                core.directory,
                rank=source.rank,
                can_replay=source.replay_endpoint is not None,
                limits=limits,
                folding=folding,
            )
        )

    return make_feed


def _sources_in(answer: bytes, host: str) -> list[EventSource]:
    """The event sources that a worker names; none where its answer makes no sense."""
    from trunkline import observe
    from trunkline.adapters.event_sources import discovered_sources

    try:
        return discovered_sources(msgspec.json.decode(answer), worker_host=host)
    except (ConfigError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        observe.log.warning("worker.odd_event_sources", host=host, why=str(error))
        return []


def _feed_limits(bounds: DirectoryConfig) -> FeedLimits:
    from trunkline.core.feed import FeedLimits

    return FeedLimits(
        max_buffered_batches=bounds.max_buffered_batches,
        max_parked_runs=bounds.max_parked_runs,
        parked_ttl_ms=bounds.parked_ttl_ms,
        replay_timeout_ms=bounds.replay_timeout_ms,
    )


def _front_parts(
    config: Config,
    halves: Sequence[Half],
    members: Members,
    clock: SystemClock,
    tenancy: Tenancy,
) -> FrontParts:
    from trunkline import cli, observe
    from trunkline.gateway.front import FrontParts
    from trunkline.model_half import served_by
    from trunkline.operations import readiness_of

    def log_request(record: AccessRecord) -> None:
        observe.log.debug("request.finished", **asdict(record))

    def models(principal: Principal) -> bytes:
        row = {"object": "model", "created": 0, "owned_by": "trunkline"}
        rows = [
            {"id": name, **row, "max_model_len": length}
            for name, length in members.lengths(config.model.max_model_len)
            if principal.may_use_model(name) and not tenancy.is_barred(name)
        ]
        return msgspec.json.encode({"object": "list", "data": rows})

    fleets = {half.core.model.name: half.core.fleet for half in halves}

    def readiness() -> Readiness:
        return readiness_of(fleets, members, clock.boot(), may_reuse=tenancy.may_reuse())

    picker, vocab_size_of = served_by(halves, members, tenancy)
    return FrontParts(
        picker=picker,
        tenancy=tenancy,
        models=models,
        readiness=readiness,
        clock=clock,
        dice=random.Random(secrets.randbits(64)),
        limits=config.limits,
        upstream=config.upstream,
        retry=config.retry,
        max_model_len=config.model.max_model_len,
        vocab_size_of=vocab_size_of,
        knows_model=members.knows_model,
        version=cli.version(),
        tenant_paths=frozenset(config.auth.tenant_paths),
        # A line costs some 12 us of the hot path: only for those who asked for all there is.
        on_finished=log_request if config.observe.log_level == "debug" else None,
    )
