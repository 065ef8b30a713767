"""What operators of tenants do: the admin port's `TenancyBackend` over registry, revoker and audit.

Names become ids here, and here it is decided whether they lie within a call's reach; what does not
looks as if it did not exist. What grants goes through the ledger, which has its intent in the audit
log first; what takes away never waits for that log. Must never: show a secret or a hash of one, or
tell who narrows their question by failing what is not theirs. Read `gateway/permissions.py` for who
may do what, `authority.py` for what stands behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from trunkline.administration_audit import AuditDesk
from trunkline.administration_fleet import recorded
from trunkline.administration_pace import KEY_CHANGES, RAISES, TenantPace, party_of
from trunkline.administration_reach import (
    check_caller,
    check_key,
    method_of,
    own_subject,
    reaches,
    reaches_tenant,
    tenant_within,
)
from trunkline.administration_views import (
    key_view,
    page_of,
    public_view,
    receipt_view,
    tenant_state,
    tenant_view,
)
from trunkline.control import changes as log
from trunkline.control.audit import AuditLog
from trunkline.control.audit_reader import AuditReader
from trunkline.control.book import Book, Check, PublicPrefix, Tenant
from trunkline.control.draft import token_digest
from trunkline.control.key_shelf import key_added
from trunkline.control.ledger import Ledger, Recorded
from trunkline.control.receipts import Receipt
from trunkline.control.registry import Registry
from trunkline.control.revocation import Revoker
from trunkline.core.credentials import (
    KeyRecord,
    NewKey,
    RandomBytes,
    SecretHash,
    draw_key,
)
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.identity import ScopeKind
from trunkline.core.principals import Principal
from trunkline.core.rates import TokenBucket
from trunkline.errors import AccessEnded, ChangeRefused, UnknownName
from trunkline.gateway.authenticate import Credentials
from trunkline.gateway.backend import (
    AuditOrder,
    AuditPageView,
    Call,
    Caller,
    Done,
    FleetChange,
    KeyOrder,
    KeyView,
    NewKeyView,
    Outcome,
    Page,
    PageOrder,
    PublicOrder,
    PublicView,
    ReceiptView,
    VerificationView,
)
from trunkline.gateway.contracts import ClientError
from trunkline.gateway.permissions import Act, Extent, extent_of
from trunkline.gateway.tenant_counts import TenantCount, TenantCounts
from trunkline.gateway.tenant_views import OrgView, Policy, TenantView
from trunkline.ports.clock import Clock

REFUSALS_BURST = 20
SCOPE_WIDEN = "scope.widen"
"""A request on the client port asked for a wider sharing of its cache than it has."""
REFUSALS_PER_S = 1.0
"""Of calls that were told no, so many are in the audit log one by one; the others are counted."""

MAX_WAITING_RECORDS = 1_024
"""With more records waiting for a sink, refusals are only counted: outcomes come first."""


@dataclass(slots=True, kw_only=True)
class AdministrationParts:
    """What an administration works with."""

    registry: Registry
    ledger: Ledger
    revoker: Revoker
    audit: AuditLog
    reader: AuditReader
    credentials: Credentials
    clock: Clock
    counts: TenantCounts
    hash_secret: SecretHash
    draw: RandomBytes = field(repr=False)
    """`draw(n)`: n unguessable bytes."""


class Administration:
    """A `gateway.backend.TenancyBackend`. Belongs to the gateway's event loop."""

    def __init__(self, parts: AdministrationParts) -> None:
        self._parts = parts
        self._desk = AuditDesk(lambda: self._book, parts.audit, parts.reader)
        self._refusals = TokenBucket(REFUSALS_PER_S, REFUSALS_BURST, parts.clock.now())
        self._widenings = TokenBucket(REFUSALS_PER_S, REFUSALS_BURST, parts.clock.now())
        """Any client can ask for too much as often as it likes: that hides no other refusal."""
        self._raises = TenantPace(RAISES, parts.clock)
        self._key_changes = TenantPace(KEY_CHANGES, parts.clock)
        self.refusals_unrecorded = 0
        """Since the last one that was recorded."""

    @property
    def _book(self) -> Book:
        return self._parts.registry.book

    # -- the door --------------------------------------------------------------------------------

    def principal(self, authorization: bytes, source: str) -> Principal | None:
        try:
            principal = self._parts.credentials.principal(authorization, source)
        except ClientError:
            return None
        if principal.auth_method != "key":
            return None
        try:
            check_caller(self._book, principal, self._wall_ms())
        except AccessEnded:
            return None
        return principal

    def refused(self, caller: Caller | None, action: str, source: str, why: str) -> None:
        now = self._parts.clock.now()
        outbox = self._parts.revoker.outbox
        is_full = outbox.pending_records >= MAX_WAITING_RECORDS
        bucket = self._widenings if action == SCOPE_WIDEN else self._refusals
        if is_full or bucket.wait_ms(1.0, now) > 0.0:
            self.refusals_unrecorded += 1
            return
        bucket.charge(1.0, now)
        if self.refusals_unrecorded:
            why = f"{why} ({self.refusals_unrecorded} more before it were not recorded)"
            self.refusals_unrecorded = 0
        intent = log.Intent(
            actor="nobody" if caller is None else caller.actor,
            auth_method=method_of(caller),
            source=source,
            request_id="" if caller is None else caller.request_id,
            wall_ms=self._wall_ms(),
        )
        outbox.put(partial(self._parts.ledger.refused, action, intent, why))

    # -- workers ---------------------------------------------------------------------------------

    async def change_fleet(
        self, call: Call, change: FleetChange, carry_out: Callable[[], Awaitable[Outcome]]
    ) -> Outcome:
        action, target = f"workers.{change.verb}", f"worker/{change.worker}"
        return await self._recorded(call, action, target, carry_out)

    async def look(
        self, call: Call, tenant: str, carry_out: Callable[[], Awaitable[Outcome]]
    ) -> Outcome:
        known = self._book.names.get(f"tenant/{tenant}", tenant)
        return await self._recorded(call, "decisions.preview", f"tenant/{known}", carry_out)

    async def _recorded(
        self, call: Call, action: str, target: str, carry_out: Callable[[], Awaitable[Outcome]]
    ) -> Outcome:
        intent, check = self._intent(call), self._check(call)
        return await recorded(self._parts.ledger, action, target, intent, check, carry_out)

    async def note_reload(self, by: log.Intent, result: str, reason: str) -> None:
        """That somebody wants the settings read again; with a `result`, what came of it. Raises
        AuditDown for a wish.
        """
        action, ledger = Act.CONFIG_RELOAD.value, self._parts.ledger
        if result:
            await ledger.came_of(action, "fleet", by, result=result, reason=reason)
        else:
            await ledger.wanted(action, "fleet", by)

    # -- organisations and tenants ---------------------------------------------------------------

    async def orgs(self, call: Call, page: PageOrder) -> Page[OrgView] | None:
        assert call.extent is Extent.FLEET
        book = self._book

        def view(org: str) -> OrgView:
            record = book.orgs[org]
            state = tenant_state(book, Subject(kind=SubjectKind.ORG, path=org))
            return OrgView(org=record.name, id=org, shared=record.is_shared, state=state)

        return page_of(book.orgs, page, lambda org: book.orgs[org].name, view)

    async def add_org(self, call: Call, name: str) -> Done:
        change = log.OrgAdded(org=self._new_id(), name=name)
        return _done(await self._commit(call, change), f"org/{name}")

    async def set_org_policy(self, call: Call, name: str, *, shared: bool) -> Done | None:
        org = self._book.names.get(f"org/{name}")
        if org is None:
            return None
        change = log.OrgPolicySet(org=org, is_shared=shared)
        return _done(await self._commit(call, change), f"org/{name}")

    async def tenants(self, call: Call, page: PageOrder) -> Page[TenantView] | None:
        book = self._book
        seen = (t for t in book.tenants.values() if reaches_tenant(self._book, call, t.tenant))
        view = partial(tenant_view, book, self._parts.counts)
        return page_of(seen, page, lambda tenant: tenant.name, view)

    def others(self, call: Call) -> TenantCount | None:
        return self._parts.counts.others() if call.extent is Extent.FLEET else None

    async def add_tenant(self, call: Call, name: str, *, org: str, create_org: bool) -> Done | None:
        """Without an organisation the tenant gets one of its own, of the same name."""
        owner = await self._org_for(call, org or name, is_made=create_org or not org)
        change = log.TenantAdded(tenant=self._new_id(), org=owner, name=name)
        return _done(await self._commit(call, change), f"tenant/{name}")

    async def set_tenant_policy(self, call: Call, name: str, policy: Policy) -> Done | None:
        tenant = tenant_within(self._book, call, name)
        if tenant is None:
            return None
        scope = policy.scope.value
        assert scope != "public", "no body has it"
        change = log.TenantPolicySet(
            tenant=tenant.tenant,
            default_scope=scope,
            is_shared=policy.shared,
            requests_per_s=policy.requests_per_s,
            tokens_per_s=policy.tokens_per_s,
            cache_floor_bytes=policy.cache_floor_bytes,
            cache_cap_bytes=policy.cache_cap_bytes,
            weight=policy.weight,
            priority=policy.priority.value,
        )
        return _done(await self._commit(call, change), f"tenant/{name}")

    # -- keys ------------------------------------------------------------------------------------

    async def keys(self, call: Call, page: PageOrder, *, tenant: str) -> Page[KeyView] | None:
        wanted = tenant_within(self._book, call, tenant) if tenant else None
        if tenant and wanted is None:
            return None
        book, wall_ms = self._book, self._wall_ms()
        seen = (
            record
            for record in book.keys
            if reaches_tenant(self._book, call, record.tenant)
            and (wanted is None or record.tenant == wanted.tenant)
        )
        return page_of(
            seen, page, lambda record: record.key_id, lambda record: key_view(book, record, wall_ms)
        )

    async def create_key(self, call: Call, order: KeyOrder) -> NewKeyView | None:
        self._check(call)(self._book)  # what it says of the caller's key would be out of date
        tenant = tenant_within(self._book, call, order.tenant)
        if tenant is None and not self._may_make_tenant(call, order):
            return None
        check_key(self._book, call, order, self._wall_ms())
        if tenant is None:
            await self.add_tenant(call, order.tenant, org=order.org, create_org=False)
            tenant = self._book.tenants[self._book.names[f"tenant/{order.tenant}"]]
        if order.org and self._book.names.get(f"org/{order.org}") != tenant.org:
            if call.extent is not Extent.FLEET:
                return None
            raise ChangeRefused(f"tenant {order.tenant} is not of organisation {order.org}")
        self._key_changes.charge(call)
        new = draw_key(self._parts.draw, self._parts.hash_secret)
        record = self._key_record(order, tenant, new)
        recorded = await self._commit(call, key_added(record))
        view = key_view(self._book, record, self._wall_ms())
        return NewKeyView(key=new.text, view=view, rev=recorded.rev)

    async def revoke_key(self, call: Call, key_id: str) -> Done | None:
        record = self._book.key(key_id)
        # The same steps whether it is foreign or none.
        tenant = "" if record is None else record.tenant
        is_reached = reaches_tenant(self._book, call, tenant)
        if not is_reached or record is None:
            return None
        if record.is_revoked:
            return Done(rev=None, what=f"key/{key_id}")
        self._key_changes.charge(call)
        return _done(await self._commit(call, log.KeyRevoked(key_id=key_id)), f"key/{key_id}")

    def _may_make_tenant(self, call: Call, order: KeyOrder) -> bool:
        """Whether a key's tenant that is not there is to be made. Raises UnknownName for those who
        would see it if it were.
        """
        if order.create_tenant and extent_of(call.caller.roles, Act.TENANTS_ADD) is not None:
            return True
        if call.extent is Extent.FLEET:
            raise UnknownName(
                f"there is no tenant {order.tenant!r}; an operator makes it with create_tenant"
                " (--create-tenant)"
            )
        return False

    def _key_record(self, order: KeyOrder, tenant: Tenant, new: NewKey) -> KeyRecord:
        wall_ms = self._wall_ms()
        ends_ms = None if order.expires_in_s is None else wall_ms + 1_000 * order.expires_in_s
        try:
            return KeyRecord(
                key_id=new.key_id,
                org=tenant.org,
                tenant=tenant.tenant,
                user=order.user,
                roles=order.roles,
                models=order.models,
                adapters=order.adapters,
                not_before_ms=order.not_before_ms,
                not_after_ms=ends_ms,
                key_class=order.key_class,
                default_scope=order.scope or ScopeKind.TENANT,
                secret_hash=new.secret_hash,
            )
        except ValueError as error:
            raise ChangeRefused(str(error)) from error

    # -- revocations -----------------------------------------------------------------------------

    async def revoke(self, call: Call, subject: str) -> ReceiptView | None:
        act = partial(self._parts.revoker.revoke, party=party_of(call))
        return await self._raise(call, subject, act)

    async def invalidate(self, call: Call, subject: str) -> ReceiptView | None:
        act = partial(self._parts.revoker.invalidate, party=party_of(call))
        return await self._raise(call, subject, act)

    async def _raise(
        self,
        call: Call,
        subject: str,
        act: Callable[[Subject, log.Intent, Check], Awaitable[Receipt]],
    ) -> ReceiptView | None:
        target = self._subject(call, subject)
        if target is None:
            return None
        self._raises.charge(call)
        receipt = await act(target, self._intent(call), self._check(call))
        return receipt_view(self._book, receipt, call.extent)

    async def enable(self, call: Call, subject: str) -> Done | None:
        target = self._subject(call, subject)
        if target is None:
            return None
        rev = await self._parts.revoker.enable(target, self._intent(call), self._check(call))
        is_audited = await self._parts.ledger.catch_up()
        return Done(rev=rev, what=subject, audit="recorded" if is_audited else "pending")

    async def receipts(self, call: Call, limit: int) -> Sequence[ReceiptView]:
        book, latest = self._book, self._parts.revoker.receipts.latest()
        own = (r for r in latest if reaches(self._book, call, r.subject))
        return [receipt_view(book, receipt, call.extent) for receipt in islice(own, limit)]

    async def receipt(self, call: Call, rev: int) -> ReceiptView | None:
        receipt = self._parts.revoker.receipts.get(rev)
        if receipt is None or not reaches(self._book, call, receipt.subject):
            return None
        return receipt_view(self._book, receipt, call.extent)

    # -- audit -----------------------------------------------------------------------------------

    async def audit(self, call: Call, order: AuditOrder) -> AuditPageView | None:
        return await self._desk.page(call, order)

    async def verify_audit(self, call: Call, checkpoint: object) -> VerificationView:
        return await self._desk.verify(call, checkpoint)

    # -- public prefixes -------------------------------------------------------------------------

    async def publics(self, call: Call, page: PageOrder) -> Page[PublicView] | None:
        assert call.extent is Extent.FLEET
        book, wall_ms = self._book, self._wall_ms()
        return page_of(
            book.publics.values(),
            page,
            lambda prefix: prefix.public_id,
            lambda prefix: public_view(book, prefix, wall_ms),
        )

    async def propose_public(self, call: Call, order: PublicOrder) -> PublicView:
        intent = self._intent(call)
        change = log.PublicProposed(
            public_id=self._new_id(),
            name=order.name,
            owner=self._org_named(order.owner),
            tokens=order.tokens,
            token_digest=token_digest(order.tokens),
            block_tokens=order.block_tokens,
            model_id=order.model,
            weights_digest=order.weights_digest,
            tokenizer_digest=order.tokenizer_digest,
            template_digest=order.template_digest,
            audience=None
            if order.audience is None
            else tuple(sorted({self._org_named(name) for name in order.audience})),
            not_after_ms=intent.wall_ms + 1_000 * order.expires_in_s,
        )
        await self._parts.ledger.commit(change, intent, self._check(call))
        return self._public_view(change.public_id)

    async def approve_public(self, call: Call, name: str) -> PublicView | None:
        prefix = self._public_named(name)
        if prefix is None:
            return None
        await self._commit(call, log.PublicApproved(public_id=prefix.public_id))
        return self._public_view(prefix.public_id)

    async def withdraw_public(self, call: Call, name: str) -> ReceiptView | None:
        """No new use from the commit on; then its blocks are made unreachable."""
        prefix = self._public_named(name)
        if prefix is None:
            return None
        intent = self._intent(call)
        if not prefix.is_withdrawn:
            change = log.PublicWithdrawn(public_id=prefix.public_id)
            await self._parts.ledger.commit(change, intent, self._check(call))
        subject = Subject(kind=SubjectKind.PUBLIC, path=prefix.public_id)
        receipt = await self._parts.revoker.invalidate(subject, intent, self._check(call))
        return receipt_view(self._book, receipt, call.extent)

    def _public_named(self, name: str) -> PublicPrefix | None:
        book = self._book
        return book.publics.get(book.names.get(f"public/{name}", name))

    def _public_view(self, public_id: str) -> PublicView:
        return public_view(self._book, self._book.publics[public_id], self._wall_ms())

    # -- names and reach -------------------------------------------------------------------------

    def _org_named(self, name: str) -> str:
        org = self._book.names.get(f"org/{name}")
        if org is None:
            raise UnknownName(f"there is no organisation {name!r}")
        return org

    async def _org_for(self, call: Call, name: str, *, is_made: bool) -> str:
        org = self._book.names.get(f"org/{name}")
        if org is None and is_made:
            await self.add_org(call, name)
        return self._org_named(name)

    def _subject(self, call: Call, name: str) -> Subject | None:
        """What a name stands for. Raises UnknownName for those alone who see the whole fleet."""
        if call.extent is Extent.FLEET:
            return self._book.subject(name)
        return own_subject(self._book, call, name)

    # -- changes ---------------------------------------------------------------------------------

    async def _commit(self, call: Call, change: log.Change) -> Recorded:
        return await self._parts.ledger.commit(change, self._intent(call), self._check(call))

    def _check(self, call: Call) -> Check:
        """That the caller may still act: its right may have ended since its head was read."""

        def check(book: Book) -> None:
            check_caller(book, call.caller.principal, self._wall_ms())

        return check

    def _intent(self, call: Call) -> log.Intent:
        return log.Intent(
            actor=call.caller.actor,
            auth_method=method_of(call.caller),
            source=call.caller.source,
            request_id=call.caller.request_id,
            reason=call.reason,
            wall_ms=self._wall_ms(),
        )

    def _new_id(self) -> str:
        return self._parts.registry.new_id(self._parts.draw)

    def _wall_ms(self) -> int:
        return round(self._parts.clock.wall() * 1_000)


def _done(recorded: Recorded, what: str) -> Done:
    return Done(rev=recorded.rev, what=what, audit="recorded" if recorded.is_audited else "pending")
