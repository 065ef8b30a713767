"""What the claims of a verified token (JWT) let its bearer do: never more than its tenant's record.

`adapters/jwt_tokens.py` has checked the signature; here is decided what the claims mean, as pure
functions of them and the time. A token names its tenant, or it is refused: there is no default.
Must never: widen, or take a claim for good that is out of shape. Read `principals.py` next.

The words of the claim `scope` (parted by blanks) that mean something here; each only narrows:

    tenant.user, tenant.admin, ...   the roles asked for, as far as the record allows them
    cache:org|tenant|user|session|none   the scope of reuse, where it is narrower than the record's
    model:<name>, adapter:<name>     only these; without any, all that the record allows

Other words (`openid`, `email`) are no matter of ours; one of ours that makes no sense is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from trunkline.core.credentials import Credential, CredentialProblem, is_name
from trunkline.core.identity import ScopeKind
from trunkline.core.principals import WIDTHS, Principal, Role

MAX_LIFE_MS = 15 * 60 * 1_000
LEEWAY_MS = 30_000
MAX_SCOPE_CHARS = 2_048
_MAX_TIME_S = 1 << 40

_ROLES = {role.value: role for role in Role}
_CACHES = {f"cache:{kind.value}": kind for kind in WIDTHS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """What the registry allows the tokens of one tenant: their bound, whatever they claim."""

    org: str
    """Id of the organisation, 32 hex digits; so for the tenant."""
    tenant: str
    roles: frozenset[Role] = frozenset({Role.TENANT_USER})
    models: frozenset[str] | None = None
    adapters: frozenset[str] | None = None
    default_scope: ScopeKind = ScopeKind.TENANT
    key_epoch: int = 0
    """Tokens of another key epoch are refused. The registry keeps none: it is 0."""

    def __post_init__(self) -> None:
        if self.default_scope not in WIDTHS:
            raise ValueError(f"no tenant has {self.default_scope.value} as its scope")


TenantPolicies: TypeAlias = Callable[[str, str], TenantPolicy | None]
"""Names of an organisation and of a tenant in it -> what its tokens may; None for no such tenant,
and for one that is switched off. Must give the same object as long as nothing changed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedClaims:
    """Whose tokens are taken, and for whom they must be made."""

    issuer: str
    audience: str

    def __post_init__(self) -> None:
        if not self.issuer or not self.audience:
            raise ValueError("tokens need a pinned issuer and a pinned audience")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClaims:
    """The claims of a verified token that are ours, each checked for its shape."""

    subject: str
    org: str
    tenant: str
    roles: frozenset[Role]
    models: frozenset[str] | None
    adapters: frozenset[str] | None
    cache: ScopeKind | None
    key_epoch: int
    not_before_ms: float
    not_after_ms: float


def read_claims(
    claims: Mapping[str, Any],  # Any: decoded JSON, checked here
    pinned: PinnedClaims,
    now_ms: float,
) -> TokenClaims | CredentialProblem:
    """What the claims say, if they are complete, for us, and of now."""
    if claims.get("iss") != pinned.issuer:
        return CredentialProblem.ISSUER
    if not _is_for(claims.get("aud"), pinned.audience):
        return CredentialProblem.AUDIENCE
    if not claims.get("org_id") or not claims.get("tenant_id"):
        return CredentialProblem.TENANT
    names = [claims.get(name) for name in ("sub", "jti", "org_id", "tenant_id")]
    life = _life_of(claims)
    asked = _scope_of(claims.get("scope", ""))
    key_epoch = claims.get("key_epoch", 0)
    if life is None or asked is None or not all(map(_is_name, names)) or not _is_count(key_epoch):
        return CredentialProblem.CLAIMS
    not_before_ms, not_after_ms = life
    if now_ms < not_before_ms:
        return CredentialProblem.EARLY
    if now_ms >= not_after_ms:
        return CredentialProblem.EXPIRED
    roles, models, adapters, cache = asked
    return TokenClaims(
        subject=claims["sub"],
        org=claims["org_id"],
        tenant=claims["tenant_id"],
        roles=roles,
        models=models,
        adapters=adapters,
        cache=cache,
        key_epoch=key_epoch,
        not_before_ms=not_before_ms,
        not_after_ms=not_after_ms,
    )


