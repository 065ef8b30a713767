"""Tokens on real keys: every row of bad tokens, the cache, and what the keys' change does to it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from trunkline.adapters.jwks import Jwks
from trunkline.adapters.jwt_tokens import MAX_TOKEN_BYTES, JwtTokens
from trunkline.core.claims import PinnedClaims, TenantPolicy
from trunkline.core.credentials import Credential, CredentialProblem
from trunkline.core.records import BootInstant, Instant, WallTime

NOW_S = 1_700_000_000
RSA_KEY = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
OTHER_RSA = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
RSA_PEM = RSA_KEY.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)


def jwk(key: Any, kid: str) -> dict[str, Any]:  # Any: three kinds of key; JSON
    algorithm = {"R": "RS256", "E": "ES256", "d": "EdDSA"}[kid[0]]
    public = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**public, "kid": kid, "use": "sig"}


KEYS = [jwk(RSA_KEY, "R1"), jwk(EC_KEY, "E1"), jwk(ED_KEY, "d1")]
PINNED_ALGORITHMS = frozenset({"RS256", "ES256", "EdDSA"})


class FixedClock:
    def __init__(self) -> None:
        self.wall_s = float(NOW_S)

    def now(self) -> Instant:
        return Instant(0.0)

    def boot(self) -> BootInstant:
        return BootInstant(0.0)

    def wall(self) -> WallTime:
        return WallTime(self.wall_s)


class Memory:
    """A source of key sets that a test can change."""

    name = "memory"

    def __init__(self, keys: list[dict[str, Any]]) -> None:  # Any: JSON
        self.keys = keys

    async def read(self) -> bytes:
        return json.dumps({"keys": self.keys}).encode()


class Issuer:
    """Everything around one `JwtTokens`."""

    def __init__(self, max_known_tokens: int = 100) -> None:
        self.clock = FixedClock()
        self.source = Memory(list(KEYS))
        self.jwks = Jwks(self.source, PINNED_ALGORITHMS, self.clock)
        asyncio.run(self.refresh())
        self.policies = {("acme", "research"): TenantPolicy(org="0a" * 16, tenant="1b" * 16)}
        self.tokens = JwtTokens(
            self.jwks,
            PinnedClaims(issuer="https://issuer", audience="trunkline"),
            lambda org, tenant: self.policies.get((org, tenant)),
            self.clock,
            max_known_tokens=max_known_tokens,
        )

    async def refresh(self) -> None:
        assert await self.jwks.refresh(), self.jwks.problem

    def outcome(self, token: bytes) -> object:
        found = self.tokens.check(token)
        return found if isinstance(found, CredentialProblem) else found.principal.user


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


def claims(**changes: Any) -> dict[str, Any]:  # Any: JSON
    base = {"iss": "https://issuer", "aud": "trunkline", "sub": "ann", "jti": "1"}
    base |= {"org_id": "acme", "tenant_id": "research"}
    return {k: v for k, v in (base | {"iat": NOW_S, "exp": NOW_S + 600} | changes).items() if v}


def token(
    key: Any = RSA_KEY,  # Any: three kinds of key
    algorithm: str = "RS256",
    header: dict[str, Any] | None = None,  # Any: JSON
    **changes: Any,  # Any: JSON
) -> bytes:
    kids = {"RS256": "R1", "ES256": "E1", "EdDSA": "d1"}
    named = {"kid": kids.get(algorithm, "R1")} | (header or {})
    named = {name: value for name, value in named.items() if value is not None}
    return jwt.encode(claims(**changes), key, algorithm, named).encode()


def part(value: object) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")


def hand_made(header: object, payload: object = None, signature: bytes = b"") -> bytes:
    """A token that no library would make."""
    body = part(claims() if payload is None else payload)
    return b".".join((part(header), body, base64.urlsafe_b64encode(signature).rstrip(b"=")))


def signed_with_public_key() -> bytes:
    """HS256 with the RSA public key as its secret: the confusion of algorithms."""
    signing = part({"alg": "HS256", "kid": "R1", "typ": "JWT"}) + b"." + part(claims())
    mac = hmac.digest(RSA_PEM, signing, hashlib.sha256)
    return signing + b"." + base64.urlsafe_b64encode(mac).rstrip(b"=")


def signed(header: object) -> bytes:
    """A header that no library would make, rightly signed."""
    signing = part(header) + b"." + part(claims())
    signature = jwt.get_algorithm_by_name("RS256").sign(signing, RSA_KEY)
    return signing + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")


def test_a_token_made_by_hand_is_as_good_as_any(issuer: Issuer) -> None:
    assert issuer.outcome(signed({"alg": "RS256", "kid": "R1"})) == "ann"


@pytest.mark.parametrize(
    ("key", "algorithm"), [(RSA_KEY, "RS256"), (EC_KEY, "ES256"), (ED_KEY, "EdDSA")]
)
def test_a_good_token_of_each_kind_of_key_is_its_principal(
    issuer: Issuer, key: Any, algorithm: str
) -> None:
    found = issuer.tokens.check(token(key, algorithm))
    assert isinstance(found, Credential)
    assert (found.principal.org, found.principal.tenant) == ("0a" * 16, "1b" * 16)
    assert (found.principal.user, found.principal.auth_method) == ("ann", "jwt")
    assert found.not_after_ms == (NOW_S + 630) * 1_000.0


GOOD = token()
BAD: dict[str, tuple[bytes, CredentialProblem]] = {
    "alg none": (hand_made({"alg": "none", "kid": "R1"}), CredentialProblem.ALGORITHM),
    "alg none and no kid": (hand_made({"alg": "none"}), CredentialProblem.ALGORITHM),
    "alg None": (hand_made({"alg": "None", "kid": "R1"}), CredentialProblem.ALGORITHM),
    "alg null": (hand_made({"alg": None, "kid": "R1"}), CredentialProblem.ALGORITHM),
    "no alg": (hand_made({"kid": "R1"}), CredentialProblem.ALGORITHM),
    "alg list": (hand_made({"alg": ["RS256"], "kid": "R1"}), CredentialProblem.ALGORITHM),
    "HS256 with the public key": (signed_with_public_key(), CredentialProblem.ALGORITHM),
    "unpinned": (token(RSA_KEY, "RS512"), CredentialProblem.ALGORITHM),
    "another key's alg": (
        token(EC_KEY, "ES256", {"kid": "R1"}),
        CredentialProblem.ALGORITHM,
    ),
    "signed by another": (token(OTHER_RSA), CredentialProblem.WRONG),
    "no signature": (hand_made({"alg": "RS256", "kid": "R1"}), CredentialProblem.WRONG),
    "changed payload": (
        b".".join((GOOD.split(b".")[0], part(claims(sub="eve")), GOOD.split(b".")[2])),
        CredentialProblem.WRONG,
    ),
    "no kid": (token(header={"kid": None}), CredentialProblem.MALFORMED),
    "unknown kid": (token(header={"kid": "R2"}), CredentialProblem.UNKNOWN),
    "kid path": (token(header={"kid": "../../../dev/null"}), CredentialProblem.UNKNOWN),
    "kid SQL": (token(header={"kid": "x' UNION SELECT 'k"}), CredentialProblem.UNKNOWN),
    "kid URL": (token(header={"kid": "https://evil.example/k"}), CredentialProblem.UNKNOWN),
    "kid number": (hand_made({"alg": "RS256", "kid": 1}), CredentialProblem.MALFORMED),
    "kid of 1,000 characters": (token(header={"kid": "k" * 1_000}), CredentialProblem.MALFORMED),
    "jku": (
        token(OTHER_RSA, header={"kid": "R2", "jku": "http://127.0.0.1:9/keys"}),
        CredentialProblem.UNKNOWN,
    ),
    "own jwk": (
        token(OTHER_RSA, header={"jwk": jwk(OTHER_RSA, "R1")}),
        CredentialProblem.WRONG,
    ),
    "crit": (
        hand_made({"alg": "RS256", "kid": "R1", "crit": ["x"]}),
        CredentialProblem.MALFORMED,
    ),
    "crit that the library knows": (
        signed({"alg": "RS256", "kid": "R1", "crit": ["b64"], "b64": True}),
        CredentialProblem.MALFORMED,
    ),
    "b64 false": (
        hand_made({"alg": "RS256", "kid": "R1", "b64": False}),
        CredentialProblem.MALFORMED,
    ),
    "an encrypted one": (
        hand_made({"alg": "RS256", "kid": "R1", "typ": "JWE"}),
        CredentialProblem.MALFORMED,
    ),
    "wrong aud": (token(aud="another"), CredentialProblem.AUDIENCE),
    "wrong iss": (token(iss="https://evil"), CredentialProblem.ISSUER),
    "expired": (token(iat=NOW_S - 700, exp=NOW_S - 31), CredentialProblem.EXPIRED),
    "from the future": (token(iat=NOW_S + 31, exp=NOW_S + 60), CredentialProblem.EARLY),
    "an hour": (token(exp=NOW_S + 3_600), CredentialProblem.CLAIMS),
    "no jti": (token(jti=None), CredentialProblem.CLAIMS),
    "no tenant": (token(tenant_id=None), CredentialProblem.TENANT),
    "no org": (token(org_id=None), CredentialProblem.TENANT),
    "tenant of another org": (token(org_id="other"), CredentialProblem.TENANT),
    "header no object": (hand_made([1]), CredentialProblem.MALFORMED),
    "header deep": (
        base64.urlsafe_b64encode(b"[" * 5_000).rstrip(b"=") + b".e30.AA",
        CredentialProblem.MALFORMED,
    ),
    "header of huge numbers": (
        base64.urlsafe_b64encode(b'{"alg":' + b"9" * 5_000 + b"}").rstrip(b"=") + b".e30.AA",
        CredentialProblem.MALFORMED,
    ),
    "not base64": (b"!!!.###.$$$", CredentialProblem.MALFORMED),
    "one part": (b"abc", CredentialProblem.MALFORMED),
    "five parts": (b"a.b.c.d.e", CredentialProblem.MALFORMED),
    "two parts": (b"a.b", CredentialProblem.MALFORMED),
    "empty parts": (b"..", CredentialProblem.MALFORMED),
    "not ASCII": ("ä.ö.ü".encode(), CredentialProblem.MALFORMED),
    "padding": (GOOD + b"=", CredentialProblem.MALFORMED),
    "one megabyte": (b"a" * (1 << 20) + b".b.c", CredentialProblem.MALFORMED),
    "over 8 KiB": (token(filler="x" * 9_000), CredentialProblem.MALFORMED),
}


@pytest.mark.parametrize(("bad", "problem"), BAD.values(), ids=BAD.keys())
def test_a_bad_token_is_refused_for_its_reason(
    issuer: Issuer, bad: bytes, problem: CredentialProblem
) -> None:
    assert issuer.outcome(bad) is problem
    assert issuer.tokens.known(bad) is None
    assert issuer.tokens.known_count == 0


IN_THE_RECORD = {"tenant of another org"}
"""What only the tenant's record tells: the time of a refusal must not."""


