"""The event codec: golden bytes, both engines' dialects, salts and tiers, and what is left out by
rule.
"""

from __future__ import annotations

import gc
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.adapters.vllm_events import (
    MAX_BLOCKS,
    MAX_CONTAINERS,
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    MAX_SALT_CHARACTERS,
    UndecodableBatch,
    decode_batch,
)
from trunkline.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BlocksUnnamed,
    CacheEvent,
)
from trunkline.core.records import EngineHash, Tier

# One of each event at 1.5 s on rank 0, as the engine sends it.
GOLDEN = bytes.fromhex(
    "93cb3ff8000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101b17061"
    "72656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920708aa626c6f636b5f73697a6502a76c6f72615f"
    "6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739191a573616c7441a96772"
    "6f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a4747970"
    "65ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da3475055a967726f75705f"
    "6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
STORED = BlocksStored(
    hashes=array("Q", [1]),
    parent=None,
    tokens=array("I", [7, 8]),
    block_tokens=2,
    tier=Tier.DEVICE,
    salt="saltA",
)
OUR_SALT = "A" * 42 + "_"


def packed(*events: Any, ts: Any = 1.5, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def stored(**fields: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [7, 8],
        "block_size": 2,
    }
    return whole | fields


def only(payload: bytes) -> CacheEvent:
    (event,) = decode_batch(0, payload).events
    return event


def one_run(**fields: Any) -> BlocksStored:
    event = only(packed(stored(**fields)))
    assert isinstance(event, BlocksStored)
    return event


def test_the_golden_batch_decodes() -> None:
    batch = decode_batch(3, GOLDEN)
    removed = BlocksRemoved(hashes=array("Q", [1]), tier=Tier.DEVICE)
    assert batch.events == (STORED, removed, AllBlocksCleared())
    assert (batch.seq, batch.sent_at, batch.rank) == (3, 1.5, 0)
    assert (batch.ignored_count, batch.bad_count) == (0, 0)


def test_positional_events_of_older_engines_decode_alike() -> None:
    old = packed(
        ["BlockStored", [1], None, [7, 8], 2, None, "GPU"],
        ["BlockRemoved", [1], "CPU"],
        ["BlockRemoved", [1]],
        ["AllBlocksCleared"],
    )
    run, from_host, from_device, cleared = decode_batch(0, old).events
    assert isinstance(run, BlocksStored)
    assert (run.tokens, run.tier, run.salt) == (STORED.tokens, Tier.DEVICE, None)
    assert from_host == BlocksRemoved(hashes=array("Q", [1]), tier=Tier.HOST)
    assert from_device == BlocksRemoved(hashes=array("Q", [1]), tier=Tier.DEVICE)
    assert cleared == AllBlocksCleared()


def test_keys_in_any_order_and_unknown_keys_make_no_difference() -> None:
    fields = dict(reversed(stored(extra_keys=[["saltA"]], medium="GPU").items()))
    assert only(packed(fields | {"novelty": [{"a": [1]}], "session_id": 5})) == STORED


def test_hashes_fold_to_the_low_64_bits_in_every_form() -> None:
    digest = bytes(range(32))
    low = int.from_bytes(digest[-8:], "big")
    assert one_run(block_hashes=[digest], parent_block_hash=digest).hashes[0] == low
    assert one_run(block_hashes=[low], parent_block_hash=low).parent == low
    assert one_run(block_hashes=[-1]).hashes[0] == 2**64 - 1  # signed, as SGLang sends them
    assert one_run(block_hashes=[2**64 - 1], parent_block_hash=-(2**63)).parent == 2**63


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", Tier.DEVICE),
        (None, Tier.DEVICE),
        ("CPU", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("DISK", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("EXTERNAL", Tier.SHARED),
        ("TAPE", Tier.SHARED),
        (7, Tier.SHARED),
    ],
)
def test_a_medium_names_a_tier_and_an_unknown_one_is_the_slowest(medium: Any, tier: Tier) -> None:
    assert one_run(medium=medium).tier is tier


@pytest.mark.parametrize(
    ("extras", "adapter", "salt"),
    [
        (["saltA"], None, "saltA"),
        (["cache_salt", "saltA"], None, "saltA"),
        ([["cache_salt", "saltA"]], None, "saltA"),
        (["lora-x", "saltA"], "lora-x", "saltA"),
        ([["lora", "lora-x", "/path"], ["cache_salt", "saltA"]], "lora-x", "saltA"),
        (["lora-x"], "lora-x", None),
        (["lora", "lora-x", "/path"], "lora-x", None),
        (None, None, None),
        ([], None, None),
    ],
)
def test_the_salt_is_found_among_the_first_block_s_extras(
    extras: Any, adapter: str | None, salt: str | None
) -> None:
    run = one_run(extra_keys=[extras], lora_name=adapter)
    assert (run.salt, run.adapter) == (salt, adapter)


def test_sglang_names_the_salt_in_a_field_of_its_own() -> None:
    assert one_run(cache_salt=OUR_SALT).salt == OUR_SALT


def test_a_salt_that_is_far_too_long_is_cut_and_stays_unknown() -> None:
    assert one_run(cache_salt="x" * 300_000).salt == "x" * MAX_SALT_CHARACTERS
    assert one_run(extra_keys=[["x" * 300_000]]).salt == "x" * MAX_SALT_CHARACTERS


def test_blocks_with_media_have_no_name_and_end_the_run() -> None:
    fields = stored(
        block_hashes=[1, 2, 3],
        token_ids=[1, 2, 3, 4, 5, 6],
        extra_keys=[[OUR_SALT], [["picture", 0]], None],
    )
    run, unnamed = decode_batch(0, packed(fields)).events
    assert isinstance(run, BlocksStored)
    assert (run.hashes, run.tokens) == (array("Q", [1]), array("I", [1, 2]))
    assert unnamed == BlocksUnnamed(hashes=array("Q", [2, 3]))


def test_media_in_the_first_block_leave_nothing_to_name_though_the_salt_is_ours() -> None:
    event = only(packed(stored(extra_keys=[["picture-digest", OUR_SALT]])))
    assert event == BlocksUnnamed(hashes=array("Q", [1]))


@pytest.mark.parametrize(
    "fields",
    [
        {"group_idx": 1},
        {"kv_cache_spec_kind": "sliding_window"},
        {"kv_cache_spec_kind": "mamba"},
        {"token_ids": []},
    ],
    ids=str,
)
def test_c53_other_groups_and_blocks_without_tokens_are_ignored_and_counted(
    fields: dict[str, Any],
) -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1], "group_idx": 1}
    batch = decode_batch(0, packed(stored(**fields), removed))
    assert batch.events == ()
    assert (batch.ignored_count, batch.bad_count) == (2, 0)


