"""The half of a gateway that says who may what, put together: registry, audit, revoker, tenancy.

Two shapes: one tenant (`--auth off`, or the one key of `--api-key`), where nothing is kept and
nothing revoked; and tenants, with a registry in the state folder. Every change of the registry is
taken in by all that goes by it, in one step of the loop, before anybody is told that it is done.
Read `wiring.py` for the rest of the gateway, `docs/tenancy.md` for what it is about.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline.control.changes import EpochRaised, SubjectEnabled, TenantRemoved
from trunkline.control.supervised import Supervised
from trunkline.core.freshness import LeaseGrants
from trunkline.core.principals import Principal
from trunkline.errors import ConfigError
from trunkline.gateway.authenticate import Authenticator, Credentials
from trunkline.gateway.publics import PublicPrefixes
from trunkline.gateway.tenancy import Tenancy
from trunkline.one_tenant import open_one_tenant
from trunkline.registry_store import Ground, Shared, gateways_at, open_registry, open_store
from trunkline.tenant_policies import Policies, publics_in_use
from trunkline.unfinished import finish_revocations

if TYPE_CHECKING:
    from trunkline.adapters.jwt_tokens import JwtTokens
    from trunkline.administration import Administration
    from trunkline.assembly import Core
    from trunkline.config import Config
    from trunkline.control.audit import AuditLog
    from trunkline.control.audit_reader import AuditReader
    from trunkline.control.book import Book, Quota
    from trunkline.control.gateways import Gateways
    from trunkline.control.holdings import Holdings
    from trunkline.control.ledger import Ledger
    from trunkline.control.receipts import HolderAck
    from trunkline.control.registry import Committed, Registry
    from trunkline.control.restored import BackupWatch
    from trunkline.control.revocation import Revoker
    from trunkline.control.siblings import Side
    from trunkline.core.credentials import SecretHash
    from trunkline.core.freshness import Order
    from trunkline.gateway.allowance import Allowance
    from trunkline.gateway.front import Front
    from trunkline.gateway.namespaces import Namespaces
    from trunkline.observe import EventLog
    from trunkline.ports.clock import Clock


@dataclass(slots=True, kw_only=True)
class Tenants:
    """What there is only where tenants are kept apart."""

    registry: Registry
    audit: AuditLog
    revoker: Revoker
    holdings: Holdings
    credentials: Credentials
    policies: Policies
    here: LocalHolder
    allowance: Allowance
    clock: Clock
    log: EventLog
    administration: Administration
    gateways: Gateways | None
    """This gateway among others; None where the registry is its own."""

    def org_and_tenant(self, name: str) -> tuple[str, str] | None:
        """Ids, of a tenant by its name; None where there is none."""
        book = self.registry.book
        tenant = book.tenants.get(book.names.get(f"tenant/{name}", ""))
        return None if tenant is None else (tenant.org, tenant.tenant)

    def publish(self, publics: PublicPrefixes, core: Core, only: str = "") -> None:
        """Let the data plane know what is registered, now and whenever that changes; of one model
        `only` where there are several.
        """

        last: list[object] = [None]

        def take_in(book: Book) -> None:
            if book.publics is last[0]:
                return  # most changes are to something else
            last[0] = book.publics
            wall_ms = self.clock.wall() * 1_000.0
            publics.swap(publics_in_use(book, core.identity(1), wall_ms, self.log, only))

        take_in(self.registry.book)
        self.registry.subscribe(lambda committed: take_in(committed.book))


@dataclass(slots=True, kw_only=True)
class Authority:
    """Who may what, for one gateway."""

    tenancy: Tenancy
    authenticator: Authenticator
    root_key: bytes = field(repr=False)
    tenants: Tenants | None
    """None where everybody is one tenant."""
    holdings: Holdings | None
    """Keeps the workers' leases; None where they have none."""

    def quota_of(self, tenant: str) -> Quota | None:
        return self.tenants.policies.quota_of(tenant) if self.tenants else None

    def know_fleet(self, cores: Sequence[Core], clock: Clock) -> None:
        """From here on grants are of the models that are served, and what is registered as public
        is shared.
        """
        one = cores[0] if len(cores) == 1 else None
        if one is not None:
            self.tenancy.served_model = lambda: one.model.name
        for core in cores if self.tenants is not None else ():
            only = "" if one else core.model.name
            grant_of = partial(self.tenancy.public_grant, model=only)
            publics = PublicPrefixes(core.identity, lambda: clock.wall() * 1_000.0, grant_of)
            core.namespaces.publics = publics
            if self.tenants is not None:
                core.picker.accounts.tenants = self.tenants.allowance.counts
                self.tenants.publish(publics, core, only)

    def attach(self, front: Front, cores: Sequence[Core]) -> None:
        """From here on a revocation reaches what runs at the front, and what is known under it."""
        if self.tenants is not None:
            self.tenants.here.attach(front, [core.namespaces for core in cores])
            if self.tenants.gateways is not None:
                fleets = [core.fleet for core in cores]
                hearsay = [core.with_hearsay() for core in cores]
                self.tenants.gateways.share_load(fleets, hearsay)
                self.tenants.gateways.share_knowledge([_side_of(core) for core in cores])


