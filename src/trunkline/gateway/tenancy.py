"""Under whose name a request runs: who asks, what it may reuse, and whether its answer may go out.

The gateway is one holder of the fleet's epochs among others. This is its table, its lease, and the
grants it gave under them. A grant is made once for each caller, model and scope, and is dropped
when the table moves. Must never: take anything of a grant from a client but a wish to narrow, or
let a decision that was made under one table outlive it. Read `namespaces.py` next.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from trunkline.core.epochs import (
    EpochTable,
    Subject,
    SubjectKind,
    domain_of,
    framed,
    scoped,
)
from trunkline.core.identity import Epochs, Scope, ScopeKind
from trunkline.core.principals import Principal, Role, ScopeTooWide, narrowed
from trunkline.errors import GatewayError
from trunkline.gateway.allowance import Allowance
from trunkline.gateway.answers import SCOPE_WIDENING, unknown_model
from trunkline.gateway.contracts import ClientError, Grant, InferenceRequest, Refusal

MAX_GRANTS = 65_536
FILLER = Principal(org="public", tenant="0" * 32, actor="filler", auth_method="gateway")
_SESSION_BYTES = 16
_SESSION_TEXT = 2 * 2 * _SESSION_BYTES


class Revoked(GatewayError):
    """What the request was admitted under was revoked since."""

    status = 403
    kind = "permission_error"
    code = "access_revoked"


class LeaseLost(GatewayError):
    """The gateway cannot know whether what was reused may still be: the answer cannot go on."""

    status = 503
    kind = "unavailable"
    code = "reuse_lease_lost"
    retryable = True


Authenticate = Callable[[bytes, str], Principal]
"""(Authorization header, source address) -> who that is. Raises ClientError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an authenticated request asks for, as far as its grant goes."""

    principal: Principal
    model: str
    wish: ScopeKind | None = None
    """The narrower scope it wishes; None for the default of its tenant."""
    session: str = ""
    """A session that `begin_session` named, already checked."""


def _unchanged(principal: Principal) -> Principal:
    return principal


def _unnamed() -> str:
    return ""


class Tenancy:
    """See the module. One a gateway; belongs to its event loop."""

    def __init__(
        self,
        *,
        authenticate: Authenticate,
        has_lease: Callable[[], bool],
        session_key: bytes,
        draw: Callable[[int], bytes],
        allowance: Allowance | None = None,
        lets_begun_finish: bool = False,
    ) -> None:
        """`has_lease` says whether the table may be believed now; `session_key` (32 bytes) binds
        sessions to their users; `draw(n)` gives n unguessable bytes; without an `allowance` nobody
        has a rate limit. `lets_begun_finish`: an answer whose first bytes left under a lease goes
        on when that ends; what it reused was bound while it was valid.
        """
        self._authenticate = authenticate
        self._has_lease = has_lease
        self._session_key = session_key
        self._draw = draw
        self._allowance = allowance
        self._lets_begun_finish = lets_begun_finish
        self.as_of_now: Callable[[Principal], Principal] = _unchanged
        """A principal with the policy of its tenant as it is now."""
        self.served_model: Callable[[], str] = _unnamed
        """The model's own name, whatever a client calls it; empty while it is not known."""
        self.meaning_of: Callable[[str], tuple[str, str]] | None = None
        """Where several models are served: the model that a name asks for and the adapter on it,
        empty for none. None where all names ask for the one model.
        """
        self._table = EpochTable()
        self._grants: OrderedDict[tuple[Asked, tuple[str, str]], Grant] = OrderedDict()
        self._public: dict[tuple[str, str], Grant | None] = {}
        self._served = ""
        """What the model was called when these were made."""

    @property
    def table(self) -> EpochTable:
        return self._table

    def swap(self, table: EpochTable) -> None:
        """From here on everything is decided under `table`. Raises ValueError for an older one."""
        if table.rev < self._table.rev:
            raise ValueError(f"revision {table.rev} is older than {self._table.rev}")
        self._table = table
        self._forget(self._served)

    def may_reuse(self) -> bool:
        """Whether anybody's cache may be used now."""
        return self._has_lease()

    def principal(self, authorization: bytes, source: str) -> Principal:
        """Raises ClientError, of one shape for every cause."""
        return self._authenticate(authorization, source)

    def admit(self, asked: Asked) -> Grant:
        """What the request runs under. Without a lease it runs, and reuses and keeps nothing.

        Raises ClientError for a caller without a role for it, what is barred, a model that the
        caller may not use, a wider scope, or one it has no part for.
        """
        self._follow_model()
        meaning = self._meaning(asked.model)
        grant = self._grants.get((asked, meaning))
        if grant is None:
            grant = self._grants[asked, meaning] = self._grant(asked, meaning)
            if len(self._grants) > MAX_GRANTS:
                self._grants.popitem(last=False)
        return grant if grant.scope is None or self._has_lease() else grant.unshared()

    def charge(self, principal: Principal) -> None:
        """One more request. Raises RateLimited where its tenant asks too much."""
        if self._allowance is not None:
            self._allowance.admit(principal.tenant)

    def admit_request(
        self,
        principal: Principal,
        request: InferenceRequest,
        wish: ScopeKind | None,
        session: bytes | None,
    ) -> None:
        """Give a request its grant, and where it is to be in a session and names none, a session.
        Raises ClientError as `admit` does.
        """
        known = ""
        is_named = session is not None or principal.default_scope is ScopeKind.SESSION
        if wish is None and is_named:
            wish = ScopeKind.SESSION  # who names a session means it
        if wish is ScopeKind.SESSION:
            if session is None:
                request.began_session = self.begin_session(principal)
                known = request.began_session[: 2 * _SESSION_BYTES]
            else:
                known = self.session(principal, session.decode("latin-1"))
        request.wish, request.in_session = wish, known
        request.grant = self.admit(
            Asked(principal=principal, model=request.model, wish=wish, session=known)
        )

    def require_access(self, principal: Principal) -> None:
        """Raises ClientError where the caller was revoked or has no role here, whatever it asks
        for.
        """
        _require_role(principal)
        try:
            self._table.admit(principal, "")
        except PermissionError as error:
            raise _forbidden(error) from error

    def is_current(self, request: InferenceRequest) -> bool:
        """Whether what was decided for it holds: its salt is one that may still be sent."""
        table, also = self._table, request.also_under
        return table.is_current(request.grant.admission) and (
            also is None or table.is_current(also)
        )

    def is_barred(self, model: str) -> bool:
        return Subject(kind=SubjectKind.MODEL, path=model) in self._table.barred

    def renew(self, request: InferenceRequest) -> None:
        """A request that waited is sent under the table, the lease, the model and the policy of
        now, not those of when it came. Raises ClientError for what is barred by now.
        """
        request.grant = self.admit(
            Asked(
                principal=self.as_of_now(request.grant.principal),
                model=request.model,
                wish=request.wish,
                session=request.in_session,
            )
        )

    def public_grant(self, public_id: str, model: str = "") -> Grant | None:
        """What the blocks of a registered prefix are kept and used under; None where it is revoked.
        Nobody's: its principal can be no caller. `model` is empty for the one that is served.
        """
        self._follow_model()
        name = (public_id, model or self._served)
        if name not in self._public:
            if len(self._public) >= MAX_GRANTS:
                self._public.clear()
            self._public[name] = self._of_public(*name)
        return self._public[name]

    def objection(self, request: InferenceRequest) -> GatewayError | None:
        """Why nothing of this request may go out now; None where it may. Asked in the same step as
        each write.
        """
        table, grant, also = self._table, request.grant, request.also_under
        if not table.may_leave(grant.admission) or (also and not table.may_leave(also)):
            return Revoked("the access this request ran under was revoked")
        may_finish = request.has_begun and self._lets_begun_finish
        if grant.scope is not None and not may_finish and not self._has_lease():
            return LeaseLost("the gateway lost its lease; ask again")
        return None

    # -- sessions --------------------------------------------------------------------------------

    def begin_session(self, principal: Principal) -> str:
        """The name of a new session of this caller: unguessable, and worth nothing to another."""
        nonce = self._draw(_SESSION_BYTES).hex()
        return nonce + self._bound(principal, nonce)

    def session(self, principal: Principal, given: str) -> str:
        """The session that `given` names. Raises ClientError where it is not this caller's."""
        nonce = given[: 2 * _SESSION_BYTES]
        bound = self._bound(principal, nonce)
        if len(given) != _SESSION_TEXT or not hmac.compare_digest(
            given.encode("utf-8", "replace"), (nonce + bound).encode("utf-8", "replace")
        ):
            text = "x-trunkline-session is no session of this caller"
            raise ClientError(Refusal(status=403, code="unknown_session", message=text))
        return nonce

    def _bound(self, principal: Principal, nonce: str) -> str:
        owner = framed(principal.org, principal.tenant, principal.user, nonce)
        made = hashlib.blake2b(
            owner, digest_size=_SESSION_BYTES, key=self._session_key, person=b"session"
        )
        return made.hexdigest()

    # -- inside ----------------------------------------------------------------------------------

    def _follow_model(self) -> None:
        served = self.served_model()
        if served != self._served:
            self._forget(served)

    def _forget(self, served: str) -> None:
        """Grants are of one table and of one model."""
        self._served = served
        self._grants.clear()
        self._public.clear()

    def _meaning(self, model: str) -> tuple[str, str]:
        """The model's own name, and the adapter on it."""
        if self.meaning_of is not None:
            return self.meaning_of(model)
        served = self._served
        return served, model if served and model and model != served else ""

    def _of_public(self, public_id: str, model: str) -> Grant | None:
        parts = [Subject(kind=SubjectKind.FLEET), Subject(kind=SubjectKind.PUBLIC, path=public_id)]
        if model:
            parts.append(Subject(kind=SubjectKind.MODEL, path=model))
        subjects = tuple(parts)
        if not self._table.barred.isdisjoint(subjects):
            return None
        epochs = self._table.epochs_of(subjects)
        scope = Scope(kind=ScopeKind.PUBLIC, public_id=public_id)
        return Grant(
            principal=FILLER,
            scope=scope,
            admission=self._table.admission(subjects),
            epochs=epochs,
            domain=domain_of(scope, epochs),
            sees_decisions=False,
        )

    def _grant(self, asked: Asked, meaning: tuple[str, str]) -> Grant:
        principal = asked.principal
        _require_role(principal)
        served, adapter = meaning
        model = adapter or served or asked.model
        if not _may_use(principal, model, served, adapter):
            raise ClientError(unknown_model(asked.model))  # as one that is not there
        try:
            admission = self._table.admit(principal, served or model, adapter)
            scope = narrowed(principal, asked.wish, asked.session)
        except PermissionError as error:
            raise _forbidden(error) from error
        except ValueError as error:
            raise ClientError(Refusal(code="scope_not_available", message=str(error))) from error
        return Grant(
            principal=principal,
            scope=scope,
            admission=admission,
            epochs=Epochs() if scope is None else scoped(admission.epochs, scope.kind),
            domain=b"" if scope is None else domain_of(scope, admission.epochs),
            adapter=adapter,
            sees_decisions=principal.auth_method == "off" or Role.FLEET_OPERATOR in principal.roles,
        )


def _require_role(principal: Principal) -> None:
    if not principal.may_infer():
        text = "no role of this credential may ask for inference; tenant.user may"
        raise ClientError(Refusal(status=403, code="role_missing", message=text))


def _may_use(principal: Principal, model: str, served: str, adapter: str) -> bool:
    """A name that it was given, or an adapter that it was given on a model that it may use."""
    if principal.may_use_model(model) and not adapter:
        return True
    if principal.models is not None and model in principal.models:
        return True
    return bool(adapter) and principal.may_use_model(served) and principal.may_use_adapter(adapter)


def _forbidden(error: PermissionError) -> ClientError:
    if isinstance(error, ScopeTooWide):
        return ClientError(SCOPE_WIDENING)
    text = "access was revoked; ask your operator"
    return ClientError(Refusal(status=403, code="access_revoked", message=text))
