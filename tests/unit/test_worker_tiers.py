"""What the simulated worker keeps in host memory: when it counts, and when it must not."""

from __future__ import annotations

import asyncio
import threading
from array import array
from dataclasses import replace
from typing import cast

import pytest

from trunkline.core.records import Instant, Tier
from trunkline.core.transfer import Reason as KvReason
from trunkline.kv.records import Owner
from trunkline.ports.publisher import BlockEvent, BlockRemoved, RunStored
from trunkline.worker import fence
from trunkline.worker.blocks import KvSequence, Stamp, Terms
from trunkline.worker.lifting import MAX_LIFTS, Lifts
from trunkline.worker.pulls import PullCall
from trunkline.worker.requests import Region
from trunkline.worker.tiers import HostTier
from worker_tenants import BLOCK, BLOCK_BYTES, EPOCHS, NS, SUBJECTS, Store, ticket, tokens

PROMPT = tokens(4 * BLOCK + 6)
OTHER_NS = b"o" * 16
PUBLIC_NS = b"p" * 16
PUBLIC = Region(blocks=2, salt="public")


@pytest.fixture(name="store")
def a_store() -> Store:
    store = Store(capacity=8, host=32)
    store.lease()
    return store


def _host_events(store: Store) -> list[BlockEvent]:
    return store.behind._notices.take(store.behind.store.take_events())


def _told(events: list[BlockEvent], resident: set[tuple[Tier, bytes]]) -> None:
    """Bring a listener's picture up to date: nothing is removed that was not told."""
    for event in events:
        if isinstance(event, RunStored):
            assert len(event.tokens) == len(event.hashes) * BLOCK
            parent = event.parent
            assert parent is None or (event.tier, parent) in resident
            resident.update((event.tier, name) for name in event.hashes)
        elif isinstance(event, BlockRemoved):
            resident.remove((event.tier, event.hash))


# --- hits ---


def test_what_left_the_device_is_hit_in_host_memory(store: Store) -> None:
    assert store.run(PROMPT, ticket()) == 0
    store.crowd_out()
    assert not _sketch(store).blocks
    assert store.run(PROMPT, ticket()) == 4 * BLOCK


def test_hits_of_the_device_go_on_in_host_memory(store: Store) -> None:
    store.run(PROMPT, ticket())
    taken = store.admitted(PROMPT[: 2 * BLOCK + 1], ticket())  # its two blocks stay
    for first in (3_000, 3_500):
        store.run(tokens(5 * BLOCK - 1, first=first), None)
    sequence = store.admitted(PROMPT, ticket())
    assert (sequence.cached_tokens, sequence.loaded_blocks) == (4 * BLOCK, 2)
    store.cache.release(sequence)
    store.cache.release(taken)


def test_what_was_loaded_is_on_the_device_again_and_announced_there(store: Store) -> None:
    store.run(PROMPT, ticket())
    store.crowd_out()
    store.cache.take_events()
    store.run(PROMPT, ticket())
    loaded = [event for event in store.cache.take_events() if isinstance(event, RunStored)]
    assert [len(event.hashes) for event in loaded] == [4]
    assert (loaded[0].tier, loaded[0].tokens) == (Tier.DEVICE, PROMPT[: 4 * BLOCK])
    assert len(_sketch(store).blocks) == 4


def test_the_last_token_is_always_computed(store: Store) -> None:
    whole = PROMPT[: 4 * BLOCK]
    store.run(whole, ticket())
    store.crowd_out()
    assert store.run(whole, ticket()) == 3 * BLOCK


def test_requests_without_a_ticket_neither_fill_nor_use_host_memory(store: Store) -> None:
    store.run(PROMPT, None)
    assert store.host_bytes() == 0
    store.run(PROMPT, ticket())
    store.crowd_out()
    assert store.run(PROMPT, None) == 0


def test_nothing_of_a_namespace_that_is_none_is_kept(store: Store) -> None:
    store.run(PROMPT, ticket(ns=b""))
    assert store.host_bytes() == 0


