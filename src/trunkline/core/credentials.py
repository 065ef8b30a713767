"""API keys: what is kept of one, how one is made, and how one is checked.

A key is `pk_<key id>_<secret>`. The registry keeps a `KeyRecord` with the keyed hash of the secret,
never the secret. Whatever is wrong with a key, a check does the same work, and the caller answers
the same; the `CredentialProblem` is for operators' counters alone. Must never: read a clock or a
source of chance, or show a secret. Read `claims.py` for tokens, `gateway/authenticate.py` next.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from trunkline.core.identity import ScopeKind
from trunkline.core.principals import Principal, Role

SECRET_HASH_BYTES = 32
KEY_TEXT_BYTES = 3 + 16 + 1 + 43
"""`pk_`, an id, `_`, a secret."""
KEY_PREFIX = b"pk_"
"""What the text of every API key begins with."""

MAX_KEYS = 100_000
"""Keys in one book, revoked ones included. A change copies the book: 3 ms for so many."""

MAX_NAME_BYTES = 256
"""Of a user's name, in UTF-8."""

SecretHash: TypeAlias = Callable[[bytes], bytes]
"""A secret's text -> 32 bytes, under the pepper."""

RandomBytes: TypeAlias = Callable[[int], bytes]
"""So many bytes of chance that nobody can guess: the system's, or a seeded one in tests."""

