"""The keys that tokens (JWT) are checked with: a JWKS file, or a URL that serves one.

Owns reading, fetching off the loop, and keeping: a set that cannot be had or read leaves the one
before it in force. Only public keys of asymmetric algorithms get in, each under its `kid` and the
pinned algorithms that fit it. Must never: follow a redirect, a proxy or a `jku`, or read without a
bound. Read `jwt_tokens.py` next.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import stat
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from trunkline.core.records import Instant
from trunkline.errors import ConfigError
from trunkline.ports.clock import Clock
from trunkline.written import is_loopback, is_printable_ascii

MAX_JWKS_BYTES = 64 << 10
MAX_KEY_COUNT = 32
MIN_RSA_BITS = 2_048
_STEP_TIMEOUT_S = 5.0  # one connect, one read: a thread cannot be ended from outside

# The pinned algorithms that a kind of key may be used with: (kty, crv) of the JWK.
_FITTING: dict[tuple[str, str], tuple[str, ...]] = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
ALGORITHMS = frozenset(name for fitting in _FITTING.values() for name in fitting)
"""All that may be pinned: asymmetric ones, so that no public key is ever taken as a secret."""

_PRIVATE_PARTS = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth", "k"})


class JwksProblem(Exception):
    """The set cannot be had, or not be used. The message names the source and the reason."""


class _Document(msgspec.Struct):
    # Any: each kind of key has members of its own; `_usable` and PyJWK look at them.
    keys: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_KEY_COUNT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySet:
    """Public keys by (`kid`, algorithm). `kids` are the names alone."""

    keys: Mapping[tuple[str, str], jwt.PyJWK] = field(default_factory=dict[Any, Any], repr=False)
    kids: frozenset[str] = frozenset()


class JwksSource(Protocol):
    """Where a JWKS comes from."""

    name: str

    async def read(self) -> bytes:
        """At most `MAX_JWKS_BYTES`. Raises JwksProblem."""
        ...


def jwks_source(where: str, *, timeout_s: float = 10.0) -> JwksSource:
    """A path, an https URL, or an http one on this machine. Raises ConfigError for any other."""
    if "://" not in where:
        return _File(Path(where))
    parts = urllib.parse.urlsplit(where)
    host = parts.hostname or ""
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"jwks {where[:200]!r}: {error}") from error
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
    if not host or not is_safe or "@" in parts.netloc or not is_printable_ascii(where):
        raise ConfigError(
            f"jwks {where[:200]!r}: give a file, an https URL without a user, or http on loopback"
        )
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    return _Url(where, parts.scheme == "https", (host, port), target, timeout_s)


def checked_algorithms(names: tuple[str, ...]) -> frozenset[str]:
    """The algorithms to pin. Raises ConfigError for none at all, `none`, and symmetric ones."""
    wrong = sorted(set(names) - ALGORITHMS)
    if wrong or not names:
        raise ConfigError(
            f"jwt algorithms {', '.join(wrong) or '(none given)'}: "
            f"allowed are {', '.join(sorted(ALGORITHMS))}"
        )
    return frozenset(names)


def read_key_set(raw: bytes, algorithms: frozenset[str]) -> KeySet:
    """The usable keys of a JWKS. Raises JwksProblem where it is none, or holds what it must not.

    Keys for other uses and of other kinds are passed over, as issuers publish them side by side. A
    private or symmetric key, two keys of one `kid`, or nothing usable are the whole set's problem.
    """
    assert algorithms <= ALGORITHMS, algorithms
    if len(raw) > MAX_JWKS_BYTES:
        raise JwksProblem(f"has {len(raw)} bytes, at most {MAX_JWKS_BYTES}")
    try:
        entries = msgspec.json.decode(raw, type=_Document).keys
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise JwksProblem(f"is no list `keys` of at most {MAX_KEY_COUNT} objects") from error
    keys: dict[tuple[str, str], jwt.PyJWK] = {}
    kids: set[str] = set()
    for entry in entries:
        if _PRIVATE_PARTS & entry.keys():
            raise JwksProblem("holds a private or symmetric key")
        kid = entry.get("kid")
        found = _usable(entry, algorithms)
        if not found or not isinstance(kid, str) or not kid:
            continue
        if kid in kids:
            raise JwksProblem("has two keys of one kid")
        kids.add(kid)
        keys.update({(kid, name): key for name, key in found.items()})
    if not keys:
        raise JwksProblem(f"has no key with a kid for {', '.join(sorted(algorithms))}")
    return KeySet(keys=keys, kids=frozenset(kids))


def _usable(entry: Mapping[str, Any], algorithms: frozenset[str]) -> dict[str, jwt.PyJWK]:
    """The key for each pinned algorithm that it fits. Any: decoded JSON."""
    kind, curve, own = entry.get("kty"), entry.get("crv", ""), entry.get("alg")
    if entry.get("use", "sig") != "sig" or type(kind) is not str or type(curve) is not str:
        return {}
    fitting = [name for name in _FITTING.get((kind, curve), ()) if name in algorithms]
    try:
        found = {name: jwt.PyJWK(dict(entry), name) for name in fitting if own in (None, name)}
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise JwksProblem(f"holds a key that cannot be read: {type(error).__name__}") from error
    sizes = [key.key.key_size for key in found.values() if isinstance(key.key, RSAPublicKey)]
    if any(bits < MIN_RSA_BITS for bits in sizes):
        raise JwksProblem(f"holds an RSA key of fewer than {MIN_RSA_BITS} bits")
    return found


class Jwks:
    """The set that is in force, and the rule by which it is read again."""

    def __init__(
        self,
        source: JwksSource,
        algorithms: frozenset[str],
        clock: Clock,
        *,
        refresh_s: float = 300.0,
        min_refresh_s: float = 30.0,
    ) -> None:
        """Read again every `refresh_s`; already `min_refresh_s` after a failure, and for a `kid`
        that is not in the set.
        """
        assert 0 < min_refresh_s <= refresh_s, (min_refresh_s, refresh_s)
        self._source = source
        self.algorithms = algorithms
        self._clock = clock
        self._refresh_s = refresh_s
        self._min_refresh_s = min_refresh_s
        self._is_wanted = asyncio.Event()
        self.current = KeySet()
        self.generation = 0
        """Goes up with each set that differs from the one before: what was verified is void."""
        self.problem = ""
        """Why the last reading failed; empty where it did not. For operators."""
        self.refreshes = 0
        self.failures = 0
        self.read_at: Instant | None = None
        self._raw: bytes = b""

    def want(self) -> None:
        """Somebody came with a `kid` that is not in the set: read it before its time."""
        self._is_wanted.set()

    @property
    def is_wanted(self) -> bool:
        return self._is_wanted.is_set()

    async def refresh(self) -> bool:
        """Read the source once; whether it could be used. What was in force stays where not."""
        self.read_at = self._clock.now()
        self.refreshes += 1
        try:
            raw = await self._source.read()
            if raw != self._raw:
                self.current = await asyncio.to_thread(read_key_set, raw, self.algorithms)
                self.generation += 1
                self._raw = raw
        except JwksProblem as problem:
            self.failures += 1
            self.problem = f"jwks {self._source.name}: {problem}"
            return False
        self.problem = ""
        return True

    async def keep(self) -> None:
        """Read it now and then, until cancelled."""
        while True:
            self._is_wanted.clear()
            is_read = await self.refresh()
            await asyncio.sleep(self._min_refresh_s)
            if is_read:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._refresh_s - self._min_refresh_s):
                        await self._is_wanted.wait()


class _File:
    """A JWKS file. Who can write it can make tokens, so others must not be able to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    async def read(self) -> bytes:
        try:
            return await asyncio.to_thread(self._bytes)
        except OSError as error:
            raise JwksProblem(f"cannot be read: {error.strerror}") from error

    def _bytes(self) -> bytes:
        with self._path.open("rb") as file:
            if self._path.stat().st_mode & stat.S_IWOTH:
                raise JwksProblem("is writable by everybody")
            return file.read(MAX_JWKS_BYTES + 1)


class _Url:
    """A JWKS behind a URL. One connection a reading; answers other than 200 are failures."""

    def __init__(
        self,
        name: str,
        is_tls: bool,
        address: tuple[str, int | None],
        target: str,
        timeout_s: float,
    ) -> None:
        self.name = name
        self._is_tls = is_tls
        self._address = address
        self._target = target
        self._timeout_s = timeout_s

    async def read(self) -> bytes:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(*self._address, timeout=_STEP_TIMEOUT_S)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.to_thread(_get, connection, self._target)
        except TimeoutError as error:
            raise JwksProblem(f"did not come within {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise JwksProblem(f"cannot be fetched: {type(error).__name__}") from error
        finally:
            _cut(connection)


def _get(connection: http.client.HTTPConnection, target: str) -> bytes:
    connection.request("GET", target, headers={"accept": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise JwksProblem(f"answered {answer.status}")
    return answer.read(MAX_JWKS_BYTES + 1)


def _cut(connection: http.client.HTTPConnection) -> None:
    """Ends the thread that may still wait on it, too."""
    held: socket.socket | None = connection.sock
    if held is not None:
        with contextlib.suppress(OSError):  # the other side was first
            held.shutdown(socket.SHUT_RDWR)
        held.close()
