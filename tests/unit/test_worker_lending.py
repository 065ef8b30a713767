"""A simulated worker's store as its pull server sees it: the modelled link, waits and leases."""

from __future__ import annotations

from random import Random
from typing import cast

from trunkline.core.records import Instant
from trunkline.core.transfer import Reason
from trunkline.kv.server import ServerOptions
from trunkline.kv.store import BlockStore
from trunkline.ports.clock import Clock
from trunkline.worker.coming import Coming
from trunkline.worker.faults import Faults
from trunkline.worker.lending import LEASE_MS, LentStore
from trunkline.worker.link import Link
from trunkline.worker.options import WorkerOptions
from trunkline.worker.storage import Storage, StorageParts, build_storage
from worker_tenants import BLOCK, NS, VOCAB, Store, ticket, tokens

PROMPT = tokens(4 * BLOCK + 6)
OTHER = bytes(32)


class Desk:
    """A store that has four blocks, lent behind a link of 1 ms a block."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.store = Store(host=32)
        self.store.lease()
        sequence = self.store.admitted(PROMPT, ticket())
        self.store.cache.compute(sequence, len(PROMPT))
        self.keys = sequence.hashes[:4]
        self.store.cache.release(sequence)
        self.link = Link(1.0 / BLOCK)
        self.lent = LentStore(
            self.kept,
            link=self.link,
            clock=cast("Clock", self.store),
            faults=faults or Faults(),
            block_tokens=BLOCK,
            coming=Coming(cast("Clock", self.store), block_tokens=BLOCK),
        )

    @property
    def kept(self) -> BlockStore:
        return self.store.behind.store

    def busy_until(self) -> float:
        return self.link.free_at


def test_only_what_is_there_takes_of_the_link() -> None:
    desk = Desk()
    desk.lent.close()  # nobody waits
    pins = desk.lent.pin(NS, [*desk.keys[:2], OTHER, OTHER], until=Instant(60_000))
    assert (len(pins.blocks), pins.reason) == (2, Reason.MISS)
    assert desk.busy_until() == 1_002.0
    assert desk.lent.unpin(pins.token)
    missing = desk.lent.pin(NS, [OTHER] * 4, until=Instant(60_000))
    assert (missing.blocks, missing.reason) == ((), Reason.MISS)
    assert desk.busy_until() == 1_002.0
    assert desk.kept.figures().pinned_bytes == 0


def test_nobody_waits_for_the_link_until_its_grant_is_over() -> None:
    desk = Desk()
    desk.link.book(97 * BLOCK, Instant(1_000))
    assert desk.lent.pin(NS, desk.keys, until=Instant(1_100)).reason is Reason.BUSY
    assert desk.busy_until() == 1_097.0, "nothing was booked"
    assert desk.kept.figures().pinned_bytes == 0, "and nothing is held"
    desk.lent.close()  # nobody waits from here on
    pins = desk.lent.pin(NS, desk.keys, until=Instant(1_101))
    assert (len(pins.blocks), pins.reason) == (4, None)


def test_a_wait_for_the_link_ends_when_its_peer_leaves_and_the_turn_is_given_back() -> None:
    desk = Desk()
    desk.link.book(40_000 * BLOCK, Instant(1_000))
    asked: list[int] = []

    def is_wanted() -> bool:
        asked.append(1)
        return len(asked) < 3

    pins = desk.lent.pin(NS, desk.keys, until=Instant(60_000), is_wanted=is_wanted)
    assert (pins.blocks, pins.reason) == ((), Reason.LOST)
    assert desk.busy_until() == 41_000.0
    assert desk.kept.figures().pinned_bytes == 0


def test_a_source_that_says_nothing_on_purpose_says_it_to_nobody_that_left() -> None:
    desk = Desk(Faults(is_pull_stalling=True))
    pins = desk.lent.pin(NS, desk.keys, until=Instant(60_000), is_wanted=lambda: False)
    assert (pins.blocks, pins.reason) == ((), Reason.LOST)


def test_a_pin_lives_as_long_as_its_lease_however_long_the_grant() -> None:
    desk = Desk()
    desk.lent.close()  # nobody waits
    pins = desk.lent.pin(NS, desk.keys, until=Instant(60_000))
    desk.store.boot_ms += LEASE_MS - 1
    assert desk.lent.renew(pins.token, Instant(60_000))
    desk.store.boot_ms += LEASE_MS
    assert not desk.lent.renew(pins.token, Instant(60_000))


def _storage() -> Storage:
    parts = StorageParts(
        fence=Store().fence,
        clock=cast("Clock", Store()),
        draw=Random(7).randbytes,
        transfer_key=bytes(32),
        vocab_size=VOCAB,
        boot_nonce="ab",
    )
    storage = build_storage(WorkerOptions(block_size=BLOCK, host_blocks=8), parts)
    assert storage is not None
    return storage


def test_a_source_gives_up_a_peer_before_what_it_sends_is_somebody_elses() -> None:
    storage = _storage()
    assert storage.exchange is not None
    options = storage.exchange.server._options
    storage.close()
    assert options.stall_ms == ServerOptions().stall_ms < LEASE_MS


def test_d11_connections_to_sources_are_kept_warm_as_long_as_the_worker_runs() -> None:
    storage = _storage()
    assert storage.exchange is not None
    keeper = storage.exchange.pulls._puller.peers._keeper
    assert not keeper.is_alive()
    storage.start()
    assert keeper.is_alive()
    storage.close()
    assert not keeper.is_alive()
