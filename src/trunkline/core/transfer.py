"""One pull of KV blocks from another worker: how its blocks are named, what allows it, how it ends.

    gateway      names blocks (`kv_chain`) and signs a `Grant`: these keys, from here to there, once
    source       reads the grant, serves it one time (`UsedGrants`)
    destination  takes chunks in order (`Arrival`), each verified, and publishes whole blocks

A kv key names tokens, namespace and epochs, as the salt that keys the chain names the latter two.
Whoever has the fleet's transfer key can sign grants: workers and gateways have it, nobody else.

Must never: read a clock, draw a nonce, or let a grant be used twice. `kv/wire.py` is how it looks
on the wire.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import heapq
import hmac
import struct
from array import array
from dataclasses import dataclass, field
from enum import Enum

from trunkline.core.identity import DIGEST_BYTES, TAG_BYTES
from trunkline.core.records import Instant
from trunkline.native import chain_keys

KV_KEY_BYTES = DIGEST_BYTES
LAYOUT_BYTES = 16
NONCE_BYTES = 16
TRANSFER_KEY_BYTES = 32

MAX_GRANT_BYTES = 8_192
"""Eight subjects of 512 bytes, two workers' names, and the rest."""
MAX_ORDER_BYTES = 16_384
"""Of the header that orders a pull: the longest grant as text, the longest names and an address; of
usual lengths, for two sources.
"""
MAX_GRANT_BLOCKS = 4_096
MAX_NAME_BYTES = 256
MAX_SUBJECTS = 8
MAX_GRANT_LIFE_MS = 60_000
"""A grant that ends later than this is refused: its nonce would have to be kept so long."""
MAX_USED_GRANTS = 65_536
"""Used nonces kept at a source. At the bound no grant is taken until the first of them ends."""

_KV_ROOT = hashlib.blake2b(b"", digest_size=DIGEST_BYTES, person=b"tl-kv-root").digest()


class PullEnd(Enum):
    """How a pull ended. Each ends exactly once."""

    PUBLISHED = "published"
    """At least one block was verified and is visible. A reason beside it says why not all."""
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class Lesson(Enum):
    """What the end of a pull says about the source's blocks."""

    REMOVE = "remove"
    """It does not have them: the entry goes."""
    QUARANTINE = "quarantine"
    """Its bytes are wrong: alarm, and nobody pulls these from it."""
    UNKNOWN = "unknown"
    """Nothing about what it has. Never taken for absent."""


class Reason(Enum):
    """Why blocks did not become visible, or not all of them."""

    MISS = "miss"
    """The source does not have the block."""
    LENGTH = "length"
    """The source's block is empty, short or long: it is none."""
    DIGEST = "digest"
    """Bytes that are not those the source announced."""
    TIMEOUT = "timeout"
    """Less than a chunk in the time for one, or the deadline."""
    CONNECT = "connect"
    """Nobody answers there."""
    LOST = "lost"
    """The connection ended in the middle."""
    NS = "ns"
    """Another namespace's block."""
    CHAIN = "chain"
    """Not the block after the one before it, or that one is not here."""
    LAYOUT = "layout"
    """Another model, revision, layout or scheme of keys."""
    GRANT = "grant"
    """The grant is not genuine, is over or used, or is for something else."""
    EPOCH = "epoch"
    """Revoked or invalidated."""
    LEASE = "lease"
    """A worker may reuse nothing: it has no lease, or has not seen a change that concerns this."""
    INCARNATION = "incarnation"
    """Another life of the worker, or another worker, than the one that was meant."""
    STAGING_FULL = "staging-full"
    """No room for bytes that are not verified yet."""
    FULL = "full"
    """No room for the blocks: nothing may give way."""
    PINS_FULL = "pins-full"
    """As many blocks are held as may be."""
    BUSY = "busy"
    """As many pulls as there may be."""
    CONFLICT = "conflict"
    """Other bytes are here under the same key: an alarm, the first stay."""
    TOKEN = "token"
    """A token that was used, whose time is over, or that was never given."""
    TIER = "tier"
    """It lies in a tier that did not answer in time, or was not asked."""
    PROTOCOL = "protocol"
    """The peer does not keep to the protocol."""
    GIVEN_UP = "given-up"
    """Computing the rest became cheaper than waiting for it."""
    CLIENT = "client"
    """Whoever wanted the blocks went away."""
    CLOSING = "closing"
    """This worker, or the other one, ends."""

    @property
    def lesson(self) -> Lesson:
        """What the directory learns about the source."""
        if self in (Reason.MISS, Reason.LENGTH):
            return Lesson.REMOVE
        return Lesson.QUARANTINE if self is Reason.DIGEST else Lesson.UNKNOWN

    @property
    def is_of_source(self) -> bool:
        """Whether, of a source that was asked, it says nothing about who asked: another source may
        well give the blocks.
        """
        return self in _SOURCES_FAULT


