"""Registry and audit log together, in the order that each change must keep.

    what grants or widens   INTENT durable in a sink -> registry commit -> record with its revision
    what takes away         registry commit, intent inside -> record, now or when a sink is back

Every revision of the registry has exactly one record, in order; what is missing after a time
without sinks, or after a crash, is made from the registry's own log. Must never: let a change that
grants happen unrecorded, hold one back that takes away, or put the words of a refusal, which hold
names, into a record. Read `revocation.py` for the holders' side.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import assert_never

from trunkline.control import changes as log
from trunkline.control.audit import REGISTRY_ACTION, AuditLog
from trunkline.control.book import Check
from trunkline.control.receipts import Erasure, Receipt
from trunkline.control.registry import Registry
from trunkline.core.audit import AuditEvent, Kind
from trunkline.core.epochs import Subject
from trunkline.errors import AccessEnded, AuditDown, Busy, ChangeRefused, GatewayError, RegistryDown
from trunkline.observe import EventLog

BEAT_S = 1.0

_BATCH = 100
_ENDED_BEFORE = "the process ended before the outcome was recorded"
_CHANGED_ELSEWHERE = f"another gateway has the outcome, or {_ENDED_BEFORE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A change that is in force, and whether its record is in the audit log already."""

    rev: int
    is_audited: bool


class Ledger:
    """Belongs to one event loop. Its owner gives it a task for `keep`."""

    def __init__(self, registry: Registry, audit: AuditLog, *, is_shared: bool = False) -> None:
        """`is_shared`: other gateways write to the registry, too."""
        self._registry = registry
        self._audit = audit
        self._first_rev = registry.rev
        """Up to here an earlier life of the process made the changes, or another gateway."""
        self._is_shared = is_shared
        self._lock = asyncio.Lock()

    async def commit(
        self, change: log.Change, intent: log.Intent, check: Check | None = None
    ) -> Recorded:
        """Carry out one change. Raises AuditDown where it grants and no sink can keep the intent;
        ChangeRefused, RegistryDown, Busy, and what `check` raises (see `Registry.commit`).
        """
        if not log.widens(change):
            rev = await self._registry.commit(change, intent, check)
            return Recorded(rev=rev, is_audited=await self._is_recorded())
        if not await self.catch_up():
            raise AuditDown("the audit log does not take what came before: nothing may be granted")
        await self._audit.write(self._wanted(log.name_of(change), _target(change), intent))
        try:
            rev = await self._registry.commit(change, intent, check)
        except (ChangeRefused, RegistryDown, Busy, AccessEnded) as error:
            action = f"wanted.{log.name_of(change)}"
            event = _event(Kind.OUTCOME, action, intent, result="refused", reason=error.code)
            await self._audit.note(event)
            raise
        return Recorded(rev=rev, is_audited=await self._is_recorded())

    async def _is_recorded(self) -> bool:
        """Whether what is in force has its record. That it cannot be said is no reason to fail."""
        try:
            return await self.catch_up()
        except RegistryDown:
            return False

    async def catch_up(self) -> bool:
        """Make the records that are missing; whether none is. Raises RegistryDown."""
        async with self._lock:
            try:
                await self._catch_up()
            except (AuditDown, Busy):
                return False
        return True

    async def keep(self, events: EventLog) -> None:
        """Until cancelled: sinks come back, checkpoints are made, missing records are written."""
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.tick()
            except GatewayError as error:
                events.warning("ledger.behind", why=str(error))

    async def tick(self) -> None:
        """Keep the audit log going. Raises RegistryDown, RegistryBroken."""
        await self._audit.tick()
        await self.catch_up()

    async def refused(self, action: str, intent: log.Intent, reason: str) -> None:
        """Somebody was told no; kept when it can be."""
        await self._audit.note(_event(Kind.REFUSED, action, intent, result="no", reason=reason))

    async def intent(self, action: str, subject: Subject, intent: log.Intent) -> None:
        """The intent to `enable`, before it happens; or the record of what is in the registry
        (`revoke`, `invalidate`). Raises AuditDown.
        """
        if not await self.catch_up():
            raise AuditDown(f"no audit sink: {self._audit.health().trouble}")
        if action not in ("revoke", "invalidate"):
            await self._audit.write(self._wanted(action, str(subject), intent))

    async def wanted(
        self, action: str, target: str, intent: log.Intent, check: Check | None = None
    ) -> None:
        """The intent to do what is no change of the registry, before it is done at once. Raises
        AuditDown, and what `check` raises.
        """
        if not await self.catch_up():
            raise AuditDown(f"no audit sink: {self._audit.health().trouble}")
        await self._audit.write(self._wanted(action, target, intent))
        if check is None:
            return
        try:
            check(self._registry.book)
        except GatewayError as error:
            await self.came_of(action, target, intent, result="refused", reason=error.code)
            raise

    async def came_of(
        self, action: str, target: str, intent: log.Intent, *, result: str, reason: str = ""
    ) -> None:
        """What came of it; kept when it can be."""
        pseudonym = self._audit.pseudonym(target)
        event = _event(
            Kind.OUTCOME, action, intent, scope_path_hmac=pseudonym, result=result, reason=reason
        )
        await self._audit.note(event)

    async def outcome(self, receipt: Receipt, intent: log.Intent) -> None:
        """What came of a revocation. Raises AuditDown."""
        counts = {
            "acked": len(receipt.acked),
            "fenced": len(receipt.fenced),
            "aborted": receipt.aborted,
            "blocks": receipt.condemned_blocks,
            "bytes": sum(receipt.condemned_bytes.values()),
            "ms": round(receipt.ms),
        }
        event = _event(
            Kind.OUTCOME,
            receipt.verb.value,
            intent,
            scope_path_hmac=self._audit.pseudonym(receipt.subject),
            rev=receipt.rev,
            epoch_to=receipt.epoch,
            result=f"fence:{receipt.fence.value} erase:{receipt.erase.value}",
            counts=counts,
        )
        await self._audit.write(event)

    async def erased(self, erasure: Erasure, intent: log.Intent) -> None:
        """What one holder has erased. Raises AuditDown."""
        counts = {f"{tier}_bytes": count for tier, count in erasure.bytes.items()}
        event = _event(
            Kind.ERASED,
            "erase",
            intent,
            rev=erasure.rev,
            scope_path_hmac=self._audit.pseudonym(f"worker/{erasure.holder}"),
            result="done" if erasure.is_done else "unfinished",
            counts={"blocks": erasure.blocks, **counts},
        )
        await self._audit.write(event)

    async def _catch_up(self) -> None:
        while self._audit.audited_rev != self._registry.rev or self._audit.head.seq == 0:
            if not await self._audit.open():
                raise AuditDown(f"no audit sink: {self._audit.health().trouble}")
            after = self._audit.audited_rev
            if after > self._registry.rev:
                raise AuditDown(
                    f"the audit log tells of revision {after}, the registry ends at"
                    f" {self._registry.rev}: it is a restored backup; start the gateway again"
                )
            entries = await self._registry.entries(after, _BATCH)
            if not entries:
                return
            for rev, entry in entries:
                await self._audit.write(self._recorded(rev, entry))
                if isinstance(entry.change, log.EpochRaised) and rev <= self._first_rev:
                    await self._audit.write(self._unknown_outcome(rev, entry.change, entry.intent))

    def _wanted(self, action: str, target: str, intent: log.Intent) -> AuditEvent:
        return _event(
            Kind.INTENT,
            f"wanted.{action}",
            intent,
            scope_path_hmac=self._audit.pseudonym(target),
            reason=intent.reason,
        )

    def _recorded(self, rev: int, entry: log.Entry) -> AuditEvent:
        """The one record of a revision."""
        change = entry.change
        epoch = change.epoch if isinstance(change, log.EpochRaised) else 0
        key_id = change.key_id if isinstance(change, log.KeyAdded | log.KeyRevoked) else ""
        return _event(
            _kind(change),
            f"{REGISTRY_ACTION}{log.name_of(change)}",
            entry.intent,
            scope_path_hmac=self._audit.pseudonym(_target(change)),
            rev=rev,
            epoch_from=max(0, epoch - 1),
            epoch_to=epoch,
            result=change.verb if isinstance(change, log.EpochRaised) else "done",
            reason=entry.intent.reason,
            counts={"intent_wall_ms": entry.intent.wall_ms},
            proof={"key_id": key_id} if key_id else {},
        )

    def _unknown_outcome(self, rev: int, change: log.EpochRaised, intent: log.Intent) -> AuditEvent:
        return _event(
            Kind.OUTCOME,
            change.verb,
            intent,
            scope_path_hmac=self._audit.pseudonym(change.subject),
            rev=rev,
            epoch_to=change.epoch,
            result="effective",
            reason=_CHANGED_ELSEWHERE if self._is_shared else _ENDED_BEFORE,
        )


