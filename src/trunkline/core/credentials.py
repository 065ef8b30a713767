"""Credentials: what is kept of an API key, how one is made, and how one is checked.

Of a key `pk_<key id>_<secret>` the registry keeps a `KeyRecord` with the keyed hash of the secret,
never the secret. Whatever is wrong with a key, a check does the same work and the caller answers
the same; the `CredentialProblem` is for operators' counters alone. A token of somebody else's
issuer (JWT) can only narrow what a `TenantPolicy` allows. Must never: read a clock or a source of
chance, or show a secret. Read `principals.py` for what comes out, `gateway/authenticate.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.core.identity import ScopeKind
from trunkline.core.principals import Role

SECRET_HASH_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One API key, as the registry keeps it. Raises ValueError where a part is out of shape."""

    key_id: str
    """16 hex digits of chance; never used again."""
    org: str
    tenant: str
    user: str = ""
    """Empty where the key is the tenant's own."""
    roles: frozenset[Role] = frozenset({Role.TENANT_USER})
    models: frozenset[str] | None = None
    """None for all; so for adapters."""
    adapters: frozenset[str] | None = None
    not_before_ms: int = 0
    """Wall time since 1970, in milliseconds."""
    not_after_ms: int | None = None
    """The first moment at which it is refused; None for no end."""
    key_class: str = ""
    quota_class: str = ""
    default_scope: ScopeKind = ScopeKind.TENANT
    secret_hash: bytes = field(repr=False)
    """BLAKE2b-256 of the secret under the pepper."""
    is_revoked: bool = False
