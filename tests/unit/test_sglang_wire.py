"""The bytes that the simulated worker publishes as SGLang are those of the engine it stands for.

Made with the struct definitions of the releases (`sglang/srt/disaggregation/kv_events.py`).
"""

from __future__ import annotations

from array import array

import msgspec
import pytest

from trunkline.adapters.sglang_wire import SglangWire
from trunkline.adapters.vllm_events import decode_batch
from trunkline.core.events import BlocksRemoved, BlocksStored
from trunkline.core.records import Tier
from trunkline.ports.publisher import BlockEvent, BlockRemoved, CacheCleared, RunStored

TAGGED = bytes.fromhex(
    "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392fd04b170"
    "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473940708090aaa626c6f636b5f73697a6502a76c6f"
    "72615f6964c0a66d656469756da3475055aa63616368655f73616c74d92b4141414141414141414141414141414141"
    "414141414141414141414141414141414141414141414141415f87a474797065ab426c6f636b53746f726564ac626c"
    "6f636b5f6861736865739105b1706172656e745f626c6f636b5f6861736809a9746f6b656e5f696473920b0caa626c"
    "6f636b5f73697a6502a76c6f72615f6964c0a66d656469756daa4350555f50494e4e454483a474797065ac426c6f63"
    "6b52656d6f766564ac626c6f636b5f68617368657392fd04a66d656469756da347505581a474797065b0416c6c426c"
    "6f636b73436c656172656401"
)
POSITIONAL = bytes.fromhex(
    "93cb3ff80000000000009498ab426c6f636b53746f72656492fd04c0940708090a02c0a347505581aa63616368655f"
    "73616c74d92b4141414141414141414141414141414141414141414141414141414141414141414141414141414141"
    "415f97ab426c6f636b53746f726564910509920b0c02c0aa4350555f50494e4e454493ac426c6f636b52656d6f7665"
    "6492fd04a347505591b0416c6c426c6f636b73436c656172656401"
)
SALT = "A" * 42 + "_"


def named(number: int) -> bytes:
    """A digest whose first eight bytes are this number, signed."""
    return number.to_bytes(8, "big", signed=True) + bytes(24)


def run(
    *names: int,
    tokens: list[int],
    parent: int | None = None,
    salt: str | None = SALT,
    tier: Tier = Tier.DEVICE,
) -> RunStored:
    return RunStored(
        hashes=tuple(named(name) for name in names),
        parent=None if parent is None else named(parent),
        tokens=array("I", tokens),
        block_tokens=len(tokens) // len(names),
        salt=salt,
        tier=tier,
    )


EVENTS: list[BlockEvent] = [
    run(-3, tokens=[7, 8]),
    run(4, parent=-3, tokens=[9, 10]),
    run(5, parent=9, tokens=[11, 12], salt=None, tier=Tier.HOST),
    BlockRemoved(hash=named(-3)),
    BlockRemoved(hash=named(4)),
    CacheCleared(),
]


@pytest.mark.parametrize(("is_positional", "golden"), [(False, TAGGED), (True, POSITIONAL)])
def test_runs_and_removals_in_a_row_are_one_event_byte_for_byte(
    is_positional: bool, golden: bytes
) -> None:
    assert SglangWire(is_positional=is_positional).encode(1.5, EVENTS, 1) == golden


def test_only_releases_that_write_maps_repeat_the_topic() -> None:
    assert SglangWire().replays_topic
    assert not SglangWire(is_positional=True).replays_topic


def test_runs_that_do_not_follow_or_differ_in_salt_or_tier_stay_apart() -> None:
    events = [
        run(1, tokens=[1, 2]),
        run(2, parent=1, tokens=[3, 4], salt="other"),
        run(3, parent=2, tokens=[5, 6], salt="other", tier=Tier.HOST),
        run(4, parent=2, tokens=[5, 6], salt="other", tier=Tier.HOST),
        BlockRemoved(hash=named(1)),
        BlockRemoved(hash=named(2), tier=Tier.HOST),
        CacheCleared(),
        CacheCleared(),
    ]
    _, told, _ = msgspec.msgpack.decode(SglangWire().encode(0, events, 0))
    assert len(told) == len(events)


@pytest.mark.parametrize("is_positional", [False, True])
def test_a_block_of_several_pages_is_told_page_by_page_and_ends_in_its_own_name(
    is_positional: bool,
) -> None:
    wire = SglangWire(block_pages=4, is_positional=is_positional)
    events = [run(1, 2, tokens=[*range(16)]), BlockRemoved(hash=named(2))]
    stored, removed = decode_batch(0, wire.encode(0, events, 0)).events
    assert isinstance(stored, BlocksStored)
    assert (len(stored.hashes), stored.block_tokens) == (8, 2)
    assert (stored.hashes[3], stored.hashes[7]) == (1, 2)
    assert len(set(stored.hashes)) == 8
    assert isinstance(removed, BlocksRemoved)
    assert removed.hashes == stored.hashes[4:]