_SOURCES_FAULT = frozenset(
    {
        *(Reason.MISS, Reason.LENGTH, Reason.DIGEST, Reason.TIMEOUT, Reason.CONNECT, Reason.LOST),
        *(Reason.INCARNATION, Reason.PROTOCOL, Reason.BUSY, Reason.PINS_FULL, Reason.TOKEN),
        Reason.TIER,
    }
)


# -- keys ------------------------------------------------------------------------------------------


def kv_chain(
    salt: str, tokens: array[int], block_tokens: int, parent: bytes | None = None
) -> bytes:
    """The kv keys of the full blocks of `tokens` (u32), 32 bytes each, packed first to last.

    `parent` is the last key of what goes before: a zone under another salt goes on after it. The
    last key of a run names everything before it. Raises ValueError for an empty salt, which would
    be everybody's, and for wrong sizes.
    """
    if not salt:
        raise ValueError("kv keys need a salt")
    named = salt.encode("utf-8", "surrogatepass")
    key = hashlib.blake2b(named, digest_size=DIGEST_BYTES, person=b"tl-kv-salt").digest()
    return chain_keys(key, _KV_ROOT if parent is None else parent, tokens, block_tokens)


def hash_scheme(block_tokens: int) -> bytes:
    """Fingerprint of how kv keys are made: workers that differ in it do not pair."""
    told = b"kv_chain 1 blake2b-256 u32le %d" % block_tokens
    return hashlib.blake2b(told, digest_size=LAYOUT_BYTES, person=b"tl-kv-scheme").digest()


def keys_digest(packed_keys: bytes) -> bytes:
    """What a grant binds a run of packed kv keys by."""
    return hashlib.blake2b(packed_keys, digest_size=DIGEST_BYTES, person=b"tl-kv-keys").digest()


