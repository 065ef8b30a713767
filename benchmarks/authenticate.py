"""What it costs to know who is asking, and whose turn it is.

    python benchmarks/authenticate.py [--json] [--rounds 5]

CPU time (process time) a call, the least of the rounds. Bars: a known API key 4 us, a known token
5 us, whatever the book's size. Checks of new tokens are listed by kind of key; their cost is why
tokens are remembered, and why wrong ones are limited by address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.jwks import ALGORITHMS, Jwks
from trunkline.adapters.jwt_tokens import JwtTokens
from trunkline.core.claims import PinnedClaims, TenantPolicy
from trunkline.core.credentials import KeyBook, KeyRecord, draw_key, secret_hash_under
from trunkline.core.fairness import FairQueue
from trunkline.gateway.authenticate import Credentials
from trunkline.gateway.contracts import ClientError

KEY_COUNT = 10_000
ADDRESS = "192.0.2.1"
BARS_US = {"known key": 4.0, "known token RS256": 5.0}
Private = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class Memory:
    """A key set of these keys, each under the name of its algorithm."""

    name = "memory"

    def __init__(self, keys: dict[str, Private]) -> None:
        named = [self._entry(key, algorithm) for algorithm, key in keys.items()]
        self._raw = json.dumps({"keys": named}).encode()

    async def read(self) -> bytes:
        return self._raw

    def _entry(self, key: Private, algorithm: str) -> dict[str, Any]:  # Any: JSON
        public = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
        return {**public, "kid": algorithm}


def cpu_us(call: Callable[[], object], calls: int, rounds: int) -> float:
    least = float("inf")
    for _ in range(rounds):
        begun_ns = time.process_time_ns()
        for _ in range(calls):
            call()
        least = min(least, (time.process_time_ns() - begun_ns) / calls / 1_000.0)
    return least


def token_of(key: Private, algorithm: str) -> bytes:
    now_s = int(time.time())
    claims = {"iss": "i", "aud": "a", "sub": "ann", "jti": "1", "iat": now_s, "exp": now_s + 900}
    claims |= {"org_id": "acme", "tenant_id": "research", "scope": "tenant.user"}
    return jwt.encode(claims, key, algorithm, {"kid": algorithm}).encode()


def tokens_of(keys: dict[str, Private]) -> JwtTokens:
    clock = SystemClock()
    policy = TenantPolicy(org="0a" * 16, tenant="1b" * 16)

    async def load() -> Jwks:
        made = Jwks(Memory(keys), ALGORITHMS, clock)
        assert await made.refresh(), made.problem
        return made

    pinned = PinnedClaims(issuer="i", audience="a")
    return JwtTokens(asyncio.run(load()), pinned, lambda _org, _tenant: policy, clock)


def credentials(rounds: int) -> dict[str, float]:
    keys: dict[str, Private] = {
        "RS256": rsa.generate_private_key(public_exponent=65_537, key_size=2_048),
        "ES256": ec.generate_private_key(ec.SECP256R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    }
    tokens = tokens_of(keys)
    hash_secret = secret_hash_under(bytes(range(32)))
    drawn = [draw_key(random.Random(n).randbytes, hash_secret) for n in range(KEY_COUNT)]
    book = KeyBook(
        KeyRecord(key_id=key.key_id, org="o", tenant="t", secret_hash=key.secret_hash)
        for key in drawn
    )
    door = Credentials(book=book, hash_secret=hash_secret, clock=SystemClock(), tokens=tokens)
    text = drawn[5].text.encode()
    good, wrong = b"Bearer " + text, b"Bearer " + text[:-1] + b"_"

    def refused() -> None:
        with suppress(ClientError):
            door.principal(wrong, ADDRESS)

    now_ms = time.time() * 1_000.0
    found = {
        "known key": cpu_us(lambda: door.principal(good, ADDRESS), 20_000, rounds),
        "new key": cpu_us(lambda: book.check(text, hash_secret, now_ms), 5_000, rounds),
        "wrong key": cpu_us(refused, 5_000, rounds),
    }
    for algorithm, key in keys.items():
        token = token_of(key, algorithm)
        header = b"Bearer " + token
        call = cpu_us(lambda token=token: tokens.check(token), 300, rounds)
        found[f"new token {algorithm}"] = call
        call = cpu_us(lambda token=token: tokens.is_plausible(token), 5_000, rounds)
        found[f"look at a token {algorithm}"] = call
        call = cpu_us(lambda header=header: door.principal(header, "192.0.2.2"), 20_000, rounds)
        found[f"known token {algorithm}"] = call
    return found


def turns(tenant_count: int, rounds: int) -> float:
    """One entry added and one taken, with 50 of each tenant waiting."""
    queue = FairQueue[int](max_entries=1 << 20, max_per_tenant=1 << 10)
    numbers = count()

    def add() -> None:
        number = next(numbers)
        queue.add(f"t{number % tenant_count}", 100.0 + number % 17, number)

    def add_and_take() -> None:
        add()
        queue.take()

    for _ in range(50 * tenant_count):
        add()
    return cpu_us(add_and_take, 5_000, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    found = credentials(args.rounds)
    for tenant_count in (10, 1_000):
        found[f"fair queue, {tenant_count} tenants"] = turns(tenant_count, args.rounds)
    is_within_bars = all(found[name] <= bar_us for name, bar_us in BARS_US.items())
    if args.json:
        report = {"us": found, "bars_us": BARS_US, "is_within_bars": is_within_bars}
        print(json.dumps({"benchmark": "authenticate", **report}, indent=2))
    else:
        for name, cost_us in found.items():
            bar = f"  (bar {BARS_US[name]:g})" if name in BARS_US else ""
            print(f"{name:34} {cost_us:8.2f} us{bar}")
    return 0 if is_within_bars else 1


if __name__ == "__main__":
    raise SystemExit(main())
