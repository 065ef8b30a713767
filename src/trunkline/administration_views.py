"""Records of the registry, the revoker and the audit log, as the admin port shows them.

Plain translations, ids into names. Must never: show a key's hash, a prefix's tokens, or to those
who see less than the fleet a worker, a holder or somebody else's key. Read `administration.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal, TypeVar

from trunkline.control.audit_reader import Record, SinkCheck
from trunkline.control.book import APPROVERS_NEEDED, Book, PublicPrefix, Tenant
from trunkline.control.receipts import Erasure, Receipt, summed
from trunkline.core.credentials import KeyRecord
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.identity import ScopeKind
from trunkline.gateway.backend import (
    ErasureView,
    KeyView,
    Page,
    PageOrder,
    PublicView,
    ReceiptView,
    SinkView,
    VerificationView,
)
from trunkline.gateway.permissions import Extent
from trunkline.gateway.tenant_counts import TenantCounts
from trunkline.gateway.tenant_views import Policy, TenantView

_T = TypeVar("_T")
_View = TypeVar("_View")
_NARROWER = (ScopeKind.USER, ScopeKind.SESSION, ScopeKind.NONE)
_OWN_FIELDS = (
    *("seq", "kind", "ts_wall", "action", "auth_method", "request_id"),
    *("rev", "epoch_from", "epoch_to", "result", "reason", "counts"),
)
"""Of a record, for the tenant that it is about: neither the chain nor the machine."""


def tenant_state(book: Book, subject: Subject) -> Literal["active", "revoked"]:
    return "revoked" if subject in book.table.barred else "active"


def tenant_view(book: Book, counts: TenantCounts, tenant: Tenant) -> TenantView:
    return TenantView(
        tenant=tenant.name,
        id=tenant.tenant,
        org=_org_name(book, tenant.org),
        state=tenant_state(book, Subject(kind=SubjectKind.TENANT, path=tenant.tenant)),
        effective_scope=book.default_scope(tenant.tenant),
        policy=Policy(
            scope=tenant.default_scope,
            shared=tenant.is_shared,
            requests_per_s=tenant.quota.requests_per_s,
            tokens_per_s=tenant.quota.tokens_per_s,
            cache_floor_bytes=tenant.quota.cache_floor_bytes,
            cache_cap_bytes=tenant.quota.cache_cap_bytes,
            weight=tenant.quota.weight,
            priority=tenant.quota.priority,
        ),
        usage=counts.of(tenant.tenant),
    )


def key_view(book: Book, record: KeyRecord, wall_ms: float) -> KeyView:
    tenant = book.tenants.get(record.tenant)
    scope = record.default_scope
    return KeyView(
        key_id=record.key_id,
        org=_org_name(book, record.org),
        tenant=record.tenant if tenant is None else tenant.name,
        state=_key_state(record, wall_ms),
        user=record.user,
        roles=sorted(role.value for role in record.roles),
        models=None if record.models is None else sorted(record.models),
        adapters=None if record.adapters is None else sorted(record.adapters),
        not_before_ms=record.not_before_ms,
        not_after_ms=record.not_after_ms,
        key_class=record.key_class,
        scope=scope if scope in _NARROWER else None,
    )


def receipt_view(book: Book, receipt: Receipt, extent: Extent) -> ReceiptView:
    is_whole = extent is Extent.FLEET
    erasures = receipt.erasures if is_whole else _added_up(receipt)
    return ReceiptView(
        rev=receipt.rev,
        subject=book.name_of(receipt.subject),
        verb=receipt.verb.value,
        epoch=receipt.epoch,
        state="effective",
        acked_count=len(receipt.acked),
        fenced_count=len(receipt.fenced),
        acked=receipt.acked if is_whole else None,
        fenced=receipt.fenced if is_whole else None,
        fence=receipt.fence.value,
        erase=receipt.erase.value,
        aborted=receipt.aborted,
        condemned_blocks=receipt.condemned_blocks,
        condemned_bytes=receipt.condemned_bytes,
        ms=round(receipt.ms, 3),
        audit=receipt.audit.value,
        erasures=[
            ErasureView(holder=e.holder, done=e.is_done, blocks=e.blocks, bytes=e.bytes)
            for e in erasures
        ],
    )


def public_view(book: Book, prefix: PublicPrefix, wall_ms: float) -> PublicView:
    audience = prefix.audience
    return PublicView(
        public_id=prefix.public_id,
        name=prefix.name,
        state=_public_state(prefix, wall_ms),
        owner=_org_name(book, prefix.owner),
        proposer=prefix.proposer,
        approvers=prefix.approvers,
        approvers_needed=APPROVERS_NEEDED,
        model=prefix.model_id,
        token_digest=prefix.token_digest.hex(),
        tokens_count=len(prefix.tokens) // 4,
        block_tokens=prefix.block_tokens,
        audience=None if audience is None else sorted(_org_name(book, org) for org in audience),
        not_after_ms=prefix.not_after_ms,
        reason=prefix.reason,
    )


def own_record(record: Record, *, subjects: frozenset[str], keys: frozenset[str]) -> Record | None:
    """A record as the tenant sees it that owns these subjects (pseudonyms) and keys; None where it
    is not about it.
    """
    actor = record.get("actor")
    is_own_actor = actor in keys
    # Keys of officers may be of this tenant too: what they do elsewhere is not its business.
    is_own_refusal = is_own_actor and record.get("kind") == "REFUSED"
    if record.get("scope_path_hmac") not in subjects and not is_own_refusal:
        return None
    own = {name: record.get(name) for name in _OWN_FIELDS}
    return {**own, "actor": actor if is_own_actor else "operator"}


def verification_view(checks: Sequence[SinkCheck]) -> VerificationView:
    """The outcome as a whole is that of the first sink that is not sound, else of the first."""
    known = [check.found for check in checks if check.found is not None]
    found = next((each for each in known if each.fault is not None), known[0])
    fault = found.fault
    return VerificationView(
        sound=fault is None,
        first_seq=found.start.seq + 1,
        last_seq=found.head.seq,
        last_hash=found.head.hash.hex(),
        checkpoints=found.checkpoints,
        fault_seq=None if fault is None else fault.seq,
        fault="" if fault is None else fault.reason,
        sinks=[
            SinkView(sink=check.sink, state=_sink_state(check), why=_sink_why(check))
            for check in checks
        ],
    )


def _sink_state(check: SinkCheck) -> Literal["sound", "faulty", "out"]:
    if check.found is None:
        return "out"
    return "sound" if check.found.fault is None else "faulty"


def _sink_why(check: SinkCheck) -> str:
    fault = None if check.found is None else check.found.fault
    return check.why if fault is None else f"record {fault.seq}: {fault.reason}"


def page_of(
    records: Iterable[_T] | Mapping[_T, object],
    order: PageOrder,
    name_of: Callable[[_T], str],
    view: Callable[[_T], _View],
) -> Page[_View] | None:
    """Up to `limit` behind the one called `after`; None where none is called so."""
    rest = iter(records)
    if order.after and not any(name_of(record) == order.after for record in rest):
        return None
    found = list(islice(rest, order.limit + 1))
    shown = found[: order.limit]
    return Page(
        items=[view(record) for record in shown],
        next=name_of(shown[-1]) if len(found) > order.limit else None,
    )


def _added_up(receipt: Receipt) -> tuple[Erasure, ...]:
    """All holders as one, without a name."""
    if not receipt.erasures:
        return ()
    whole = Erasure(
        holder="",
        rev=receipt.rev,
        is_done=all(e.is_done for e in receipt.erasures),
        blocks=sum(e.blocks for e in receipt.erasures),
        bytes=summed(e.bytes for e in receipt.erasures),
    )
    return (whole,)


def _key_state(record: KeyRecord, wall_ms: float) -> Literal["live", "early", "expired", "revoked"]:
    if record.is_revoked:
        return "revoked"
    if record.not_after_ms is not None and wall_ms >= record.not_after_ms:
        return "expired"
    return "early" if wall_ms < record.not_before_ms else "live"


def _public_state(
    prefix: PublicPrefix, wall_ms: float
) -> Literal["proposed", "live", "expired", "withdrawn"]:
    if prefix.is_withdrawn:
        return "withdrawn"
    if wall_ms >= prefix.not_after_ms:
        return "expired"
    return "live" if prefix.is_live(wall_ms) else "proposed"


def _org_name(book: Book, org: str) -> str:
    record = book.orgs.get(org)
    return org if record is None else record.name
