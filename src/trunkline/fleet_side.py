"""What the membership of a gateway's workers is put together from: sockets, feeds, bounds.

One fleet, or one for each model that is served. Names the adapters of event streams. Read
`control/membership.py` for what it does, `discovery_side.py` for how workers are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec

from trunkline.adapters.clock import SystemClock
from trunkline.config import Config, DirectoryConfig
from trunkline.errors import ConfigError
from trunkline.model_tables import names_of

if TYPE_CHECKING:
    from trunkline.adapters.zmq_events import EventContext
    from trunkline.assembly import Core
    from trunkline.authority import Authority
    from trunkline.control.discovery import Facts
    from trunkline.control.fleets import Members
    from trunkline.control.parts import MemberParts
    from trunkline.core.actions import Action
    from trunkline.core.feed import FeedLimits, WorkerFeed
    from trunkline.core.records import WorkerId
    from trunkline.model_half import Half
    from trunkline.ports.worker import EventSource


async def memberships(config: Config, halves: Sequence[Half], stack: AsyncExitStack) -> Members:
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


def member_parts(
    config: Config, core: Core, clock: SystemClock, context: EventContext, authority: Authority
) -> MemberParts:
    from trunkline import observe
    from trunkline.adapters.zmq_events import run_feed
    from trunkline.control.parts import MemberParts
    from trunkline.control.probe import fetch

    gateways = authority.tenants.gateways if authority.tenants else None
    relays = gateways.relays if gateways else None

    async def follow(
        source: EventSource, feed: WorkerFeed, on_action: Callable[[Action], None]
    ) -> None:
        await run_feed(source, feed, clock, on_action, context=context, relays=relays)

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