def _side_of(core: Core) -> Side:
    from trunkline.control.siblings import Side

    return Side(
        directory=core.directory,
        names=core.namespaces,
        feeds=core.feeds,
        block_tokens=core.block_tokens,
    )


@asynccontextmanager
async def open_authority(
    config: Config, clock: Clock, root_key: bytes, log: EventLog
) -> AsyncGenerator[Authority]:
    """`root_key` is the configured one; empty takes one of the state folder, or, for one tenant,
    one for this life. Raises ConfigError, RegistryBroken.
    """
    if config.is_one_tenant:
        opened = open_one_tenant(config, clock, log, secrets.token_bytes, root_key)
        async with opened as (door, tenancy, holdings):
            yield Authority(
                tenancy=tenancy,
                authenticator=door,
                root_key=root_key or secrets.token_bytes(32),
                tenants=None,
                holdings=holdings,
            )
        return
    from trunkline.adapters.state_dir import StateDir

    state = StateDir(state_path(config.auth.state_dir))
    async with AsyncExitStack() as stack:
        ground = Ground(
            stack=stack,
            tasks=await stack.enter_async_context(Supervised()),
            config=config,
            clock=clock,
            state=state,
            root_key=root_key or state.secret("root"),
            log=log,
        )
        yield await _with_tenants(ground)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Door:
    """Who may come in."""

    credentials: Credentials
    policies: Policies
    allowance: Allowance
    tenancy: Tenancy
    hash_secret: SecretHash


@dataclass(frozen=True, slots=True, kw_only=True)
class _Records:
    """What is kept of who may what, and of who did what."""

    registry: Registry
    ledger: Ledger
    audit: AuditLog
    reader: AuditReader
    shared: Shared | None


async def _with_tenants(ground: Ground) -> Authority:
    from trunkline.control.restored import BackupWatch

    records = await _open_records(ground)
    registry, ledger, gateways = records.registry, records.ledger, None
    if records.shared is not None:
        gateways = gateways_at(ground, records.shared, registry, lambda: holdings.renew())
    door = await _open_door(ground, registry.book, gateways)
    here = LocalHolder(door.tenancy)
    grants = LeaseGrants(ground.clock.boot(), has_earlier_life=registry.rev > 0)
    watch = BackupWatch(ground.clock, ground.log)
    holdings = await _open_holdings(ground, registry, grants, watch, gateways)
    revoker = await _open_revoker(ground, registry, ledger, grants, holdings, here, gateways)

    _follow_registry(ground, registry, door, grants, holdings)
    ground.begin(ledger.keep(ground.log), "ledger")
    ground.begin(watch.run(registry, revoker), "restored backups")
    if gateways is not None:
        await ground.stack.enter_async_context(gateways)
        ground.begin(gateways.run(revoker, watch), "gateways")
    revoker.begin(
        finish_revocations(registry, records.reader, revoker, ground.log),
        "interrupted revocations",
    )
    return Authority(
        tenancy=door.tenancy,
        authenticator=door.credentials,
        root_key=ground.root_key,
        holdings=holdings,
        tenants=Tenants(
            registry=registry,
            audit=records.audit,
            revoker=revoker,
            holdings=holdings,
            credentials=door.credentials,
            policies=door.policies,
            here=here,
            allowance=door.allowance,
            clock=ground.clock,
            log=ground.log,
            administration=_administration(ground, records, door, revoker),
            gateways=gateways,
        ),
    )