def test_a_missing_beginning_is_put_again_from_the_device(store: Store) -> None:
    """Host memory lost a prefix that the device still has: what follows it is kept all the same."""
    store.run(PROMPT[: 2 * BLOCK + 1], ticket())
    store.behind.condemn(lambda _owner: True)
    while store.behind.store.erase(8):
        pass
    assert store.host_bytes() == 0
    assert store.run(PROMPT, ticket()) == 2 * BLOCK
    assert store.host_bytes() == 4 * BLOCK_BYTES


def test_a_prompt_that_host_memory_cannot_hold_is_given_up_once() -> None:
    store = Store(capacity=16, host=4)
    store.lease()
    assert store.run(tokens(8 * BLOCK + 1), ticket()) == 0
    assert store.host_bytes() == 4 * BLOCK_BYTES
    assert store.behind.put_refused == {KvReason.FULL: 1}


def test_a_beginning_that_was_dropped_as_spoilt_is_not_put_again(store: Store) -> None:
    store.run(PROMPT[: 2 * BLOCK + 1], ticket())
    running = store.admitted(PROMPT, ticket())
    store.behind.condemn(lambda _owner: True)
    while store.behind.store.erase(8):
        pass
    store.cache._drop(running.hashes[1], running.blocks[1])
    store.cache.compute(running, len(PROMPT))
    assert store.host_bytes() == BLOCK_BYTES
    assert store.behind.put_refused == {KvReason.NS: 1}
    store.cache.release(running)


def test_what_was_damaged_on_the_device_before_it_is_kept_goes_nowhere(store: Store) -> None:
    """Behind the device it would get a digest of its own, and nobody would see the damage again."""
    running = store.admitted(PROMPT, ticket())
    store.cache.compute(running, len(PROMPT), keeps=False)
    damaged = bytearray(running.blocks[2].kv)
    damaged[7] ^= 1
    running.blocks[2].kv = damaged
    store.cache.keep(running)
    assert store.host_bytes() == 2 * BLOCK_BYTES
    assert store.behind.put_refused == {KvReason.DIGEST: 1}
    store.cache.release(running)


def test_a_worker_without_a_lease_uses_and_keeps_nothing(store: Store) -> None:
    store.run(PROMPT, ticket())
    store.crowd_out()
    store.boot_ms += 10_000
    assert store.run(PROMPT, ticket()) == 0
    assert store.run(tokens(40, first=2_000), ticket()) == 0
    assert store.host_bytes() == 4 * BLOCK_BYTES
    store.lease()
    assert store.run(PROMPT, ticket()) == 4 * BLOCK


def test_a_request_that_needs_a_newer_revision_computes(store: Store) -> None:
    store.run(PROMPT, ticket())
    store.crowd_out()
    assert store.run(PROMPT, ticket(rev=10)) == 0
    assert store.refused() == {fence.Reason.LEASE: 1}


# --- two tenants ---


def test_the_same_prompt_of_another_tenant_is_no_hit_and_that_of_the_same_one_is_d16(
    store: Store,
) -> None:
    mine, theirs = ticket(), ticket(ns=OTHER_NS, tenant="b" * 32)
    store.run(PROMPT, mine, salt="a")
    store.crowd_out()
    assert store.run(PROMPT, theirs, salt="b") == 0
    store.crowd_out()
    assert store.run(PROMPT, mine, salt="a") == 4 * BLOCK
    store.crowd_out()
    assert store.run(PROMPT, theirs, salt="b") == 4 * BLOCK


def test_another_namespace_under_the_same_salt_is_refused_d16(store: Store) -> None:
    store.run(PROMPT, ticket())
    store.crowd_out()
    assert store.run(PROMPT, ticket(ns=OTHER_NS)) == 0
    assert store.refused() == {fence.Reason.NS: 1}


def test_kv_of_another_tenant_would_change_the_answer(store: Store) -> None:
    """That answers are compared is what makes the other tests mean something."""
    store.run(PROMPT, ticket())
    store.crowd_out()
    with store.behind.found(_sketch(store), 0, 4) as run:
        store_of_mine = [bytes(block.data) for block in run.blocks]
    store.run(PROMPT, ticket(ns=OTHER_NS), salt="b")
    store.crowd_out()
    with store.behind.found(_sketch(store, OTHER_NS, "b"), 0, 4) as run:
        assert all(
            bytes(block.data) != mine for block, mine in zip(run.blocks, store_of_mine, strict=True)
        )


