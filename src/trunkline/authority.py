"""The half of a gateway that says who may what, put together: registry, audit, revoker, tenancy.

Two shapes: one tenant (`--auth off`, or the one key of `--api-key`), where nothing is kept and
nothing revoked; and tenants, with a registry in the state folder. Every change of the registry is
taken in by all that goes by it, in one step of the loop, before anybody is told that it is done.
Read `wiring.py` for the rest of the gateway, `docs/tenancy.md` for what it is about.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline.control.book import APPROVERS_NEEDED
from trunkline.control.book import PublicPrefix as Registered
from trunkline.core.claims import TenantPolicy
from trunkline.core.freshness import LeaseGrants
from trunkline.core.identity import ModelIdentity, ScopeKind
from trunkline.core.principals import WIDTHS, Principal
from trunkline.core.publics import PublicBook, PublicPrefix
from trunkline.errors import ConfigError, RegistryDown
from trunkline.gateway.authenticate import Authenticator, Credentials, OpenDoor, StaticKey
from trunkline.gateway.contracts import EVERYBODY
from trunkline.gateway.publics import PublicPrefixes
from trunkline.gateway.tenancy import Tenancy

if TYPE_CHECKING:
    from trunkline.adapters.jwt_tokens import JwtTokens
    from trunkline.adapters.state_dir import StateDir
    from trunkline.administration import Administration
    from trunkline.assembly import Core
    from trunkline.config import AuthConfig, Config
    from trunkline.control.audit import AuditLog
    from trunkline.control.audit_reader import AuditReader
    from trunkline.control.book import Book, Quota
    from trunkline.control.holdings import Holdings
    from trunkline.control.ledger import Ledger
    from trunkline.control.receipts import HolderAck
    from trunkline.control.registry import Committed, Registry
    from trunkline.control.revocation import Revoker
    from trunkline.core.freshness import Order
    from trunkline.gateway.allowance import Allowance
    from trunkline.gateway.front import Front
    from trunkline.gateway.namespaces import Namespaces
    from trunkline.observe import EventLog
    from trunkline.ports.clock import Clock

LEDGER_BEAT_S = 1.0
MAX_POLICIES = 65_536


@dataclass(slots=True, kw_only=True)
class Tenants:
    """What there is only where tenants are kept apart."""

    registry: Registry
    ledger: Ledger
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

    def publish(self, publics: PublicPrefixes, core: Core) -> None:
        """Let the data plane know what is registered, now and whenever that changes."""

        last: list[object] = [None]

        def take_in(book: Book) -> None:
            if book.publics is last[0]:
                return  # most changes are to something else
            last[0] = book.publics
            model = core.identity(1)
            known: list[PublicPrefix] = []
            for record in book.publics.values():
                if len(record.approvers) < APPROVERS_NEEDED or record.is_withdrawn:
                    continue
                try:
                    PublicBook([*known, prefix := prefix_of(record, model)])
                except ValueError as error:
                    self.log.error("public.left_out", prefix=record.name, why=str(error))
                else:
                    known.append(prefix)
            publics.swap(PublicBook(known))

        take_in(self.registry.book)
        self.registry.subscribe(lambda committed: take_in(committed.book))


def prefix_of(record: Registered, model: ModelIdentity) -> PublicPrefix:
    """A registration as the data plane has it; what it leaves open is that of the served model."""
    return PublicPrefix(
        public_id=record.public_id,
        owner=record.owner,
        approvers=(record.approvers[0], record.approvers[1]),
        tokens=record.tokens,
        audience=record.audience,
        model_id=record.model_id,
        weights_digest=record.weights_digest,
        tokenizer_digest=record.tokenizer_digest or model.tokenizer_digest,
        template_digest=record.template_digest or model.template_digest,
        not_after_ms=record.not_after_ms,
        reason=record.reason or record.name,
    )


@dataclass(slots=True, kw_only=True)
class Authority:
    """Who may what, for one gateway."""

    tenancy: Tenancy
    authenticator: Authenticator
    root_key: bytes
    tenants: Tenants | None
    """None where everybody is one tenant."""

    def quota_of(self, tenant: str) -> Quota | None:
        return self.tenants.policies.quota_of(tenant) if self.tenants else None

    def know_fleet(self, core: Core, clock: Clock) -> None:
        """From here on grants are of the model that the fleet serves, and what is registered as
        public is shared.
        """
        self.tenancy.served_model = lambda: core.model.name
        if self.tenants is not None:
            publics = PublicPrefixes(
                core.identity, lambda: clock.wall() * 1_000.0, self.tenancy.public_grant
            )
            core.namespaces.publics = publics
            self.tenants.publish(publics, core)

    def attach(self, front: Front, namespaces: Namespaces) -> None:
        """From here on a revocation reaches what runs at the front, and what is known under it."""
        if self.tenants is not None:
            self.tenants.here.attach(front, namespaces)


@asynccontextmanager
async def open_authority(
    config: Config, clock: Clock, root_key: bytes, log: EventLog
) -> AsyncGenerator[Authority]:
    """`root_key` is the configured one; empty takes one of the state folder, or, for one tenant,
    one for this life. Raises ConfigError, RegistryBroken.
    """
    if config.auth.auth == "off" or config.listen.api_key:
        if config.auth.jwt_issuer:
            raise ConfigError("jwt_issuer makes no sense where all callers are one tenant")
        key = config.listen.api_key
        door = StaticKey(key, EVERYBODY) if key else OpenDoor(EVERYBODY)
        yield Authority(
            tenancy=_tenancy(door.principal, secrets.token_bytes(32)),
            authenticator=door,
            root_key=root_key or secrets.token_bytes(32),
            tenants=None,
        )
        return
    from trunkline.adapters.state_dir import StateDir

    state = StateDir(_state_path(config.auth.state_dir))
    async with AsyncExitStack() as stack:
        yield await _with_tenants(stack, config, clock, state, root_key, log)


async def _with_tenants(
    stack: AsyncExitStack,
    config: Config,
    clock: Clock,
    state: StateDir,
    root_key: bytes,
    log: EventLog,
) -> Authority:
    from trunkline.administration import Administration, AdministrationParts
    from trunkline.control.holders import HolderParts
    from trunkline.control.holdings import Holdings
    from trunkline.control.ledger import Ledger
    from trunkline.control.probe import fetch, post
    from trunkline.control.revocation import Revoker, RevokerParts
    from trunkline.core.credentials import secret_hash_under
    from trunkline.gateway.allowance import Allowance

    # First, since it remembers how far the registry had come: a restored backup is behind it.
    audit, reader = await _open_audit(stack, config.auth, state, clock, log)
    registry = await _open_registry(stack, state, clock, log, audit.audited_rev)
    ledger = Ledger(registry, audit)
    policies = Policies(registry.book)
    hash_secret = secret_hash_under(state.secret("pepper"))
    credentials = Credentials(
        book=registry.book.keys,
        hash_secret=hash_secret,
        clock=clock,
        tokens=await _open_tokens(stack, config.auth, clock, policies, log),
    )

    def who(authorization: bytes, source: str) -> Principal:
        return policies.applied(credentials.principal(authorization, source))

    allowance = Allowance(
        policies.allowance_of,
        clock,
        default_tokens_per_s=config.limits.rate_limit_tokens_per_second or None,
    )
    tenancy = _tenancy(who, state.secret("session"), allowance)
    here = LocalHolder(tenancy)
    grants = LeaseGrants(clock.boot(), has_earlier_life=registry.rev > 0)
    holdings = await stack.enter_async_context(
        Holdings(
            HolderParts(
                table=lambda: registry.table,
                grants=grants,
                fetch=fetch,
                post=post,
                clock=clock,
                log=log,
            )
        )
    )
    revoker = await stack.enter_async_context(
        Revoker(
            RevokerParts(
                registry=registry,
                grants=grants,
                holders=holdings.all,
                here=here,
                audit=ledger,
                clock=clock,
                log=log,
            )
        )
    )

    def take_in(committed: Committed) -> None:
        policies.swap(committed.book)
        credentials.swap(committed.book.keys)
        tenancy.swap(committed.book.table)
        grants.raise_floor(committed.book.table.changed_rev)
        holdings.renew()

    tenancy.swap(registry.table)
    registry.subscribe(take_in)
    if not len(registry.book.keys) and not config.auth.jwt_issuer:
        log.warning(
            "keys.none",
            meaning="nobody can be served yet",
            remedy="trunkline keys create --tenant NAME --create-tenant; --auth off asks nobody",
        )
    beat = asyncio.create_task(_keep_ledger(ledger, log))
    stack.callback(beat.cancel)
    return Authority(
        tenancy=tenancy,
        authenticator=credentials,
        root_key=root_key or state.secret("root"),
        tenants=Tenants(
            registry=registry,
            ledger=ledger,
            audit=audit,
            revoker=revoker,
            holdings=holdings,
            credentials=credentials,
            policies=policies,
            here=here,
            allowance=allowance,
            clock=clock,
            log=log,
            administration=Administration(
                AdministrationParts(
                    registry=registry,
                    ledger=ledger,
                    revoker=revoker,
                    audit=audit,
                    reader=reader,
                    credentials=credentials,
                    clock=clock,
                    hash_secret=hash_secret,
                    draw=secrets.token_bytes,
                )
            ),
        ),
    )


class LocalHolder:
    """This gateway as a holder of epochs. Its table is the registry's own, swapped by the commit;
    what is left to do is to end what runs and to forget what is known.
    """

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self._front: Front | None = None
        self._namespaces: Namespaces | None = None

    def attach(self, front: Front, namespaces: Namespaces) -> None:
        self._front = front
        self._namespaces = namespaces

    def __call__(self, order: Order) -> HolderAck:
        from trunkline.control.receipts import HolderAck
        from trunkline.control.revocation import HERE

        assert self._tenancy.table.rev >= order.rev, "told of a change before its commit was"
        aborted = self._front.fence() if self._front else 0
        if self._namespaces is not None:
            self._namespaces.retire_stale(self._tenancy.table)
        return HolderAck(life=HERE, aborted=aborted)


class Policies:
    """What the book says of tenants, in the shapes that the data plane asks for. The same objects
    are given out as long as the book stays as it is.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._applied: dict[Principal, Principal] = {}
        self._of_tokens: dict[tuple[str, str], TenantPolicy | None] = {}

    def swap(self, book: Book) -> None:
        self._book = book
        self._applied.clear()
        self._of_tokens.clear()

    def quota_of(self, tenant: str) -> Quota | None:
        record = self._book.tenants.get(tenant)
        return None if record is None else record.quota

    def allowance_of(self, tenant: str) -> Quota:
        """As `quota_of`, with a default for whoever is not in the book."""
        from trunkline.control.book import Quota

        return self.quota_of(tenant) or Quota()

    def applied(self, principal: Principal) -> Principal:
        """The principal with its tenant's default scope, where its credential names no narrower."""
        known = self._applied.get(principal)
        if known is None:
            if len(self._applied) >= MAX_POLICIES:
                self._applied.clear()
            known = self._applied[principal] = self._apply(principal)
        return known

    def _apply(self, principal: Principal) -> Principal:
        if principal.tenant not in self._book.tenants:
            return principal
        default = self._book.default_scope(principal.tenant)
        own = principal.default_scope
        is_own = own is not ScopeKind.TENANT  # which is what a key has that says nothing
        if is_own and WIDTHS.index(own) > WIDTHS.index(default):
            return principal
        return replace(principal, default_scope=default)

    def of_token(self, org: str, tenant: str) -> TenantPolicy | None:
        """What tokens of a tenant may, by the names that they claim; None for no such tenant."""
        name = (org, tenant)
        if name not in self._of_tokens:
            if len(self._of_tokens) >= MAX_POLICIES:
                self._of_tokens.clear()
            self._of_tokens[name] = self._policy(org, tenant)
        return self._of_tokens[name]

    def _policy(self, org: str, tenant: str) -> TenantPolicy | None:
        book = self._book
        org_id = book.names.get(f"org/{org}", org)
        tenant_id = book.names.get(f"tenant/{tenant}", tenant)
        record = book.tenants.get(tenant_id)
        if record is None or record.org != org_id:
            return None
        return TenantPolicy(
            org=org_id, tenant=tenant_id, default_scope=book.default_scope(tenant_id)
        )


