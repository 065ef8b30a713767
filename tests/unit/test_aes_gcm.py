"""What is sealed opens for its namespace, as what it was, while the key is there."""

from __future__ import annotations

import pytest

from trunkline.adapters.aes_gcm import AesGcmSealer

A, B = b"a" * 16, b"b" * 16
DATA = memoryview(bytes(range(256)) * 4)


def sealed(sealer: AesGcmSealer, ns: bytes = A) -> bytes:
    data = sealer.seal(ns, DATA, b"block 1")
    assert data is not None
    return data


def test_what_is_sealed_opens_again_and_is_longer_by_the_overhead() -> None:
    sealer = AesGcmSealer()
    data = sealed(sealer)
    assert sealer.unseal(A, data, b"block 1") == bytes(DATA)
    assert len(data) == len(DATA) + sealer.overhead_bytes


def test_it_opens_for_no_other_namespace_block_or_process() -> None:
    sealer = AesGcmSealer()
    data = sealed(sealer)
    sealed(sealer, B)
    assert sealer.unseal(B, data, b"block 1") is None
    assert sealer.unseal(A, data, b"block 2") is None
    other = AesGcmSealer()
    sealed(other)
    assert other.unseal(A, data, b"block 1") is None


@pytest.mark.parametrize("position", [0, 11, 12, 500, -17, -1])
def test_a_changed_bit_anywhere_is_found(position: int) -> None:
    sealer = AesGcmSealer()
    data = bytearray(sealed(sealer))
    data[position] ^= 4
    assert sealer.unseal(A, bytes(data), b"block 1") is None


@pytest.mark.parametrize("length", [0, 1, 27, 28, 500])
def test_what_is_too_short_is_none(length: int) -> None:
    sealer = AesGcmSealer()
    assert sealer.unseal(A, sealed(sealer)[:length], b"block 1") is None


def test_a_destroyed_key_opens_nothing_and_is_not_made_again() -> None:
    sealer = AesGcmSealer()
    data = sealed(sealer)
    sealer.destroy(A)
    sealer.destroy(A)
    assert sealer.unseal(A, data, b"block 1") is None
    assert sealer.seal(A, DATA, b"block 1") is None
    assert sealed(sealer, B)


def test_no_nonce_is_used_twice() -> None:
    sealer = AesGcmSealer()
    assert len({sealed(sealer)[:12] for _ in range(1_000)}) == 1_000


def test_a_key_that_opens_something_is_used() -> None:
    sealer = AesGcmSealer(max_namespaces=2)
    read, unread = sealed(sealer, A), sealed(sealer, B)
    assert sealer.unseal(A, read, b"block 1") == bytes(DATA)
    sealed(sealer, b"c" * 16)
    assert sealer.unseal(A, read, b"block 1") == bytes(DATA)
    assert sealer.unseal(B, unread, b"block 1") is None


def test_as_many_keys_as_may_be_and_the_least_recently_used_goes() -> None:
    sealer = AesGcmSealer(max_namespaces=2)
    old, kept = sealed(sealer, A), sealed(sealer, B)
    newest = sealed(sealer, b"c" * 16)
    assert sealer.unseal(A, old, b"block 1") is None
    assert sealer.unseal(B, kept, b"block 1") == bytes(DATA)
    assert sealer.unseal(b"c" * 16, newest, b"block 1") == bytes(DATA)
    for number in range(5):
        sealer.destroy(bytes([number]) * 16)
    assert sealer.seal(bytes([4]) * 16, DATA, b"") is None
