"""What gateways tell one another that they expect at the workers, and what each makes of it."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import msgspec
import pytest
from hearsay_desk import ACME, BLOCK, MODEL, OURS, ROOT, TTL_MS, W1, W2, Desk, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_load_sync import Air

from hand_clock import HandClock
from trunkline.core import directory as directory_module
from trunkline.core import hearsay
from trunkline.core.events import BlocksRemoved
from trunkline.core.fleet import WorkerState
from trunkline.core.hearsay import Heard
from trunkline.core.identity import (
    DIGEST_BYTES,
    Epochs,
    Namespace,
    Scope,
    ScopeKind,
    derive_namespace,
)
from trunkline.core.keys import KeyRun
from trunkline.core.publics import two_zone_chain
from trunkline.core.records import Instant, NamespaceTag, Tier, WorkerId
from trunkline.native import _fallback


@pytest.fixture(params=["as built", "pure"], autouse=True)
def of_both_indexes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pure":
        monkeypatch.setattr(directory_module, "BlockIndex", _fallback.BlockIndex)


@pytest.fixture(name="desks")
def two_gateways() -> list[Desk]:
    air, clock = Air(), HandClock(ms=1_000.0)
    return [Desk(f"g{number}", air, clock) for number in range(2)]


# -- what is told -------------------------------------------------------------------------------


def test_what_one_gateway_chose_the_other_expects_and_holds_for_no_more_than_that(
    desks: list[Desk],
) -> None:
    one, other = desks
    other.expected(1)  # its namespace is in use there
    one.choose(8)
    assert other.expected(8) == 0, "before the beat"
    one.beat()
    match = other.look(other.chain(8))
    assert match.expected[other.slot(W1)] == 8
    assert match.expected[other.slot(W2)] == 0
    assert not any(match.device + match.resident), "a hint is no hit"
    assert other.directory.held_count(W1) == 0


def test_only_new_blocks_are_told_and_the_one_before_them(desks: list[Desk]) -> None:
    one, other = desks
    other.expected(1)
    one.choose(8)
    one.beat()
    one.choose(10)
    [(worker, run)] = one.hearsay.drained()
    assert (worker, run.first_block, run.block_count) == (W1, 8, 2)
    assert run.packed == one.chain(10).packed[7 * DIGEST_BYTES :]
    assert other.hearsay.hear(worker, run, other.clock.now()) is Heard.TAKEN
    assert other.expected(12) == 10
    one.choose(10)
    assert one.hearsay.drained() == [], "all of it was expected"


def test_of_siblings_within_one_beat_each_tells_what_is_its_own(desks: list[Desk]) -> None:
    one, other = desks
    other.expected(1)
    for blocks in (6, 7, 9, 9):
        one.choose(blocks)
    one.beat()
    assert other.expected(9) == 9
    assert one.hearsay.stats.said == 9


def test_what_follows_blocks_that_are_not_known_here_is_not_taken(desks: list[Desk]) -> None:
    one, other = desks
    other.expected(1)
    one.choose(8)
    one.hearsay.drained()  # lost on the way
    one.choose(20)
    one.beat()
    assert other.expected(20) == 0, "not a block behind a hole"
    assert other.hearsay.stats.loose == 12
    assert other.directory.predicted_count(W1) == 0


def test_what_follows_blocks_that_events_told_of_is_taken(desks: list[Desk]) -> None:
    one, other = desks
    for desk in desks:
        desk.store(8)
    one.choose(10)
    one.beat()
    match = other.look(other.chain(12))
    assert match.expected[other.slot(W1)] == 10
    assert match.device[other.slot(W1)] == match.resident[other.slot(W1)] == 8


def test_blocks_of_both_zones_are_told_each_under_its_own_namespace(desks: list[Desk]) -> None:
    one, other = desks
    public = derive_namespace(ROOT, Scope(kind=ScopeKind.PUBLIC, public_id="p"), MODEL)
    zoned = two_zone_chain(public, OURS, tokens(9), 4)
    other.look(zoned)
    one.hearsay.say(1, W1, zoned, 0)
    one.beat()
    assert other.look(zoned).expected[other.slot(W1)] == 9
    assert other.expected(9) == 0, "under the caller's own namespace it is another chain"


def test_an_attempt_that_filled_nothing_before_the_beat_is_not_told(desks: list[Desk]) -> None:
    one, other = desks
    other.expected(1)
    one.hearsay.unsay(one.choose(8))
    one.hearsay.unsay(77)
    one.beat()
    assert other.expected(8) == 0


# -- its end ------------------------------------------------------------------------------------


def test_it_ends_by_its_age(desks: list[Desk]) -> None:
    one, other = desks
    other.expected(1)
    one.choose(8)
    one.beat()
    other.clock.ms += TTL_MS - 1.0
    other.directory.expire(other.clock.now())
    assert other.expected(8) == 8
    other.clock.ms += 1.0
    other.directory.expire(other.clock.now())
    assert other.expected(8) == 0


def test_it_ends_with_an_event_that_a_block_is_gone_and_with_the_workers_life(
    desks: list[Desk],
) -> None:
    one, other = desks
    other.expected(1)
    one.choose(8)
    one.beat()
    other.store(8)
    other.directory.removed(W1, BlocksRemoved(hashes=array("Q", [3]), tier=Tier.DEVICE))
    assert other.expected(8) == 2
    one.choose(8, seed=1)
    one.beat()
    assert other.expected(8, seed=1) == 8
    other.directory.restart(W1)
    assert other.expected(8, seed=1) == 0


def test_nothing_is_expected_of_workers_that_are_unknown_or_bear_no_predictions(
    desks: list[Desk],
) -> None:
    one, other = desks
    other.directory.join(WorkerId("idle"), block_tokens=BLOCK)
    other.directory.leave(W2)
    other.expected(1)
    for worker in (W2, WorkerId("idle")):
        one.hearsay.say(1, worker, one.chain(4), 0)
        one.beat()
    assert other.sync.strange_blocks == 8
    assert other.directory.block_count() == 0


def test_of_another_block_size_nothing_is_taken(desks: list[Desk]) -> None:
    one, other = desks
    other.expected(1)
    other.directory.join(W2, block_tokens=2 * BLOCK)
    one.choose(8, W2)
    one.beat()
    assert other.hearsay.stats.loose == 8
    assert other.directory.predicted_count(W2) == 0


def test_a_barred_or_untrusted_worker_counts_no_more_for_what_is_told_of_it(
    desks: list[Desk],
) -> None:
    one, other = desks
    other.expected(1)
    one.choose(8)
    one.beat()
    other.directory.bar(W1, True)
    assert other.expected(8) == 0


def test_a_checkpoint_that_is_told_counts_until_the_next_heartbeat_lacks_it(
    desks: list[Desk],
) -> None:
    one, other = desks
    other.expected(1)
    now = other.clock.now()
    other.directory.report(W1, [], is_complete=True, taken_at=now)
    other.clock.ms += 1.0
    one.choose(17)
    one.beat()
    assert other.expected(17) == 17
    other.directory.report(W1, [], is_complete=True, taken_at=Instant(other.clock.now() + 1.0))
    assert other.expected(17) == 0


# -- namespaces ---------------------------------------------------------------------------------


def test_what_is_told_of_a_namespace_that_nobody_used_here_waits_for_it(desks: list[Desk]) -> None:
    one, other = desks
    one.choose(8)
    one.beat()
    one.choose(9)
    one.beat()
    assert (other.hearsay.waiting_count, other.directory.block_count()) == (9, 0)
    assert other.expected(9) == 9
    assert other.hearsay.waiting_count == 0


def test_what_waits_counts_no_longer_than_it_would_have(desks: list[Desk]) -> None:
    one, other = desks
    one.choose(8)
    one.beat()
    other.clock.ms += 4_000.0
    assert other.expected(8) == 8
    other.clock.ms += 1_000.0
    other.directory.expire(other.clock.now())
    assert other.expected(8) == 0
    late = Desk("g2", one.air, one.clock)
    one.choose(8, seed=3)
    one.beat()
    late.clock.ms += TTL_MS
    assert late.expected(8, seed=3) == 0
    assert late.hearsay.stats.stale == 8


def test_what_waits_too_long_or_is_too_much_is_forgotten_and_counted(
    desks: list[Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = desks
    monkeypatch.setattr(hearsay, "MAX_WAITING_BLOCKS", 20)
    for seed in range(3):
        one.choose(8, seed=seed)
        one.beat()
    assert (other.hearsay.waiting_count, other.hearsay.stats.stale) == (16, 8)
    other.clock.ms += TTL_MS
    other.hearsay.expire(other.clock.now())
    assert (other.hearsay.waiting_count, other.hearsay.stats.stale) == (0, 24)


@pytest.mark.parametrize(
    "theirs",
    [
        derive_namespace(b"q" * 32, ACME, MODEL),
        derive_namespace(ROOT, replace(ACME, tenant="beta"), MODEL),
        derive_namespace(ROOT, ACME, replace(MODEL, model_id="n")),
        derive_namespace(ROOT, ACME, MODEL, Epochs(tenant=1)),
    ],
    ids=["another fleet's secret", "another tenant", "another model", "a raised epoch"],
)
def test_what_is_told_never_counts_under_another_namespace(theirs: Namespace) -> None:
    air, clock = Air(), HandClock(ms=1_000.0)
    one, other = Desk("g0", air, clock), Desk("g1", air, clock, theirs)
    other.expected(1)
    one.choose(8)
    one.beat()
    assert other.expected(8) == 0
    assert other.directory.block_count() == 0


def test_a_namespace_that_was_retired_takes_nothing(desks: list[Desk]) -> None:
    one, other = desks
    other.expected(1)
    one.choose(8)
    one.beat()
    other.directory.retire_namespace(OURS.tag)
    one.choose(9)
    one.beat()
    assert other.directory.match(other.chain(9)).expected[other.slot(W1)] == 0


# -- pulls --------------------------------------------------------------------------------------


def test_what_only_another_gateway_expects_is_not_pulled_until_events_confirm_it(
    desks: list[Desk],
) -> None:
    one, other = desks
    for desk in desks:
        desk.store(8)
    one.choose(12)
    one.beat()
    keys, now = other.chain(12), other.clock.now()
    states = [WorkerState(worker=w, slot=other.slot(w), block_tokens=BLOCK) for w in (W1, W2)]

    def lendable() -> list[int]:
        return other.hearsay.lendable(other.look(keys), keys, states, now)

    assert lendable() == [8, 0]
    other.choose(20, seed=5)
    own = other.chain(20, 5)
    assert other.hearsay.lendable(other.look(own), own, states, now) == [20, 0], "our own choice"
    other.directory.clear(W1)
    other.store(12)
    assert lendable() == [12, 0]


# -- against a twin -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_other_expects_nothing_that_was_not_told_and_forgets_all_of_it(seed: int) -> None:
    """Words get lost, events come or not, workers restart, time passes."""
    draw = random.Random(seed)
    air, clock = Air(), HandClock(ms=1_000.0)
    one = Desk("g0", Air(), clock)
    other = Desk("g1", air, clock)
    told: dict[tuple[WorkerId, bytes], Instant] = {}
    for _ in range(draw.randrange(1, 30)):
        match draw.randrange(6):
            case 0 | 1 | 2:
                one.choose(draw.randrange(1, 12), draw.choice((W1, W2)), draw.randrange(3))
            case 3:
                body = one.sync.word(clock.now())
                if body is not None and draw.random() < 0.7:
                    for worker, tag, first, packed in msgspec.msgpack.decode(body)[2]:
                        run = KeyRun(tag=NamespaceTag(tag), first_block=first, packed=packed)
                        for at in range(0, len(run.packed), DIGEST_BYTES):
                            key = run.packed[at : at + DIGEST_BYTES]
                            told[WorkerId(worker), key] = Instant(clock.now() + TTL_MS)
                    air.cry(body)
            case 4:
                clock.ms += draw.choice((50.0, 2_000.0, TTL_MS))
                for desk in (one, other):
                    desk.directory.expire(clock.now())
            case _:
                worker = draw.choice((W1, W2))
                other.directory.restart(worker)
                told = {name: at for name, at in told.items() if name[0] != worker}
        for worker in (W1, W2):
            for prefix in range(3):
                keys = other.chain(12, prefix)
                match = other.look(keys)
                assert not any(match.device + match.resident)
                for block in range(match.expected[other.slot(worker)]):
                    assert told[worker, keys[block]] > clock.now()
    clock.ms += 2.0 * TTL_MS
    other.directory.expire(clock.now())
    assert other.directory.block_count() == 0