# -- grants ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """These blocks, from this life of one worker to this life of another, once, until then.

    Raises ValueError for what no grant can be.
    """

    source: str
    source_incarnation: str
    destination: str
    destination_incarnation: str
    ns: bytes
    subjects: tuple[str, ...]
    """What the namespace depends on and can be revoked, and beside it the epoch of each."""
    epochs: tuple[int, ...]
    rev: int
    """What either worker must have seen of the registry."""
    layout: bytes
    first_block: int
    block_count: int
    keys: bytes
    """`keys_digest` of the kv keys. Not the last key alone: a source that lacks it could not tell
    whether those it has lead to it.
    """
    max_bytes: int
    deadline_ms: int
    """Wall clock, milliseconds since 1970."""
    nonce: bytes = field(repr=False)

    def __post_init__(self) -> None:
        names = [self.source, self.source_incarnation]
        names += [self.destination, self.destination_incarnation]
        if not all(0 < len(name.encode()) <= MAX_NAME_BYTES for name in names):
            raise ValueError("a worker or an incarnation has no name, or one that is too long")
        sizes = [(self.ns, TAG_BYTES), (self.layout, LAYOUT_BYTES)]
        sizes += [(self.keys, DIGEST_BYTES), (self.nonce, NONCE_BYTES)]
        if any(len(value) != size for value, size in sizes):
            raise ValueError("a namespace, layout, key or nonce of a wrong size")
        if len(self.subjects) != len(self.epochs) or len(self.subjects) > MAX_SUBJECTS:
            raise ValueError(f"{len(self.subjects)} subjects with {len(self.epochs)} epochs")
        if not 1 <= self.block_count <= MAX_GRANT_BLOCKS:
            raise ValueError(f"{self.block_count} blocks, allowed are 1 to {MAX_GRANT_BLOCKS}")
        numbers = (*self.epochs, self.rev, self.first_block, self.max_bytes, self.deadline_ms)
        if any(not 0 <= number < 2**64 for number in numbers):
            raise ValueError("a number is outside 0..2**64-1")

    def covers(self, packed_keys: bytes) -> bool:
        """Whether it is for exactly these kv keys."""
        is_long_enough = len(packed_keys) == self.block_count * KV_KEY_BYTES
        return is_long_enough and hmac.compare_digest(keys_digest(packed_keys), self.keys)

    def signed(self, transfer_key: bytes) -> str:
        """The grant as base64url text, authenticated. Raises ValueError where it is too long."""
        body = _encoded(self)
        token = body + seal(transfer_key, b"grant", body)
        if len(token) > MAX_GRANT_BYTES:
            raise ValueError(f"a grant of {len(token)} bytes, at most {MAX_GRANT_BYTES}")
        return base64.urlsafe_b64encode(token).rstrip(b"=").decode("ascii")


def read_grant(text: str, transfer_key: bytes) -> Grant | None:
    """What `signed` made; None for anything else, be it forged, damaged or of another key."""
    if len(text) > (MAX_GRANT_BYTES * 4 + 2) // 3:
        return None
    try:
        token = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    body, mac = token[:-DIGEST_BYTES], token[-DIGEST_BYTES:]
    if not hmac.compare_digest(seal(transfer_key, b"grant", body), mac):
        return None
    try:
        grant = _decoded(body)
    except (ValueError, struct.error):
        return None
    return grant if _encoded(grant) == body else None


def seal(transfer_key: bytes, purpose: bytes, data: bytes) -> bytes:
    """Keyed BLAKE2b-256 of `data`. What is made for one purpose is worth nothing for another."""
    assert len(transfer_key) == TRANSFER_KEY_BYTES, len(transfer_key)
    assert 0 < len(purpose) <= 13, purpose
    return hashlib.blake2b(
        data, digest_size=DIGEST_BYTES, key=transfer_key, person=b"tl-" + purpose
    ).digest()


class UsedGrants:
    """The nonces that a source has served, each until its grant is over. Of one life of a source:
    the next one has another incarnation, and refuses them for that.
    """

    __slots__ = ("_by_end", "_capacity", "_nonces")

    def __init__(self, capacity: int = MAX_USED_GRANTS) -> None:
        assert capacity > 0, capacity
        self._capacity = capacity
        self._nonces: set[bytes] = set()
        self._by_end: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._nonces)

    def use(self, grant: Grant, now_ms: float) -> Reason | None:
        """Use it up; why not, where it is over, used or unreasonably long, or nothing more fits."""
        while self._by_end and self._by_end[0][0] <= now_ms:
            self._nonces.remove(heapq.heappop(self._by_end)[1])
        if not now_ms < grant.deadline_ms <= now_ms + MAX_GRANT_LIFE_MS:
            return Reason.GRANT
        if grant.nonce in self._nonces:
            return Reason.GRANT
        if len(self._nonces) >= self._capacity:
            return Reason.BUSY
        self._nonces.add(grant.nonce)
        heapq.heappush(self._by_end, (grant.deadline_ms, grant.nonce))
        return None


# -- arrival ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The one chunk that may come next."""

    block: int
    offset_bytes: int
    length_bytes: int


class Arrival:
    """What a destination expects of one pull: each chunk once, in order, in time.

    Only whole blocks count, and only those before the first that is not verified.
    """

    __slots__ = (
        *("_block_bytes", "_block_count", "_chunk_bytes", "_deadline", "_due_at"),
        *("_offset_bytes", "_stall_ms", "whole_blocks"),
    )

    def __init__(
        self,
        *,
        block_count: int,
        block_bytes: int,
        chunk_bytes: int,
        stall_ms: float,
        deadline: Instant,
        now: Instant,
    ) -> None:
        assert block_count > 0, block_count
        assert block_bytes > 0, block_bytes
        assert chunk_bytes > 0, chunk_bytes
        self._block_count = block_count
        self._block_bytes = block_bytes
        self._chunk_bytes = chunk_bytes
        self._stall_ms = stall_ms
        self._deadline = deadline
        self._offset_bytes = 0
        self._due_at = min(deadline, Instant(now + stall_ms))
        self.whole_blocks = 0

    @property
    def is_complete(self) -> bool:
        return self.whole_blocks == self._block_count

    @property
    def verified_bytes(self) -> int:
        return self.whole_blocks * self._block_bytes + self._offset_bytes

    @property
    def rest_bytes(self) -> int:
        return self._block_count * self._block_bytes - self.verified_bytes

    @property
    def due_at(self) -> Instant:
        """When the expected chunk must have been verified."""
        return self._due_at

    def expected(self) -> Expected:
        assert not self.is_complete, "nothing more is to come"
        length = min(self._chunk_bytes, self._block_bytes - self._offset_bytes)
        return Expected(
            block=self.whole_blocks, offset_bytes=self._offset_bytes, length_bytes=length
        )

    def fault(self, block: int, offset_bytes: int, length_bytes: int) -> Reason | None:
        """What is wrong with a chunk that announces itself as this one."""
        if self.is_complete:
            return Reason.PROTOCOL
        wanted = self.expected()
        if (block, offset_bytes) != (wanted.block, wanted.offset_bytes):
            return Reason.PROTOCOL
        return None if length_bytes == wanted.length_bytes else Reason.LENGTH

    def is_late(self, now: Instant) -> bool:
        return now >= self._due_at

    def verified(self, now: Instant) -> None:
        """The expected chunk is there and its digest is right."""
        self._offset_bytes += self.expected().length_bytes
        if self._offset_bytes == self._block_bytes:
            self._offset_bytes = 0
            self.whole_blocks += 1
        self._due_at = min(self._deadline, Instant(now + self._stall_ms))


