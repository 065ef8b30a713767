"""Faults that users of other KV stores met, as far as the store alone decides them. Numbers are
those of the conformance list of the data plane.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kv_desk import (
    LAYOUT,
    SIZE,
    SOON,
    Desk,
    DiskDesk,
    chain,
    content,
    fill,
    manifests_at,
    other_bytes,
    owner,
)
from trunkline.core.records import Instant, Tier
from trunkline.core.transfer import Reason
from trunkline.kv import Kept, Place
from trunkline.kv.digests import fault_of
from trunkline.kv.records import Added

A = owner("a")
B = owner("b")


def test_d01_memory_that_was_used_again_under_a_slow_reader_is_told_by_its_digest() -> None:
    desk = Desk(host_blocks=1)
    old, new = chain(A, 0, 1), chain(A, 100, 1)
    desk.put(old, A)
    slow = desk.pin(old, A, until=desk.clock.ms + 200.0)
    block = slow.blocks[0]
    assert fault_of(block.data, block.manifest, LAYOUT) is None
    desk.clock.ms += 1_000.0
    assert desk.put(new, A)[0] != Reason.FULL
    # A "still there?" afterwards would find a valid block in the same memory.
    assert bytes(block.data) == content(new[0])
    assert fault_of(block.data, block.manifest, LAYOUT) is Reason.DIGEST
    assert not desk.store.renew(slow.token, SOON)


def test_d01_a_lease_that_is_renewed_keeps_the_memory_for_as_long_as_bytes_move() -> None:
    desk = Desk(host_blocks=1)
    old, new = chain(A, 0, 1), chain(A, 100, 1)
    desk.put(old, A)
    slow = desk.pin(old, A, until=desk.clock.ms + 200.0)
    for _ in range(20):
        desk.clock.ms += 100.0
        assert desk.store.renew(slow.token, Instant(desk.clock.ms + 200.0))
        assert desk.put(new, A) == [Reason.FULL]
    assert bytes(slow.blocks[0].data) == content(old[0])


def test_d01_a_renewal_never_shortens_a_lease() -> None:
    desk = Desk()
    places = chain(A, 0, 1)
    desk.put(places, A)
    pins = desk.pin(places, A, until=desk.clock.ms + 500.0)
    assert desk.store.renew(pins.token, Instant(desk.clock.ms + 1.0))
    desk.clock.ms += 499.0
    assert desk.store.unpin(pins.token)


def test_d02_whatever_the_index_names_in_a_tier_can_be_read_there(tmp_path: Path) -> None:
    desk = DiskDesk(root=tmp_path, host_blocks=2, disk_blocks=3)
    prompts = [chain(A, 1_000 * number, 2) for number in range(5)]
    for prompt in prompts:
        desk.put_through(prompt, A)
        names = {path.name for path in desk.files()}
        on_disk = [place for tier, place in _resident(desk) if tier is Tier.DISK]
        assert len(names) == len(on_disk) == desk.store.figures().disk_bytes // SIZE
    for prompt in prompts:
        there = {place.key for _, place in _resident(desk)}
        expected = [*(place.key in there for place in prompt), False].index(False)
        # Coming up pushes others down, which may take the tail of this one.
        assert min(expected, 1) <= desk.hits(prompt, A, load_until=SOON) <= expected
        desk.settle()
    assert desk.disk is not None
    assert desk.disk.counters.phantoms == 0
    desk.store.close()


def _resident(desk: Desk) -> list[tuple[Tier, Place]]:
    return [(tier, manifest.place) for tier, manifest in desk.store.resident()]


def test_d02_a_copy_on_disk_that_is_gone_does_not_stand_in_for_the_one_in_memory(
    tmp_path: Path,
) -> None:
    desk = DiskDesk(root=tmp_path, host_blocks=2)
    old, new = chain(A, 0, 1), chain(A, 100, 1)
    desk.put_through([*old, *new, *chain(A, 200, 1)], A)
    assert desk.hits(old, A, load_until=SOON) == 1
    desk.settle()  # coming up pushed another one down
    for path in desk.files():
        path.unlink()
    # In memory as well: found, whatever became of the copy.
    assert desk.hits(old, A) == 1
    desk.put_through([*chain(A, 300, 1), *chain(A, 400, 1)], A)
    assert desk.pin(old, A, load_until=SOON).reason is Reason.MISS
    assert desk.pin(old, A).reason is Reason.MISS
    desk.store.close()


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1])
def test_d03_an_empty_or_short_block_is_never_kept(length: int) -> None:
    desk = Desk()
    places = chain(A, 0, 1)
    assert desk.store.put(places[0], A, bytes(length)) is Reason.LENGTH
    assert desk.pin(places, A).reason is Reason.MISS


def test_d04_a_store_that_starts_anew_knows_nothing_of_its_earlier_life(tmp_path: Path) -> None:
    earlier = DiskDesk(root=tmp_path, host_blocks=1)
    places = chain(A, 0, 1)
    earlier.put_through([*places, *chain(A, 100, 1)], A)
    pins = earlier.pin(places, A, load_until=SOON)
    staging = earlier.stage(places, A)
    later = DiskDesk(root=tmp_path, incarnation="2" * 32)
    later.store.take_events()
    assert not later.store.renew(pins.token, SOON)
    assert not later.store.unpin(pins.token)
    assert later.store.publish(staging.token, []).reason is Reason.TOKEN
    assert later.store.resident() == []
    # What it holds is told anew, as something that was just added.
    later.put(places, A)
    added = later.store.take_events()
    assert [event.keys for event in added if isinstance(event, Added)] == [(places[0].key,)]
    earlier.store.close()
    later.store.close()


def test_d04_memory_that_is_given_away_again_has_another_generation() -> None:
    desk = Desk(host_blocks=1)
    seen: set[int] = set()
    for number in range(10):
        (outcome,) = desk.put(chain(A, 1_000 * number, 1), A)
        assert isinstance(outcome, Kept)
        seen.add(outcome.manifest.generation)
    assert seen == set(range(1, 11))


def test_d06_a_thousand_writers_that_died_leave_no_records(tmp_path: Path) -> None:
    desk = Desk(staging_blocks=4)
    places = chain(A, 0, 2)
    base = desk.store.figures()
    for number in range(1_000):
        staging = desk.stage(places, A, until=desk.clock.ms + 10.0)
        desk.clock.ms += 20.0
        assert desk.staged_bytes() == 0
        assert desk.store.figures().quarantined_bytes == 2 * SIZE
        # Its supervisor says that nobody writes to it any more.
        assert desk.store.abandon(staging.token), number
    assert replace(desk.store.figures(), void_tokens=0) == base


@pytest.mark.parametrize("filled", [0, 1, 2, 3])
def test_d07_a_writer_that_dies_at_any_step_blocks_nobody(filled: int) -> None:
    source, desk = Desk(), Desk(staging_blocks=6)
    places = chain(A, 0, 3)
    source.put(places, A)
    dead = desk.stage(places, A, until=desk.clock.ms + 100.0)
    for index in range(filled):
        dead.buffer(index)[:] = content(places[index])
    # While it is staged, and after: the keys are free, also for the engine's own blocks.
    assert isinstance(desk.put(places[:1], A)[0], Kept)
    desk.clock.ms += 200.0
    assert desk.store.publish(dead.token, manifests_at(source.store, places, A)).count == 0
    other = desk.stage(places, A)
    fill(other)
    published = desk.store.publish(other.token, manifests_at(source.store, places, A))
    assert (published.count, published.reason) == (3, None)
    assert desk.hits(places, A) == 3


def test_d08_a_late_end_of_one_write_does_not_complete_another() -> None:
    source, desk = Desk(), Desk()
    places = chain(A, 0, 2)
    source.put(places, A)
    manifests = manifests_at(source.store, places, A)
    first = desk.stage(places, A)
    fill(first)
    assert desk.store.abandon(first.token)
    second = desk.stage(places, A)
    for late in (first.token, first.token):
        assert desk.store.publish(late, manifests).reason is Reason.TOKEN
    assert desk.hits(places, A) == 0
    fill(second)
    assert desk.store.publish(second.token, manifests).count == 2
    assert desk.store.publish(second.token, manifests).reason is Reason.TOKEN
    assert not desk.store.abandon(second.token)
    assert len(first.token) == 16
    assert first.token != second.token


def test_d08_of_two_writers_of_one_block_one_wins_and_other_bytes_are_an_alarm() -> None:
    source, desk = Desk(), Desk()
    places = chain(A, 0, 2)
    source.put(places, A)
    manifests = manifests_at(source.store, places, A)
    stagings = [desk.stage(places, A) for _ in range(2)]
    for staging in stagings:
        fill(staging)
    stagings[1].buffer(1)[:] = bytes(SIZE)
    forged = [manifests[0], replace(manifests[1], digests=_digests(bytes(SIZE)))]
    assert desk.store.publish(stagings[0].token, manifests).count == 2
    late = desk.store.publish(stagings[1].token, forged)
    assert (late.count, late.reason) == (1, Reason.CONFLICT)
    assert [alarm.place for alarm in desk.alarms] == [places[1]]
    assert desk.hits(places, A) == 2
    assert desk.staged_bytes() == 0


def _digests(data: bytes) -> tuple[bytes, ...]:
    desk = Desk()
    (place,) = chain(A, 0, 1)
    kept = desk.store.put(place, A, data)
    assert isinstance(kept, Kept)
    return kept.manifest.digests


def test_d12_damage_in_memory_is_met_once_and_what_stands_on_it_goes_too() -> None:
    desk = Desk()
    places = chain(A, 0, 4)
    desk.put(places, A)
    pins = desk.pin(places, A)
    _damage(desk, places[2])
    again = desk.pin(places, A)
    assert (len(again.blocks), again.reason) == (2, Reason.DIGEST)
    assert desk.pin(places, A).reason is Reason.MISS
    assert desk.store.figures().spoilt == 1
    desk.store.unpin(again.token)
    desk.store.unpin(pins.token)
    desk.check_sums()


def _damage(desk: Desk, place: Place) -> None:
    """Flip a bit under the store's feet, as bad memory does."""
    entry = desk.store._catalogue.find(place.key)
    assert entry is not None
    assert entry.slot is not None
    entry.slot.view[SIZE // 2] ^= 1


def test_d13_ten_thousand_look_ups_that_lead_to_nothing_leave_nothing_pinned() -> None:
    desk = Desk(max_pins=16_384)
    places = chain(A, 0, 2)
    desk.put(places, A)
    for _ in range(10_000):
        assert len(desk.pin(places, A, until=desk.clock.ms + 100.0).blocks) == 2
    assert desk.store.figures().pins == 10_000
    desk.clock.ms += 100.0
    figures = desk.store.figures()
    assert (figures.pinned_bytes, figures.pins, figures.expired_pins) == (0, 0, 10_000)


def test_d13_dropping_a_request_gives_back_all_that_was_found_for_it() -> None:
    desk = Desk()
    places = chain(A, 0, 2)
    desk.put(places, A)
    keys = [place.key for place in places]
    for holder in ("r1", "r1", "r2"):
        assert desk.store.pin(A.ns, keys, until=SOON, holder=holder).blocks
    assert desk.store.unpin_holder("r1") == 2
    assert desk.store.unpin_holder("r1") == 0
    assert desk.store.figures().pins == 1
    assert desk.store.unpin_holder("r2") == 1
    assert desk.store.figures().pinned_bytes == 0


def test_d13_as_many_pins_as_may_be_and_no_more() -> None:
    desk = Desk(max_pins=3)
    places = chain(A, 0, 1)
    desk.put(places, A)
    tokens = [desk.pin(places, A).token for _ in range(3)]
    assert desk.pin(places, A).reason is Reason.PINS_FULL
    desk.store.unpin(tokens[0])
    assert len(desk.pin(places, A).blocks) == 1


def test_d14_giving_back_twice_is_counted_and_takes_nobody_elses_hold() -> None:
    desk = Desk(host_blocks=1)
    places = chain(A, 0, 1)
    desk.put(places, A)
    first, second = desk.pin(places, A), desk.pin(places, A)
    assert desk.store.unpin(first.token)
    for _ in range(3):
        assert not desk.store.unpin(first.token)
    assert desk.store.figures().void_tokens == 3
    assert desk.store.figures().pinned_bytes == SIZE
    assert desk.put(chain(A, 100, 1), A) == [Reason.FULL]
    assert desk.store.unpin(second.token)


@pytest.mark.parametrize("missing", [0, 1])
def test_d20_a_block_with_a_stale_component_is_not_published_nor_anything_behind_it(
    missing: int,
) -> None:
    source, desk = Desk(), Desk()
    places = chain(A, 0, 3)
    source.put(places, A)
    staging = desk.stage(places, A)
    kv_bytes = LAYOUT.components[0].size_bytes
    for index, place in enumerate(places):
        whole = content(place)
        if index != 1:
            staging.buffer(index)[:] = whole
        elif missing == 0:
            staging.buffer(index)[kv_bytes:] = whole[kv_bytes:]
        else:
            staging.buffer(index)[:kv_bytes] = whole[:kv_bytes]
    published = desk.store.publish(staging.token, manifests_at(source.store, places, A))
    assert (published.count, published.reason) == (1, Reason.DIGEST)
    assert desk.hits(places, A) == 1
    assert desk.staged_bytes() == 0


def test_d21_the_digest_is_of_the_bytes_that_are_kept_whatever_becomes_of_the_engines() -> None:
    desk = Desk()
    (place,) = chain(A, 0, 1)
    engine = bytearray(content(place))
    kept = desk.store.put(place, A, engine)
    engine[:] = bytes(SIZE)
    assert isinstance(kept, Kept)
    pins = desk.pin([place], A)
    assert bytes(pins.blocks[0].data) == content(place)
    assert fault_of(pins.blocks[0].data, kept.manifest, LAYOUT) is None


def test_d22_a_lease_that_was_lost_is_a_shorter_hit_and_no_assertion() -> None:
    desk = Desk(host_blocks=3)
    places = chain(A, 0, 3)
    desk.put(places, A)
    pins = desk.pin(places, A, until=desk.clock.ms + 10.0)
    desk.clock.ms += 10.0
    desk.put(chain(A, 100, 2), A)
    assert not desk.store.renew(pins.token, SOON)
    assert desk.hits(places, A) == 1


def test_d22_what_was_found_cannot_be_evicted_before_it_is_used() -> None:
    desk = Desk(host_blocks=4)
    places = chain(A, 0, 3)
    desk.put(places, A)
    pins = desk.pin(places, A)
    outcomes = [desk.put(chain(A, 1_000 * number, 1), A)[0] for number in range(1, 50)]
    assert all(isinstance(outcome, Kept) for outcome in outcomes)
    for place, block in zip(places, pins.blocks, strict=True):
        assert bytes(block.data) == content(place)


def test_d33_a_renewal_does_not_bring_back_what_has_run_out() -> None:
    desk = Desk()
    places = chain(A, 0, 1)
    desk.put(places, A)
    pins = desk.pin(places, A, until=desk.clock.ms + 10.0)
    staging = desk.stage(chain(A, 100, 1), A, until=desk.clock.ms + 10.0)
    desk.clock.ms += 10.0
    assert not desk.store.renew(pins.token, SOON)
    assert desk.store.figures().pinned_bytes == 0
    assert desk.store.publish(staging.token, []).reason is Reason.TOKEN


def test_d33_making_room_really_makes_room() -> None:
    desk = Desk(host_blocks=4)
    for number in range(50):
        (outcome,) = desk.put(chain(A, 1_000 * number, 1), A)
        assert isinstance(outcome, Kept)
    figures = desk.store.figures()
    assert (figures.host_bytes, figures.evicted) == (4 * SIZE, 46)


def test_d33_a_run_keeps_the_blocks_that_came_in_before_the_one_that_could_not() -> None:
    source, desk = Desk(), Desk(host_blocks=2)
    places = chain(A, 0, 4)
    source.put(places, A)
    staging = desk.stage(places, A)
    fill(staging)
    published = desk.store.publish(staging.token, manifests_at(source.store, places, A))
    assert (published.count, published.reason) == (2, Reason.FULL)
    assert desk.hits(places, A) == 2
    assert desk.staged_bytes() == 0


def test_other_bytes_from_a_source_do_not_replace_what_is_here() -> None:
    source, desk = Desk(), Desk()
    places = chain(A, 0, 1)
    source.put(places, A)
    desk.put(places, A)
    staging = desk.stage(places, A)
    fill(staging)
    forged = [other_bytes(manifest) for manifest in manifests_at(source.store, places, A)]
    assert desk.store.publish(staging.token, forged).reason is Reason.DIGEST
    assert desk.hits(places, A) == 1


def test_condemned_blocks_make_room_before_any_that_can_be_used() -> None:
    desk = Desk(host_blocks=4)
    mine, theirs = chain(A, 0, 2), chain(B, 0, 2)
    desk.put(mine, A)
    desk.put(theirs, B)
    desk.judge.epochs["tenant/b"] = 1
    erasure = desk.store.condemn(desk.judge.is_stale)
    desk.put(chain(A, 100, 2), A)
    assert desk.hits(mine, A) == 2
    assert desk.store.erase(10) == 2
    assert erasure.is_done
    desk.check_sums()


def test_a_revocation_is_not_done_before_each_pinned_block_is_wiped() -> None:
    """One had left the index before it, which does not stand in for one that had not."""
    desk = Desk()
    first, second = chain(A, 0, 1), chain(A, 100, 1)
    desk.put([*first, *second], A)
    pins = [desk.pin(places, A) for places in (first, second)]
    _damage(desk, first[0])
    assert desk.pin(first, A).reason is Reason.DIGEST
    erasure = desk.store.condemn(lambda whose: whose == A)
    assert erasure.condemned_blocks == 2
    for pin in pins:
        assert not erasure.is_done
        assert desk.store.unpin(pin.token)
        while desk.store.erase(8):
            pass
    assert erasure.is_done
    assert not any(any(block.data) for pin in pins for block in pin.blocks)


def test_a_later_revocation_does_not_take_what_an_earlier_one_waits_for() -> None:
    desk = Desk()
    places = chain(A, 0, 2)
    desk.put(places, A)
    pins = desk.pin(places, A)
    earlier = desk.store.condemn(lambda whose: whose == A)
    assert desk.store.erase(8) == 2
    later = desk.store.condemn(lambda whose: whose == A)
    assert (later.condemned_blocks, later.is_done) == (0, True)
    desk.store.unpin(pins.token)
    while desk.store.erase(8):
        pass
    assert (earlier.condemned_blocks, earlier.is_done) == (2, True)


@pytest.mark.parametrize("is_revoked", [False, True], ids=["damaged", "revoked"])
def test_what_cannot_be_found_any_more_is_not_held_longer(is_revoked: bool) -> None:
    desk = Desk()
    places, others = chain(A, 0, 3), chain(B, 0, 1)
    desk.put(places, A)
    desk.put(others, B)
    pins, theirs = desk.pin(places, A), desk.pin(others, B)
    assert desk.store.renew(pins.token, SOON)
    if is_revoked:
        desk.store.condemn(lambda whose: whose == A)
    else:
        _damage(desk, places[1])
        assert desk.hits(places, A) == 1
    assert not desk.store.renew(pins.token, SOON)
    assert desk.store.renew(theirs.token, SOON)
    assert desk.store.unpin(pins.token)