@pytest.mark.parametrize(("bad", "problem"), BAD.values(), ids=BAD.keys())
def test_a_bad_token_is_plausible_where_its_signature_alone_would_tell(
    issuer: Issuer, bad: bytes, problem: CredentialProblem
) -> None:
    is_in_record = bad in [BAD[name][0] for name in IN_THE_RECORD]
    is_unread = bad == GOOD + b"="  # the signature is not read
    is_forged = problem is CredentialProblem.WRONG
    assert issuer.tokens.is_plausible(bad) is (is_forged or is_in_record or is_unread)


def test_a_good_token_is_plausible_and_that_remembers_nothing(issuer: Issuer) -> None:
    assert issuer.tokens.is_plausible(GOOD)
    assert issuer.tokens.known_count == 0


def test_a_token_of_a_new_key_asks_for_the_keys_where_it_is_only_looked_at(issuer: Issuer) -> None:
    assert not issuer.tokens.is_plausible(token(header={"kid": "R9"}))
    assert issuer.jwks.is_wanted


def test_a_token_with_a_claim_twice_is_refused(issuer: Issuer) -> None:
    body = json.dumps(claims())[:-1] + ', "tenant_id": "other"}'
    twice = jwt.PyJWS().encode(body.encode(), RSA_KEY, "RS256", {"kid": "R1"})
    assert issuer.outcome(twice.encode()) is CredentialProblem.CLAIMS