async def _open_records(ground: Ground) -> _Records:
    from trunkline.control.ledger import Ledger

    # The store first: whoever has not got its lock touches nothing. Then the audit log, as that
    # remembers how far the registry had come: a restored backup is behind it.
    store, shared = await open_store(ground)
    audit, reader = await _open_audit(ground)
    registry = await open_registry(ground, store, audit.audited_rev)
    return _Records(
        registry=registry,
        ledger=Ledger(registry, audit, is_shared=shared is not None),
        audit=audit,
        reader=reader,
        shared=shared,
    )


def _administration(
    ground: Ground, records: _Records, door: _Door, revoker: Revoker
) -> Administration:
    from trunkline.administration import Administration, AdministrationParts

    return Administration(
        AdministrationParts(
            registry=records.registry,
            ledger=records.ledger,
            revoker=revoker,
            audit=records.audit,
            reader=records.reader,
            credentials=door.credentials,
            clock=ground.clock,
            counts=door.allowance.counts,
            hash_secret=door.hash_secret,
            draw=secrets.token_bytes,
        )
    )


def _follow_registry(
    ground: Ground, registry: Registry, door: _Door, grants: LeaseGrants, holdings: Holdings
) -> None:
    """What is committed is in force at this door, and in what workers are granted, at once."""

    def take_in(committed: Committed) -> None:
        if isinstance(committed.change, EpochRaised | SubjectEnabled):
            kind = committed.change.subject.partition("/")[0]
            ground.log.warning(
                "access.changed", rev=committed.rev, kind=kind, by=committed.intent.actor
            )
        if isinstance(committed.change, TenantRemoved):
            door.allowance.counts.forget(committed.change.tenant)
        door.policies.swap(committed.book)
        door.credentials.swap(committed.book.keys)
        door.tenancy.swap(committed.book.table)
        grants.raise_floor(committed.book.table.changed_rev)
        if committed.book.table.changed_rev == committed.rev:
            holdings.renew()  # what leaves the epochs as they are goes with the next beat

    door.tenancy.swap(registry.table)
    door.tenancy.as_of_now = door.policies.applied
    registry.subscribe(take_in)


async def _open_door(ground: Ground, book: Book, gateways: Gateways | None) -> _Door:
    from trunkline.core.credentials import secret_hash_under
    from trunkline.gateway.allowance import Allowance

    config, clock = ground.config, ground.clock
    policies = Policies(book)
    hash_secret = secret_hash_under(ground.state.secret("pepper"))
    credentials = Credentials(
        book=book.keys,
        hash_secret=hash_secret,
        clock=clock,
        tokens=await _open_tokens(ground, policies),
    )
    allowance = Allowance(
        policies.allowance_of,
        clock,
        default_tokens_per_s=config.limits.rate_limit_tokens_per_second or None,
    )

    def who(authorization: bytes, source: str) -> Principal:
        return policies.applied(credentials.principal(authorization, source))

    if not len(book.keys) and not config.auth.jwt_issuer:
        ground.log.warning(
            "keys.none",
            meaning="nobody can be served yet",
            remedy="trunkline keys create --tenant NAME --create-tenant; --auth off asks nobody",
        )
    return _Door(
        credentials=credentials,
        policies=policies,
        allowance=allowance,
        tenancy=Tenancy(
            authenticate=who,
            has_lease=gateways.is_valid if gateways else _holds_the_registry,
            session_key=ground.state.secret("session"),
            draw=secrets.token_bytes,
            allowance=allowance,
            lets_begun_finish=config.control.control_lost == "finish",
        ),
        hash_secret=hash_secret,
    )


async def _open_holdings(
    ground: Ground,
    registry: Registry,
    grants: LeaseGrants,
    watch: BackupWatch,
    gateways: Gateways | None,
) -> Holdings:
    from trunkline.control.holders import HolderParts
    from trunkline.control.holdings import Holdings
    from trunkline.control.probe import fetch, post

    parts = HolderParts(
        table=lambda: registry.table,
        grants=grants,
        fetch=fetch,
        post=post,
        clock=ground.clock,
        log=ground.log,
        on_ahead=watch.tell,
    )
    if gateways is not None:
        parts.lease_left_ms = gateways.left_ms
    return await ground.stack.enter_async_context(Holdings(parts))


