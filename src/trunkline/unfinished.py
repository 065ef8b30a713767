"""Revocations that a crash cut off: carried out again after a start, so that each has its outcome.

What the registry holds is in force from the first moment of the new life; what is missing is the
proof. Nobody of the old life is known any more, so it is complete when every lease that could have
been granted has run out. Where gateways share a registry, the log does not say who made a change:
those of others that came while this one was away are carried out here, too. Read
`control/revocation.py` for what is resumed.
"""

from __future__ import annotations

from trunkline.control.audit_reader import AuditQuery, AuditReader
from trunkline.control.changes import EpochRaised
from trunkline.control.registry import Registry
from trunkline.control.revocation import Revoker, order_of
from trunkline.errors import GatewayError
from trunkline.observe import EventLog

MAX_LOOKED_AT = 256
"""Newest revisions that are looked at: more than that do not run at a time."""


async def finish_revocations(
    registry: Registry, reader: AuditReader, revoker: Revoker, log: EventLog
) -> None:
    """Resume each revocation without an outcome in the audit log. Where the registry or that log
    cannot be read, none: they are in force all the same.
    """
    last_rev = registry.rev
    try:
        entries = await registry.entries(max(0, last_rev - MAX_LOOKED_AT), MAX_LOOKED_AT)
        raised = {rev: entry for rev, entry in entries if isinstance(entry.change, EpochRaised)}
        if not raised:
            return
        page = await reader.page(AuditQuery(limit=1_000, kind="OUTCOME"), dict)
    except GatewayError as error:
        log.warning("revocation.not_resumed", why=str(error))
        return
    # One without counts says only that the process ended before.
    known = {record.get("rev") for record in page.records if record.get("counts")}
    for rev, entry in raised.items():
        change = entry.change
        if rev in known or not isinstance(change, EpochRaised):
            continue
        try:
            receipt = await revoker.resume(order_of(rev, change), entry.intent)
        except GatewayError as error:
            log.warning("revocation.not_resumed", rev=rev, why=str(error))
            continue
        log.info("revocation.resumed", rev=rev, verb=change.verb, ms=round(receipt.ms))
