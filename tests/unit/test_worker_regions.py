"""Salt regions: one prompt under several salts, each block's KV under the mask of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from trunkline.adapters.event_publisher import encode_batch
from trunkline.adapters.vllm_events import decode_batch
from trunkline.core.events import BlocksStored
from trunkline.core.simkv import apply_mask
from trunkline.core.transfer import kv_chain
from trunkline.kv.tickets import MAX_REGIONS, Ticket
from trunkline.ports.publisher import RunStored
from trunkline.worker.batches import terms_of_another
from trunkline.worker.blocks import Terms
from trunkline.worker.fence import Reason
from trunkline.worker.requests import MAX_REGION_BLOCKS, BadRequest, Reader, Region
from worker_tenants import BLOCK, VOCAB, Store, right, ticket, tokens

PUBLIC = Region(blocks=2, salt="public")
PUBLIC_NS = b"p" * 16
SHARED = tokens(2 * BLOCK)
FILLER = SHARED + tokens(8, first=2_000)


def _prompt(own: int = 700) -> Any:
    return SHARED + tokens(2 * BLOCK + 6, first=own)


def _filled() -> Store:
    """A store in which the filler has put the public prefix."""
    store = Store()
    store.lease()
    assert store.run(FILLER, ticket(ns=PUBLIC_NS), salt="public") == 0
    store.cache.take_events()
    return store


def _tenant(letter: str) -> Any:
    return ticket(ns=letter.encode() * 16, tenant=letter * 32, regions=(PUBLIC_NS,))


def test_two_tenants_share_the_region_and_nothing_behind_it() -> None:
    store = _filled()
    asked: list[tuple[str, int]] = [("a", 32), ("b", 32), ("a", 64), ("b", 64)]
    for letter, cached in asked:
        assert store.run(_prompt(), _tenant(letter), salt=letter, regions=(PUBLIC,)) == cached
    assert store.refused() == {}


def test_the_first_private_block_is_told_with_its_salt_and_the_public_block_before_it() -> None:
    store = _filled()
    store.run(_prompt(), _tenant("a"), salt="a", regions=(PUBLIC,))
    (event,) = store.cache.take_events()
    assert isinstance(event, RunStored)
    assert (event.salt, event.begins_region, len(event.hashes)) == ("a", True, 2)
    assert event.tokens == _prompt()[32:64]
    wire = msgspec.msgpack.decode(encode_batch(0, [event], 0))[1][0]
    assert wire["extra_keys"] == [["a"], None]
    assert event.parent is not None
    assert wire["parent_block_hash"] == int.from_bytes(event.parent[-8:], "big")
    (read,) = decode_batch(0, encode_batch(0, [event], 0)).events
    assert isinstance(read, BlocksStored)
    assert (read.salt, read.parent) == ("a", wire["parent_block_hash"])


def test_later_blocks_of_the_private_part_are_told_without_a_salt() -> None:
    store = _filled()
    prompt = _prompt()
    sequence = store.admitted(prompt, _tenant("a"), salt="a", regions=(PUBLIC,))
    store.cache.compute(sequence, 48)
    store.cache.compute(sequence, 64)
    first, second = store.cache.take_events()
    assert isinstance(first, RunStored)
    assert isinstance(second, RunStored)
    assert (first.begins_region, second.begins_region) == (True, False)


def test_the_names_of_a_region_are_those_of_a_prompt_under_its_salt() -> None:
    store = _filled()
    plain = store.admitted(FILLER, None, salt="public")
    both = store.admitted(_prompt(), None, salt="a", regions=(PUBLIC,))
    assert both.hashes[:2] == plain.hashes[:2]
    assert both.hashes[2] == kv_chain("a", _prompt()[32:48], BLOCK, both.hashes[1])
    other = store.admitted(_prompt(), None, salt="b", regions=(PUBLIC,))
    assert other.hashes[2] != both.hashes[2]


def test_what_a_tenant_computes_of_a_region_is_never_kept() -> None:
    store = Store()
    store.lease()
    for _ in range(2):
        assert store.run(_prompt(), _tenant("a"), salt="a", regions=(PUBLIC,)) == 0
    assert store.cache.resident_blocks == 0
    assert store.run(FILLER, ticket(ns=PUBLIC_NS), salt="public") == 0


def test_a_region_of_another_namespace_is_no_hit() -> None:
    store = _filled()
    asked = ticket(ns=b"a" * 16, regions=(b"q" * 16,))
    assert store.run(_prompt(), asked, salt="a", regions=(PUBLIC,)) == 0
    assert store.refused() == {Reason.NS: 1}


def test_kv_of_the_region_under_the_wrong_salt_gives_a_wrong_answer() -> None:
    store = Store()
    prompt = _prompt()
    assert store.run(prompt, None, salt="a", regions=(PUBLIC,)) == 0
    sequence = store.admitted(prompt, None, salt="a", regions=(PUBLIC,))
    private = sequence.blocks[2]
    store.cache.release(sequence)
    public_mask, private_mask = (zone.mask for zone in sequence.zones)
    private.kv = apply_mask(apply_mask(private.kv, private_mask), public_mask)
    spoilt = store.admitted(prompt, None, salt="a", regions=(PUBLIC,))
    assert spoilt.cached_tokens == 64
    store.cache.compute(spoilt, len(prompt))
    assert store.cache.answer(spoilt, 8, VOCAB) != right(prompt)


def test_a_stock_engine_with_regions_keeps_them_all() -> None:
    store = Store()
    assert store.run(_prompt(), None, salt="a", regions=(PUBLIC,)) == 0
    stored = store.cache.take_events()
    told = [
        (event.salt, event.parent is None, event.begins_region)
        for event in stored
        if isinstance(event, RunStored)
    ]
    assert told == [("public", True, False), ("a", False, True)]
    assert store.run(_prompt(), None, salt="b", regions=(PUBLIC,)) == 32


def test_a_region_ends_with_the_last_full_block_of_the_prompt() -> None:
    store = Store()
    wide = Region(blocks=100, salt="public")
    sequence = store.admitted(tokens(40), None, salt="a", regions=(wide,))
    assert [(zone.first, zone.salt) for zone in sequence.zones] == [(0, "public"), (2, "a")]


def test_regions_follow_one_another() -> None:
    store = Store()
    regions = (Region(blocks=1, salt="x"), Region(blocks=2, salt="y"))
    assert store.run(tokens(90), None, salt="a", regions=regions) == 0
    assert store.run(tokens(90), None, salt="a", regions=regions) == 80
    assert store.run(tokens(90), None, salt="b", regions=regions) == 48
    assert store.run(tokens(90), None, salt="x") == 16


class _Words:
    """A tokenizer for prompts given as ids."""

    vocab_size = VOCAB

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        raise AssertionError(text)


def _read(regions: Any, *, salt: str | None = "a", has_regions: bool = True) -> Any:
    words: Any = _Words()
    reader = Reader(
        tokenizer=words,
        template=words,
        model="m",
        context_tokens=1_000,
        default_tokens=16,
        has_regions=has_regions,
    )
    body = {"prompt": [1, 2, 3], "cache_salt_regions": regions, "cache_salt": salt}
    return reader.generation(body, is_chat=False).regions


def test_regions_at_their_bounds_are_read() -> None:
    given = [[MAX_REGION_BLOCKS, "s" * 1_024]] * MAX_REGIONS
    assert len(_read(given)) == MAX_REGIONS
    assert _read(None) == _read([], salt=None) == ()


def test_another_prompt_of_a_batch_stands_on_the_ticket_without_its_public_beginning() -> None:
    told = Ticket(
        ns=b"own", subjects=("fleet",), epochs=(1,), rev=1, tenant="a", regions=(b"public",)
    )
    other = terms_of_another(Terms(ticket=told, regions=(Region(blocks=1, salt="public"),)))
    assert other == Terms(ticket=replace(told, regions=()))
    assert terms_of_another(Terms()) == Terms()


def test_without_regions_in_the_engine_the_field_is_ignored() -> None:
    assert _read("anything", has_regions=False) == ()


@pytest.mark.parametrize(
    "given",
    [
        "public",
        {"a": 1},
        [["public", 2]],
        [[0, "s"]],
        [[-1, "s"]],
        [[True, "s"]],
        [[1.5, "s"]],
        [[1, ""]],
        [[1, None]],
        [[1]],
        [[1, "s", 2]],
        [[MAX_REGION_BLOCKS + 1, "s"]],
        [[1, "s" * 1_025]],
        [[1, "s"]] * (MAX_REGIONS + 1),
    ],
)
def test_regions_that_make_no_sense_are_refused(given: Any) -> None:
    with pytest.raises(BadRequest, match="cache_salt_regions"):
        _read(given)


def test_regions_need_a_salt_for_the_rest() -> None:
    with pytest.raises(BadRequest, match="needs a cache_salt"):
        _read([[1, "s"]], salt=None)