def granted(claims: TokenClaims, policy: TenantPolicy | None) -> Credential | CredentialProblem:
    """The credential that claims and the tenant's record give together: the less of both."""
    if policy is None:
        return CredentialProblem.TENANT
    if claims.key_epoch != policy.key_epoch:
        return CredentialProblem.REVOKED
    wished = policy.default_scope if claims.cache is None else claims.cache
    principal = Principal(
        org=policy.org,
        tenant=policy.tenant,
        user=claims.subject,
        actor=claims.subject,
        auth_method="jwt",
        roles=claims.roles & policy.roles,
        models=_common(claims.models, policy.models),
        adapters=_common(claims.adapters, policy.adapters),
        default_scope=max(wished, policy.default_scope, key=WIDTHS.index),
    )
    return Credential(
        principal=principal,
        not_before_ms=claims.not_before_ms,
        not_after_ms=claims.not_after_ms,
    )


def _life_of(claims: Mapping[str, Any]) -> tuple[float, float] | None:
    """From when and until when, leeway included; None where a time is missing or makes no sense."""
    begin_ms, end_ms = _time_ms(claims.get("iat")), _time_ms(claims.get("exp"))
    earliest_ms = _time_ms(claims.get("nbf", claims.get("iat")))
    if begin_ms is None or end_ms is None or earliest_ms is None:
        return None
    if not 0 < end_ms - begin_ms <= MAX_LIFE_MS:
        return None
    return max(begin_ms, earliest_ms) - LEEWAY_MS, end_ms + LEEWAY_MS


_Asked: TypeAlias = tuple[
    frozenset[Role], frozenset[str] | None, frozenset[str] | None, ScopeKind | None
]


def _scope_of(scope: Any) -> _Asked | None:  # Any: decoded JSON
    """Roles, models, adapters and scope of reuse that are asked for; None for what makes no sense.

    No role is a user's: whoever wants more must say so, and whoever says only less gets less.
    """
    if not isinstance(scope, str) or len(scope) > MAX_SCOPE_CHARS:
        return None
    words = scope.split(" ")
    models = frozenset(word[6:] for word in words if word.startswith("model:"))
    adapters = frozenset(word[8:] for word in words if word.startswith("adapter:"))
    caches = [_CACHES.get(word) for word in words if word.startswith("cache:")]
    if None in caches or "" in models | adapters:
        return None
    roles = frozenset(_ROLES[word] for word in words if word in _ROLES)
    narrowest = max((kind for kind in caches if kind), key=WIDTHS.index, default=None)
    return roles or frozenset({Role.TENANT_USER}), models or None, adapters or None, narrowest


def _common(asked: frozenset[str] | None, allowed: frozenset[str] | None) -> frozenset[str] | None:
    if asked is None or allowed is None:
        return allowed if asked is None else asked
    return asked & allowed


def _is_for(audience: object, pinned: str) -> bool:
    """Whether the pinned audience is the claim, or one of the claim's list."""
    return audience == pinned or (isinstance(audience, list) and pinned in audience)


def _is_name(value: Any) -> bool:  # Any: decoded JSON
    return isinstance(value, str) and is_name(value)


def _time_ms(value: Any) -> float | None:  # Any: decoded JSON
    # Compared first: NaN and Infinity fail here. A boolean is no number.
    if type(value) in (int, float) and 0 <= value < _MAX_TIME_S:
        return float(value) * 1_000.0
    return None


def _is_count(value: Any) -> bool:  # Any: decoded JSON
    return type(value) is int and 0 <= value < 2**63