def _event(kind: Kind, action: str, intent: log.Intent, **words: object) -> AuditEvent:
    # Any of the remaining fields; AuditEvent says which there are
    return AuditEvent(
        kind=kind,
        action=action,
        actor=intent.actor,
        auth_method=intent.auth_method,
        source=intent.source,
        request_id=intent.request_id,
        **words,  # pyright: ignore[reportArgumentType]  # checked by the tests of each caller
    )


def _kind(change: log.Change) -> Kind:
    match change:
        case log.KeyAdded() | log.KeyRevoked():
            return Kind.KEY
        case log.PublicProposed() | log.PublicApproved() | log.PublicWithdrawn():
            return Kind.PUBLIC_REG
        case log.EpochRaised() | log.SubjectEnabled():
            return Kind.INTENT
        case _:
            return Kind.POLICY


def _target(change: log.Change) -> str:
    """The subject that a change is about, as it goes under the audit key."""
    match change:
        case log.EpochRaised() | log.SubjectEnabled():
            return change.subject
        case log.KeyAdded() | log.TenantAdded() | log.TenantRemoved() | log.TenantPolicySet():
            return f"tenant/{change.tenant}"
        case log.KeyRevoked():
            return f"key/{change.key_id}"
        case log.OrgAdded() | log.OrgRemoved() | log.OrgPolicySet():
            return f"org/{change.org}"
        case log.PublicProposed() | log.PublicApproved() | log.PublicWithdrawn():
            return f"public/{change.public_id}"
        case log.RevisionLost():
            return "fleet"
        case _:
            assert_never(change)
