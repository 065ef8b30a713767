"""Tokens (JWT) of a pinned issuer: signature checked, claims read, a principal made.

Owns the order of the checks (size and shape before any parsing, `kid` and algorithm before any
cryptography, signature before any claim is believed) and the cache of tokens that were found good:
a check costs 55 us (RSA) to 95 us (EdDSA), a token that is known 1 us, a look at what an unchecked
one claims 15 us (`benchmarks/authenticate.py`). A hit is judged by the time and the tenant's record
of now.
Must never: try a key that the token does not name, follow what a header says, or let a message of
the library reach a client. Read `core/claims.py` for what the claims mean.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import jwt

from trunkline.adapters.jwks import Jwks
from trunkline.core.claims import (
    PinnedClaims,
    TenantPolicies,
    TenantPolicy,
    TokenClaims,
    granted,
    read_claims,
)
from trunkline.core.credentials import Credential, CredentialProblem
from trunkline.ports.clock import Clock

MAX_TOKEN_BYTES = 8 << 10
MAX_KID_CHARS = 256
_TYPES = ("JWT", "AT+JWT", "")


@dataclass(slots=True, kw_only=True)
class _Known:
    """A token that was found good, and the tenant's record that it was measured by."""

    claims: TokenClaims
    policy: TenantPolicy | None
    credential: Credential


class JwtTokens:
    """Checks tokens. Belongs to one event loop; `Jwks.keep` renews the keys beside it."""

    def __init__(
        self,
        jwks: Jwks,
        pinned: PinnedClaims,
        policies: TenantPolicies,
        clock: Clock,
        *,
        max_known_tokens: int = 8_192,
    ) -> None:
        """`max_known_tokens` bounds the cache; the longest unused goes first."""
        self._jwks = jwks
        self._pinned = pinned
        self._policies = policies
        self._clock = clock
        self._max_known_tokens = max_known_tokens
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._generation = jwks.generation
        self._jws = jwt.PyJWS(options={"verify_signature": True})

    def known(self, token: bytes) -> Credential | None:
        """The credential of a token that was checked before and is still good, without the work."""
        if self._generation != self._jwks.generation:
            self._known.clear()
            self._generation = self._jwks.generation
            return None
        digest = hashlib.blake2b(token, digest_size=32).digest()
        entry = self._known.get(digest)
        if entry is None:
            return None
        policy = self._policies(entry.claims.org, entry.claims.tenant)
        if policy is not entry.policy:
            outcome = granted(entry.claims, policy)
            if isinstance(outcome, CredentialProblem):
                del self._known[digest]
                return None
            entry.policy, entry.credential = policy, outcome
        if not entry.credential.is_good_at(self._clock.wall() * 1_000.0):
            del self._known[digest]
            return None
        self._known.move_to_end(digest)
        return entry.credential

    def is_plausible(self, token: bytes) -> bool:
        """Whether it is worth the work of a check: it names a key of ours, and what it claims is
        complete, for us, and of now. Proves nothing.

        Does not ask for the tenant's record: the time of a refusal would tell who is in there.
        """
        if isinstance(self._key_of(token), CredentialProblem):
            return False
        payload = _decoded(token.split(b".")[1])
        claims = None if payload is None else _claims_in(payload)
        if claims is None:
            return False
        return isinstance(
            read_claims(claims, self._pinned, self._clock.wall() * 1_000.0), TokenClaims
        )

    def check(self, token: bytes) -> Credential | CredentialProblem:
        """What the token proves now; remembered where it is good."""
        key = self._key_of(token)
        if isinstance(key, CredentialProblem):
            return key
        payload = self._verified(token, key)
        if isinstance(payload, CredentialProblem):
            return payload
        claims = _claims_in(payload)
        if claims is None:
            return CredentialProblem.CLAIMS
        read = read_claims(claims, self._pinned, self._clock.wall() * 1_000.0)
        if isinstance(read, CredentialProblem):
            return read
        policy = self._policies(read.org, read.tenant)
        credential = granted(read, policy)
        if isinstance(credential, Credential):
            self._remember(token, _Known(claims=read, policy=policy, credential=credential))
        return credential

    def _key_of(self, token: bytes) -> jwt.PyJWK | CredentialProblem:
        """The key that the token names, bound to the algorithm that it names."""
        if len(token) > MAX_TOKEN_BYTES or token.count(b".") != 2 or not token.isascii():
            return CredentialProblem.MALFORMED
        header = _header_of(token)
        if header is None:
            return CredentialProblem.MALFORMED
        kid, algorithm = header.get("kid"), header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in self._jwks.algorithms:
            return CredentialProblem.ALGORITHM
        if not isinstance(kid, str) or len(kid) > MAX_KID_CHARS:
            return CredentialProblem.MALFORMED
        key = self._jwks.current.keys.get((kid, algorithm))
        if key is not None:
            return key
        if kid in self._jwks.current.kids:
            return CredentialProblem.ALGORITHM
        self._jwks.want()
        return CredentialProblem.UNKNOWN

    def _verified(self, token: bytes, key: jwt.PyJWK) -> bytes | CredentialProblem:
        """The payload, if this key has signed it."""
        try:
            # The key is bound to one algorithm: the header cannot choose another.
            return self._jws.decode_complete(token, key, algorithms=[key.algorithm_name])["payload"]
        except jwt.InvalidSignatureError:
            return CredentialProblem.WRONG
        except (jwt.PyJWTError, ValueError):
            return CredentialProblem.MALFORMED

    def _remember(self, token: bytes, entry: _Known) -> None:
        digest = hashlib.blake2b(token, digest_size=32).digest()
        self._known[digest] = entry
        self._known.move_to_end(digest)
        if len(self._known) > self._max_known_tokens:
            self._known.popitem(last=False)

    @property
    def known_count(self) -> int:
        return len(self._known)


def _header_of(token: bytes) -> dict[str, Any] | None:  # Any: decoded JSON
    """The header, unverified; None where it is none, or asks for extensions of the format."""
    text = _decoded(token.partition(b".")[0])
    if text is None:
        return None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or "crit" in header or "b64" in header:
        return None
    return header if str(header.get("typ", "")).upper() in _TYPES else None  # pyright: ignore


def _decoded(part: bytes) -> bytes | None:
    try:
        return base64.b64decode(part + b"=" * (-len(part) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None


def _claims_in(payload: bytes) -> dict[str, Any] | None:  # Any: decoded JSON
    try:
        claims = json.loads(payload, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError):
        return None
    return claims if isinstance(claims, dict) else None  # pyright: ignore


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: decoded JSON
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found