# --- what is not in order ---


def test_damaged_bytes_are_no_hit_and_nobody_meets_them_again(store: Store) -> None:
    store.run(PROMPT, ticket())
    store.crowd_out()
    entry = store.behind.store._catalogue.find(_sketch(store).hashes[2])
    assert entry is not None
    assert entry.slot is not None
    entry.slot.view[100] ^= 1
    assert store.run(PROMPT, ticket()) == 2 * BLOCK
    assert store.refused() == {fence.Reason.SUM: 1}
    store.crowd_out()
    assert store.run(PROMPT, ticket()) == 4 * BLOCK


def test_the_guard_has_the_last_word_on_what_was_loaded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that would hand out another owner's block: the check at the point of use sees it."""
    store.run(PROMPT, ticket())
    store.crowd_out()

    def false_stamp(ns: bytes, subjects: tuple[str, ...], epochs: tuple[int, ...]) -> Stamp:
        assert ns == NS
        return Stamp(ns=OTHER_NS, subjects=subjects, epochs=epochs)

    monkeypatch.setattr("trunkline.worker.tiers.Stamp", false_stamp)
    free = store.cache.places.free_count
    assert store.run(PROMPT, ticket()) == 0
    assert store.refused() == {fence.Reason.NS: 1}
    assert store.cache.places.free_count == free


def test_a_block_that_is_revoked_after_it_was_loaded_does_not_stand(store: Store) -> None:
    store.run(PROMPT, ticket())
    store.crowd_out()
    sequence = store.admitted(PROMPT, ticket())
    assert sequence.loaded_blocks == 4
    store.lease(10, **{SUBJECTS[1]: EPOCHS[1] + 1})
    assert store.cache.fault(sequence) is fence.Reason.EPOCH


# --- revocation ---


def test_a_raised_epoch_makes_host_blocks_unreachable_before_they_are_wiped(store: Store) -> None:
    store.run(PROMPT, ticket())
    store.crowd_out()
    sketch = _sketch(store)
    erasure = store.behind.store.condemn(_is_stale)
    assert (erasure.condemned_blocks, erasure.condemned_bytes) == (4, 4 * BLOCK_BYTES)
    assert store.behind.count_from(sketch, 0, 4) == 0
    assert not erasure.is_done
    while store.behind.store.erase(2):
        pass
    assert erasure.is_done
    assert (erasure.erased_blocks, store.host_bytes()) == (4, 0)


def test_epochs_are_the_fences_also_where_no_order_came(store: Store) -> None:
    store.run(PROMPT, ticket())
    store.crowd_out()
    store.lease(10, **{SUBJECTS[2]: EPOCHS[2] + 1})
    assert store.run(PROMPT, ticket()) == 0


# --- events ---


def test_a_run_in_host_memory_is_told_with_its_tokens_and_salt(store: Store) -> None:
    store.run(PROMPT, ticket())
    (event,) = _host_events(store)
    assert isinstance(event, RunStored)
    assert (event.tier, event.parent, event.salt) == (Tier.HOST, None, "salt")
    assert event.tokens == PROMPT[: 4 * BLOCK]
    assert list(event.hashes) == _sketch(store).hashes


def test_zones_are_told_as_runs_of_their_own(store: Store) -> None:
    public = PROMPT[: 2 * BLOCK]
    store.run(public + tokens(8, first=900), ticket(ns=PUBLIC_NS), salt="public")
    store.run(PROMPT, ticket(regions=(PUBLIC_NS,)), regions=(PUBLIC,))
    shared, own = _host_events(store)
    assert isinstance(shared, RunStored)
    assert isinstance(own, RunStored)
    assert (shared.salt, shared.begins_region, len(shared.hashes)) == ("public", False, 2)
    assert (own.salt, own.begins_region, own.parent) == ("salt", True, shared.hashes[1])


