"""The gateway's desk for pulls: who takes part, what is granted, what the end of a pull teaches."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from random import Random

import msgspec
import pytest
from picker_bench import Characters, Contents, derive

from hand_clock import HandClock
from trunkline.assembly import Given, assemble
from trunkline.config import Config
from trunkline.core.decision import Candidates, Decision, Gain, Reason
from trunkline.core.directory import Directory
from trunkline.core.events import BlocksStored
from trunkline.core.fleet import WorkerState
from trunkline.core.links import LinkProfile, Links
from trunkline.core.records import Slot, Tier, WorkerId
from trunkline.core.transfer import (
    MAX_GRANT_BLOCKS,
    MAX_GRANT_LIFE_MS,
    MAX_NAME_BYTES,
    MAX_ORDER_BYTES,
    kv_chain,
    read_grant,
)
from trunkline.gateway.contracts import OPEN_GRANT
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.pulls import (
    NO_PART,
    PullDesk,
    PullOrder,
    PullPlan,
    plan_of,
)
from trunkline.ports.worker import PullAddress
from trunkline.worker.orders import order_from

KEY = b"k" * 32
BLOCK = 16
W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")


def address(name: str, *, layout: bytes = b"l" * 16, incarnation: str = "i1") -> PullAddress:
    return PullAddress(
        worker=name, incarnation=incarnation, host="127.0.0.1", port=7, local="sock",
        layout=layout, block_bytes=1_024,
    )  # fmt: skip


class Bench:
    def __init__(self, blocks: int = 8, transfer_key: bytes = KEY) -> None:
        self.clock = HandClock()
        self.ignored: list[WorkerId] = []
        self.directory = Directory(max_blocks=1_000)
        self.namespaces = Namespaces(derive, self.directory, draw=bytes)
        self.links = Links(LinkProfile(), bytes_per_token=1_000)
        self.missing: list[tuple[WorkerId, bytes]] = []
        self.desk = PullDesk(
            self.links,
            transfer_key=transfer_key,
            clock=self.clock,
            draw=Random(3).randbytes,
            on_missing=lambda worker, name: self.missing.append((worker, name)),
            on_ignored=self.ignored.append,
        )
        self.tokens = array("I", range(BLOCK * blocks + 3))
        keys = self.namespaces.keys(OPEN_GRANT, self.tokens, BLOCK)
        assert keys is not None
        self.keys = keys.private
        self.addresses = {name: address(name) for name in (W0, W1, W2)}

    def sources(self, expected: list[int]) -> list[int]:
        """In blocks."""
        states = [
            WorkerState(worker=name, slot=Slot(i), block_tokens=BLOCK)
            for i, name in enumerate(self.addresses)
        ]
        pulling = [(state, self.addresses[state.worker]) for state in states]
        found = self.desk.source_tokens(expected, self.keys, pulling, limit=8)
        return [tokens // BLOCK if tokens != NO_PART else NO_PART for tokens in found]

    def ordered(
        self, first: int = 2, last: int = 8, other: int = 0, ready_ms: float = 0.0
    ) -> PullOrder | None:
        """From `w0`, and where it fails from `w2` up to block `other`."""
        stakes = self.namespaces.stakes(OPEN_GRANT, BLOCK)
        assert stakes is not None
        plan = PullPlan(
            source=W0, destination=W1, first_block=first, last_block=last, ready_ms=ready_ms
        )
        if other:
            plan = replace(plan, other=replace(plan, source=W2, last_block=other))
        return self.desk.order(plan, stakes, self.keys, self.tokens, self.addresses.get)

    def order(
        self, first: int = 2, last: int = 8, other: int = 0, ready_ms: float = 0.0
    ) -> PullOrder:
        order = self.ordered(first, last, other, ready_ms)
        assert order is not None
        return order

    def learn(self, order: PullOrder, **told: object) -> None:
        self.sources([8, 0, 0])  # notes the lives
        self.desk.learn(order, self.keys, msgspec.json.encode(told))


def test_blocks_go_only_between_workers_of_the_layout_that_most_have() -> None:
    bench = Bench()
    bench.addresses[W0] = address("w0", layout=b"o" * 16)
    assert bench.sources([8, 8, 0]) == [NO_PART, 8, 0]


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


def both() -> Bench:
    """Whose `w1` takes orders of two sources."""
    bench = Bench()
    bench.addresses[W1] = replace(bench.addresses[W1], sources=2)
    return bench


def test_an_order_of_two_sources_has_a_grant_for_each() -> None:
    bench = both()
    order = bench.order(other=5)
    read = order_from([(b"x-trunkline-pull", order.header[1].encode())])
    assert read is not None
    assert read.other is not None
    assert (read.source, read.fault, read.other.source, read.other.fault) == (
        "w0",
        None,
        "w2",
        None,
    )
    grants = [read_grant(one.grant, KEY) for one in (read, read.other)]
    found = [(g.source, g.destination, g.first_block, g.block_count) for g in grants if g]
    assert found == [("w0", "w1", 2, 6), ("w2", "w1", 2, 3)]


def test_who_takes_orders_of_one_source_gets_no_other() -> None:
    order = Bench().order(other=8)
    assert "other" not in json.loads(order.header[1])
    assert order.other is None


def test_another_source_that_has_gone_meanwhile_is_left_out() -> None:
    bench = both()
    del bench.addresses[W2]
    assert bench.order(other=8).other is None


def test_an_order_is_never_longer_than_a_worker_takes() -> None:
    bench = both()
    one = len(bench.order().header[1])
    bench.addresses[W0] = replace(bench.addresses[W0], local="l" * (MAX_ORDER_BYTES - one + 4))
    full = bench.order(other=8)
    assert len(full.header[1]) == MAX_ORDER_BYTES, "alone it fits"
    assert full.other is None, "and nothing beside it"
    bench.addresses[W0] = replace(bench.addresses[W0], local="l" * (MAX_ORDER_BYTES - one + 5))
    assert bench.ordered(other=8) is None
    two = both()
    pair = len(two.order(other=8).header[1])
    room = "l" * (MAX_ORDER_BYTES - pair + 4)
    two.addresses[W2] = replace(two.addresses[W2], local=room)
    assert len(two.order(other=8).header[1]) == MAX_ORDER_BYTES
    two.addresses[W2] = replace(two.addresses[W2], local=room + "l")
    assert two.order(other=8).other is None
    assert two.desk.accounts.ordered == 3


def test_names_that_no_grant_can_say_make_no_order() -> None:
    bench = Bench()
    bench.addresses[W0] = replace(bench.addresses[W0], worker="w" * (MAX_NAME_BYTES + 1))
    assert bench.ordered() is None
    bench = Bench()
    del bench.addresses[W1]
    assert bench.ordered() is None


def test_both_ends_of_a_pull_that_was_tried_twice_are_learnt() -> None:
    bench = both()
    first = {"reason": "miss", "ms": 4.0}
    bench.sources([8, 8, 8])
    bench.learn(bench.order(other=8), end="published", blocks=6, ms=400.0, first=first)
    assert bench.desk.accounts.ended == {("rejected", "miss"): 1, ("published", ""): 1}
    assert bench.desk.accounts.ms == 404.0
    assert bench.sources([8, 8, 8]) == [2, 8, 8]
    assert [worker for worker, _ in bench.missing] == [W0]
    assert bench.links.transfer_ms(W2, W1, 96) > bench.links.transfer_ms(W0, W1, 96)


def test_a_source_after_which_another_was_asked_was_busy_itself() -> None:
    bench = both()
    first = {"reason": "busy", "ms": 1.0}
    told = {"end": "rejected", "reason": "lost", "blocks": 0, "ms": 2.0, "first": first}
    bench.learn(bench.order(other=8), **told)
    assert bench.sources([8, 8, 8]) == [NO_PART, 8, NO_PART]


def test_an_answer_about_another_source_that_was_not_named_teaches_nothing() -> None:
    bench = both()
    bench.learn(bench.order(), end="published", blocks=6, ms=1.0, first={"reason": "miss"})
    told = {"end": "published", "blocks": 4, "ms": 1.0, "first": {"reason": "miss", "ms": 1.0}}
    bench.learn(bench.order(other=5), **told)
    assert bench.desk.accounts.ended == {("untold", ""): 2}


def decided(queue_ms: list[float], source: WorkerId | None = W0) -> Decision:
    """`w1` has two blocks and is to pull six."""
    return Decision(
        request_id="r",
        policy="p",
        prompt_tokens=200,
        choice=1,
        reason=Reason.CACHE_PULL,
        gain=Gain(saved_prefill_ms=0.0, queue_ms=0.0, transfer_ms=0.0, imbalance_ms=0.0),
        source=source,
        candidates=Candidates(
            workers=[W0, W1, W2, WorkerId("w3")],
            matched_tokens=[8 * BLOCK, 2 * BLOCK, 0, 0],
            pulled_tokens=[0, 6 * BLOCK, 0, 0],
            queue_ms=queue_ms,
            transfer_ms=[0.0] * 4,
            miss_ms=[0.0] * 4,
            imbalance_ms=[0.0] * 4,
            decode_pressure_ms=[0.0] * 4,
            cost_ms=[0.0] * 4,
        ),
    )


@pytest.mark.parametrize(
    ("held", "queue_ms", "expected"),
    [
        ([8, 2, 5, 4], [0.0] * 4, (W2, 5)),
        ([8, 2, 9, 8], [0.0, 0.0, 3.0, 2.0], ("w3", 8)),
        ([8, 2, 9, 9], [0.0] * 4, (W2, 8)),
        ([8, 2, 2, 0], [0.0] * 4, None),
        ([8, 2, -1, -1], [0.0] * 4, None),
    ],
)
def test_the_other_source_is_who_has_most_of_it_and_of_those_the_least_busy(
    held: list[int], queue_ms: list[float], expected: tuple[WorkerId, int] | None
) -> None:
    at = dict(zip([W0, W1, W2, WorkerId("w3")], held, strict=True))
    plan = plan_of(decided(queue_ms), BLOCK, lambda worker: at[worker] * BLOCK)
    assert plan is not None
    assert (plan.source, plan.first_block, plan.last_block) == (W0, 2, 8)
    other = plan.other and (plan.other.source, plan.other.last_block)
    assert other == expected
    assert plan_of(decided(queue_ms, source=None), BLOCK, lambda worker: 0) is None


def test_a_pull_that_went_well_teaches_the_pair_its_price() -> None:
    bench = Bench()
    before_ms = bench.links.transfer_ms(W0, W1, 96)
    for _ in range(20):
        bench.learn(bench.order(), end="published", blocks=6, ms=400.0)
    assert bench.links.transfer_ms(W0, W1, 96) > 10 * before_ms
    assert bench.desk.accounts.tokens == 20 * 96
    assert bench.desk.accounts.bytes == 20 * 96 * 1_000
    assert bench.desk.accounts.ended == {("published", ""): 20}


def test_a_pull_that_waits_for_its_source_has_the_time_for_it_and_teaches_the_pair_nothing() -> (
    None
):
    bench = Bench()

    def life_ms(order: PullOrder) -> float:
        grant = read_grant(json.loads(order.header[1])["grant"], KEY)
        assert grant is not None
        return grant.deadline_ms - bench.clock.wall() * 1e3

    waiting = bench.order(ready_ms=4_000.0)
    assert life_ms(waiting) - life_ms(bench.order()) == pytest.approx(3 * 4_000.0, abs=2.0)
    assert life_ms(bench.order(ready_ms=1e6)) <= MAX_GRANT_LIFE_MS
    before_ms = bench.links.transfer_ms(W0, W1, 96)
    bench.learn(waiting, end="published", blocks=6, ms=4_010.0)
    assert bench.links.transfer_ms(W0, W1, 96) == before_ms
    assert bench.desk.accounts.tokens == 96


def test_a_block_that_was_not_there_shortens_what_is_asked_of_that_worker() -> None:
    bench = Bench()
    bench.learn(bench.order(), end="published", reason="miss", blocks=2, ms=3.0)
    assert bench.sources([8, 8, 8]) == [4, 8, 8]
    salt = bench.namespaces.salt(OPEN_GRANT, BLOCK)
    names = kv_chain(salt, bench.tokens, BLOCK)
    assert bench.missing == [(W0, names[4 * 32 : 5 * 32])], "and the directory is told"


def test_what_the_destination_could_not_do_rests_the_destination() -> None:
    bench = Bench()
    bench.learn(bench.order(), end="rejected", reason="busy", blocks=0, ms=0.0)
    assert bench.sources([8, 8, 8]) == [8, NO_PART, 8]
    bench.clock.ms += 1_000.0
    assert bench.sources([8, 8, 8]) == [8, 8, 8]


def test_the_next_life_of_a_source_bears_no_grudge_and_teaches_nothing_of_the_last() -> None:
    bench = Bench()
    order = bench.order()
    bench.learn(order, end="rejected", reason="digest", blocks=0, ms=0.0)
    assert bench.sources([8, 0, 0])[0] == 2
    bench.addresses[W0] = address("w0", incarnation="i2")
    assert bench.sources([8, 0, 0])[0] == 8
    bench.learn(order, end="rejected", reason="digest", blocks=0, ms=0.0)
    assert bench.sources([8, 0, 0])[0] == 8, "that was of the life before"


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
