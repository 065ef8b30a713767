"""The block store: what is found, by whom, and that every byte is somewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_desk import (
    LAYOUT,
    SIZE,
    SOON,
    Desk,
    chain,
    content,
    fill,
    manifests_at,
    owner,
)
from trunkline.core.records import Instant, Tier
from trunkline.core.transfer import Reason
from trunkline.kv import Kept, Place
from trunkline.kv.admission import manifest_of
from trunkline.kv.arena import Slot
from trunkline.kv.digests import digests_of
from trunkline.kv.news import News
from trunkline.kv.records import Added, Gone, Overflowed

A = owner("a")
B = owner("b")


def test_what_was_put_is_found_by_its_namespace_and_by_no_other() -> None:
    desk = Desk()
    places = chain(A, 0, 3)
    assert all(isinstance(kept, Kept) and kept.is_new for kept in desk.put(places, A))
    assert desk.hits(places, A) == 3
    assert desk.pin(places, B).reason is Reason.NS
    assert desk.hits(places, B) == 0
    desk.check_sums()


def test_a_run_ends_at_the_first_block_that_is_not_there() -> None:
    desk = Desk()
    places = chain(A, 0, 4)
    desk.put(places[:2], A)
    pins = desk.pin(places, A)
    assert [block.manifest.place for block in pins.blocks] == places[:2]
    assert pins.reason is Reason.MISS


def test_a_block_whose_parent_is_not_here_is_refused() -> None:
    desk = Desk()
    places = chain(A, 0, 3)
    assert desk.put(places[1:], A) == [Reason.CHAIN, Reason.CHAIN]
    assert desk.store.figures().host_bytes == 0


def test_the_same_block_again_is_no_change_and_other_bytes_are_an_alarm() -> None:
    desk = Desk()
    (place,) = chain(A, 0, 1)
    desk.put([place], A)
    again = desk.store.put(place, A, content(place))
    assert isinstance(again, Kept)
    assert not again.is_new
    assert desk.store.put(place, A, bytes(SIZE)) is Reason.CONFLICT
    assert [alarm.place for alarm in desk.alarms] == [place]
    assert desk.store.figures().conflicts == 1
    assert desk.hits([place], A) == 1


def test_the_tail_of_a_prefix_gives_way_before_its_head() -> None:
    desk = Desk(host_blocks=3)
    old, new = chain(A, 0, 3), chain(A, 100, 2)
    desk.put(old, A)
    desk.put(new, A)
    assert desk.hits(old, A) == 1
    assert desk.hits(new, A) == 2
    gone = [event for event in desk.store.take_events() if isinstance(event, Gone)]
    assert gone == [Gone(key=place.key, tier=Tier.HOST) for place in (old[2], old[1])]


def test_what_is_pinned_stays_and_the_newcomer_is_refused() -> None:
    desk = Desk(host_blocks=2)
    old, new = chain(A, 0, 2), chain(A, 100, 1)
    desk.put(old, A)
    pins = desk.pin(old, A)
    assert desk.put(new, A) == [Reason.FULL]
    assert bytes(pins.blocks[1].data) == content(old[1])
    desk.store.unpin(pins.token)
    assert isinstance(desk.put(new, A)[0], Kept)


def test_events_tell_of_each_block_that_came() -> None:
    desk = Desk()
    places = chain(A, 0, 2)
    desk.put(places, A)
    added = desk.store.take_events()
    assert [event.keys for event in added if isinstance(event, Added)] == [
        (place.key,) for place in places
    ]
    assert desk.store.take_events() == []


def test_a_staging_is_invisible_until_it_is_published() -> None:
    source, desk = Desk(), Desk()
    places = chain(A, 0, 3)
    source.put(places, A)
    staging = desk.stage(places, A)
    assert desk.staged_bytes() == 3 * SIZE
    fill(staging)
    assert desk.hits(places, A) == 0
    published = desk.store.publish(staging.token, manifests_at(source.store, places, A))
    assert (published.count, published.reason) == (3, None)
    assert desk.staged_bytes() == 0
    assert desk.hits(places, A) == 3
    desk.check_sums()


@pytest.mark.parametrize("flipped", range(4))
def test_only_whole_leading_blocks_are_published(flipped: int) -> None:
    source, desk = Desk(), Desk()
    places = chain(A, 0, 4)
    source.put(places, A)
    staging = desk.stage(places, A)
    fill(staging)
    staging.buffer(flipped)[SIZE - 1] ^= 1
    published = desk.store.publish(staging.token, manifests_at(source.store, places, A))
    assert (published.count, published.reason) == (flipped, Reason.DIGEST)
    assert desk.hits(places, A) == flipped
    assert desk.staged_bytes() == 0


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("layout_digest", bytes(16), Reason.LAYOUT),
        ("chunk_bytes", 32, Reason.LAYOUT),
        ("size_bytes", SIZE - 1, Reason.LENGTH),
        ("digests", (), Reason.LENGTH),
        ("owner", B, Reason.NS),
        ("owner", replace(A, epochs=(0, 9)), Reason.EPOCH),
        ("place", Place(key=bytes(32), parent=bytes(32), index=0), Reason.CHAIN),
    ],
)
def test_a_manifest_of_something_else_is_refused(field: str, value: object, reason: Reason) -> None:
    source, desk = Desk(), Desk()
    places = chain(A, 0, 1)
    source.put(places, A)
    staging = desk.stage(places, A)
    fill(staging)
    wrong = [replace(manifests_at(source.store, places, A)[0], **{field: value})]
    published = desk.store.publish(staging.token, wrong)
    assert (published.count, published.reason) == (0, reason)
    assert desk.hits(places, A) == 0
    assert desk.staged_bytes() == 0


def test_a_full_staging_budget_refuses_at_once() -> None:
    desk = Desk(staging_blocks=2)
    places = chain(A, 0, 3)
    assert desk.store.stage(A, places, until=SOON) is Reason.STAGING_FULL
    staging = desk.stage(places[:2], A)
    assert desk.store.stage(A, places[:1], until=SOON) is Reason.STAGING_FULL
    assert desk.store.abandon(staging.token)
    assert not desk.store.abandon(staging.token)
    assert desk.store.figures().void_tokens == 1
    desk.stage(places[:1], A)


def test_quarantined_memory_is_not_used_again_until_it_is_told() -> None:
    desk = Desk(staging_blocks=1)
    places = chain(A, 0, 1)
    staging = desk.stage(places, A)
    assert desk.store.abandon(staging.token, quarantine=True)
    assert desk.store.figures().quarantined_bytes == SIZE
    assert desk.store.stage(A, places, until=SOON) is Reason.STAGING_FULL
    assert not desk.store.abandon(staging.token)
    assert desk.store.unquarantine(staging.token)
    assert desk.store.figures().quarantined_bytes == 0
    desk.stage(places, A)


def test_a_condemned_owner_is_unreachable_at_once_and_wiped_in_slices() -> None:
    desk = Desk()
    mine, others = chain(A, 0, 3), chain(B, 0, 2)
    desk.put(mine, A)
    desk.put(others, B)
    pins = desk.pin(mine, A)
    erasure = desk.store.condemn(lambda whose: whose == A)
    assert desk.hits(mine, A) == 0
    assert desk.hits(others, B) == 2
    assert (erasure.condemned_blocks, erasure.erased_blocks) == (3, 0)
    assert desk.store.erase(10) == 3
    assert not erasure.is_done
    assert bytes(pins.blocks[0].data) == content(mine[0])
    desk.store.unpin(pins.token)
    assert [desk.store.erase(2), desk.store.erase(2), desk.store.erase(2)] == [2, 1, 0]
    assert erasure.is_done
    assert not any(any(block.data) for block in pins.blocks)
    desk.check_sums()


def test_a_pin_that_ran_out_is_dropped_by_itself_and_cannot_be_renewed() -> None:
    desk = Desk()
    places = chain(A, 0, 2)
    desk.put(places, A)
    pins = desk.pin(places, A, until=1_500.0)
    assert desk.store.renew(pins.token, Instant(2_000.0))
    desk.clock.ms = 1_999.0
    assert desk.store.figures().pinned_bytes == 2 * SIZE
    desk.clock.ms = 2_000.0
    assert desk.store.figures().pinned_bytes == 0
    assert not desk.store.renew(pins.token, SOON)
    assert not desk.store.unpin(pins.token)


def test_events_that_nobody_takes_are_dropped_at_the_bound_and_that_is_told() -> None:
    news = News(max_events=3)
    for number in range(4):
        news.gone(bytes([number]) * 32, Tier.HOST)
    assert news.take() == [Overflowed(), Gone(key=b"\3" * 32, tier=Tier.HOST)]
    assert news.take() == []


def test_free_memory_with_bytes_of_a_revoked_owner_is_wiped_too() -> None:
    desk = Desk(host_blocks=1)
    old, new = chain(A, 0, 1), chain(B, 0, 1)
    desk.put(old, A)
    view = desk.pin(old, A, until=desk.clock.ms + 1.0).blocks[0].data
    desk.clock.ms += 1.0
    assert bytes(view) == content(old[0])
    staging = desk.stage(new, B)
    staging.buffer(0)[:] = b"s" * SIZE
    partial = staging.buffer(0).toreadonly()
    assert desk.store.abandon(staging.token)
    erasure = desk.store.condemn(lambda whose: whose.domain in ("a", "b"))
    assert (erasure.condemned_blocks, erasure.erased_blocks) == (2, 0)
    while desk.store.erase(4):
        pass
    assert erasure.is_done
    assert not any(view)
    assert not any(partial)


def test_a_lease_is_cut_at_ten_minutes() -> None:
    desk = Desk()
    places = chain(A, 0, 1)
    desk.put(places, A)
    pins = desk.pin(places, A, until=1e12)
    staging = desk.stage(chain(A, 100, 1), A, until=1e12)
    desk.clock.ms += 600_000.0
    assert not desk.store.unpin(pins.token)
    assert desk.store.publish(staging.token, []).reason is Reason.TOKEN


def test_a_lease_that_ran_out_while_bytes_were_compared_accuses_no_block() -> None:
    """The memory may have been another block's by then."""
    desk = Desk()
    places = chain(A, 0, 1)
    desk.put(places, A)
    pins = desk.pin(places, A)
    entry = desk.store._catalogue.find(places[0].key)
    assert entry is not None
    desk.store.unpin(pins.token)
    shortened = desk.store._shorten(pins.token, entry, 0, Reason.DIGEST)
    assert shortened == (b"", Reason.TOKEN)
    assert desk.store.figures().spoilt == 0
    assert desk.hits(places, A) == 1