def test_a_listener_that_goes_by_events_knows_what_is_there() -> None:
    store = Store(capacity=64, host=16)
    store.lease()
    resident: set[tuple[Tier, bytes]] = set()
    for turn in range(40):
        prompt = tokens(3 * BLOCK + 4, first=300 + turn % 7 * 40) + tokens(2 * BLOCK, first=turn)
        store.run(prompt, ticket(ns=NS if turn % 3 else OTHER_NS), salt=str(turn % 3 == 0))
        if turn % 4 == 0:
            _told(_host_events(store), resident)
    _told(_host_events(store), resident)
    kept = store.behind.store.resident()
    assert len(kept) == 16
    assert {(tier, manifest.place.key) for tier, manifest in kept} == resident
    assert store.behind.store.figures().evicted > 0


def test_events_that_overflow_are_made_good_from_what_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident: set[tuple[Tier, bytes]] = set()
    store.run(PROMPT, ticket())
    _told(_host_events(store), resident)
    monkeypatch.setattr(store.behind.store._catalogue.news, "_max_events", 3)
    for turn in range(12):
        store.run(tokens(4 * BLOCK + 1, first=1_000 + 100 * turn), ticket())
    _told(_host_events(store), resident)
    kept = store.behind.store.resident()
    assert {(tier, manifest.place.key) for tier, manifest in kept} == resident


def test_what_was_never_kept_is_never_told() -> None:
    store = Store(capacity=64, host=4)
    store.lease()
    sequence = _sketch(store)
    store.behind.await_pull(sequence, 0, 4)
    store.behind.end_pull(sequence.hashes)
    assert _host_events(store) == []
    assert len(store.behind._notices) == 0


