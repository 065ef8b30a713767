"""Who is asking: the bytes of an Authorization header -> a principal, or one refusal for all.

Owns the cache of good API keys, the limit on wrong tokens by address, and the counts of reasons,
which are for operators alone: whatever is wrong with a credential, the client sees the same
401. Must never: keep a credential (digests only), or take anything but the header for a proof. Read
`core/credentials.py` for how a key is checked, `client.py` next.

Three ways to let people in, one protocol: `OpenDoor` (everybody is one tenant), `StaticKey` (one
key, one tenant), `Credentials` (API keys of the registry, and tokens).

Wrong credentials lock out no right ones, whoever sits behind the same proxy. A key is always looked
at: that costs as little as counting it. A token costs a check of its signature (55 to 95 us), so an
address that brought too many wrong ones gets it only for tokens that could be good by all that
stands in them, and only while all such addresses together leave something of `spare_per_s`. Whoever
forges tokens of that shape faster than that, from an address of many, holds up new tokens from
there; not those that are in use, and no keys.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, ip_address
from typing import Protocol

from trunkline.core.credentials import (
    KEY_PREFIX,
    KEY_TEXT_BYTES,
    Credential,
    CredentialProblem,
    KeyBook,
    SecretHash,
)
from trunkline.core.principals import Principal
from trunkline.core.rates import TokenBucket
from trunkline.gateway.contracts import ClientError, Refusal
from trunkline.ports.clock import Clock

REFUSAL = Refusal(status=401, code="invalid_api_key", message="no valid API key")
"""The one answer to an unknown, wrong, expired, revoked or unreadable credential."""
NONE_SENT = replace(
    REFUSAL, message="no valid API key: none was sent; send it as Authorization: Bearer KEY"
)
"""The same where there is no credential: who sends none learns nothing by that."""

MAX_AUTHORIZATION_BYTES = (8 << 10) + 64
"""A token of 8 KiB, and its scheme."""


class Authenticator(Protocol):
    """What the client listener asks, once for each request."""

    refusals: dict[CredentialProblem, int]
    """Counts by reason, for operators."""

    def principal(self, authorization: bytes, address: str) -> Principal:
        """Whose credential this is. `address` is where the connection comes from, for the limit.

        Raises ClientError with `REFUSAL`, or `NONE_SENT`.
        """
        ...


class TokenCheck(Protocol):
    """`adapters/jwt_tokens.py`, as seen from here."""

    def known(self, token: bytes) -> Credential | None: ...

    def is_plausible(self, token: bytes) -> bool: ...

    def check(self, token: bytes) -> Credential | CredentialProblem: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthLimits:
    """The bounds of one `Credentials`."""

    max_known_keys: int = 8_192
    """Good keys whose digest is remembered, which saves 3 us each time; the longest unused goes
    first.
    """
    max_sources: int = 4_096
    """Addresses with wrong tokens that are kept account of. The one that has brought none for
    longest goes first, and would begin anew: whoever has so many addresses is not stopped by this.
    """
    wrong_burst: int = 20
    """Wrong tokens that one address may bring at once."""
    wrong_per_s: float = 1.0
    spare_burst: int = 250
    """Wrong tokens of a good shape that addresses over their own limit may bring at once, all of
    them together.
    """
    spare_per_s: float = 250.0
    """At 95 us each 2.4 % of a core."""


class OpenDoor:
    """No credentials: everybody is the one principal. What a client sends is not looked at."""

    def __init__(self, principal: Principal) -> None:
        self.refusals: dict[CredentialProblem, int] = {}
        self._principal = principal

    def principal(self, authorization: bytes, address: str) -> Principal:
        return self._principal


class StaticKey:
    """One key for everybody, all of them the one principal.

    Not limited by address: a comparison costs less than the account of who failed it.
    """

    def __init__(self, key: str, principal: Principal) -> None:
        self.refusals: dict[CredentialProblem, int] = {}
        self._principal = principal
        self.take(key)

    def take(self, key: str) -> None:
        """This key from here on."""
        if not key:
            raise ValueError("an empty API key would let everybody in; use OpenDoor and say so")
        self._wanted = hashlib.blake2b(key.encode(), digest_size=32).digest()

    def principal(self, authorization: bytes, address: str) -> Principal:
        # Digests are compared, so that the time tells nothing of the key's length either.
        given = bearer(authorization)
        digest = hashlib.blake2b(given, digest_size=32).digest()
        if hmac.compare_digest(digest, self._wanted):
            return self._principal
        raise _refused(self.refusals, _problem_of(authorization, given) or CredentialProblem.WRONG)


class Credentials:
    """API keys of the registry's book, and tokens where an issuer is configured."""

    def __init__(
        self,
        *,
        book: KeyBook,
        hash_secret: SecretHash,
        clock: Clock,
        tokens: TokenCheck | None = None,
        limits: AuthLimits | None = None,
    ) -> None:
        self.refusals: dict[CredentialProblem, int] = {}
        self._book = book
        self._hash_secret = hash_secret
        self._wall = clock.wall
        self._tokens = tokens
        self._limits = limits or AuthLimits()
        self._known: OrderedDict[bytes, Credential] = OrderedDict()
        self.sources = WrongSources(self._limits, clock)
        """Of tokens: what a wrong key costs is not worth an account."""

    def swap(self, book: KeyBook) -> None:
        """The keys as they are now: what is revoked in it is refused from this call on."""
        for digest, known in list(self._known.items()):
            key_id = known.principal.actor
            # Unchanged keys stay known: callers behind one address with a flood need that.
            if book.get(key_id) != self._book.get(key_id):
                del self._known[digest]
        self._book = book

    def principal(self, authorization: bytes, address: str) -> Principal:
        given = bearer(authorization)
        problem = _problem_of(authorization, given)
        if problem is None:
            if self._tokens is None or given.startswith(KEY_PREFIX):
                outcome = self._key(given)
            else:
                outcome = self._token(self._tokens, given, address)
            if isinstance(outcome, Credential):
                return outcome.principal
            problem = outcome
        raise _refused(self.refusals, problem)

    def _key(self, given: bytes) -> Credential | CredentialProblem:
        now_ms = self._wall() * 1_000.0  # wall time, as people wrote it into the key
        if len(given) != KEY_TEXT_BYTES:  # not worth a digest
            return self._book.check(given, self._hash_secret, now_ms)
        digest = hashlib.blake2b(given, digest_size=32).digest()
        known = self._known.get(digest)
        if known is not None and known.is_good_at(now_ms):
            self._known.move_to_end(digest)
            return known
        outcome = self._book.check(given, self._hash_secret, now_ms)
        if isinstance(outcome, Credential):
            self._known[digest] = outcome
            if len(self._known) > self._limits.max_known_keys:
                self._known.popitem(last=False)
        return outcome

    def _token(
        self, tokens: TokenCheck, given: bytes, address: str
    ) -> Credential | CredentialProblem:
        known = tokens.known(given)
        if known is not None:
            return known
        is_spare = self.sources.is_limited(address)
        if is_spare and not (self.sources.has_spare() and tokens.is_plausible(given)):
            return CredentialProblem.LIMITED
        outcome = tokens.check(given)
        if isinstance(outcome, CredentialProblem):
            self.sources.failed(address)
            if is_spare:
                self.sources.use_spare()
        return outcome


