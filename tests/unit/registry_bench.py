"""What the tests of registry and audit log share: a clock that is set by hand, ids, records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

from hand_clock import WALL_MS
from trunkline.control.changes import (
    Change,
    EpochRaised,
    Intent,
    KeyAdded,
    OrgAdded,
    PublicProposed,
    TenantAdded,
)
from trunkline.control.draft import token_digest
from trunkline.control.registry import Registry

DAY_MS = 86_400_000
_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(work)


def an_id(number: int) -> str:
    return f"{number:032x}"


def intent(actor: str = "alice", *, wall_ms: int = WALL_MS, reason: str = "test") -> Intent:
    return Intent(
        actor=actor, auth_method="key", source="127.0.0.1", reason=reason, wall_ms=wall_ms
    )


ORG = OrgAdded(org=an_id(1), name="acme-corp")
TENANT = TenantAdded(tenant=an_id(2), org=an_id(1), name="acme")
TENANT_SUBJECT = f"tenant/{an_id(2)}"


def a_key(number: int = 1, tenant: str = TENANT.tenant) -> KeyAdded:
    return KeyAdded(
        key_id=f"{number:016x}", org=ORG.org, tenant=tenant, user="bob", secret_hash=bytes(32)
    )


def raised(epoch: int, *, subject: str = TENANT_SUBJECT, is_revoked: bool = False) -> EpochRaised:
    verb = "revoke" if is_revoked else "invalidate"
    return EpochRaised(subject=subject, epoch=epoch, verb=verb, bars=is_revoked)


def a_prefix(number: int = 50, name: str = "rules", *, blocks: int = 2) -> PublicProposed:
    tokens = random.Random(number).randbytes(4 * 16 * blocks)
    return PublicProposed(
        public_id=an_id(number),
        name=name,
        owner=ORG.org,
        tokens=tokens,
        token_digest=token_digest(tokens),
        block_tokens=16,
        model_id="llama",
        audience=None,
        not_after_ms=WALL_MS + 30 * DAY_MS,
    )


async def commit_all(registry: Registry, *changes: Change) -> int:
    for change in changes:
        await registry.commit(change, intent())
    return registry.rev
