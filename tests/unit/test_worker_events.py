"""The bytes that the simulated worker publishes are those of the engine it stands for."""

from __future__ import annotations

import dataclasses
from array import array

import msgspec
import pytest

from trunkline.adapters.event_publisher import encode_batch
from trunkline.adapters.vllm_events import decode_batch
from trunkline.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from trunkline.core.records import Tier
from trunkline.ports.publisher import BlockRemoved, CacheCleared, RunStored

# One of each event at 1.5 s on rank 0, as recorded from the engine.
GOLDEN = bytes.fromhex(
    "93cb3ff8000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101b1706172"
    "656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920708aa626c6f636b5f73697a6502a76c6f72615f6964"
    "c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739191a573616c7441a967726f7570"
    "5f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c"
    "6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da3475055a967726f75705f6964780081"
    "a474797065b0416c6c426c6f636b73436c656172656400"
)
ONE = (1).to_bytes(32, "big")


def _stored(parent: bytes | None = None, salt: str | None = "saltA") -> RunStored:
    return RunStored(
        hashes=(ONE,), parent=parent, tokens=array("I", [7, 8]), block_tokens=2, salt=salt
    )


def test_each_event_is_byte_for_byte_what_the_engine_publishes() -> None:
    assert encode_batch(1.5, [_stored(), BlockRemoved(hash=ONE), CacheCleared()], 0) == GOLDEN


def test_integer_names_are_the_low_64_bits_unsigned() -> None:
    name = b"\x01" * 24 + b"\xff" * 8
    batch = msgspec.msgpack.decode(encode_batch(0, [BlockRemoved(hash=name)], 0))
    assert batch[1][0]["block_hashes"] == [2**64 - 1]


def test_wide_names_are_the_whole_digest() -> None:
    batch = msgspec.msgpack.decode(encode_batch(0, [_stored(parent=ONE)], 0, is_wide=True))
    assert batch[1][0]["block_hashes"] == [ONE]
    assert batch[1][0]["parent_block_hash"] == ONE


def test_the_salt_is_told_with_the_first_block_only() -> None:
    batch = msgspec.msgpack.decode(encode_batch(0, [_stored(), _stored(parent=ONE)], 0))
    assert [event["extra_keys"] for event in batch[1]] == [[["saltA"]], [None]]


@pytest.mark.parametrize("is_wide", [False, True])
def test_the_gateway_reads_back_what_was_published(is_wide: bool) -> None:
    run = RunStored(
        hashes=(b"a" * 32, b"b" * 32),
        parent=None,
        tokens=array("I", range(32)),
        block_tokens=16,
        salt="saltA",
    )
    events = [run, _stored(parent=b"b" * 32), BlockRemoved(hash=b"a" * 32), CacheCleared()]
    batch = decode_batch(5, encode_batch(1.5, events, 0, is_wide=is_wide))
    stored, next_stored, removed, cleared = batch.events
    assert isinstance(stored, BlocksStored)
    assert isinstance(next_stored, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert isinstance(cleared, AllBlocksCleared)
    assert (stored.tokens, stored.parent, stored.salt) == (run.tokens, None, "saltA")
    assert next_stored.parent == stored.hashes[1]
    assert removed.hashes == stored.hashes[:1]


@pytest.mark.parametrize(
    ("tier", "medium"),
    [(Tier.DEVICE, "GPU"), (Tier.HOST, "CPU"), (Tier.DISK, "DISK"), (Tier.SHARED, "EXTERNAL")],
)
def test_each_tier_is_told_in_the_engines_word_and_read_back(tier: Tier, medium: str) -> None:
    events = [dataclasses.replace(_stored(), tier=tier), BlockRemoved(hash=ONE, tier=tier)]
    payload = encode_batch(0, events, 0)
    assert [event["medium"] for event in msgspec.msgpack.decode(payload)[1]] == [medium] * 2
    stored, removed = decode_batch(0, payload).events
    assert isinstance(stored, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert (stored.tier, removed.tier) == (tier, tier)
    assert stored.tokens == array("I", [7, 8])