def _tenancy(
    authenticate: Callable[[bytes, str], Principal],
    session_key: bytes,
    allowance: Allowance | None = None,
) -> Tenancy:
    return Tenancy(
        authenticate=authenticate,
        has_lease=_holds_the_registry,
        session_key=session_key,
        draw=secrets.token_bytes,
        allowance=allowance,
    )


def _holds_the_registry() -> bool:
    """The registry's one writer is this process: no table is newer than its own, ever."""
    return True


def _state_path(named: str) -> Path:
    if named:
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "trunkline"


async def _open_registry(
    stack: AsyncExitStack, state: StateDir, clock: Clock, log: EventLog, acknowledged_rev: int
) -> Registry:
    from trunkline.adapters.sqlite_store import SqliteStore
    from trunkline.control.registry import Registry
    from trunkline.ports.store import StoreBroken, StoreDown, StoreTaken

    try:
        store = await SqliteStore.open(state.registry_file)
    except (StoreTaken, StoreDown, StoreBroken) as error:
        raise ConfigError(f"the registry {state.registry_file}: {error}") from error
    stack.push_async_callback(store.close)
    registry = await Registry.load(store, clock, acknowledged_rev=acknowledged_rev)
    if registry.lost_revisions:
        log.error(
            "registry.restored",
            lost_revisions=registry.lost_revisions,
            meaning="a backup: changes were forgotten, revoked keys and tenants may be back",
            remedy="compare with the audit log; all caches were made unreachable",
        )
    return registry