class WrongSources:
    """Which addresses have brought too many wrong tokens lately, and what is left for them."""

    def __init__(self, limits: AuthLimits, clock: Clock) -> None:
        self._limits = limits
        self._now = clock.now
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._spare = TokenBucket(limits.spare_per_s, limits.spare_burst, clock.now())

    def __len__(self) -> int:
        return len(self._buckets)

    def is_limited(self, address: str) -> bool:
        if not self._buckets:
            return False
        bucket = self._buckets.get(network_of(address))
        return bucket is not None and bucket.wait_ms(1.0, self._now()) > 0.0

    def has_spare(self) -> bool:
        """Whether one more token of a limited address may be checked."""
        return self._spare.wait_ms(1.0, self._now()) == 0.0

    def use_spare(self) -> None:
        """It was a wrong one."""
        self._spare.charge(1.0, self._now())

    def failed(self, address: str) -> None:
        """One more from there. Those that have been quiet long enough are forgotten."""
        now = self._now()
        source = network_of(address)
        bucket = self._buckets.pop(source, None)
        if bucket is None:
            bucket = TokenBucket(self._limits.wrong_per_s, self._limits.wrong_burst, now)
        bucket.charge(1.0, now)
        self._buckets[source] = bucket
        oldest = next(iter(self._buckets.values()))
        while len(self._buckets) > self._limits.max_sources or oldest.is_full(now):
            self._buckets.popitem(last=False)
            oldest = next(iter(self._buckets.values()))


def network_of(address: str) -> str:
    """What counts as one source: an IPv4 address, the /64 of an IPv6 one, anything else as it is.

    A machine with IPv6 has 2**64 addresses to come from.
    """
    if ":" not in address:
        return address
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{found.packed[:8].hex()}/64"


def credential(headers: dict[bytes, bytes]) -> bytes:
    """What a client shows, as the `Authorization` header has it; Anthropic's clients have a header
    of their own for keys, which counts where the other one is not there. Empty for nothing.
    """
    given = headers.get(b"authorization")
    if given is None:
        key = headers.get(b"x-api-key")
        return b"" if key is None else b"Bearer " + key
    return given


def bearer(authorization: bytes) -> bytes:
    """The credential behind the scheme, whose case means nothing; empty for another scheme."""
    scheme, _, given = authorization.partition(b" ")
    return given.strip(b" ") if scheme.lower() == b"bearer" else b""


def _problem_of(authorization: bytes, given: bytes) -> CredentialProblem | None:
    """What is wrong with the header by its shape alone."""
    if not authorization:
        return CredentialProblem.MISSING
    if len(authorization) > MAX_AUTHORIZATION_BYTES or not given:
        return CredentialProblem.MALFORMED
    return None


def _refused(refusals: dict[CredentialProblem, int], problem: CredentialProblem) -> ClientError:
    refusals[problem] = refusals.get(problem, 0) + 1
    return ClientError(NONE_SENT if problem is CredentialProblem.MISSING else REFUSAL)
