"""The lease loop of one worker: what it is granted, and what its answers are taken for."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from trunkline.control.holders import MAX_ENDED, HolderParts, WorkerHolder
from trunkline.control.receipts import Erase, Fence
from trunkline.core.epochs import EpochTable, Subject, SubjectKind
from trunkline.core.freshness import Freshness, Grant, LeaseGrants, Order, Verb
from trunkline.core.records import BootInstant, Instant, WallTime
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.observe import EventLog
from trunkline.ports.worker import Endpoint
from virtual_loop import VirtualLoop

ACME = Subject(kind=SubjectKind.TENANT, path="acme")
ORDER = Order(rev=1, subject=ACME, epoch=1, verb=Verb.REVOKE)
Change = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Machine:
    """A worker by its protocol, and the clocks and table on the gateway's side."""

    loop: asyncio.AbstractEventLoop
    freshness: Freshness = field(default_factory=lambda: Freshness("1"))
    status: int = 200
    is_silent: bool = False
    left_ms: Callable[[], float] = lambda: math.inf
    """Of the gateway's own lease with the registry."""
    change: Change = lambda body: body
    """What becomes of its answers."""
    table: EpochTable = field(default_factory=EpochTable)
    grants_seen: list[dict[str, Any] | None] = field(default_factory=list[dict[str, Any] | None])
    ahead: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    pulls: list[tuple[str, list[tuple[str, bytes]], int]] = field(
        default_factory=list[tuple[str, list[tuple[str, bytes]], int]]
    )
    holder: WorkerHolder = field(init=False)
    grants: LeaseGrants = field(init=False)

    def __post_init__(self) -> None:
        self.grants = LeaseGrants(self.boot(), has_earlier_life=False)
        parts = HolderParts(
            table=lambda: self.table,
            grants=self.grants,
            fetch=self.fetch,
            post=self.post,
            clock=self,
            log=EventLog("test-holders"),
            on_ahead=lambda worker, rev: self.ahead.append((worker, rev)),
            on_pulls=lambda worker, ended, lost: self.pulls.append((worker, [*ended], lost)),
            lease_left_ms=lambda: self.left_ms(),
        )
        self.holder = WorkerHolder("w", Endpoint(host="w", port=1, host_header="w"), parts)

    def now(self) -> Instant:
        return Instant(self.loop.time() * 1_000.0)

    def boot(self) -> BootInstant:
        return BootInstant(self.loop.time() * 1_000.0)

    def wall(self) -> WallTime:
        return WallTime(0.0)

    def raise_epoch(self) -> None:
        rev = self.table.rev + 1
        self.table = self.table.raised(
            ACME, self.table.epochs.get(ACME, 0) + 1, rev=rev, bars=False
        )

    async def fetch(
        self, endpoint: Endpoint, method: str, path: str, *, timeout_ms: float
    ) -> tuple[int, bytes]:
        rev = int(path.rpartition("=")[2])
        answer = {"rev": rev, "done": True, "blocks": 3, "bytes": {"device": 9}}
        return self.status, json.dumps(self.change(answer)).encode()

    async def post(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        *,
        timeout_ms: float,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> tuple[int, bytes]:
        await asyncio.sleep(0.001)
        if self.is_silent:
            await asyncio.sleep(timeout_ms / 1_000.0)
            raise WorkerTimeout("silent")
        words = json.loads(body)
        if path.endswith("revoke"):
            self.freshness.obey(words["rev"], words["subject"], words["epoch"])
            return self.status, json.dumps(
                self.change({"rev": words["rev"], "aborted": 2})
            ).encode()
        self.grants_seen.append(words["grant"])
        if words["grant"] is not None:
            self.freshness.take(Grant(**words["grant"]))
        answer = {
            "ask": self.freshness.ask(self.boot()),
            "boot_nonce": self.freshness.boot_nonce,
            "rev": self.freshness.rev,
            "fence": "worker",
            "erase": "namespace",
            "salt_regions": True,
        }
        return self.status, json.dumps(self.change(answer)).encode()

    def lives(self, secs: float) -> None:
        async def live() -> None:
            task = asyncio.create_task(self.holder.run())
            await asyncio.sleep(secs)
            task.cancel()

        self.loop.run_until_complete(live())


@pytest.fixture(name="machine")
def a_machine() -> Iterator[Machine]:
    logging.disable(logging.CRITICAL)
    loop = VirtualLoop()
    yield Machine(loop)
    loop.close()
    logging.disable(logging.NOTSET)


def test_a_worker_has_its_first_lease_at_once_and_keeps_it(machine: Machine) -> None:
    machine.raise_epoch()
    machine.lives(0.1)
    assert machine.freshness.is_valid(machine.boot())
    assert (machine.freshness.rev, machine.freshness.epoch("tenant/acme")) == (1, 1)
    for _ in range(5):
        machine.lives(1.0)
        assert machine.freshness.is_valid(machine.boot())
    assert machine.holder.is_granted()
    assert (machine.holder.fence, machine.holder.erase) == (Fence.WORKER, Erase.NAMESPACE)


@pytest.mark.parametrize("phase_ms", [0.0, 250.0, 500.0, 750.0, 990.0])
def test_reuse_has_no_holes_where_the_gateways_own_lease_is_short(
    phase_ms: float, machine: Machine
) -> None:
    """A gateway that shares its registry renews its lease each second, and lends what is left."""
    machine.left_ms = lambda: 3_000.0 - (machine.boot() + phase_ms) % 1_070.0
    seen: list[tuple[bool, bool]] = []

    async def watch() -> None:
        running = asyncio.create_task(machine.holder.run())
        await asyncio.sleep(1.2)
        for _ in range(1_000):
            await asyncio.sleep(0.02)
            seen.append((machine.freshness.is_valid(machine.boot()), machine.holder.is_granted()))
        running.cancel()

    machine.loop.run_until_complete(watch())
    assert set(seen) == {(True, True)}
    assert len(machine.grants_seen) < 2 * 22, "two calls a beat at most, and only some"


def test_one_call_a_beat_is_enough_where_the_registry_is_its_own(machine: Machine) -> None:
    machine.lives(20.5)
    assert len(machine.grants_seen) <= 22
    assert machine.holder.is_granted()


def test_epochs_are_sent_again_only_when_there_are_new_ones(machine: Machine) -> None:
    machine.raise_epoch()
    machine.lives(4.5)
    sent = [grant["epochs"] for grant in machine.grants_seen if grant]
    assert sent[0] == {"tenant/acme": 1}
    assert sent[2:] == [{}] * len(sent[2:])
    machine.raise_epoch()
    machine.lives(3.0)
    assert machine.freshness.epoch("tenant/acme") == 2


def test_a_change_that_is_none_to_epochs_moves_the_revision_and_sends_no_epochs(
    machine: Machine,
) -> None:
    machine.raise_epoch()
    machine.lives(1.5)
    for rev in (2, 3, 4):
        machine.grants_seen.clear()
        machine.table = machine.table.advanced(rev=rev)
        machine.lives(1.5)
        assert [grant["epochs"] for grant in machine.grants_seen if grant] == [{}, {}]
        assert machine.freshness.rev == rev
        assert machine.holder.is_granted()
    machine.raise_epoch()
    machine.lives(1.5)
    assert (machine.freshness.rev, machine.freshness.epoch("tenant/acme")) == (5, 2)


def test_the_next_life_of_a_worker_is_given_all_epochs_whatever_changed_since(
    machine: Machine,
) -> None:
    machine.raise_epoch()
    machine.lives(1.5)
    machine.table = machine.table.advanced(rev=2)
    machine.freshness = Freshness("2")
    machine.lives(1.5)
    assert (machine.freshness.rev, machine.freshness.epoch("tenant/acme")) == (2, 1)


def test_a_change_is_brought_there_before_the_next_beat(machine: Machine) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(machine.holder.run())
        await asyncio.sleep(0.2)
        machine.raise_epoch()
        machine.holder.renew()
        await asyncio.sleep(0.1)
        assert machine.freshness.rev == 1
        task.cancel()

    machine.loop.run_until_complete(scenario())


def test_a_worker_that_is_ahead_of_the_registry_has_no_lease_and_is_told_of(
    machine: Machine,
) -> None:
    """The registry is a restored backup: what an earlier life of it told the worker is above."""
    earlier = Grant(ask=machine.freshness.ask(machine.boot()), rev=9, ttl_ms=100.0)
    machine.freshness.take(earlier)
    machine.lives(4.0)
    assert not machine.freshness.is_valid(machine.boot())
    assert not machine.holder.is_granted()
    assert set(machine.ahead) == {("w", 9)}
    for rev in range(1, 10):
        machine.table = machine.table.advanced(rev=rev)
    machine.lives(2.5)
    assert machine.holder.is_granted()


def test_a_worker_has_a_lease_when_it_says_so_and_not_when_it_was_sent(machine: Machine) -> None:
    machine.raise_epoch()
    machine.change = lambda body: {**body, "rev": 0}
    machine.lives(2.5)
    assert not machine.holder.is_granted()
    machine.change = lambda body: body
    machine.lives(2.5)
    assert machine.holder.is_granted()


def test_a_silent_worker_is_granted_nothing_and_taken_up_again(machine: Machine) -> None:
    machine.lives(1.5)
    machine.is_silent = True
    machine.lives(10.0)
    assert not machine.holder.is_granted()
    assert machine.grants.until("w#1", machine.boot()) is None
    machine.is_silent = False
    machine.lives(2.1)
    assert machine.freshness.is_valid(machine.boot())


def test_the_ask_of_an_earlier_life_is_not_granted_to_the_next(machine: Machine) -> None:
    machine.lives(1.5)
    machine.freshness = Freshness("2")
    machine.lives(0.1)
    assert machine.freshness.is_valid(machine.boot())
    assert machine.grants.until("w#1", machine.boot()) is not None, "the first may still be about"
    assert machine.grants.until("w#2", machine.boot()) is not None


def test_a_stock_engine_is_asked_once_and_again_when_it_is_another(machine: Machine) -> None:
    machine.status = 404
    machine.lives(5.0)
    assert len(machine.grants_seen) == 1
    assert machine.holder.is_stock
    assert not machine.holder.is_told
    assert (machine.holder.fence, machine.holder.erase) == (Fence.GATEWAY, Erase.RESTART)
    machine.status = 200
    machine.holder.look_again()
    machine.lives(0.1)
    assert machine.freshness.is_valid(machine.boot())
    assert machine.holder.is_told


def less(name: str) -> Change:
    return lambda body: {key: value for key, value in body.items() if key != name}


BAD_LEASES: dict[str, Change] = {
    "no ask": less("ask"),
    "no nonce": less("boot_nonce"),
    "an ask of another life": lambda body: body | {"ask": "other:1.000"},
    "an ask that is long": lambda body: body | {"ask": "1:" + "0" * 200},
    "a revision below 0": lambda body: body | {"rev": -1},
    "a fence nobody knows": lambda body: body | {"fence": "none"},
    "no text": lambda body: body | {"boot_nonce": 7},
}


@pytest.mark.parametrize("name", BAD_LEASES)
def test_an_answer_that_is_none_is_granted_nothing(name: str, machine: Machine) -> None:
    machine.change = BAD_LEASES[name]
    machine.lives(3.5)
    assert machine.grants_seen == [None] * len(machine.grants_seen)
    assert len(machine.grants_seen) >= 3


PULL: dict[str, Any] = {
    "worker": "w:1",
    "incarnation": "ab",
    "host": "127.0.0.1",
    "port": 4_000,
    "local": "trunkline-kv-1",
    "layout": "0f" * 16,
    "block_bytes": 1_024,
}


def with_pull(**changes: Any) -> Change:
    return lambda body: body | {"pull": PULL | changes}


def test_a_worker_says_where_its_blocks_can_be_pulled_from(machine: Machine) -> None:
    machine.lives(0.1)
    assert machine.holder.pull is None
    machine.change = with_pull()
    machine.lives(1.5)
    pull = machine.holder.pull
    assert pull is not None
    assert (pull.worker, pull.incarnation) == ("w:1", "ab")
    assert (pull.host, pull.port, pull.local) == ("127.0.0.1", 4_000, "trunkline-kv-1")
    assert (pull.layout, pull.block_bytes) == (b"\x0f" * 16, 1_024)
    assert not pull.lends_owed, "unless it says so"
    machine.change = with_pull(local="l" * 107, worker="w" * 256, port=65_535)
    machine.lives(1.5)
    assert machine.holder.pull is not None
    assert machine.holder.pull.port == 65_535
    machine.change = lambda body: body
    machine.lives(1.5)
    assert machine.holder.pull is None


@pytest.mark.parametrize(
    "changes",
    [
        {"port": 0},
        {"port": 65_536},
        {"port": "4000"},
        {"host": ""},
        {"worker": "w" * 257},
        {"local": "l" * 108},
        {"layout": "0f" * 15},
        {"layout": "0F" * 16},
        {"layout": "0f" * 15 + "0\n"},
        {"incarnation": None},
        {"block_bytes": 0},
        {"more": 1},
    ],
)
def test_a_pull_address_that_is_none_makes_no_lease(
    changes: dict[str, Any], machine: Machine
) -> None:
    machine.change = with_pull(**changes)
    machine.lives(2.5)
    assert machine.grants_seen == [None] * len(machine.grants_seen)
    assert machine.holder.pull is None


def test_what_a_worker_says_of_pulls_is_passed_on_and_what_it_lost_is_counted_in_a_life(
    machine: Machine,
) -> None:
    said = {"pulled": [{"name": "n", "told": "{}"}], "lost_tokens": 40}
    machine.change = lambda body: body | said
    machine.lives(0.1)
    assert machine.pulls[0] == ("w", [("n", b"{}")], 40)
    machine.change = lambda body: body | {"lost_tokens": 64}
    machine.pulls.clear()
    machine.lives(1.5)
    assert sum(lost for _, _, lost in machine.pulls) == 24
    machine.freshness = Freshness("2")
    machine.change = lambda body: body | {"lost_tokens": 8}
    machine.pulls.clear()
    machine.lives(1.5)
    assert sum(lost for _, _, lost in machine.pulls) == 8


@pytest.mark.parametrize(
    "said",
    [
        {"pulled": [{"name": "n", "told": "{}"}] * (MAX_ENDED + 1)},
        {"pulled": [{"name": "", "told": "{}"}]},
        {"pulled": [{"name": "n", "told": "x" * 1_025}]},
        {"lost_tokens": -1},
    ],
    ids=("too many", "no name", "too long", "less than nothing"),
)
def test_ends_of_pulls_that_are_none_make_no_lease(machine: Machine, said: dict[str, Any]) -> None:
    machine.change = lambda body: body | said
    machine.lives(2.5)
    assert not machine.freshness.is_valid(machine.boot())
    assert machine.pulls == []


def test_an_ack_is_of_the_life_that_says_it(machine: Machine) -> None:
    machine.lives(0.1)

    async def told() -> tuple[str, int]:
        ack = await machine.holder.revoke(ORDER)
        return ack.life, ack.aborted

    assert machine.loop.run_until_complete(told()) == ("w#1", 2)
    machine.change = lambda body: body | {"boot_nonce": "2"}
    assert machine.loop.run_until_complete(told()) == ("w#2", 2)


BAD_ACKS: dict[str, Change] = {
    "of another revision": lambda body: body | {"rev": 2},
    "of no revision": less("rev"),
    "with a count below 0": lambda body: body | {"aborted": -1},
    "with too many tiers": lambda body: body | {"condemned_bytes": {f"t{n}": 1 for n in range(17)}},
}


@pytest.mark.parametrize("name", BAD_ACKS)
def test_an_ack_that_is_none_counts_as_silence(name: str, machine: Machine) -> None:
    machine.change = BAD_ACKS[name]
    with pytest.raises(WorkerLost):
        machine.loop.run_until_complete(machine.holder.revoke(ORDER))


def test_what_is_erased_is_told_for_the_revision_that_was_asked_for(machine: Machine) -> None:
    erasure = machine.loop.run_until_complete(machine.holder.erased(4))
    assert (erasure.holder, erasure.rev, erasure.is_done, erasure.blocks) == ("w", 4, True, 3)
    machine.change = lambda body: body | {"rev": 5}
    with pytest.raises(WorkerLost):
        machine.loop.run_until_complete(machine.holder.erased(4))
