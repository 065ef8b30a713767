"""An admin port on a real socket over a real registry, revoker and audit log.

The registry is in memory, the audit log in files, the only holder is this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from admin_port import FakeBackend, FakeOverview
from fleet import WAIT_S
from starlette.applications import Starlette

from trunkline.adapters.audit_files import CheckpointFile, FileSink
from trunkline.adapters.clock import SystemClock
from trunkline.adapters.signing import Ed25519Signer
from trunkline.administration import Administration, AdministrationParts
from trunkline.config import ListenConfig
from trunkline.control.audit import AuditLog, AuditOrigin
from trunkline.control.audit_reader import AuditReader
from trunkline.control.ledger import Ledger
from trunkline.control.memory_store import MemoryStore
from trunkline.control.receipts import HolderAck
from trunkline.control.registry import Committed, Registry
from trunkline.control.revocation import HERE, Revoker, RevokerParts
from trunkline.core.audit import Head
from trunkline.core.credentials import secret_hash_under
from trunkline.core.freshness import LeaseGrants, Order
from trunkline.core.records import Instant, WallTime
from trunkline.gateway.admin import Beside, admin_app
from trunkline.gateway.authenticate import Credentials
from trunkline.gateway.listener import bind_admin, serve_admin
from trunkline.gateway.metrics import Exposition
from trunkline.gateway.tenant_counts import TenantCounts
from trunkline.observe import EventLog
from trunkline.ports.audit import SinkDown

OPERATOR_KEY = "marked-operator-key"


class ShiftedClock(SystemClock):
    """The machine's, with a wall clock that can be set ahead, and a monotonic one that can be
    stopped: rates go by it, and a slow machine would fill up what they take.
    """

    ahead_s = 0.0
    stopped_at: Instant | None = None

    def stop(self) -> None:
        self.stopped_at = self.now()

    def now(self) -> Instant:
        return super().now() if self.stopped_at is None else self.stopped_at

    def wall(self) -> WallTime:
        return WallTime(super().wall() + self.ahead_s)


class BreakableSink(FileSink):
    """Takes records until somebody pulls the plug."""

    is_broken = False

    async def append(self, lines: Sequence[bytes], head: Head) -> None:
        if self.is_broken:
            raise SinkDown("unplugged")
        await super().append(lines, head)


class TenantPort:
    """The port in a thread with its own loop, as clients with various keys see it."""

    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    registry: Registry
    administration: Administration
    audit: AuditLog
    app: Starlette

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.operator_key = key
        self.orders: list[Order] = []
        self.clock = ShiftedClock()
        self.sink = BreakableSink(folder / "audit")
        self.checkpoint_file = folder / "checkpoints.jsonl"
        self.store = MemoryStore()
        self.counts = TenantCounts()
        self._clients: list[httpx.Client] = []
        self._is_started = threading.Event()
        self._trouble: BaseException | None = None
        self._listener = bind_admin(ListenConfig(admin_port=0, admin_api_key=key))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert self._is_started.wait(WAIT_S)
        if self._trouble is not None:
            raise self._trouble
        self.operator = self.client(key)

    def client(self, key: str = "") -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        made = httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S)
        self._clients.append(made)
        return made

    def key(self, tenant: str, *roles: str, **fields: Any) -> str:
        """The text of a new key; the tenant is made where it is not there."""
        body = {"tenant": tenant, "create_tenant": True, **fields}
        if roles:
            body["roles"] = list(roles)
        made = self.operator.post("/keys", json=body)
        assert made.status_code == 201, made.text
        return made.json()["key"]

    def records(self) -> list[dict[str, Any]]:
        return self.operator.get("/audit", params={"limit": 1000}).json()["records"]

    def unplug(self) -> None:
        """The sink takes nothing more, and nobody waits long for what it does not take."""
        self.sink.is_broken = True
        self._revoker._parts = replace(self._revoker._parts, audit_patience_ms=10.0)

    def settled(self) -> None:
        """Everything that waits for the audit log has been written."""

        async def drain() -> None:
            done = self.administration._parts.revoker.outbox.put(self._nothing)
            await done.wait()

        asyncio.run_coroutine_threadsafe(drain(), self.loop).result(WAIT_S)

    @staticmethod
    async def _nothing() -> None: ...

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.loop.call_soon_threadsafe(self.stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._trouble = error
            self._is_started.set()
            raise

    async def _run(self) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        clock, hash_secret = self.clock, secret_hash_under(b"p" * 32)
        draw = _drawing()
        signer = Ed25519Signer.from_file(self.folder / "sign.key")
        keeper = CheckpointFile(self.checkpoint_file)
        self.registry = registry = await Registry.load(self.store, clock)
        self.audit = audit = AuditLog(
            [self.sink],
            signer=signer,
            keeper=keeper,
            clock=clock,
            sink_timeout_s=WAIT_S,
            origin=AuditOrigin(host="here", boot_id="b", audit_key=b"a" * 32),
        )
        assert await audit.open()
        credentials = Credentials(book=registry.book.keys, hash_secret=hash_secret, clock=clock)
        ledger = Ledger(registry, audit)

        def take_in(committed: Committed) -> None:
            credentials.swap(committed.book.keys)

        registry.subscribe(take_in)
        parts = RevokerParts(
            registry=registry,
            grants=LeaseGrants(clock.boot(), has_earlier_life=False),
            holders=list,
            here=self._here,
            audit=ledger,
            clock=clock,
            log=EventLog("tenant-port"),
            audit_patience_ms=WAIT_S * 1_000.0,
        )
        async with Revoker(parts) as revoker:
            self._revoker = revoker
            self.administration = Administration(
                AdministrationParts(
                    registry=registry,
                    ledger=ledger,
                    revoker=revoker,
                    audit=audit,
                    reader=AuditReader(audit, keeper=keeper, is_signed=signer.is_signed),
                    credentials=credentials,
                    clock=clock,
                    counts=self.counts,
                    hash_secret=hash_secret,
                    draw=draw,
                )
            )
            backend = FakeBackend()
            self.app = app = admin_app(
                backend,
                Exposition([], version="1", native="pure"),
                settings={},
                key=self.operator_key,
                beside=Beside(engines=backend, overview=FakeOverview()),
                tenancy=self.administration,
            )
            self._is_started.set()
            await serve_admin(app, self._listener, self.stop)
        await audit.close()
        await keeper.close()

    def _here(self, order: Order) -> HolderAck:
        self.orders.append(order)
        return HolderAck(life=HERE, aborted=1, condemned_blocks=2, condemned_bytes={"device": 64})


def _drawing() -> Any:
    import random

    return random.Random(7).randbytes


@contextlib.contextmanager
def serving_tenants(folder: Path, key: str = OPERATOR_KEY) -> Iterator[TenantPort]:
    port = TenantPort(folder, key)
    try:
        yield port
    finally:
        port.close()
