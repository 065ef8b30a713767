"""The chain of block keys: pinned against a second writing of its definition, and attacked."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from array import array
from itertools import pairwise

import pytest

from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import KeyChain, as_tokens, chain

ROOT_KEY = bytes(range(32))
TENANT = Scope(kind=ScopeKind.TENANT, org="acme", tenant="blue")

# Two blocks of valid Llama-3 ids with one 64-bit MurmurHash3, d8056b59a143448a; see docs/adr/0001.
MURMUR_TAIL = [9125, 527, 264, 11190, 18328, 13, 5321, 389, 264, 4382, 2077]
MURMUR_A = [50189, 87, 59448, 44955, 1, *MURMUR_TAIL]
MURMUR_B = [38978, 5034, 45992, 48707, 1, *MURMUR_TAIL]


def namespace(block_tokens: int = 16, scope: Scope = TENANT) -> Namespace:
    model = ModelIdentity(model_id="llama", block_tokens=block_tokens)
    return derive_namespace(ROOT_KEY, scope, model)


def chain_by_definition(
    space: Namespace, tokens: list[int], block_tokens: int, extra: bytes = b""
) -> list[bytes]:
    """The formula of the module, written a second time and slowly."""
    keys: list[bytes] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        message = keys[-1] if keys else space.root
        message += block_tokens.to_bytes(4, "little")
        for token in tokens[start : start + block_tokens]:
            message += token.to_bytes(4, "little")
        message += len(extra).to_bytes(4, "little") + extra
        keys.append(hashlib.blake2b(message, digest_size=32, key=space.key, person=b"blk").digest())
    return keys


def keys_of(block_chain: KeyChain) -> list[bytes]:
    return [bytes(block_chain[index]) for index in range(len(block_chain))]


@pytest.mark.parametrize("block_tokens", [1, 7, 16, 22, 23, 256])
@pytest.mark.parametrize("extra", [b"", b"\x01" * 40])
def test_chain_follows_its_definition(block_tokens: int, extra: bytes) -> None:
    space = namespace(block_tokens)
    tokens = [token * 7919 % 128_256 for token in range(600)]
    found = keys_of(chain(space, as_tokens(tokens), extra))
    assert found == chain_by_definition(space, tokens, block_tokens, extra)


def test_chain_equals_the_pinned_vector() -> None:
    """A change of this value orphans every block of every running fleet."""
    block_chain = chain(namespace(), as_tokens(range(40)))
    assert len(block_chain) == 2, "a partial last block has no key"
    assert [key.hex() for key in keys_of(block_chain)] == [
        "821e3771a7860eb5bde1c5b293a34d4eda8cdf979aea21916459fd0bfffc6434",
        "5fdcea57f5ee2eafdba1fb28402d6df3bd492fc631e51eeb9c902fd97d6bb4b2",
    ]


def test_one_different_token_changes_every_later_key_and_no_earlier() -> None:
    tokens = list(range(160))
    changed = [*tokens[:80], 999_999, *tokens[81:]]
    before, after = (keys_of(chain(namespace(), as_tokens(ids))) for ids in (tokens, changed))
    assert before[:5] == after[:5]
    assert not set(before[5:]) & set(after)


def test_murmur_collision_pair_gets_different_keys() -> None:
    first, second = (keys_of(chain(namespace(), as_tokens(ids))) for ids in (MURMUR_A, MURMUR_B))
    assert first != second


def test_rolling_hash_differential_gets_different_keys() -> None:
    """+31 on one token and -1 on the next keeps a base-31 rolling hash equal."""

    def rolling(ids: list[int]) -> int:
        value = 0
        for token in ids:
            value = (value * 31 + token) % 2**64
        return value

    tokens = [token + 100 for token in range(16)]
    shifted = [*tokens[:4], tokens[4] - 1, tokens[5] + 31, *tokens[6:]]
    assert rolling(tokens) == rolling(shifted)
    assert keys_of(chain(namespace(), as_tokens(tokens))) != keys_of(
        chain(namespace(), as_tokens(shifted))
    )


def neighbours(draw: random.Random) -> tuple[list[int], list[list[int]]]:
    """A random block, and ten that differ from it in what a careless encoding or a weak hash loses:
    shifts, swaps, moved boundaries, integer widths, zeros at the ends, differentials.
    """
    block = [draw.randrange(1, 128_256) for _ in range(16)]
    at = draw.randrange(15)
    before, one, other, after = block[:at], block[at], block[at + 1], block[at + 2 :]
    return block, [
        [*block[1:], block[0]],
        [*before, other + (one == other), one, *after],
        [*block[:-1], 0],
        [0, *block[:-1]],
        [*before, one | other << 16 & 0xFFFF_FFFF, other ^ 1, *after],
        [token << 8 for token in block],
        [token << 15 for token in block],
        [*before, one ^ 1 << draw.randrange(32), other, *after],
        [*before, one + 1_000, other - 31_000 & 0xFFFF_FFFF, *after],
        [*before, one - 1, other + 31, *after],
    ]


def test_a_hundred_thousand_structured_pairs_never_meet() -> None:
    """S6. Neither the two of a pair, nor anything with anything."""
    draw = random.Random(6)
    space = namespace()
    seen: dict[bytes, bytes] = {}
    for _ in range(10_000):
        block, others = neighbours(draw)
        for ids in (block, *others):
            tokens = as_tokens(ids)
            assert ids is block or ids != block
            key = chain(space, tokens).packed
            assert seen.setdefault(key, tokens.tobytes()) == tokens.tobytes()
    assert len(seen) > 109_000, "pairs that are equal prove nothing"


def test_parts_without_a_length_before_them_would_meet_and_ours_do_not() -> None:
    """S6: pairs that plain joining makes equal, in scopes, in models and between the two."""
    pairs = [
        (("org_1", "2345"), ("org_12345", "")),
        (("org_1", "2345"), ("org_12", "345")),
        (("a", "b\x00c"), ("a\x00b", "c")),
        (("a/b", "c"), ("a", "b/c")),
        (("a", "b\x03\x00\x01\x00\x00\x00c"), ("a", "b")),
    ]
    for (org, tenant), (other_org, other_tenant) in pairs:
        spaces: list[Namespace] = []
        for one, two in ((org, tenant), (other_org, other_tenant)):
            kind = ScopeKind.TENANT if two else ScopeKind.ORG
            spaces.append(namespace(scope=Scope(kind=kind, org=one, tenant=two)))
            model = ModelIdentity(model_id=one, weights_digest=two, block_tokens=16)
            spaces.append(derive_namespace(ROOT_KEY, TENANT, model))
        keys = [chain(space, as_tokens(range(16))).packed for space in spaces]
        assert len(set(keys)) == len({space.tag for space in spaces}) == 4


def test_arrays_of_equal_length_differ_and_1234_shares_nothing_with_12345() -> None:
    """C43: identity is the ids themselves, not their count or their text."""
    one = keys_of(chain(namespace(1), as_tokens([1234])))
    other = keys_of(chain(namespace(1), as_tokens([12345])))
    assert not set(one) & set(other)
    assert not set(keys_of(chain(namespace(2), as_tokens([1, 23])))) & set(
        keys_of(chain(namespace(2), as_tokens([12, 3])))
    )
    assert keys_of(chain(namespace(), as_tokens([5] * 16))) != keys_of(
        chain(namespace(), as_tokens([6] * 16))
    )


def test_block_size_is_part_of_a_key() -> None:
    """Also where the tokens hashed before are the same: the size is in the message itself."""
    space = namespace(16)
    assert (
        chain_by_definition(space, list(range(32)), 16)[-1]
        != chain_by_definition(space, list(range(32)), 32)[-1]
    )
    assert chain(namespace(32), as_tokens(range(32)))[0] not in keys_of(
        chain(namespace(16), as_tokens(range(32)))
    )


def test_extra_is_framed_so_that_it_never_meets_tokens() -> None:
    tokens = as_tokens(range(16))
    variants = [b"", b"\x00", b"\x00\x00\x00\x00", b"\x01\x00\x00\x00", b"a", b"aa"]
    keys = [bytes(chain(namespace(), tokens, extra)[0]) for extra in variants]
    assert len(set(keys)) == len(keys)


def test_other_namespaces_share_no_key() -> None:
    tokens = as_tokens(range(64))
    scopes = [
        TENANT,
        Scope(kind=ScopeKind.TENANT, org="acme", tenant="green"),
        Scope(kind=ScopeKind.ORG, org="acme"),
        Scope(kind=ScopeKind.PUBLIC, public_id="acme"),
    ]
    sets = [set(keys_of(chain(namespace(scope=scope), tokens))) for scope in scopes]
    assert len(set.union(*sets)) == sum(map(len, sets))


def test_checkpoints_lie_at_256_1024_and_4096_tokens() -> None:
    block_chain = chain(namespace(16), as_tokens(range(5_000)))
    keys = keys_of(block_chain)
    assert block_chain.checkpoints() == [(256, keys[15]), (1024, keys[63]), (4096, keys[255])]
    shorter = chain(namespace(16), as_tokens(range(1_039)))
    assert shorter.checkpoints() == [(256, keys[15]), (1024, keys[63])]
    assert chain(namespace(16), as_tokens(range(255))).checkpoints() == []
    assert chain(namespace(24), as_tokens(range(5_000))).checkpoints() == []


def test_empty_prompt_and_partial_block_have_no_key() -> None:
    assert len(chain(namespace(), array("I"))) == 0
    assert len(chain(namespace(), as_tokens(range(15)))) == 0
    with pytest.raises(IndexError, match="block 0 of a chain of 0"):
        _ = chain(namespace(), array("I"))[0]


def test_token_ids_outside_32_bits_are_refused() -> None:
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match="outside"):
            as_tokens([wrong])
    with pytest.raises(TypeError):
        as_tokens(["12"])  # type: ignore[list-item]  # the point of the test


def test_keys_do_not_depend_on_the_hash_seed_or_the_twin() -> None:
    code = (
        "from trunkline.core.identity import *;"
        "from trunkline.core.keys import *;"
        "n = derive_namespace(bytes(range(32)), Scope(kind=ScopeKind.TENANT, org='acme',"
        " tenant='blue'), ModelIdentity(model_id='llama', block_tokens=16));"
        "print(chain(n, as_tokens(range(64))).packed.hex(), n.salt, n.tag.hex())"
    )
    answers: set[str] = set()
    for seed, pure in (("0", "0"), ("1", "0"), ("4242", "1")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "TRUNKLINE_PURE": pure}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
        )
        answers.add(run.stdout)
    assert len(answers) == 1
    assert answers.pop().startswith(chain(namespace(), as_tokens(range(64))).packed.hex())


def test_a_million_random_blocks_get_a_million_keys() -> None:
    draw = random.Random(60)
    tokens = array("I", draw.randbytes(4 * 1_000_000))
    keys = chain(namespace(1), tokens).packed
    seen = {keys[start : start + 32] for start in range(0, len(keys), 32)}
    assert len(seen) == 1_000_000
    assert all(one != other for one, other in pairwise(sorted(key[:16] for key in seen)))