async def _open_revoker(
    ground: Ground,
    registry: Registry,
    ledger: Ledger,
    grants: LeaseGrants,
    holdings: Holdings,
    here: LocalHolder,
    gateways: Gateways | None,
) -> Revoker:
    from trunkline.control.revocation import Revoker, RevokerParts

    parts = RevokerParts(
        registry=registry,
        grants=grants,
        holders=holdings.all,
        here=here,
        audit=ledger,
        clock=ground.clock,
        log=ground.log,
        peers=gateways,
    )
    return await ground.stack.enter_async_context(Revoker(parts))


class LocalHolder:
    """This gateway as a holder of epochs. Its table is the registry's own, swapped by the commit;
    what is left to do is to end what runs and to forget what is known.
    """

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self._front: Front | None = None
        self._namespaces: Sequence[Namespaces] = ()

    def attach(self, front: Front, namespaces: Sequence[Namespaces]) -> None:
        self._front = front
        self._namespaces = namespaces

    def __call__(self, order: Order) -> HolderAck:
        from trunkline.control.receipts import HolderAck
        from trunkline.control.revocation import HERE

        assert self._tenancy.table.rev >= order.rev, "told of a change before its commit was"
        aborted = self._front.fence() if self._front else 0
        for namespaces in self._namespaces:
            namespaces.retire_stale(self._tenancy.table)
        return HolderAck(life=HERE, aborted=aborted)


def _holds_the_registry() -> bool:
    """The registry's one writer is this process: no table is newer than its own, ever."""
    return True


def state_path(named: str) -> Path:
    if named:
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "trunkline"


async def _open_audit(ground: Ground) -> tuple[AuditLog, AuditReader]:
    from trunkline.adapters.audit_files import CheckpointFile, FileSink
    from trunkline.adapters.signing import Ed25519Signer
    from trunkline.adapters.state_dir import boot_id, host_name, is_one_place
    from trunkline.control.audit import AuditLog, AuditOrigin
    from trunkline.control.audit_reader import AuditReader

    state, auth = ground.state, ground.config.auth
    copy_dir = Path(auth.audit_copy_dir) if auth.audit_copy_dir else state.path / "audit-copy"
    try:
        signer = Ed25519Signer.from_file(state.signing_key_file)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if is_one_place(state.audit_dir, copy_dir):
        ground.log.warning(
            "audit.one_place",
            meaning="who loses or restores that disk has no second copy of the audit log",
            remedy="--audit-copy-dir on another disk",
        )
    keeper = CheckpointFile(copy_dir.with_name(copy_dir.name + "-checkpoints.jsonl"))
    audit = AuditLog(
        [FileSink(state.audit_dir), FileSink(copy_dir)],
        signer=signer,
        keeper=keeper,
        clock=ground.clock,
        origin=AuditOrigin(host=host_name(), boot_id=boot_id(), audit_key=state.secret("audit")),
    )
    if not await audit.open():
        ground.log.error(
            "audit.down", why=audit.health().trouble, meaning="nothing can be granted until it is"
        )
    ground.stack.push_async_callback(audit.close)
    return audit, AuditReader(
        audit, keeper=keeper, is_signed=signer.is_signed, key_id=signer.key_id
    )


async def _open_tokens(ground: Ground, policies: Policies) -> JwtTokens | None:
    auth, clock = ground.config.auth, ground.clock
    if not auth.jwt_issuer:
        return None
    if not auth.jwt_audience or not auth.jwt_jwks:
        raise ConfigError("jwt_issuer needs --jwt-audience and --jwt-jwks beside it")
    from trunkline.adapters.jwks import Jwks, checked_algorithms, jwks_source
    from trunkline.adapters.jwt_tokens import JwtTokens
    from trunkline.core.claims import PinnedClaims

    jwks = Jwks(jwks_source(auth.jwt_jwks), checked_algorithms(auth.jwt_algorithms), clock)
    if not await jwks.refresh():
        ground.log.error("jwks.unread", why=jwks.problem, meaning="no token is taken until it is")
    ground.begin(jwks.keep(), "jwks")
    pinned = PinnedClaims(issuer=auth.jwt_issuer, audience=auth.jwt_audience)
    return JwtTokens(jwks, pinned, policies.of_token, clock)
