"""What the registry's log holds: one typed record for each change, with who wanted it and why.

The records are a contract with logs that exist: fields and tags are only ever added. Must never:
hold a key's secret, or be read with anything but strict decoding. Read `book.py` next, for what
each change does.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from trunkline.core.publics import MAX_PREFIX_TOKENS

MAX_PUBLIC_TOKENS = MAX_PREFIX_TOKENS
# A public prefix of the longest allowed length, four bytes a token, and its words.
MAX_ENTRY_BYTES = 4 * MAX_PUBLIC_TOKENS + 65_536

Id: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""128 random bits in hex; never used again."""
Name: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
Word: TypeAlias = Annotated[str, Meta(max_length=512)]
SubjectName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=600)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Rate: TypeAlias = Annotated[float, Meta(gt=0, le=1e12)]
WallMs: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
ScopeName: TypeAlias = Literal["none", "session", "user", "tenant", "org"]


class Intent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who wanted a change, how that was known, and why. Never a secret."""

    actor: Annotated[str, Meta(min_length=1, max_length=512)]
    auth_method: Word = ""
    source: Word = ""
    request_id: Word = ""
    reason: Word = ""
    wall_ms: WallMs = 0


class OrgAdded(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="org-added"
):
    org: Id
    name: Name


class OrgRemoved(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="org-removed"
):
    """Only without tenants, and revoked before."""

    org: Id


class OrgPolicySet(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="org-policy"
):
    org: Id
    is_shared: bool
    """The organisation allows its tenants to share, where they opt in as well."""


class TenantAdded(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tenant-added"
):
    tenant: Id
    org: Id
    name: Name


class TenantRemoved(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tenant-removed"
):
    """Only when revoked before. Its keys are revoked with it."""

    tenant: Id


class TenantPolicySet(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tenant-policy"
):
    """The whole policy: what is not given is back at its default. None is no limit."""

    tenant: Id
    default_scope: ScopeName = "tenant"
    is_shared: bool = False
    """The tenant opts in to sharing inside its organisation."""
    requests_per_s: Rate | None = None
    tokens_per_s: Rate | None = None
    cache_floor_bytes: Count = 0
    cache_cap_bytes: Count | None = None
    weight: Annotated[float, Meta(gt=0, le=1_000)] = 1.0
    priority: Literal["low", "normal", "high"] = "normal"


class KeyAdded(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="key-added"
):
    """`core.credentials.KeyRecord` as it is written; see there."""

    key_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    org: Id
    tenant: Id
    user: Word = ""
    roles: tuple[Word, ...] = ("tenant.user",)
    models: tuple[Word, ...] | None = None
    adapters: tuple[Word, ...] | None = None
    not_before_ms: WallMs = 0
    not_after_ms: WallMs | None = None
    key_class: Word = ""
    default_scope: ScopeName = "tenant"
    secret_hash: Annotated[bytes, Meta(min_length=32, max_length=32)]


class KeyRevoked(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="key-revoked"
):
    key_id: Word


class EpochRaised(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="epoch-raised"
):
    """`subject` is the text of a `Subject`, ids and no names; an epoch is at most its revision."""

    subject: SubjectName
    epoch: Annotated[int, Meta(ge=1, le=2**53)]
    verb: Literal["revoke", "invalidate"]
    bars: bool
    """New requests are refused until it is enabled again."""


class SubjectEnabled(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="subject-enabled"
):
    subject: SubjectName


class PublicProposed(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="public-proposed"
):
    """A prefix for all of an audience. The actor of the intent is the proposer."""

    public_id: Id
    name: Name
    owner: Id
    """The organisation that answers for it."""
    tokens: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_PUBLIC_TOKENS)]
    """Little-endian u32."""
    token_digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    block_tokens: Annotated[int, Meta(ge=1, le=65_536)]
    model_id: Annotated[str, Meta(min_length=1, max_length=512)]
    weights_digest: Word = ""
    tokenizer_digest: Word = ""
    template_digest: Word = ""
    audience: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=10_000)] | None
    """Ids of organisations; None for all."""
    not_after_ms: WallMs


class PublicApproved(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="public-approved"
):
    """One approval. The actor of the intent is the approver; two different ones are needed."""

    public_id: Id


class PublicWithdrawn(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="public-withdrawn"
):
    public_id: Id


class RevisionLost(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="revision-lost"
):
    """Stands where a restored backup has forgotten a change, so that revisions never fall."""


Change: TypeAlias = (
    OrgAdded
    | OrgRemoved
    | OrgPolicySet
    | TenantAdded
    | TenantRemoved
    | TenantPolicySet
    | KeyAdded
    | KeyRevoked
    | EpochRaised
    | SubjectEnabled
    | PublicProposed
    | PublicApproved
    | PublicWithdrawn
    | RevisionLost
)

_TAKING = (
    OrgRemoved,
    TenantRemoved,
    KeyRevoked,
    EpochRaised,
    PublicWithdrawn,
    RevisionLost,
)


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One record of the log: the change and its intent, durable together."""

    change: Change
    intent: Intent


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry, strict=True)


def encode_entry(entry: Entry) -> bytes:
    """The record's bytes, proven to be readable. Raises ValueError for fields out of range."""
    record = _encoder.encode(entry)
    if len(record) > MAX_ENTRY_BYTES:
        raise ValueError(f"a record of {len(record)} bytes, at most {MAX_ENTRY_BYTES}")
    if decode_entry(record) != entry:
        raise ValueError("a record that would be read back as another one")
    return record


def decode_entry(record: bytes) -> Entry:
    """Strict: raises ValueError for an unknown tag or field, or one out of range."""
    try:
        return _decoder.decode(record)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def widens(change: Change) -> bool:
    """Whether it grants anything. What only takes away goes on without an audit log."""
    return not isinstance(change, _TAKING)


def name_of(change: Change) -> str:
    """The record's tag: `key-added`, `epoch-raised`."""
    return str(change.__struct_config__.tag)