async def _open_audit(
    stack: AsyncExitStack, auth: AuthConfig, state: StateDir, clock: Clock, log: EventLog
) -> tuple[AuditLog, AuditReader]:
    from trunkline.adapters.audit_files import CheckpointFile, FileSink
    from trunkline.adapters.signing import Ed25519Signer
    from trunkline.adapters.state_dir import boot_id, host_name
    from trunkline.control.audit import AuditLog, AuditOrigin
    from trunkline.control.audit_reader import AuditReader

    copy_dir = Path(auth.audit_copy_dir) if auth.audit_copy_dir else state.path / "audit-copy"
    try:
        signer = Ed25519Signer.from_file(state.signing_key_file)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    keeper = CheckpointFile(copy_dir.with_name(copy_dir.name + "-checkpoints.jsonl"))
    audit = AuditLog(
        [FileSink(state.audit_dir), FileSink(copy_dir)],
        signer=signer,
        keeper=keeper,
        clock=clock,
        origin=AuditOrigin(host=host_name(), boot_id=boot_id(), audit_key=state.secret("audit")),
    )
    if not await audit.open():
        log.error(
            "audit.down", why=audit.health().trouble, meaning="nothing can be granted until it is"
        )
    stack.push_async_callback(audit.close)
    return audit, AuditReader(audit, keeper=keeper, is_signed=signer.is_signed)