@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b"\xff", b"[" * 4_000])
def test_a_signed_payload_that_is_no_object_is_refused(issuer: Issuer, body: bytes) -> None:
    signed = jwt.PyJWS().encode(body, RSA_KEY, "RS256", {"kid": "R1"})
    assert issuer.outcome(signed.encode()) is CredentialProblem.CLAIMS


def test_a_token_at_the_size_limit_is_read_and_one_byte_more_is_not(issuer: Issuer) -> None:
    just = next(
        made
        for size in range(5_000, 6_500)
        if len(made := token(ED_KEY, "EdDSA", filler="x" * size)) >= MAX_TOKEN_BYTES - 1
    )
    assert len(just) in (MAX_TOKEN_BYTES - 1, MAX_TOKEN_BYTES)
    assert issuer.outcome(just) == "ann"
    assert (
        issuer.outcome(just + b"A" * (MAX_TOKEN_BYTES + 1 - len(just)))
        is CredentialProblem.MALFORMED
    )


@given(st.binary(max_size=300) | st.tuples(st.integers(0, len(GOOD) - 1), st.binary(max_size=2)))
def test_no_bytes_break_the_check_and_no_change_leaves_a_token_good(
    change: bytes | tuple[int, bytes],
) -> None:
    if isinstance(change, bytes):
        bad = change
    else:
        bad = GOOD[: change[0]] + change[1] + GOOD[change[0] + 1 :]
    if bad != GOOD:
        assert isinstance(SHARED.tokens.check(bad), CredentialProblem)
        assert SHARED.tokens.is_plausible(bad) in (True, False)


