"""How far a call reaches, and what it may give away: pure questions about callers and the book.

Must never: change anything, or answer for what lies outside differently than for what is not there.
Read `administration.py` for who asks.
"""

from __future__ import annotations

from trunkline.control.book import Book, Tenant
from trunkline.core.credentials import KeyRecord, is_name
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.identity import ScopeKind
from trunkline.core.principals import WIDTHS, Principal
from trunkline.errors import AccessEnded, ChangeRefused
from trunkline.gateway.backend import Call, Caller, KeyOrder
from trunkline.gateway.permissions import Extent, grantable_roles


def reaches(book: Book, call: Call, subject: Subject) -> bool:
    """Whether this may be acted on, or seen, in this call."""
    if call.extent is Extent.FLEET:
        return True
    caller = call.caller.principal
    assert caller is not None, "the operator reaches the fleet"
    if subject.kind in (SubjectKind.TENANT, SubjectKind.USER):
        return reaches_tenant(book, call, subject.path.partition("/")[0])
    is_own_org = subject.kind is SubjectKind.ORG and subject.path == caller.org
    return is_own_org and call.extent is Extent.ORG


def reaches_tenant(book: Book, call: Call, tenant: str) -> bool:
    """The same for the id of a tenant."""
    if call.extent is Extent.FLEET:
        return True
    caller = call.caller.principal
    assert caller is not None, "the operator reaches the fleet"
    if call.extent is Extent.TENANT:
        return tenant == caller.tenant
    record = book.tenants.get(tenant)
    return record is not None and record.org == caller.org


def tenant_within(book: Book, call: Call, word: str) -> Tenant | None:
    """The tenant of this name, or id, where the call reaches it. What is foreign takes the same
    steps as what does not exist, so that it takes the same time.
    """
    record = book.tenants.get(book.names.get(f"tenant/{word}", word))
    tenant, org = ("", "") if record is None else (record.tenant, record.org)
    if call.extent is Extent.FLEET:
        return record
    caller = call.caller.principal
    assert caller is not None, "the operator reaches the fleet"
    is_own = tenant == caller.tenant if call.extent is Extent.TENANT else org == caller.org
    return record if is_own else None


def own_subject(book: Book, call: Call, name: str) -> Subject | None:
    """What a name stands for, to those who see less than the fleet: looked for among their own."""
    kind, _, rest = name.partition("/")
    word, slash, user = rest.partition("/")
    tenant = tenant_within(book, call, word)
    caller = call.caller.principal
    assert caller is not None, "the operator reaches the fleet"
    is_own_org = book.names.get(f"org/{rest}", rest) == caller.org
    if kind == "tenant" and tenant is not None and not slash:
        return Subject(kind=SubjectKind.TENANT, path=tenant.tenant)
    if kind == "user" and tenant is not None and is_name(user):
        return Subject(kind=SubjectKind.USER, path=f"{tenant.tenant}/{user}")
    if kind == "org" and is_own_org and call.extent is Extent.ORG:
        return Subject(kind=SubjectKind.ORG, path=caller.org)
    return None


def check_caller(book: Book, caller: Principal | None, wall_ms: int) -> None:
    """Whether somebody who was let in by a key would be let in still. Raises AccessEnded."""
    if caller is None:
        return  # the operator
    record = book.key(caller.actor)
    is_good = record is not None and not record.is_revoked and caller.tenant in book.tenants
    ends_ms = None if record is None else record.not_after_ms
    try:
        book.table.admit(caller, "")
    except PermissionError:
        is_good = False
    if not is_good or (ends_ms is not None and wall_ms >= ends_ms):
        raise AccessEnded("a valid bearer key is needed")


def check_key(book: Book, call: Call, order: KeyOrder, wall_ms: int) -> None:
    """What a key may be given by whoever makes it: never more than they have. Raises
    ChangeRefused.
    """
    foreign = order.roles - grantable_roles(call.caller.roles)
    if foreign:
        names = ", ".join(sorted(role.value for role in foreign))
        raise ChangeRefused(f"you may not make keys with the role {names}")
    if order.scope is not None and order.scope is not ScopeKind.NONE and not order.user:
        raise ChangeRefused(f"scope {order.scope.value} needs a user in the key")
    if order.user and not is_name(order.user):
        raise ChangeRefused("the user's name is too long or not printable")
    maker = call.caller.principal
    if maker is None:
        return
    _check_end(book.key(maker.actor), order, wall_ms)
    if call.extent is Extent.FLEET:
        return
    if maker.key_class and order.key_class != maker.key_class:
        raise ChangeRefused("your own key has a class, and the keys it makes have the same")
    scope = order.scope or ScopeKind.TENANT
    if WIDTHS.index(scope) < WIDTHS.index(maker.default_scope):
        raise ChangeRefused(
            f"scope {scope.value} is wider than your own key's, {maker.default_scope.value}"
        )
    pairs = ((order.models, maker.models, "models"), (order.adapters, maker.adapters, "adapters"))
    for wanted, own, what in pairs:
        if own is not None and (wanted is None or not wanted <= own):
            raise ChangeRefused(f"the key would have more {what} than your own")


def _check_end(own: KeyRecord | None, order: KeyOrder, wall_ms: int) -> None:
    if own is None or own.not_after_ms is None:
        return
    left_s = (own.not_after_ms - wall_ms) // 1_000
    if order.expires_in_s is None or order.expires_in_s > left_s:
        raise ChangeRefused(f"your own key ends in {left_s} s, and the key would not end before it")


def method_of(caller: Caller | None) -> str:
    if caller is None:
        return ""
    return "operator" if caller.principal is None else caller.principal.auth_method