_KEY_ID_BYTES = 8
_SECRET_BYTES = 32
_KEY_TEXT = re.compile(rb"pk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_NO_SECRET = b"-" * 43
_NO_HASH = bytes(SECRET_HASH_BYTES)


class CredentialProblem(Enum):
    """Why a credential was refused. Operators count them; a client never learns which it was."""

    MISSING = "missing"
    MALFORMED = "malformed"
    """Neither a key nor a token by its shape, or too long to be one."""
    UNKNOWN = "unknown"
    """No such key id, no such `kid`."""
    WRONG = "wrong"
    """The secret or the signature does not match."""
    EARLY = "early"
    EXPIRED = "expired"
    REVOKED = "revoked"
    ALGORITHM = "algorithm"
    """A token's algorithm is not among the pinned ones, or not one of its key."""
    ISSUER = "issuer"
    AUDIENCE = "audience"
    CLAIMS = "claims"
    """A claim is missing or out of shape."""
    TENANT = "tenant"
    """A token names no tenant, or one that does not exist."""
    LIMITED = "limited"
    """Too many wrong tokens from one address: its signature was not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A credential that was found good, and until when that may be believed."""

    principal: Principal
    not_before_ms: float = 0.0
    """Wall time since 1970, in milliseconds; so for `not_after_ms`, the first bad moment."""
    not_after_ms: float = float("inf")

    def is_good_at(self, now_ms: float) -> bool:
        return self.not_before_ms <= now_ms < self.not_after_ms


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
    default_scope: ScopeKind = ScopeKind.TENANT
    secret_hash: bytes = field(repr=False)
    """BLAKE2b-256 of the secret under the pepper."""
    is_revoked: bool = False

    def __post_init__(self) -> None:
        if not _KEY_ID.fullmatch(self.key_id):
            raise ValueError(f"key id {self.key_id[:40]!r} is not 16 hex digits")
        if not self.org or not self.tenant:
            raise ValueError(f"key {self.key_id} names no organisation or no tenant")
        if self.user and not is_name(self.user):
            raise ValueError(f"the user of key {self.key_id} is too long or not printable")
        if self.default_scope is ScopeKind.PUBLIC:
            raise ValueError(f"no key has {self.default_scope.value} as its scope")
        if len(self.secret_hash) != SECRET_HASH_BYTES:
            raise ValueError(f"the hash of key {self.key_id} has {len(self.secret_hash)} bytes")
        if self.not_after_ms is not None and self.not_after_ms <= self.not_before_ms:
            raise ValueError(f"key {self.key_id} ends before it begins")

    def principal(self) -> Principal:
        return Principal(
            org=self.org,
            tenant=self.tenant,
            user=self.user,
            actor=self.key_id,
            auth_method="key",
            roles=self.roles,
            models=self.models,
            adapters=self.adapters,
            key_class=self.key_class,
            default_scope=self.default_scope,
        )


def is_name(text: str) -> bool:
    """Whether this may stand in a log line and in the path of a `Subject`."""
    return bool(text) and text.isprintable() and len(text.encode()) <= MAX_NAME_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key that was just drawn. `text` is shown once, to whom it is for, and kept nowhere."""

    key_id: str
    text: str = field(repr=False)
    secret_hash: bytes = field(repr=False)


def draw_key(random_bytes: RandomBytes, hash_secret: SecretHash) -> NewKey:
    """A new key: an id of 64 bits and a secret of 256. Raises ValueError for a poor source."""
    key_id = _drawn(random_bytes, _KEY_ID_BYTES).hex()
    secret = base64.urlsafe_b64encode(_drawn(random_bytes, _SECRET_BYTES)).rstrip(b"=")
    text = f"pk_{key_id}_{secret.decode('ascii')}"
    return NewKey(key_id=key_id, text=text, secret_hash=hash_secret(secret))


def secret_hash_under(pepper: bytes) -> SecretHash:
    """BLAKE2b-256 keyed with a pepper of 32 to 64 bytes. Raises ValueError for another length."""
    if not 32 <= len(pepper) <= 64:
        raise ValueError(f"the pepper has {len(pepper)} bytes, needed are 32 to 64")

    def hash_secret(secret: bytes) -> bytes:
        return hashlib.blake2b(
            secret, digest_size=SECRET_HASH_BYTES, key=pepper, person=b"api-key"
        ).digest()

    return hash_secret


class KeyBook:
    """All API keys at one moment. Immutable: a change makes another book, swapped in as a whole."""

    __slots__ = ("_records",)

    def __init__(self, records: Iterable[KeyRecord] = ()) -> None:
        """Raises ValueError for two records of one id, or more than `MAX_KEYS`."""
        self._records: dict[str, KeyRecord] = {}
        for record in records:
            if record.key_id in self._records:
                raise ValueError(f"two keys have the id {record.key_id}")
            self._records[record.key_id] = record
        if len(self._records) > MAX_KEYS:
            raise ValueError(f"{len(self._records)} keys, at most {MAX_KEYS}")

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[KeyRecord]:
        """In the order they were made."""
        return iter(self._records.values())

    def get(self, key_id: str) -> KeyRecord | None:
        return self._records.get(key_id)

    def replaced(self, record: KeyRecord) -> KeyBook:
        """A book with this record added, or in the place of the one with its id."""
        book = KeyBook()
        book._records = {**self._records, record.key_id: record}
        if len(book) > MAX_KEYS:
            raise ValueError(f"{len(book)} keys, at most {MAX_KEYS}")
        return book

    def check(
        self, given: bytes, hash_secret: SecretHash, now_ms: float
    ) -> Credential | CredentialProblem:
        """What this text of a key proves at this wall time.

        One hash and one comparison whatever is given: text that is no key (of any length, in any
        alphabet) and unknown ids are held against a dummy, and what else is wrong with a key is
        looked at only behind the right secret.
        """
        shape = _KEY_TEXT.fullmatch(given)
        record = None if shape is None else self._records.get(shape[1].decode("ascii"))
        secret = _NO_SECRET if shape is None else shape[2]
        wanted = _NO_HASH if record is None else record.secret_hash
        is_same = hmac.compare_digest(hash_secret(secret), wanted)
        if shape is None:
            return CredentialProblem.MALFORMED
        if record is None:
            return CredentialProblem.UNKNOWN
        if not is_same:
            return CredentialProblem.WRONG
        return _judged(record, now_ms)


def _judged(record: KeyRecord, now_ms: float) -> Credential | CredentialProblem:
    """What else may be wrong with a key whose secret is right."""
    if record.is_revoked:
        return CredentialProblem.REVOKED
    if now_ms < record.not_before_ms:
        return CredentialProblem.EARLY
    not_after_ms = float("inf") if record.not_after_ms is None else record.not_after_ms
    if now_ms >= not_after_ms:
        return CredentialProblem.EXPIRED
    return Credential(
        principal=record.principal(),
        not_before_ms=record.not_before_ms,
        not_after_ms=not_after_ms,
    )


def _drawn(random_bytes: RandomBytes, count: int) -> bytes:
    drawn = random_bytes(count)
    if len(drawn) != count or len(set(drawn)) == 1:
        raise ValueError(
            f"a source of chance gave {len(drawn)} bytes of {count}, or all equal ones"
        )
    return drawn