def test_an_event_type_from_the_future_is_ignored_and_counted() -> None:
    batch = decode_batch(0, packed({"type": "BlockMoved", "to": "moon"}, stored(), ["New", 1]))
    assert (len(batch.events), batch.ignored_count) == (1, 2)


def test_fingerprints_tell_lives_apart_by_their_time_stamps() -> None:
    one, other = packed(stored(), ts=1.0), packed(stored(), ts=2.0)
    assert decode_batch(0, one).fingerprint == decode_batch(0, one).fingerprint
    assert decode_batch(0, one).fingerprint != decode_batch(0, other).fingerprint


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5, unique=True),
    st.integers(1, 8),
    st.none() | st.integers(0, 2**64 - 1),
    st.sampled_from(Tier),
    st.none() | st.just(OUR_SALT),
    st.none() | st.just("lora-x"),
    st.data(),
)
def test_every_run_and_removal_decodes_to_what_was_sent(
    hashes: list[int],
    size: int,
    parent: int | None,
    tier: Tier,
    salt: str | None,
    adapter: str | None,
    data: st.DataObject,
) -> None:
    count = len(hashes) * size
    ids = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count))
    run = BlocksStored(
        hashes=array("Q", hashes),
        parent=None if parent is None else EngineHash(parent),
        tokens=array("I", ids),
        block_tokens=size,
        tier=tier,
        salt=salt,
        adapter=adapter,
    )
    medium = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}.get(tier, "EXTERNAL")
    sent = stored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=ids,
        block_size=size,
        medium=medium,
        lora_name=adapter,
        extra_keys=[[name for name in (adapter, salt) if name], *[None] * (len(hashes) - 1)],
    )
    gone = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
    removed = BlocksRemoved(hashes=array("Q", hashes), tier=tier)
    assert decode_batch(0, packed(sent, gone)).events == (run, removed)


def test_a_batch_over_the_size_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(UndecodableBatch, match="at most 2097152"):
        decode_batch(0, bytes(MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(UndecodableBatch, match="no batch"):
        decode_batch(0, bytes(MAX_PAYLOAD_BYTES))


def removed_of(count: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [1] * count}


def test_a_batch_is_bounded_in_events_and_in_blocks() -> None:
    batch = decode_batch(0, packed(*[removed_of(MAX_BLOCKS // MAX_EVENTS)] * MAX_EVENTS))
    assert (len(batch.events), batch.bad_count) == (MAX_EVENTS, 0)
    with pytest.raises(UndecodableBatch, match="block hashes"):
        decode_batch(0, packed(removed_of(MAX_BLOCKS), removed_of(1)))
    with pytest.raises(UndecodableBatch, match="8193 events"):
        decode_batch(0, packed(*[removed_of(1)] * (MAX_EVENTS + 1)))


def test_a_batch_is_bounded_in_lists_within_fields_that_are_not_used() -> None:
    half = removed_of(1) | {"novelty": [[]] * (MAX_CONTAINERS // 2 - 2)}
    assert len(decode_batch(0, packed(half, half)).events) == 2
    with pytest.raises(UndecodableBatch, match="lists and maps"):
        decode_batch(0, packed(half, half, removed_of(1) | {"novelty": [[]] * 8}))
    with pytest.raises(UndecodableBatch, match="lists and maps"):
        decode_batch(0, packed(removed_of(1) | {"novelty": [[]] * 1_000_000}))


def test_the_collector_rests_while_a_message_is_read_and_works_again_after() -> None:
    assert gc.isenabled()
    decode_batch(0, GOLDEN)
    with pytest.raises(UndecodableBatch):
        decode_batch(0, b"")
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({"lora_name": "x"}, "x"),
        ({"lora_name": "x", "lora_id": 3}, "x"),
        ({"lora_id": 3}, "unnamed"),
        ({"lora_name": 7}, "unnamed"),
        ({"lora_name": None, "lora_id": None}, None),
    ],
    ids=str,
)
def test_any_trace_of_an_adapter_names_one(fields: dict[str, Any], adapter: str | None) -> None:
    assert one_run(**fields).adapter == adapter
