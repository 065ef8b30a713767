"""Namespaces: pinned against a second writing of the derivation, and mutated in every part."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.identity import (
    Epochs,
    ModelIdentity,
    Namespace,
    Scope,
    ScopeKind,
    derive_namespace,
)
from trunkline.core.keys import as_tokens, chain

ROOT_KEY = bytes(range(32))
SCOPE = Scope(kind=ScopeKind.SESSION, org="acme", tenant="blue", user="ann", session="s1")
PUBLIC = Scope(kind=ScopeKind.PUBLIC, public_id="handbook")
MODEL = ModelIdentity(
    model_id="llama",
    block_tokens=16,
    weights_digest="w",
    adapter_digest="a",
    tokenizer_digest="t",
    template_digest="c",
    rope_attn_digest="r",
    kv_dtype_quant="bf16",
    mm_processor_digest="m",
    engine_kv_format="nhd",
)
FIELDS = [
    "scope_kind",
    "org",
    "tenant",
    "user",
    "session",
    "public_id",
    "model_id",
    "weights_digest",
    "adapter_digest",
    "tokenizer_digest",
    "template_digest",
    "rope_attn_digest",
    "kv_dtype_quant",
    "block_tokens",
    "mm_processor_digest",
    "engine_kv_format",
]
EPOCHS = ["fleet", "org", "tenant", "user", "key_class", "public", "model", "adapter"]


def by_definition(scope: Scope, model: ModelIdentity, epochs: tuple[int, ...]) -> dict[str, Any]:
    """The derivation, written a second time from its description."""

    def keyed(key: bytes, person: bytes, data: bytes, size: int = 32) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=key, person=person).digest()

    description = b"pkv-ns-v1"
    for number, name in enumerate(FIELDS, start=1):
        value = scope.kind.value if name == "scope_kind" else getattr(scope, name, None)
        text = str(getattr(model, name) if value is None else value).encode()
        description += number.to_bytes(2, "little") + len(text).to_bytes(4, "little") + text
    key = keyed(ROOT_KEY, b"ns", description + struct.pack("<8Q", *epochs))
    return {
        "key": key,
        "root": keyed(key, b"root", b""),
        "tag": keyed(key, b"tag", b"", size=16),
        "salt": base64.urlsafe_b64encode(keyed(key, b"salt", b"")).decode().rstrip("="),
    }


def secrets_of(namespace: Namespace) -> dict[str, Any]:
    return {name: getattr(namespace, name) for name in ("key", "root", "tag", "salt")}


def forged(scope: Scope, **parts: Any) -> Scope:
    """A scope that its constructor would refuse: one part changed, whatever the kind excludes."""
    made = object.__new__(Scope)
    for field in fields(Scope):
        object.__setattr__(made, field.name, parts.get(field.name, getattr(scope, field.name)))
    return made


def mutations() -> list[tuple[str, Namespace]]:
    """The base namespace, changed in each single part of 16 fields and 8 epochs."""
    made: list[tuple[str, Namespace]] = []
    for name in FIELDS:
        scope, model = SCOPE, MODEL
        if name == "scope_kind":
            scope = forged(SCOPE, kind=ScopeKind.USER)
        elif hasattr(SCOPE, name):
            scope = forged(SCOPE, **{name: getattr(SCOPE, name) + "x"})
        elif name == "block_tokens":
            model = replace(MODEL, block_tokens=32)
        else:
            model = replace(MODEL, **{name: getattr(MODEL, name) + "x"})
        made.append((name, derive_namespace(ROOT_KEY, scope, model)))
    for name in EPOCHS:
        epochs = replace(Epochs(), **{name: 1})
        made.append((f"epoch {name}", derive_namespace(ROOT_KEY, SCOPE, MODEL, epochs)))
    return made


def test_namespace_follows_its_definition() -> None:
    for scope in (SCOPE, PUBLIC):
        epochs = Epochs(fleet=1, org=2, tenant=3, user=4, key_class=5, public=6, model=7, adapter=8)
        found = secrets_of(derive_namespace(ROOT_KEY, scope, MODEL, epochs))
        assert found == by_definition(scope, MODEL, (1, 2, 3, 4, 5, 6, 7, 8))


def test_namespace_equals_the_pinned_vector() -> None:
    """A change of these values orphans every block of every running fleet."""
    scope = Scope(kind=ScopeKind.TENANT, org="acme", tenant="blue")
    namespace = derive_namespace(ROOT_KEY, scope, ModelIdentity(model_id="llama", block_tokens=16))
    assert namespace.key.hex() == "9ee4142600c2775466aa5a859da9fcfd763e39fde164d2a2c10a226f608c79fd"
    assert (
        namespace.root.hex() == "da7a4790b0088c1a3b5dd0e2d73e42208b93b380130b879a958f8d7d3b1d386c"
    )
    assert namespace.tag.hex() == "7fe43ec7f95ccab78affedd5a160f09c"
    assert namespace.salt == "QtkBvSB-vslAeMKGVF4EZIfSzBrpHkzdDkUNzt9Wfhw"


def test_the_lists_of_parts_here_are_complete() -> None:
    scope_parts = {field.name for field in fields(Scope)} - {"kind"} | {"scope_kind"}
    assert set(FIELDS) == scope_parts | {field.name for field in fields(ModelIdentity)}
    assert [field.name for field in fields(Epochs)] == EPOCHS
    assert len(mutations()) == 24


@pytest.mark.parametrize(("part", "changed"), mutations())
def test_each_single_part_changes_key_tag_salt_and_chain(part: str, changed: Namespace) -> None:
    """S7."""
    base = derive_namespace(ROOT_KEY, SCOPE, MODEL)
    for name, value in secrets_of(changed).items():
        assert value != getattr(base, name), (part, name)
    tokens = as_tokens(range(256))
    before, after = chain(base, tokens).packed, chain(changed, tokens).packed
    keys = {before[start : start + 32] for start in range(0, len(before), 32)}
    assert not keys & {after[start : start + 32] for start in range(0, len(after), 32)}


def test_all_mutations_differ_from_one_another() -> None:
    namespaces = [derive_namespace(ROOT_KEY, SCOPE, MODEL)] + [made for _, made in mutations()]
    for name in ("key", "root", "tag", "salt"):
        assert len({getattr(namespace, name) for namespace in namespaces}) == 25


def test_parts_are_framed_so_that_a_moved_boundary_is_another_namespace() -> None:
    """("org_1", "2345") must never meet ("org_12345", "")."""
    first = Scope(kind=ScopeKind.TENANT, org="org_1", tenant="2345")
    for second in (
        forged(first, org="org_12345", tenant=""),
        forged(first, org="org_12", tenant="345"),
        forged(first, org="", tenant="org_12345"),
        forged(first, org="org_1", tenant="", user="2345"),
    ):
        assert (
            derive_namespace(ROOT_KEY, first, MODEL).key
            != derive_namespace(ROOT_KEY, second, MODEL).key
        )


@given(st.lists(st.text(min_size=1, max_size=4), min_size=4, max_size=4), st.data())
def test_different_scopes_never_share_a_namespace(parts: list[str], data: st.DataObject) -> None:
    others = data.draw(st.permutations(parts))
    scopes = [
        Scope(kind=ScopeKind.SESSION, org=p[0], tenant=p[1], user=p[2], session=p[3])
        for p in (parts, others)
    ]
    tags = [derive_namespace(ROOT_KEY, scope, MODEL).tag for scope in scopes]
    assert (tags[0] == tags[1]) == (scopes[0] == scopes[1])


def test_salt_is_43_url_safe_characters() -> None:
    for _, namespace in mutations():
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", namespace.salt)


def test_another_root_key_is_another_world() -> None:
    base = derive_namespace(ROOT_KEY, SCOPE, MODEL)
    other = derive_namespace(bytes(32), SCOPE, MODEL)
    assert not set(secrets_of(base).values()) & set(secrets_of(other).values())
    for size in (0, 31, 65):
        with pytest.raises(ValueError, match=f"root key has {size} bytes"):
            derive_namespace(bytes(size), SCOPE, MODEL)


def test_a_scope_names_exactly_the_parts_of_its_kind() -> None:
    with pytest.raises(ValueError, match="scope tenant needs tenant"):
        Scope(kind=ScopeKind.TENANT, org="acme")
    with pytest.raises(ValueError, match="scope org excludes user"):
        Scope(kind=ScopeKind.ORG, org="acme", user="ann")
    with pytest.raises(ValueError, match="scope public needs public_id"):
        Scope(kind=ScopeKind.PUBLIC)


def test_epochs_and_block_sizes_have_bounds() -> None:
    for wrong in (-1, 2**64):
        with pytest.raises(ValueError, match="epoch is outside"):
            derive_namespace(ROOT_KEY, SCOPE, MODEL, Epochs(user=wrong))
    for wrong in (0, 65_537):
        with pytest.raises(ValueError, match="block_tokens"):
            replace(MODEL, block_tokens=wrong)
    with pytest.raises(ValueError, match="model_id is empty"):
        replace(MODEL, model_id="")


def test_secrets_stay_out_of_a_namespace_printed() -> None:
    namespace = derive_namespace(ROOT_KEY, SCOPE, MODEL)
    shown = repr(namespace)
    for secret in (namespace.key, namespace.root, namespace.salt):
        assert repr(secret) not in shown
        assert str(secret) not in shown