def test_nothing_is_reused_or_kept_without_the_hosts_lease() -> None:
    desk = Desk()
    places = chain(A, 0, 2)
    desk.put(places[:1], A)
    staging = desk.stage(places, A)
    fill(staging)
    desk.judge.has_lease = False
    assert desk.put(places[1:], A) == [Reason.LEASE]
    assert desk.pin(places, A).reason is Reason.LEASE
    assert desk.store.stage(A, places, until=SOON) is Reason.LEASE
    source = Desk()
    source.put(places, A)
    published = desk.store.publish(staging.token, manifests_at(source.store, places, A))
    assert (published.count, published.reason) == (0, Reason.LEASE)
    desk.judge.has_lease = True
    assert desk.hits(places, A) == 1


def test_what_left_the_index_while_it_was_pinned_is_wiped_by_a_later_revocation() -> None:
    desk = Desk()
    places = chain(A, 0, 2)
    desk.put(places, A)
    pins = desk.pin(places, A)
    entry = desk.store._catalogue.find(places[0].key)
    assert entry is not None
    assert entry.slot is not None
    entry.slot.view[0] ^= 1
    assert desk.pin(places, A).reason is Reason.DIGEST
    erasure = desk.store.condemn(lambda whose: whose == A)
    assert erasure.condemned_blocks == 2
    desk.store.unpin(pins.token)
    assert not erasure.is_done
    assert desk.store.erase(8) == 2
    assert erasure.is_done
    assert not any(any(block.data) for block in pins.blocks)


def test_a_block_that_is_being_written_when_its_owner_is_revoked_does_not_come_in() -> None:
    desk = Desk()
    (place,) = chain(A, 0, 1)
    admission = desk.store._admission
    slot = admission.reserve(place, A)
    assert isinstance(slot, Slot)
    slot.view[:] = content(place)
    erasure = desk.store.condemn(lambda whose: whose == A)
    digests = digests_of(slot.view, LAYOUT)
    written = manifest_of(LAYOUT, place, A, slot, digests)
    assert admission.settle(written, slot, saved_ms=0.0, copies=0) is Reason.EPOCH
    assert desk.pin([place], A).reason is Reason.MISS
    assert not erasure.is_done
    assert desk.store.erase(8) == 1
    assert erasure.is_done
    assert not any(slot.view)
    desk.check_sums()
