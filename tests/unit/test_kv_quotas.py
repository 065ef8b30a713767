"""Quotas of domains in the block store: floors that hold, caps that bind, and whose turn it is."""

from __future__ import annotations

from array import array

from kv_desk import BLOCK_TOKENS, SIZE, Desk, chain, owner, places_of
from trunkline.core.transfer import Reason, kv_chain
from trunkline.kv import Kept, Owner, Place

QUIET = owner("quiet")
NOISY = owner("noisy")
THIRD = owner("third")


def prompts(whose: Owner, count: int) -> list[Place]:
    """So many prompts of one block."""
    return [chain(whose, 1_000 * number, 1)[0] for number in range(count)]


def resident(desk: Desk, whose: Owner) -> int:
    return sum(manifest.owner == whose for _, manifest in desk.store.resident())


def test_a_flood_takes_what_is_above_the_floor_of_another_and_no_more() -> None:
    desk = Desk(host_blocks=8)
    desk.store.set_quota("quiet", floor_bytes=3 * SIZE)
    desk.put(prompts(QUIET, 6), QUIET)
    outcomes = desk.put(prompts(NOISY, 200), NOISY)
    assert all(isinstance(outcome, Kept) for outcome in outcomes)
    assert resident(desk, QUIET) == 3
    assert resident(desk, NOISY) == 5


def test_a_floor_keeps_nothing_empty_for_its_tenant() -> None:
    desk = Desk(host_blocks=4)
    desk.store.set_quota("quiet", floor_bytes=4 * SIZE)
    desk.put(prompts(NOISY, 4), NOISY)
    assert resident(desk, NOISY) == 4
    desk.put(prompts(QUIET, 4), QUIET)
    assert resident(desk, QUIET) == 4


def test_a_tenant_takes_its_own_blocks_below_its_own_floor() -> None:
    desk = Desk(host_blocks=2)
    desk.store.set_quota("quiet", floor_bytes=2 * SIZE)
    outcomes = desk.put(prompts(QUIET, 5), QUIET)
    assert all(isinstance(outcome, Kept) for outcome in outcomes)
    assert desk.put(prompts(NOISY, 1), NOISY) == [Reason.FULL]


def test_a_cap_makes_a_tenant_give_its_own_while_there_is_room() -> None:
    desk = Desk(host_blocks=8)
    desk.store.set_quota("noisy", cap_bytes=2 * SIZE)
    desk.put(prompts(THIRD, 3), THIRD)
    desk.put(prompts(NOISY, 10), NOISY)
    assert resident(desk, NOISY) == 2
    assert resident(desk, THIRD) == 3


def test_who_is_over_a_cap_that_was_lowered_goes_first() -> None:
    desk = Desk(host_blocks=6)
    desk.put(prompts(THIRD, 3), THIRD)
    desk.put(prompts(NOISY, 3), NOISY)
    desk.store.set_quota("noisy", cap_bytes=SIZE)
    desk.put(prompts(QUIET, 2), QUIET)
    assert (resident(desk, THIRD), resident(desk, NOISY)) == (3, 1)


def test_floors_that_are_more_than_there_is_count_in_proportion() -> None:
    desk = Desk(host_blocks=6)
    for name in ("quiet", "noisy", "third"):
        desk.store.set_quota(name, floor_bytes=4 * SIZE)
    desk.put(prompts(NOISY, 6), NOISY)
    desk.put(prompts(QUIET, 6), QUIET)
    desk.put(prompts(THIRD, 6), THIRD)
    assert [resident(desk, whose) for whose in (QUIET, NOISY, THIRD)] == [2, 2, 2]


def test_a_quota_that_is_given_up_puts_the_blocks_in_line_with_all_others() -> None:
    desk = Desk(host_blocks=3)
    desk.store.set_quota("quiet", floor_bytes=3 * SIZE)
    desk.put(prompts(QUIET, 3), QUIET)
    assert desk.put(prompts(NOISY, 1), NOISY) == [Reason.FULL]
    desk.store.set_quota("quiet")
    desk.put(prompts(NOISY, 3), NOISY)
    assert (resident(desk, QUIET), resident(desk, NOISY)) == (0, 3)


def test_a_block_behind_another_tenants_is_in_that_ones_way_and_not_behind_it() -> None:
    """Two zones: the head is in one order of eviction, the tail in another one."""
    desk = Desk(host_blocks=3)
    desk.store.set_quota("noisy", floor_bytes=SIZE)
    head = chain(QUIET, 0, 1)
    packed = kv_chain(NOISY.ns.hex(), array("I", range(BLOCK_TOKENS)), BLOCK_TOKENS, head[0].key)
    tail = places_of(packed, head[0].key, 1)
    desk.put(head, QUIET)
    desk.put(tail, NOISY)
    outcomes = desk.put(prompts(THIRD, 5), THIRD)
    assert all(isinstance(outcome, Kept) for outcome in outcomes)
    here = {manifest.place.key for _, manifest in desk.store.resident()}
    assert {head[0].key, tail[0].key} <= here
    # The same where the quota comes after the blocks.
    desk.store.set_quota("noisy")
    desk.store.set_quota("quiet", cap_bytes=3 * SIZE)
    assert desk.hits(tail, NOISY) == 1
    desk.put(prompts(THIRD, 7)[5:], THIRD)
    here = {manifest.place.key for _, manifest in desk.store.resident()}
    assert tail[0].key not in here or head[0].key in here


def test_as_many_domains_have_a_quota_as_may_be_and_no_more() -> None:
    desk = Desk()
    for number in range(1_024):
        assert desk.store.set_quota(f"t{number}", cap_bytes=SIZE)
    assert not desk.store.set_quota("one-more", cap_bytes=SIZE)
    assert desk.store.set_quota("t7", cap_bytes=2 * SIZE)
    assert desk.store.set_quota("t7")
    assert desk.store.set_quota("one-more", cap_bytes=SIZE)
