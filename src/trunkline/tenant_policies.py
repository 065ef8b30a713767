"""What the registry's book says of tenants and public prefixes, in the shapes the data plane takes.

Must never: widen what the book allows. Read `control/book.py` for the book, `authority.py` for who
asks.
"""

from __future__ import annotations

from dataclasses import replace

from trunkline.control.book import Book, Quota
from trunkline.control.book import PublicPrefix as Registered
from trunkline.core.claims import TenantPolicy
from trunkline.core.identity import ModelIdentity, ScopeKind
from trunkline.core.principals import WIDTHS, Principal
from trunkline.core.publics import PublicBook, PublicPrefix, require_room
from trunkline.observe import EventLog

MAX_POLICIES = 65_536
_OPEN = Quota()


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
        return self.quota_of(tenant) or _OPEN

    def applied(self, principal: Principal) -> Principal:
        """The principal with its tenant's default scope, where its credential names no narrower.

        A key says nothing by the scope `tenant`, and gets the policy's, which may be wider. A token
        that says `tenant` means it: it was measured by the policy when it was checked.
        """
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
        is_silent = principal.auth_method == "key" and own is ScopeKind.TENANT
        if not is_silent and WIDTHS.index(own) > WIDTHS.index(default):
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


def publics_in_use(
    book: Book, model: ModelIdentity, wall_ms: float, log: EventLog, only: str = ""
) -> PublicBook:
    """What is registered, approved and has not ended, as the data plane has it. What does not fit,
    by a registry of other bounds, is left out and named.
    """
    known: list[PublicPrefix] = []
    token_count = 0
    for record in book.publics.values():
        if not record.is_live(wall_ms) or (only and record.model_id != only):
            continue
        try:
            prefix = prefix_of(record, model)
            require_room(len(known) + 1, token_count + prefix.token_count)
        except ValueError as error:
            log.error("public.left_out", prefix=record.name, why=str(error))
        else:
            known.append(prefix)
            token_count += prefix.token_count
    return PublicBook(known)
