"""Who may reuse a block, and of what: scope + everything that changes KV + epochs = namespace.

A namespace is derived from the *authenticated* principal and the model's revision; nothing a client
writes takes part. From it, and a root secret, come the key of the block chain, the tag that may be
logged, and the salt that fences a stock engine. Raising any epoch changes all of them at once.

Must never: accept a namespace part from a client, or hand out `key` to a log. Read `keys.py` next.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from dataclasses import dataclass, field, fields
from enum import Enum

from trunkline.core.records import NamespaceTag

DIGEST_BYTES = 32
TAG_BYTES = 16
_DESCRIPTION_TAG = b"pkv-ns-v1"


class ScopeKind(Enum):
    """Who may hit a block. `NONE` means that blocks are inserted nowhere."""

    NONE = "none"
    SESSION = "session"
    USER = "user"
    TENANT = "tenant"
    ORG = "org"
    PUBLIC = "public"


_REQUIRED_PARTS: dict[ScopeKind, tuple[str, ...]] = {
    ScopeKind.NONE: (),
    ScopeKind.SESSION: ("org", "tenant", "user", "session"),
    ScopeKind.USER: ("org", "tenant", "user"),
    ScopeKind.TENANT: ("org", "tenant"),
    ScopeKind.ORG: ("org",),
    ScopeKind.PUBLIC: ("public_id",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One reuse scope: `session < user < tenant < org`, or `public/<id>`.

    Raises ValueError when a part that the kind needs is empty, or a part that it excludes is given:
    a tenant scope that names a user would silently be narrower than it says.
    """

    kind: ScopeKind
    org: str = ""
    tenant: str = ""
    user: str = ""
    session: str = ""
    public_id: str = ""

    def __post_init__(self) -> None:
        required = _REQUIRED_PARTS[self.kind]
        for part in ("org", "tenant", "user", "session", "public_id"):
            is_given = bool(getattr(self, part))
            if is_given != (part in required):
                verb = "needs" if part in required else "excludes"
                raise ValueError(f"scope {self.kind.value} {verb} {part}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Everything about a model and its serving that changes KV, as ids and digests."""

    model_id: str
    block_tokens: int
    weights_digest: str = ""
    adapter_digest: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""
    rope_attn_digest: str = ""
    kv_dtype_quant: str = ""
    mm_processor_digest: str = ""
    engine_kv_format: str = ""

    def __post_init__(self) -> None:
        if not self.model_id:
            raise ValueError("model_id is empty")
        if not 1 <= self.block_tokens <= 65_536:
            raise ValueError(f"block_tokens is {self.block_tokens}, allowed are 1 to 65536")


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """One counter for each revocable part of a scope path; 0 where a part is absent."""

    fleet: int = 0
    org: int = 0
    tenant: int = 0
    user: int = 0
    key_class: int = 0
    public: int = 0
    model: int = 0
    adapter: int = 0

    def packed(self) -> bytes:
        """The eight counters as little-endian u64. Raises ValueError outside 0..2**64-1."""
        values = [getattr(self, f.name) for f in fields(self)]
        if any(not 0 <= value < 2**64 for value in values):
            raise ValueError(f"an epoch is outside 0..2**64-1: {self}")
        return struct.pack("<8Q", *values)


# Canonical field ids. They are part of the wire contract: never renumber, only append.
_FIELD_IDS: dict[str, int] = {
    "scope_kind": 1,
    "org": 2,
    "tenant": 3,
    "user": 4,
    "session": 5,
    "public_id": 6,
    "model_id": 7,
    "weights_digest": 8,
    "adapter_digest": 9,
    "tokenizer_digest": 10,
    "template_digest": 11,
    "rope_attn_digest": 12,
    "kv_dtype_quant": 13,
    "block_tokens": 14,
    "mm_processor_digest": 15,
    "engine_kv_format": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """One reuse domain, with the secrets derived for it.

    `key` (32 bytes) keys the block chain and is a secret; `root` (32 bytes) is the chain value
    before the first block; `tag` (16 bytes) may be logged; `salt` (43 URL-safe characters) goes to
    the engine.
    """

    scope: Scope
    model: ModelIdentity
    epochs: Epochs
    key: bytes = field(repr=False)
    root: bytes = field(repr=False)
    tag: NamespaceTag
    salt: str = field(repr=False)


def derive_namespace(
    root_key: bytes, scope: Scope, model: ModelIdentity, epochs: Epochs | None = None
) -> Namespace:
    """Derive the namespace of a scope and a model under a root secret of 32 to 64 bytes.

    The description is tagged and length-prefixed with no optional elision, so that ("org_1",
    "2345") never meets ("org_12345", ""). Raises ValueError for a short root key or an out-of-range
    epoch.
    """
    if not 32 <= len(root_key) <= 64:
        raise ValueError(f"root key has {len(root_key)} bytes, needed are 32 to 64")
    known_epochs = epochs or Epochs()
    key = _keyed(root_key, b"ns", _describe(scope, model) + known_epochs.packed())
    tag = hashlib.blake2b(digest_size=TAG_BYTES, key=key, person=b"tag").digest()
    salt = base64.urlsafe_b64encode(_keyed(key, b"salt", b"")).rstrip(b"=").decode("ascii")
    return Namespace(
        scope=scope,
        model=model,
        epochs=known_epochs,
        key=key,
        root=_keyed(key, b"root", b""),
        tag=NamespaceTag(tag),
        salt=salt,
    )


def _describe(scope: Scope, model: ModelIdentity) -> bytes:
    values: dict[str, str] = {"scope_kind": scope.kind.value}
    for part in ("org", "tenant", "user", "session", "public_id"):
        values[part] = getattr(scope, part)
    for model_field in fields(model):
        values[model_field.name] = str(getattr(model, model_field.name))
    assert values.keys() == _FIELD_IDS.keys()
    out = [_DESCRIPTION_TAG]
    for name, field_id in sorted(_FIELD_IDS.items(), key=lambda item: item[1]):
        encoded = values[name].encode("utf-8")
        out.append(struct.pack("<HI", field_id, len(encoded)) + encoded)
    return b"".join(out)


def _keyed(key: bytes, person: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=key, person=person).digest()
