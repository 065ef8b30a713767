"""One life of the gateway's process: the real parts, put together over the virtual network.

Front, line, picker, router, directory, feeds, membership, tenancy, registry, lease loops, revoker
and audit log are the product's own, as `wiring.py` and `authority.py` put them together; what they
keep is in memory. What outlives a process is in `Durable`. Read `world.py` for who starts and kills
it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache

import msgspec
from faults.machines import Machine, MachineClock
from faults.network import FaultyNet
from faults.records import SIGNER, Papers
from faults.setting import ORG, Setting, transfer_key
from faults.shared import Common, Reach
from faults.streams import Air, Subscription
from memory_bucket import ChainedMemory
from victim_words import MODEL, template, tokenizer

from trunkline import observe
from trunkline.adapters.event_sources import discovered_sources
from trunkline.adapters.nats_board import NatsBoard
from trunkline.adapters.nats_store import NatsStore
from trunkline.assembly import Core, Given, assemble
from trunkline.authority import LocalHolder
from trunkline.config import (
    BreakerConfig,
    Config,
    DirectoryConfig,
    HealthConfig,
    LimitsConfig,
    ListenConfig,
    RetryConfig,
    RoutingConfig,
    UpstreamConfig,
)
from trunkline.control.audit import AuditLog
from trunkline.control.audit_reader import AuditReader
from trunkline.control.book import Quota
from trunkline.control.changes import Intent, OrgAdded, TenantAdded
from trunkline.control.gateways import GatewayParts, Gateways
from trunkline.control.holders import HolderParts
from trunkline.control.holdings import Holdings
from trunkline.control.ledger import Ledger
from trunkline.control.load_sync import LoadSync
from trunkline.control.membership import Membership
from trunkline.control.mirrored_store import MirroredStore
from trunkline.control.parts import MemberParts
from trunkline.control.probe import fetch, post
from trunkline.control.receipts import Receipt
from trunkline.control.registry import Committed, Registry
from trunkline.control.restored import BackupWatch
from trunkline.control.revocation import Revoker, RevokerParts
from trunkline.control.supervised import Supervised
from trunkline.control.views import WorkerSpec
from trunkline.core.actions import Action
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.feed import WorkerFeed
from trunkline.core.freshness import LEASE_TTL_MS, RATE_MARGIN, LeaseGrants
from trunkline.core.principals import Principal
from trunkline.core.records import WorkerId
from trunkline.core.repair import FeedLimits
from trunkline.gateway.allowance import Allowance
from trunkline.gateway.contracts import ClientError, Refusal
from trunkline.gateway.fair_line import FairPicker, LineLimits
from trunkline.gateway.front import Front, FrontParts, Readiness, serve_front
from trunkline.gateway.tenancy import Tenancy
from trunkline.ports.store import StoreDown
from trunkline.ports.worker import Endpoint, EventSource
from trunkline.unfinished import finish_revocations

PORT = 30_000
BREAKER_PAUSE_S = 2.0
BLOCK_KV_BYTES = 64
"""Bytes of KV a token in the simulated engine."""
ME = Intent(actor="officer", reason="simulation")


@cache
def tenant_id(number: int) -> str:
    return f"{number + 1:032x}"


@cache
def subject_of_tenant(number: int) -> Subject:
    return Subject(kind=SubjectKind.TENANT, path=tenant_id(number))


def worker_name(number: int) -> str:
    return f"w{number}"


def gateway_names(count: int) -> list[str]:
    return [f"g{number}" for number in range(count)] if count > 1 else ["gateway"]


def lease_ends_s(posted_s: float) -> float:
    """By when a gateway's lease is over whose notice was sent then, whatever its clock."""
    return posted_s + LEASE_TTL_MS * RATE_MARGIN / 1e3


@dataclass(slots=True)
class Durable:
    """What is still there when a gateway's process begins anew."""

    name: str

    records: list[bytes] = field(default_factory=list[bytes])
    """The registry's log, or its copy where gateways share it."""
    lives: int = 0
    papers: Papers = field(default_factory=Papers)
    """Its audit log."""