def test_what_left_is_remembered_for_a_while_in_case_it_turns_up_on_disk(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.kv.notices.MAX_LATE", 6)
    notices = store.behind._notices
    for turn in range(40):
        store.run(tokens(2 * BLOCK + 1, first=1_000 + 40 * turn), ticket())
        notices.take(store.behind.store.take_events())
    assert store.behind.store.figures().evicted > 6
    assert len(notices) == 32 + 6


# --- the disk ---


class _StuckDisk:
    """What `Lifts` needs of a tier, with a disk that does not answer before it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.is_full = threading.Event()
        self.asked = 0

    def goes_on_below(self, sequence: KvSequence, first: int, limit: int) -> bool:
        return True

    def bring_up(self, sequence: KvSequence, first: int, limit: int, until: Instant) -> int:
        self.asked += 1
        if self.asked == MAX_LIFTS:
            self.is_full.set()
        self.answers.wait()
        return 2

    def flush(self) -> None:
        pass


def test_no_more_requests_wait_for_the_disk_than_may(store: Store) -> None:
    async def scenario() -> None:
        disk = _StuckDisk()
        tier = cast("HostTier", disk)  # three of its methods are all that is asked
        lifts = Lifts(tier, clock=store, load_ms=lambda tokens: 0.0, block_tokens=BLOCK)
        terms = Terms(ticket=ticket())
        calls = [PullCall(None) for _ in range(MAX_LIFTS + 1)]
        waiting = [
            asyncio.create_task(lifts.lift(call, store.cache, PROMPT, "salt", terms))
            for call in calls[:-1]
        ]
        await asyncio.to_thread(disk.is_full.wait)
        assert not lifts.is_wanted(store.cache, PROMPT, "salt", terms)
        await lifts.lift(calls[-1], store.cache, PROMPT, "salt", terms)  # does not wait
        disk.answers.set()
        await asyncio.gather(*waiting)
        assert [call.lifted_tokens for call in calls] == [2 * BLOCK] * MAX_LIFTS + [0]
        assert lifts.is_wanted(store.cache, PROMPT, "salt", terms)
        assert not lifts.is_wanted(store.cache, PROMPT, "salt", Terms())
        lifts.close()

    asyncio.run(scenario())


# --- quotas and public prefixes ---


def test_a_tenants_cap_on_the_device_is_its_cap_in_proportion() -> None:
    store = Store(capacity=8, host=32)
    store.lease()
    for first in range(300, 900, 100):
        store.run(tokens(4 * BLOCK + 1, first=first), ticket(cap=2))
    assert 0 < store.host_bytes() <= 8 * BLOCK_BYTES


def test_another_tenants_flood_leaves_a_floor_alone() -> None:
    store = Store(capacity=8, host=32)
    store.lease()
    store.run(PROMPT, ticket(floor=1))
    for first in range(1_000, 3_000, 100):
        flood = ticket(ns=OTHER_NS, tenant="b" * 32)
        store.run(tokens(6 * BLOCK, first=first), flood, salt="b")
    assert store.run(PROMPT, ticket(floor=1)) == 4 * BLOCK


def _public_prompt(own: int) -> array[int]:
    return PROMPT[: 2 * BLOCK] + tokens(2 * BLOCK, first=own)


def test_a_registered_public_prefix_stays_whatever_floods_host_memory() -> None:
    store = Store(capacity=8, host=16)
    store.lease()
    filler = ticket(ns=PUBLIC_NS, tenant="f")
    store.run(_public_prompt(2_000)[: 2 * BLOCK + 1], filler, salt="public")
    mine = ticket(regions=(PUBLIC_NS,))
    store.run(_public_prompt(2_100), mine, regions=(PUBLIC,))
    assert store.behind.public_blocks == 2
    for first in range(1_000, 3_000, 100):
        store.run(tokens(6 * BLOCK, first=first), ticket(ns=OTHER_NS), salt="b")
    assert store.run(_public_prompt(2_200), mine, regions=(PUBLIC,)) == 2 * BLOCK


def test_public_prefixes_hold_a_quarter_of_host_memory_at_most() -> None:
    store = Store(capacity=64, host=8)
    store.lease()
    long = tokens(6 * BLOCK)
    store.run(long, ticket(ns=PUBLIC_NS, tenant="f"), salt="public")
    region = Region(blocks=6, salt="public")
    prompt = long + tokens(2 * BLOCK, first=2_000)
    store.run(prompt, ticket(regions=(PUBLIC_NS,)), regions=(region,))
    assert store.behind.public_blocks == 2


def test_what_a_public_prefix_holds_goes_with_its_epoch() -> None:
    store = Store(capacity=8, host=16)
    store.lease()
    store.run(_public_prompt(2_000)[: 2 * BLOCK + 1], ticket(ns=PUBLIC_NS), salt="public")
    store.run(_public_prompt(2_100), ticket(regions=(PUBLIC_NS,)), regions=(PUBLIC,))
    pinned = store.behind.store.figures().pinned_bytes
    assert pinned == 2 * BLOCK_BYTES
    store.behind.condemn(_is_stale)
    assert store.behind.public_blocks == 0
    assert store.behind.store.figures().pinned_bytes == 0


def test_what_a_public_prefix_holds_is_renewed() -> None:
    store = Store(capacity=8, host=16)
    store.lease()
    store.run(_public_prompt(2_000)[: 2 * BLOCK + 1], ticket(ns=PUBLIC_NS), salt="public")
    store.run(_public_prompt(2_100), ticket(regions=(PUBLIC_NS,)), regions=(PUBLIC,))
    for _ in range(10):
        store.boot_ms += 200_000
        store.behind.tend()
    assert store.behind.store.figures().pinned_bytes == 2 * BLOCK_BYTES


def test_refused_puts_are_counted_by_why(store: Store) -> None:
    sequence = store.admitted(PROMPT, ticket())
    store.boot_ms += 10_000
    store.cache.compute(sequence, len(PROMPT))
    assert store.behind.put_refused == {}, "nothing was published, so nothing was put"
    store.cache.release(sequence)
    store.lease()
    sequence = store.admitted(PROMPT, replace(ticket(), epochs=(0, *EPOCHS[1:])))
    store.cache.compute(sequence, len(PROMPT))
    assert store.behind.put_refused in ({}, {KvReason.EPOCH: 1})


def _sketch(store: Store, ns: bytes = NS, salt: str = "salt") -> KvSequence:
    return store.cache.sketch(PROMPT, salt, Terms(ticket=ticket(ns=ns)))


def _is_stale(owner: Owner) -> bool:
    return owner.epochs == EPOCHS