# -- encoding --------------------------------------------------------------------------------------

_GRANT_TAG = b"tl-kv-grant-1"
_FIELD = struct.Struct("<HI")

# Ids are part of the wire contract: never renumber, only append.
_TEXTS = {1: "source", 2: "source_incarnation", 3: "destination", 4: "destination_incarnation"}
_BYTES = {5: "ns", 6: "layout", 7: "keys", 8: "nonce"}
_NUMBERS = {9: "rev", 10: "first_block", 11: "block_count", 12: "max_bytes", 13: "deadline_ms"}
_SUBJECT, _EPOCH = 14, 15


def _encoded(grant: Grant) -> bytes:
    """Tagged and length-prefixed, in the order of the ids: two grants never encode alike."""
    parts: list[tuple[int, bytes]] = [(i, getattr(grant, n).encode()) for i, n in _TEXTS.items()]
    parts += [(i, getattr(grant, name)) for i, name in _BYTES.items()]
    parts += [(i, struct.pack("<Q", getattr(grant, name))) for i, name in _NUMBERS.items()]
    for subject, epoch in zip(grant.subjects, grant.epochs, strict=True):
        parts += [(_SUBJECT, subject.encode()), (_EPOCH, struct.pack("<Q", epoch))]
    fields_bytes = (_FIELD.pack(field_id, len(value)) + value for field_id, value in parts)
    return _GRANT_TAG + b"".join(fields_bytes)


def _decoded(body: bytes) -> Grant:
    """Raises ValueError or struct.error; what is not canonical shows when it is encoded again."""
    if not body.startswith(_GRANT_TAG):
        raise ValueError("no grant of this version")
    texts: dict[str, str] = {}
    raw: dict[str, bytes] = {}
    numbers: dict[str, int] = {}
    subjects: list[str] = []
    epochs: list[int] = []
    at = len(_GRANT_TAG)
    while at < len(body):
        field_id, length = _FIELD.unpack_from(body, at)
        at += _FIELD.size
        value = body[at : at + length]
        at += length
        if field_id in _TEXTS:
            texts[_TEXTS[field_id]] = value.decode()
        elif field_id in _BYTES:
            raw[_BYTES[field_id]] = value
        elif field_id in _NUMBERS:
            numbers[_NUMBERS[field_id]] = struct.unpack("<Q", value)[0]
        elif field_id == _SUBJECT:
            subjects.append(value.decode())
        elif field_id == _EPOCH:
            epochs.append(struct.unpack("<Q", value)[0])
        else:
            raise ValueError(f"unknown field {field_id}")
    if len(texts) + len(raw) + len(numbers) != len(_TEXTS) + len(_BYTES) + len(_NUMBERS):
        raise ValueError("a field is missing")
    return Grant(
        source=texts["source"],
        source_incarnation=texts["source_incarnation"],
        destination=texts["destination"],
        destination_incarnation=texts["destination_incarnation"],
        ns=raw["ns"],
        layout=raw["layout"],
        keys=raw["keys"],
        nonce=raw["nonce"],
        rev=numbers["rev"],
        first_block=numbers["first_block"],
        block_count=numbers["block_count"],
        max_bytes=numbers["max_bytes"],
        deadline_ms=numbers["deadline_ms"],
        subjects=tuple(subjects),
        epochs=tuple(epochs),
    )