SHARED = Issuer()


class TestKnown:
    """Tokens that were checked before."""

    def test_a_good_token_is_known_afterwards(self, issuer: Issuer) -> None:
        assert issuer.tokens.known(GOOD) is None
        checked = issuer.tokens.check(GOOD)
        assert issuer.tokens.known(GOOD) is checked

    def test_it_is_known_until_it_ends(self, issuer: Issuer) -> None:
        issuer.tokens.check(GOOD)
        issuer.clock.wall_s = NOW_S + 629.9
        assert issuer.tokens.known(GOOD) is not None
        issuer.clock.wall_s = NOW_S + 630.0
        assert issuer.tokens.known(GOOD) is None
        assert issuer.tokens.known_count == 0
        assert issuer.outcome(GOOD) is CredentialProblem.EXPIRED

    def test_new_keys_drop_all_of_them_and_the_same_keys_none(self, issuer: Issuer) -> None:
        issuer.tokens.check(GOOD)
        asyncio.run(issuer.refresh())
        assert issuer.tokens.known(GOOD) is not None
        issuer.source.keys = [jwk(OTHER_RSA, "R1")]
        asyncio.run(issuer.refresh())
        assert issuer.tokens.known(GOOD) is None
        assert issuer.tokens.known_count == 0
        assert issuer.outcome(GOOD) is CredentialProblem.WRONG

    def test_a_tenant_that_is_gone_is_refused_at_once(self, issuer: Issuer) -> None:
        issuer.tokens.check(GOOD)
        issuer.policies.clear()
        assert issuer.tokens.known(GOOD) is None
        assert issuer.outcome(GOOD) is CredentialProblem.TENANT

    def test_a_narrower_record_narrows_a_known_token_at_once(self, issuer: Issuer) -> None:
        issuer.tokens.check(GOOD)
        issuer.policies["acme", "research"] = TenantPolicy(
            org="0a" * 16, tenant="1b" * 16, models=frozenset({"small"})
        )
        found = issuer.tokens.known(GOOD)
        assert found is not None
        assert found.principal.models == {"small"}
        assert issuer.tokens.known(GOOD) is found

    def test_a_raised_key_epoch_ends_known_tokens(self, issuer: Issuer) -> None:
        issuer.tokens.check(GOOD)
        issuer.policies["acme", "research"] = TenantPolicy(
            org="0a" * 16, tenant="1b" * 16, key_epoch=1
        )
        assert issuer.tokens.known(GOOD) is None
        assert issuer.outcome(GOOD) is CredentialProblem.REVOKED

    def test_the_longest_unused_goes_first_at_the_bound(self) -> None:
        issuer = Issuer(max_known_tokens=3)
        first, second, third, fourth = (token(ED_KEY, "EdDSA", jti=str(n)) for n in range(1, 5))
        for each in (first, second, third):
            issuer.tokens.check(each)
        issuer.tokens.known(first)
        issuer.tokens.check(fourth)
        assert issuer.tokens.known_count == 3
        assert issuer.tokens.known(second) is None
        assert issuer.tokens.known(first) is not None


def test_an_unknown_kid_asks_for_the_keys_and_a_known_one_does_not(issuer: Issuer) -> None:
    issuer.outcome(token(OTHER_RSA))
    issuer.outcome(GOOD)
    assert not issuer.jwks.is_wanted
    issuer.outcome(token(header={"kid": "R9"}))
    assert issuer.jwks.is_wanted
