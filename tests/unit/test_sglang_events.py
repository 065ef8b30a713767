"""The event codec on SGLang's bytes: what each of its releases puts on the wire.

The bytes were made with the struct definitions of the releases named here
(`sglang/srt/disaggregation/kv_events.py`), not recorded from a running engine.
"""

from __future__ import annotations

import contextlib
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.adapters.vllm_events import MAX_BLOCKS, UndecodableBatch, decode_batch
from trunkline.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
)
from trunkline.core.records import EngineHash, Tier

SALT = "A" * 42 + "_"
MINUS_3 = 2**64 - 3
"""Hashes are signed there."""

# 0.5.20 to 0.5.23: a map an event, without what is absent; the salt with each run.
TAGGED = bytes.fromhex(
    "93cb3ff80000000000009489a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392fd04b170"
    "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473940708090aaa626c6f636b5f73697a6502a76c6f"
    "72615f6964c0a66d656469756da3475055aa63616368655f73616c74d92b4141414141414141414141414141414141"
    "414141414141414141414141414141414141414141414141415faa73657373696f6e5f6964a2733188a474797065ab"
    "426c6f636b53746f726564ac626c6f636b5f6861736865739105b1706172656e745f626c6f636b5f6861736804a974"
    "6f6b656e5f696473920b0caa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756daa4350555f50494e"
    "4e4544aa63616368655f73616c74d92b41414141414141414141414141414141414141414141414141414141414141"
    "41414141414141414141415f83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657392fd04"
    "a66d656469756da347505581a474797065b0416c6c426c6f636b73436c656172656401"
)
# 0.5.18 and 0.5.19: an array an event, the salt in a map at its end.
POSITIONAL = bytes.fromhex(
    "93cb3ff80000000000009498ab426c6f636b53746f72656492fd04c0940708090a02c0a347505581aa63616368655f"
    "73616c74d92b4141414141414141414141414141414141414141414141414141414141414141414141414141414141"
    "415f97ab426c6f636b53746f7265649105c0920b0c02c0aa4350555f50494e4e454493ac426c6f636b52656d6f7665"
    "6492fd04a347505591b0416c6c426c6f636b73436c656172656401"
)
# 0.4.9 to 0.5.3: no medium.
BARE = bytes.fromhex(
    "93cb3ff80000000000009396ab426c6f636b53746f72656491fdc092070802c092ac426c6f636b52656d6f76656491"
    "fd91b0416c6c426c6f636b73436c6561726564c0"
)


