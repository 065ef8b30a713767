"""The gateway's desk for pulls: who takes part, what is granted, what the end of a pull teaches."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import msgspec
import pytest
from picker_bench import Characters, Contents, derive

from hand_clock import HandClock
from trunkline.assembly import Given, assemble
from trunkline.config import Config
from trunkline.core.directory import Directory, Match
from trunkline.core.events import BlocksStored
from trunkline.core.fleet import WorkerState
from trunkline.core.links import LinkProfile, Links
from trunkline.core.records import Slot, Tier, WorkerId
from trunkline.core.transfer import MAX_GRANT_BLOCKS, kv_chain, read_grant
from trunkline.gateway.contracts import OPEN_GRANT
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.pulls import NO_PART, PullDesk, PullOrder, PullPlan
from trunkline.ports.worker import PullAddress

KEY = b"k" * 32
BLOCK = 16
W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")


def address(name: str, *, layout: bytes = b"l" * 16, incarnation: str = "i1") -> PullAddress:
    return PullAddress(
        worker=name, incarnation=incarnation, host="127.0.0.1", port=7, local="sock",
        layout=layout, block_bytes=1_024,
    )  # fmt: skip


class Bench:
    def __init__(self, blocks: int = 8) -> None:
        self.clock = HandClock()
        self.directory = Directory(max_blocks=1_000)
        self.namespaces = Namespaces(derive, self.directory, draw=bytes)
        self.links = Links(LinkProfile(), bytes_per_token=1_000)
        self.missing: list[tuple[WorkerId, bytes]] = []
        self.desk = PullDesk(
            self.links,
            transfer_key=KEY,
            clock=self.clock,
            draw=bytes,
            on_missing=lambda worker, name: self.missing.append((worker, name)),
        )
        self.tokens = array("I", range(BLOCK * blocks + 3))
        keys = self.namespaces.keys(OPEN_GRANT, self.tokens, BLOCK)
        assert keys is not None
        self.keys = keys.private
        self.addresses = {name: address(name) for name in (W0, W1, W2)}

    def sources(
        self, resident: list[int], expected: list[int], owing: frozenset[WorkerId] = frozenset()
    ) -> list[int]:
        """In blocks."""
        states = [
            WorkerState(worker=name, slot=Slot(i), block_tokens=BLOCK)
            for i, name in enumerate(self.addresses)
        ]
        match = Match(
            block_tokens=BLOCK, block_count=8, device=resident, resident=resident, expected=expected
        )
        pulling = [(state, self.addresses[state.worker]) for state in states]
        found = self.desk.source_tokens(
            match, self.keys, pulling, lambda worker: worker in owing, limit=8
        )
        return [tokens // BLOCK if tokens != NO_PART else NO_PART for tokens in found]

    def order(self, first: int = 2, last: int = 8) -> PullOrder:
        stakes = self.namespaces.stakes(OPEN_GRANT, BLOCK)
        assert stakes is not None
        plan = PullPlan(source=W0, destination=W1, first_block=first, last_block=last)
        ends = (self.addresses[W0], self.addresses[W1])
        return self.desk.order(plan, stakes, self.keys, self.tokens, ends)

    def learn(self, order: PullOrder, **told: object) -> None:
        self.sources([8, 0, 0], [8, 0, 0])  # notes the lives
        self.desk.learn(order, self.keys, msgspec.json.encode(told))


def test_what_a_source_still_owes_does_not_count_and_what_lies_on_disk_never_does() -> None:
    bench = Bench()
    assert bench.sources([3, 0, 8], [5, 4, 6]) == [5, 4, 6]
    assert bench.sources([3, 0, 8], [5, 4, 6], frozenset({W0, W1, W2})) == [3, 0, 6]


def test_blocks_go_only_between_workers_of_the_layout_that_most_have() -> None:
    bench = Bench()
    bench.addresses[W0] = address("w0", layout=b"o" * 16)
    assert bench.sources([8, 8, 0], [8, 8, 0]) == [NO_PART, 8, 0]


def test_a_grant_says_exactly_what_is_to_be_pulled() -> None:
    bench = Bench()
    order = bench.order()
    name, text = order.header
    assert name == "x-trunkline-pull"
    told = json.loads(text)
    assert (told["host"], told["port"], told["local"]) == ("127.0.0.1", 7, "sock")
    grant = read_grant(told["grant"], KEY)
    assert grant is not None
    assert (grant.source, grant.destination) == ("w0", "w1")
    assert (grant.first_block, grant.block_count, grant.max_bytes) == (2, 6, 6 * 1_024)
    assert grant.ns == bench.keys.namespace.tag
    salt = bench.namespaces.salt(OPEN_GRANT, BLOCK)
    assert grant.covers(kv_chain(salt, bench.tokens, BLOCK)[2 * 32 :])
    assert "fleet" in grant.subjects
    assert 0 < grant.deadline_ms - bench.clock.wall() * 1e3 <= 60_000


def test_a_grant_is_bounded_in_blocks() -> None:
    bench = Bench(blocks=MAX_GRANT_BLOCKS + 9)
    assert bench.order(first=0, last=MAX_GRANT_BLOCKS + 9).block_count == MAX_GRANT_BLOCKS


def test_a_name_that_is_not_ascii_makes_a_header_that_is() -> None:
    bench = Bench()
    bench.addresses[W0] = replace(bench.addresses[W0], worker="grün-1")
    header = bench.order().header[1]
    assert header.isascii()
    assert json.loads(header)["source"] == "grün-1"


def test_a_pull_that_went_well_teaches_the_pair_its_price() -> None:
    bench = Bench()
    before_ms = bench.links.transfer_ms(W0, W1, 96)
    for _ in range(20):
        bench.learn(bench.order(), end="published", blocks=6, ms=400.0)
    assert bench.links.transfer_ms(W0, W1, 96) > 10 * before_ms
    assert bench.desk.accounts.tokens == 20 * 96
    assert bench.desk.accounts.bytes == 20 * 96 * 1_000
    assert bench.desk.accounts.ended == {("published", ""): 20}


def test_a_block_that_was_not_there_shortens_what_is_asked_of_that_worker() -> None:
    bench = Bench()
    bench.learn(bench.order(), end="published", reason="miss", blocks=2, ms=3.0)
    assert bench.sources([8, 8, 8], [8, 8, 8]) == [4, 8, 8]
    salt = bench.namespaces.salt(OPEN_GRANT, BLOCK)
    names = kv_chain(salt, bench.tokens, BLOCK)
    assert bench.missing == [(W0, names[4 * 32 : 5 * 32])], "and the directory is told"


def test_what_the_destination_could_not_do_rests_the_destination() -> None:
    bench = Bench()
    bench.learn(bench.order(), end="rejected", reason="busy", blocks=0, ms=0.0)
    assert bench.sources([8, 8, 8], [8, 8, 8]) == [8, NO_PART, 8]
    bench.clock.ms += 1_000.0
    assert bench.sources([8, 8, 8], [8, 8, 8]) == [8, 8, 8]


def test_the_next_life_of_a_source_bears_no_grudge_and_teaches_nothing_of_the_last() -> None:
    bench = Bench()
    order = bench.order()
    bench.learn(order, end="rejected", reason="digest", blocks=0, ms=0.0)
    assert bench.sources([8, 0, 0], [8, 0, 0])[0] == 2
    bench.addresses[W0] = address("w0", incarnation="i2")
    assert bench.sources([8, 0, 0], [8, 0, 0])[0] == 8
    bench.learn(order, end="rejected", reason="digest", blocks=0, ms=0.0)
    assert bench.sources([8, 0, 0], [8, 0, 0])[0] == 8, "that was of the life before"


@pytest.mark.parametrize(
    "told",
    [b"", b"{", b"[]", b'{"end":"lost"}', b'{"end":"published","blocks":7}', b"x" * 2_000,
     b'{"end":"published","blocks":-1}', b'{"end":"published","blocks":1,"ms":-1}'],
)  # fmt: skip
def test_an_answer_that_says_nothing_sensible_teaches_nothing(told: bytes) -> None:
    bench = Bench()
    bench.desk.learn(bench.order(), bench.keys, told)
    assert bench.desk.accounts.ended == {("untold", ""): 1}
    assert len(bench.links) == len(bench.desk.sources) == 0


def test_a_block_that_is_missing_in_host_memory_leaves_the_directory_there_and_nowhere_else() -> (
    None
):
    bench = Bench()
    given = Given(
        tokenizer=Characters(),
        template=Contents(),
        root_key=bytes(32),
        directory_seed=0,
        clock=bench.clock,
        draw=bytes,
        quota_of=lambda _tenant: None,
        transfer_key=KEY,
    )
    core = assemble(Config(), given)
    desk = core.picker.desk
    assert desk is not None
    core.directory.join(W0, block_tokens=BLOCK)
    namespace = core.namespaces.namespace(OPEN_GRANT, BLOCK)
    assert namespace is not None
    names = kv_chain(namespace.salt, bench.tokens, BLOCK)
    low = array("Q", [int.from_bytes(names[i + 24 : i + 32], "big") for i in range(0, 8 * 32, 32)])
    keys = core.namespaces.keys(OPEN_GRANT, bench.tokens, BLOCK)
    assert keys is not None
    run = BlocksStored(
        hashes=low,
        parent=None,
        tokens=bench.tokens[: 8 * BLOCK],
        block_tokens=BLOCK,
        tier=Tier.HOST,
        salt=namespace.salt,
    )
    core.directory.stored(W0, run)
    core.directory.stored(
        W0, replace(run, hashes=low[:3], tokens=run.tokens[: 3 * BLOCK], tier=Tier.DEVICE)
    )
    for index in (1, 5):
        desk._on_missing(W0, names[32 * index : 32 * index + 32])
    desk._on_missing(WorkerId("gone"), names[:32])
    match = core.directory.match(keys.private)
    assert (match.device, match.resident) == ([3], [5])
