"""Where everybody is one tenant: one door, nothing revoked, and leases only where workers pull.

KV is pulled, and kept behind the device, on behalf of requests with a ticket alone; a ticket is
worth something beside a lease. So a gateway with a transfer key grants leases on epochs that never
change. Read `authority.py` for who may what where there are many.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trunkline.config import Config
from trunkline.core.epochs import EpochTable
from trunkline.core.freshness import LeaseGrants
from trunkline.errors import ConfigError
from trunkline.gateway.authenticate import OpenDoor, StaticKey
from trunkline.gateway.contracts import EVERYBODY
from trunkline.gateway.tenancy import Tenancy
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock

if TYPE_CHECKING:
    from trunkline.control.holdings import Holdings


@asynccontextmanager
async def open_one_tenant(
    config: Config,
    clock: Clock,
    log: EventLog,
    draw: Callable[[int], bytes],
    root_key: bytes = b"",
) -> AsyncGenerator[tuple[OpenDoor | StaticKey, Tenancy, Holdings | None]]:
    """Door, tenancy and the workers' leases. `draw(n)` gives n unguessable bytes. Gateways with one
    root key know one another's sessions. Raises ConfigError.
    """
    from trunkline.control.holders import HolderParts
    from trunkline.control.holdings import Holdings
    from trunkline.control.probe import fetch, post

    if config.auth.jwt_issuer:
        raise ConfigError("jwt_issuer makes no sense where all callers are one tenant")
    key = config.listen.api_key
    door = StaticKey(key, EVERYBODY) if key else OpenDoor(EVERYBODY)
    tenancy = Tenancy(
        authenticate=door.principal,
        has_lease=_nothing_changes,
        session_key=_session_key(root_key) if root_key else draw(32),
        draw=draw,
    )
    if not config.routing.transfer_key_file:
        yield door, tenancy, None
        return
    table = EpochTable()
    parts = HolderParts(
        table=lambda: table,
        grants=LeaseGrants(clock.boot(), has_earlier_life=False),
        fetch=fetch,
        post=post,
        clock=clock,
        log=log,
    )
    async with Holdings(parts) as holdings:
        yield door, tenancy, holdings


def _session_key(root_key: bytes) -> bytes:
    return hashlib.blake2b(digest_size=32, key=root_key, person=b"sessions").digest()


def _nothing_changes() -> bool:
    """There is no registry: what this process knows is all there is."""
    return True
