"""The check at the point of use: each single thing that is wrong with a block refuses it, is
counted under its reason, and leaves the answer right.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trunkline.core.freshness import Grant, Taken
from trunkline.ports.publisher import BlockRemoved, RunStored
from trunkline.worker.blocks import Block, BlockState
from trunkline.worker.cache import BlockCache
from trunkline.worker.fence import Reason
from worker_tenants import BLOCK, EPOCHS, NS, SUBJECTS, Store, right, ticket, tokens

PROMPT = tokens(70)
"""Four full blocks that can hit."""


def _warm() -> Store:
    store = Store()
    store.lease()
    assert store.run(PROMPT, ticket()) == 0
    assert store.run(PROMPT, ticket()) == 64
    assert store.refused() == {}
    store.cache.take_events()
    return store


def _block(store: Store, index: int = 0) -> Block:
    """A block of the prompt as it lies in the cache."""
    sequence = store.admitted(PROMPT, ticket())
    block = sequence.blocks[index]
    store.cache.release(sequence)
    return block


def test_another_namespace_tag_under_the_same_name_is_no_hit() -> None:
    store = _warm()
    assert store.run(PROMPT, ticket(ns=bytes(16))) == 0
    assert store.refused() == {Reason.NS: 1}
    assert store.run(PROMPT, ticket()) == 64, "whose it is keeps it"


@pytest.mark.parametrize("bit", range(0, 128, 17))
def test_every_part_of_the_namespace_tag_counts(bit: int) -> None:
    store = _warm()
    other = bytearray(NS)
    other[bit // 8] ^= 1 << bit % 8
    assert store.run(PROMPT, ticket(ns=bytes(other))) == 0
    assert store.refused() == {Reason.NS: 1}


@pytest.mark.parametrize("place", range(8), ids=SUBJECTS)
def test_a_raised_epoch_refuses_what_was_kept_under_the_old_one(place: int) -> None:
    store = _warm()
    raised = (*EPOCHS[:place], EPOCHS[place] + 1, *EPOCHS[place + 1 :])
    store.fence.freshness.obey(10, SUBJECTS[place], raised[place])
    # The request is admitted under the new epoch, but asks for the blocks of the old one.
    assert store.run(PROMPT, ticket(epochs=raised)) == 0
    assert store.refused() == {Reason.EPOCH: 1}
    assert store.run(PROMPT, ticket(epochs=raised)) == 64


@pytest.mark.parametrize("place", range(8), ids=SUBJECTS)
@pytest.mark.parametrize("step", [-1, 1])
def test_a_request_under_other_epochs_than_the_table_reuses_and_keeps_nothing(
    place: int, step: int
) -> None:
    store = _warm()
    other = (*EPOCHS[:place], EPOCHS[place] + step, *EPOCHS[place + 1 :])
    before = store.cache.resident_blocks
    assert store.run(PROMPT, ticket(epochs=other)) == 0
    assert store.run(PROMPT, ticket(epochs=other)) == 0
    assert store.refused() == {Reason.EPOCH: 2}
    assert store.cache.resident_blocks == before


def test_a_worker_behind_the_revision_of_a_request_computes_it() -> None:
    store = _warm()
    assert store.run(PROMPT, ticket(rev=10)) == 0
    assert store.refused() == {Reason.LEASE: 1}
    store.lease(rev=10)
    assert store.run(PROMPT, ticket(rev=10)) == 64


def test_without_a_lease_nothing_is_reused_and_nothing_is_kept() -> None:
    store = Store()
    assert store.run(PROMPT, ticket(rev=0, epochs=(0,) * 8)) == 0
    assert store.cache.resident_blocks == 0
    assert store.cache.take_events() == []
    assert store.refused() == {Reason.LEASE: 1}


def test_a_lease_ends_by_the_boot_clock_to_the_millisecond() -> None:
    store = _warm()
    store.boot_ms = 3_999.9
    assert store.run(PROMPT, ticket()) == 64
    store.boot_ms = 4_000.0
    assert store.run(PROMPT, ticket()) == 0
    assert store.refused() == {Reason.LEASE: 1}


def _other_name(block: Block) -> None:
    block.hash = block.hash[:-1] + bytes([block.hash[-1] ^ 1])


def _reused(block: Block) -> None:
    block.generation += 1


def _not_ready(block: Block) -> None:
    block.state = BlockState.WORKING


def _short(block: Block) -> None:
    block.kv = block.kv[:-1]


def _flipped(block: Block) -> None:
    block.kv = bytes([block.kv[0] ^ 0x10]) + block.kv[1:]


def _orphaned(block: Block) -> None:
    block.parent = bytes(32)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_other_name, Reason.HASH),
        (_reused, Reason.GEN),
        (_not_ready, Reason.GEN),
        (_short, Reason.LAYOUT),
        (_flipped, Reason.SUM),
        (_orphaned, Reason.CHAIN),
    ],
)
@pytest.mark.parametrize("index", [0, 2])
def test_a_block_that_is_not_what_it_says_ends_the_prefix_before_it(
    harm: Callable[[Block], None], reason: Reason, index: int
) -> None:
    store = _warm()
    harm(_block(store, index))
    assert store.run(PROMPT, ticket()) == index * BLOCK
    assert store.refused() == {reason: 1}


@pytest.mark.parametrize("bit", [0, 1, 4_095, 8_191])
def test_one_flipped_bit_anywhere_in_a_block_is_seen(bit: int) -> None:
    store = _warm()
    kv = _block(store).kv
    assert isinstance(kv, bytearray)
    kv[bit // 8] ^= 1 << bit % 8
    assert store.run(PROMPT, ticket()) == 0
    assert store.refused() == {Reason.SUM: 1}


def test_a_damaged_block_is_overwritten_told_and_never_met_again() -> None:
    store = _warm()
    block = _block(store, 3)
    name = block.hash
    _flipped(block)
    assert store.run(PROMPT, ticket()) == 48
    assert store.cache.erase(8) == 1
    events = store.cache.take_events()
    assert BlockRemoved(hash=name) in events
    assert store.run(PROMPT, ticket()) == 64
    assert store.refused() == {Reason.SUM: 1}


def test_the_check_stops_at_the_first_thing_that_is_wrong() -> None:
    store = _warm()
    block = _block(store)
    _flipped(block)
    _orphaned(block)
    _reused(block)
    assert store.run(PROMPT, ticket()) == 0
    assert store.refused() == {Reason.GEN: 1}


def test_a_place_that_is_given_away_is_of_another_generation() -> None:
    store = Store(capacity=5)
    store.lease()
    generations: list[int] = []
    for first in (300, 900, 1_500):
        sequence = store.admitted(tokens(64, first), ticket())
        store.cache.compute(sequence, 64)
        generations.extend(block.generation for block in sequence.blocks if not block.index)
        store.cache.release(sequence)
    assert generations == sorted(set(generations))
    assert len(generations) > 1


def test_before_the_first_byte_leaves_everything_is_checked_again() -> None:
    store = _warm()
    sequence = store.admitted(PROMPT, ticket())
    assert sequence.cached_tokens == 64
    assert store.cache.fault(sequence) is None
    store.fence.freshness.obey(10, "tenant/t", 4)
    assert store.cache.fault(sequence) is Reason.EPOCH
    assert store.refused() == {Reason.EPOCH: 1}


@pytest.mark.parametrize(
    ("harm", "reason"), [(_reused, Reason.GEN), (_flipped, Reason.SUM), (_short, Reason.LAYOUT)]
)
def test_what_happens_to_a_block_between_binding_and_first_byte_is_seen(
    harm: Callable[[Block], None], reason: Reason
) -> None:
    store = _warm()
    sequence = store.admitted(PROMPT, ticket())
    harm(sequence.blocks[2])
    assert store.cache.fault(sequence) is reason


def test_a_lease_that_ends_between_binding_and_first_byte_is_seen() -> None:
    store = _warm()
    sequence = store.admitted(PROMPT, ticket())
    store.boot_ms += 3_000
    assert store.cache.fault(sequence) is Reason.LEASE


def test_what_hit_nothing_needs_no_second_check() -> None:
    store = Store()
    assert store.cache.fault(store.admitted(PROMPT, ticket())) is None


def test_scope_none_looks_up_nothing_and_keeps_nothing() -> None:
    store = _warm()
    nobody = ticket(ns=b"")
    before = store.cache.resident_blocks
    assert store.run(PROMPT, nobody) == 0
    assert store.run(PROMPT, nobody) == 0
    assert store.cache.resident_blocks == before
    assert store.cache.take_events() == []
    assert store.refused() == {}


def test_requests_without_a_ticket_and_those_with_one_see_nothing_of_each_other() -> None:
    store = _warm()
    assert store.run(PROMPT, None) == 0
    assert store.run(PROMPT, None) == 64
    assert store.run(PROMPT, ticket()) == 64
    assert store.refused() == {}


def test_without_an_agent_a_ticket_is_computed() -> None:
    store = Store()
    store.cache = BlockCache(capacity=32, block_tokens=BLOCK)
    assert store.run(PROMPT, ticket()) == 0
    assert store.run(PROMPT, ticket()) == 0
    assert store.cache.resident_blocks == 0


def test_a_sequence_that_may_not_publish_one_block_publishes_none_behind_it() -> None:
    store = _warm()
    prompt = tokens(64, first=2_000)
    sequence = store.admitted(prompt, ticket())
    store.cache.compute(sequence, 16)
    store.boot_ms += 3_000
    store.cache.compute(sequence, 32)
    store.lease()
    store.cache.compute(sequence, 64)
    stored = [event for event in store.cache.take_events() if isinstance(event, RunStored)]
    assert [len(event.hashes) for event in stored] == [1]
    assert store.cache.answer(sequence, 8, 4_096) == right(prompt)
    store.cache.release(sequence)
    assert store.cache.erase(99) == 3
    assert store.cache.take_events() == []


@pytest.mark.parametrize(
    ("ask", "taken"),
    [("xx:1.000", Taken.OTHER_LIFE), ("ab:1.000", Taken.UNKNOWN_ASK)],
)
def test_a_grant_for_an_ask_of_another_life_or_of_none_arms_nothing(ask: str, taken: Taken) -> None:
    store = Store()
    store.fence.freshness.ask(store.fence.boot())
    grant = Grant(ask=ask, rev=9, ttl_ms=3_000)
    assert store.fence.freshness.take(grant) is taken
    assert store.run(PROMPT, ticket(rev=0, epochs=(0,) * 8)) == 0
    assert store.cache.resident_blocks == 0