async def _open_tokens(
    stack: AsyncExitStack, auth: AuthConfig, clock: Clock, policies: Policies, log: EventLog
) -> JwtTokens | None:
    if not auth.jwt_issuer:
        return None
    if not auth.jwt_audience or not auth.jwt_jwks:
        raise ConfigError("jwt_issuer needs --jwt-audience and --jwt-jwks beside it")
    from trunkline.adapters.jwks import Jwks, checked_algorithms, jwks_source
    from trunkline.adapters.jwt_tokens import JwtTokens
    from trunkline.core.claims import PinnedClaims

    jwks = Jwks(jwks_source(auth.jwt_jwks), checked_algorithms(auth.jwt_algorithms), clock)
    if not await jwks.refresh():
        log.error("jwks.unread", why=jwks.problem, meaning="no token is taken until it is")
    keeping = asyncio.create_task(jwks.keep())
    stack.callback(keeping.cancel)
    pinned = PinnedClaims(issuer=auth.jwt_issuer, audience=auth.jwt_audience)
    return JwtTokens(jwks, pinned, policies.of_token, clock)


async def _keep_ledger(ledger: Ledger, log: EventLog) -> None:
    """Audit sinks come back, checkpoints are made, missing records are written."""
    while True:
        await asyncio.sleep(LEDGER_BEAT_S)
        try:
            await ledger.tick()
        except RegistryDown as error:
            log.warning("registry.down", why=str(error))