def packed(*events: Any, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def tagged(**fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [-3, 4],
        "parent_block_hash": None,
        "token_ids": [7, 8, 9, 10],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": SALT,
        **fields,
    }


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def only(event: Any) -> CacheEvent:
    (decoded,) = decode_batch(0, packed(event)).events
    return decoded


def run(*hashes: int, tokens: list[int], parent: int | None = None, **more: Any) -> BlocksStored:
    fields: dict[str, Any] = {"salt": SALT, "tier": Tier.DEVICE, **more}
    return BlocksStored(
        hashes=array("Q", hashes),
        parent=None if parent is None else EngineHash(parent),
        tokens=array("I", tokens),
        block_tokens=2,
        **fields,
    )


def whole(batch: EventBatch) -> tuple[CacheEvent, ...]:
    assert (batch.bad_count, batch.ignored_count, batch.sent_at) == (0, 0, 1.5)
    return batch.events


def test_the_tagged_maps_of_0_5_20_and_later_decode() -> None:
    batch = decode_batch(0, TAGGED)
    assert batch.rank == 1
    assert whole(batch) == (
        run(MINUS_3, 4, tokens=[7, 8, 9, 10]),
        run(5, parent=4, tokens=[11, 12], tier=Tier.HOST),
        BlocksRemoved(hashes=array("Q", [MINUS_3, 4]), tier=Tier.DEVICE),
        AllBlocksCleared(),
    )


def test_the_arrays_of_0_5_18_decode_with_the_salt_that_stands_at_their_end() -> None:
    assert whole(decode_batch(0, POSITIONAL)) == (
        run(MINUS_3, 4, tokens=[7, 8, 9, 10]),
        run(5, tokens=[11, 12], tier=Tier.HOST, salt=None),
        BlocksRemoved(hashes=array("Q", [MINUS_3, 4]), tier=Tier.DEVICE),
        AllBlocksCleared(),
    )


def test_the_arrays_of_0_4_9_decode_without_medium_and_salt() -> None:
    batch = decode_batch(0, BARE)
    assert batch.rank is None
    assert whole(batch) == (
        run(MINUS_3, tokens=[7, 8], salt=None),
        BlocksRemoved(hashes=array("Q", [MINUS_3]), tier=Tier.DEVICE),
        AllBlocksCleared(),
    )


def test_blocks_named_by_pairs_of_neighbours_are_those_of_the_first_of_each() -> None:
    pairs = [[7, 8], [8, 9], [9, 10], [10, 11]]
    assert only(tagged(token_ids=pairs)) == run(MINUS_3, 4, tokens=[7, 8, 9, 10])


@pytest.mark.parametrize(
    "pairs", [[[7], [8], [9], [10]], [[7, 8, 9]] * 4, [[7, "x"]] * 4, [["x", 7]] * 4, [[7, 8], 9]]
)
def test_pairs_that_are_none_are_a_bad_event_and_no_more(pairs: list[Any]) -> None:
    batch = decode_batch(0, packed(tagged(token_ids=pairs), removed(4)))
    assert batch.bad_count == 1
    assert batch.events == (BlocksRemoved(hashes=array("Q", [4]), tier=Tier.DEVICE),)


def test_an_adapter_s_blocks_are_told_apart_from_those_of_the_model() -> None:
    event = only(tagged(lora_name="poet"))
    assert isinstance(event, BlocksStored)
    assert (event.adapter, event.salt) == ("poet", SALT)


def test_a_whole_context_in_pages_of_one_token_is_one_batch() -> None:
    hashes = list(range(1, MAX_BLOCKS + 1))
    pages = tagged(block_hashes=hashes, token_ids=[5] * MAX_BLOCKS, block_size=1)
    (event,) = decode_batch(0, packed(pages)).events
    assert isinstance(event, BlocksStored)
    assert len(event.hashes) == MAX_BLOCKS
    with pytest.raises(UndecodableBatch):
        decode_batch(0, packed(removed(*hashes, 7)))


def test_c23_an_oversized_field_that_only_informs_does_not_lose_the_removals_beside_it() -> None:
    big = tagged(session_id="s" * 500_000, routed_experts=[[1, 2]] * 1_000)
    array_form = ["BlockStored", [9], None, [1, 2], 2, None, "GPU", {"session_id": "s" * 500_000}]
    batch = decode_batch(0, packed(big, removed(-3), array_form, removed(4)))
    gone = [event.hashes[0] for event in batch.events if isinstance(event, BlocksRemoved)]
    assert gone == [MINUS_3, 4]


# Any msgpack value, as deep as hypothesis likes; the field names are SGLang's.
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)
_NAMES = st.sampled_from([*sorted(tagged()), "session_id", "lora_name"])
_MAPS = st.dictionaries(_NAMES, _VALUES, max_size=5).map(lambda fields: tagged(**fields))
_ARRAYS = st.lists(_VALUES, max_size=9).map(lambda items: ["BlockStored", *items])


@given(st.lists(_MAPS | _ARRAYS, max_size=4))
def test_whatever_an_event_holds_the_removal_behind_it_is_not_lost(events: list[Any]) -> None:
    batch = decode_batch(0, packed(*events, removed(4)))
    assert batch.events[-1] == BlocksRemoved(hashes=array("Q", [4]), tier=Tier.DEVICE)


@given(st.binary(max_size=200) | st.integers(0, len(TAGGED)).map(lambda cut: TAGGED[:cut]))
def test_garbage_raises_the_codec_s_own_error_or_is_a_batch(payload: bytes) -> None:
    with contextlib.suppress(UndecodableBatch):
        decode_batch(0, payload)


@given(st.integers(0, len(POSITIONAL) - 1), st.integers(0, 255))
def test_a_flipped_byte_raises_the_codec_s_own_error_or_is_a_batch(at: int, byte: int) -> None:
    for payload in (TAGGED, POSITIONAL, BARE):
        spoilt = bytearray(payload)
        spoilt[at % len(spoilt)] = byte
        with contextlib.suppress(UndecodableBatch):
            decode_batch(0, bytes(spoilt))