class Gate:
    """Make it as a part of its machine, and give `run` a task there."""

    def __init__(
        self, setting: Setting, net: FaultyNet, air: Air, durable: Durable, common: Common | None
    ) -> None:
        """`common`: the registry that it shares; None where it has its own."""
        self.setting = setting
        self.net = net
        self.name = durable.name
        self.machine = Machine(self.name)
        durable.lives += 1
        self.life = durable.lives
        draw = random.Random(f"life {self.life} of {self.name} in {setting.seed}")
        rate = draw.choice((1.0, draw.uniform(0.995, 1.005))) if common else 1.0
        self.clock = MachineClock(loop=net, rate=rate, age_s=1e4)
        self.store = ChainedMemory(durable.records)
        """Its own, or its copy of the shared one."""
        self.papers = durable.papers
        self.common = common
        self.reach: Reach
        self.gateways: Gateways | None = None
        """This gateway among others; None where it is alone."""
        self.feeds: dict[WorkerId, WorkerFeed] = {}
        """The newest of each worker."""
        self.is_up = asyncio.Event()
        self.on_serving: Callable[[], None] = lambda: None
        self.on_up: Callable[[], None] = lambda: None
        self.decision_count = 0
        self._air = air
        self._secrets = random.Random(f"secrets {setting.seed}").randbytes
        self._whose = f"{self.name} {self.life}" if common else f"{self.life}"
        self._draw = random.Random(f"draws {setting.seed} {self._whose}").randbytes
        self.registry: Registry
        self.audit: AuditLog
        self.ledger: Ledger
        self.core: Core
        self.tenancy: Tenancy
        self.allowance: Allowance
        self.grants: LeaseGrants
        self.holdings: Holdings
        self.revoker: Revoker
        self.members: Membership
        self.line: FairPicker
        self.front: Front

    async def run(self) -> None:
        """Until it is killed."""
        await self._open_registry()
        await self._open_audit()
        await self._know_tenants()
        self.core = self._core()
        self.tenancy = self._tenancy()
        self.grants = LeaseGrants(self.clock.boot(), has_earlier_life=self.life > 1)
        watch = BackupWatch(self.clock, observe.log)
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(Supervised())
            self.holdings = await stack.enter_async_context(Holdings(self._holder_parts(watch)))
            here = LocalHolder(self.tenancy)
            self.revoker = await stack.enter_async_context(Revoker(self._revoker_parts(here)))
            self.registry.subscribe(self._take_in)
            tasks.begin(watch.run(self.registry, self.revoker), "restored backups")
            tasks.begin(self.ledger.keep(observe.log), "audit log")
            tasks.begin(self._finish_revocations(), "interrupted revocations")
            if self.gateways is not None:
                await stack.enter_async_context(self.gateways)
                tasks.begin(self.gateways.run(self.revoker, watch), "gateways")
            members = Membership(self._member_parts(), heartbeat_ttl_ms=3_000.0)
            self.members = await stack.enter_async_context(members)
            self.front = await serve_front(ListenConfig(port=PORT), self._front_parts())
            self.on_serving()
            here.attach(self.front, [self.core.namespaces])
            if self.gateways is not None:
                self.gateways.share_load([self.core.fleet], [self.core.with_hearsay()])
            for number in range(self.setting.worker_count):
                self.add_worker(number)
            self.on_up()
            self.is_up.set()
            while True:
                await asyncio.sleep(0.25)
                self.core.directory.expire(self.clock.now())

    def add_worker(self, number: int) -> None:
        name = worker_name(number)
        endpoint = Endpoint(host=name, port=8_000, host_header=name)
        self.members.add(WorkerSpec(name=name, endpoint=endpoint))

    # -- what is asked of it -----------------------------------------------------------------------

    async def raise_epoch(self, subject: Subject, *, bars: bool) -> Receipt:
        verb = self.revoker.revoke if bars else self.revoker.invalidate
        return await verb(subject, ME)

    async def enable(self, subject: Subject) -> int | None:
        return await self.revoker.enable(subject, ME)

    def is_apart(self) -> bool:
        """Whether it has no lease with the registry, as far as the world knows."""
        return self.net.time() > self.may_reuse_until_s()

    def may_reuse_until_s(self) -> float:
        """By when its last notice was sent, which is all that the world knows of its lease."""
        if self.common is None:
            return 1e9
        return lease_ends_s(self.reach.posted_s)

    # -- its parts ---------------------------------------------------------------------------------

    async def _open_registry(self) -> None:
        """As `registry_store.py` does it; a process that cannot is begun anew until it can."""
        if self.common is None:
            self.registry = await Registry.load(self.store, self.clock)
            return
        self.reach = self.common.reach()
        store = MirroredStore(_as_store(self.reach), self.store)
        board = _as_board(self.reach)
        while True:
            try:
                await board.join()
                await store.sync()
            except StoreDown:
                if not self.store.records:
                    await asyncio.sleep(0.5)
                    continue
            break
        self.registry = await Registry.load(store, self.clock)
        if store.is_joined:
            store.owes_mend = False  # loading did it
        nonce = self._draw(16).hex()
        parts = GatewayParts(
            load=LoadSync(nonce, self.reach, self.clock),
            life=f"gateway/{self.name}#{nonce}",
            nonce=nonce,
            registry=self.registry,
            store=store,
            board=board,
            clock=self.clock,
            log=observe.log,
            on_back=lambda: self.holdings.renew(),
        )
        self.gateways = Gateways(parts)

    async def _open_audit(self) -> None:
        self.audit = self.papers.log(self.name, self.life, self.clock)
        await self.audit.open()
        self.ledger = Ledger(self.registry, self.audit, is_shared=self.common is not None)

    async def _finish_revocations(self) -> None:
        reader = AuditReader(self.audit, keeper=self.papers.keeper, is_signed=SIGNER.is_signed)
        await finish_revocations(self.registry, reader, self.revoker, observe.log)

    async def _know_tenants(self) -> None:
        if self.registry.rev or self.name not in ("gateway", "g0"):
            return
        await self.registry.commit(OrgAdded(org=ORG, name="org"), ME)
        for number in range(self.setting.tenant_count):
            change = TenantAdded(tenant=tenant_id(number), org=ORG, name=f"tenant-{number}")
            await self.registry.commit(change, ME)

    def _take_in(self, committed: Committed) -> None:
        """As `authority.py` does it."""
        table = committed.book.table
        self.tenancy.swap(table)
        self.grants.raise_floor(table.changed_rev)
        if table.changed_rev == committed.rev:
            self.holdings.renew()

    def _quota(self, _tenant: str) -> Quota:
        setting = self.setting
        block_bytes = setting.block_tokens * BLOCK_KV_BYTES
        cap = setting.cap_blocks
        return Quota(
            requests_per_s=setting.requests_per_s,
            cache_floor_bytes=setting.floor_blocks * block_bytes,
            cache_cap_bytes=None if cap is None else cap * block_bytes,
        )

    def _core(self) -> Core:
        setting = self.setting
        self._routing = RoutingConfig(
            policy=setting.policy,
            profile=setting.profile,
            seed=setting.seed,
            decision_header=False,
            virtual_nodes=16,
            link_gbit=setting.pulls.link_gbit if setting.pulls else 25.0,
        )
        given = Given(
            tokenizer=tokenizer(),
            template=template(),
            root_key=random.Random(f"root {setting.seed}").randbytes(32),
            directory_seed=setting.seed,
            clock=self.clock,
            draw=self._draw,
            quota_of=self._quota,
            transfer_key=transfer_key(setting) if setting.pulls else b"",
        )
        return assemble(Config(routing=self._routing), given)

    def _tenancy(self) -> Tenancy:
        self.allowance = Allowance(self._quota, self.clock)
        made = Tenancy(
            authenticate=self._authenticate,
            has_lease=self.gateways.is_valid if self.gateways else lambda: True,
            session_key=self._secrets(32),
            draw=self._draw,
            allowance=self.allowance,
            lets_begun_finish=self.setting.lets_begun_finish,
        )
        made.swap(self.registry.table)
        made.served_model = lambda: self.core.model.name
        return made

    def _authenticate(self, authorization: bytes, _source: str) -> Principal:
        tenant, _, user = authorization.removeprefix(b"Bearer ").decode().partition("/")
        if not tenant.isdigit():
            raise ClientError(Refusal(status=401, code="invalid_api_key", message="no"))
        name = tenant_id(int(tenant))
        return Principal(org=ORG, tenant=name, user=user, actor=tenant, auth_method="key")

    def _holder_parts(self, watch: BackupWatch) -> HolderParts:
        parts = HolderParts(
            table=lambda: self.registry.table,
            grants=self.grants,
            fetch=fetch,
            post=post,
            clock=self.clock,
            log=observe.log,
            on_ahead=watch.tell,
        )
        if self.gateways is not None:
            parts.lease_left_ms = self.gateways.left_ms
        return parts

    def _revoker_parts(self, here: LocalHolder) -> RevokerParts:
        return RevokerParts(
            registry=self.registry,
            grants=self.grants,
            holders=self.holdings.all,
            here=here,
            audit=self.ledger,
            clock=self.clock,
            log=observe.log,
            peers=self.gateways,
        )

    def _member_parts(self) -> MemberParts:
        return MemberParts(
            fleet=self.core.fleet,
            directory=self.core.directory,
            targets=self.core.picker,
            clock=self.clock,
            fetch=fetch,
            make_feed=self._make_feed,
            run_feed=self._follow,
            find_sources=_sources_in,
            model=self.core.model,
            health=HealthConfig(
                health_check_interval_secs=1.0,
                health_check_timeout_secs=1.0,
                health_failure_threshold=2,
                health_success_threshold=1,
                load_interval_secs=2.0,
                disable_self_test=True,
            ),
            breaker=BreakerConfig(
                cb_failure_threshold=self.setting.breaker_threshold,
                cb_success_threshold=1,
                cb_timeout_duration_secs=BREAKER_PAUSE_S,
            ),
            routing=self._routing,
            default_block_tokens=16,
            log=observe.log,
            holdings=self.holdings,
        )

    def _make_feed(self, worker: WorkerId, source: EventSource) -> WorkerFeed:
        bounds = DirectoryConfig()
        limits = FeedLimits(
            max_buffered_batches=bounds.max_buffered_batches,
            max_parked_runs=bounds.max_parked_runs,
            parked_ttl_ms=bounds.parked_ttl_ms,
            replay_timeout_ms=2_000,
        )
        made = WorkerFeed(
            worker,
            self.core.directory,
            rank=source.rank,
            can_replay=source.replay_endpoint is not None,
            limits=limits,
        )
        self.feeds[worker] = made
        return made

    async def _follow(
        self, source: EventSource, feed: WorkerFeed, on_action: Callable[[Action], None]
    ) -> None:
        await Subscription(self._air, source, feed, self.clock, on_action).follow()

    def _front_parts(self) -> FrontParts:
        setting, core = self.setting, self.core
        upstream = UpstreamConfig(
            connect_timeout_ms=500,
            first_byte_timeout_ms=setting.first_byte_ms,
            stream_idle_timeout_ms=setting.stream_idle_ms,
        )
        self.line = FairPicker(
            core.picker,
            fleet=core.fleet,
            clock=self.clock,
            limits=LineLimits(
                room_ms=setting.room_ms,
                max_waiting=setting.line_places,
                max_wait_ms=0.95 * setting.first_byte_ms,
            ),
            allowance=self.allowance,
            renew=self.tenancy.renew,
        )
        return FrontParts(
            picker=self.line,
            models=lambda _principal: [],
            readiness=lambda: Readiness(is_ready=True),
            clock=self.clock,
            dice=random.Random(f"dice {setting.seed} {self._whose}"),
            limits=LimitsConfig(
                write_buffer_bytes=setting.write_buffer_bytes,
                write_stall_ms=setting.write_stall_ms,
            ),
            upstream=upstream,
            retry=RetryConfig(retry_budget_floor_per_s=setting.retry_floor_per_s),
            max_model_len=4_096,
            version="1",
            vocab_size_of=lambda _model: core.prompts.vocab_size,
            knows_model=lambda name: name == MODEL,
            tenancy=self.tenancy,
        )


def _as_store(reach: Reach) -> NatsStore:
    """The real adapter, over what behaves as its bucket does."""
    return NatsStore(reach)  # pyright: ignore[reportArgumentType] - as above


def _as_board(reach: Reach) -> NatsBoard:
    return NatsBoard(reach, [])  # pyright: ignore[reportArgumentType] - as above


def _sources_in(answer: bytes, host: str) -> list[EventSource]:
    return discovered_sources(msgspec.json.decode(answer), worker_host=host)
