"""The connector's two halves in one engine: what is kept, what comes back, and whose it is."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from engine_desk import BLOCK, KEY, SALT, Engine, Request, layout, told
from trunkline.connectors.keeper import MAX_TOLD
from trunkline.connectors.plan import LOADS_A_REQUEST, Planner
from trunkline.connectors.wishes import MAX_WISH_BYTES, read_wishes
from trunkline.core.records import Tier
from trunkline.core.transfer import PullEnd, Reason
from trunkline.kv.orders import Pulled
from trunkline.kv.records import Pins
from trunkline.kv.store import BlockStore
from trunkline.ports.publisher import BlockRemoved, RunStored

Make = Callable[..., Engine]


@pytest.fixture
def make() -> Generator[Make]:
    made: list[Engine] = []

    def engine(name: str = "e1", **options: Any) -> Engine:
        made.append(Engine(name, **options))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def tokens(blocks: int, first: int = 100) -> list[int]:
    """Whole blocks and one token more, which is always computed."""
    return list(range(first, first + blocks * BLOCK + 1))


def test_what_was_computed_comes_back_when_the_device_has_lost_it(make: Make) -> None:
    engine = make()
    assert engine.run(Request(request_id="a", tokens=tokens(6))).promised_blocks == 0
    ran = engine.run(Request(request_id="b", tokens=tokens(6)))
    assert (ran.promised_blocks, ran.brought_blocks) == (6, 6)
    assert engine.keeper.figures.from_host == 6 * BLOCK
    assert engine.keeper.figures.lost == 0


def test_only_what_the_device_lacks_is_brought(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    ran = engine.run(Request(request_id="b", tokens=tokens(6)), on_device=4)
    assert (ran.promised_blocks, ran.brought_blocks) == (2, 2)


def test_the_last_token_of_a_prompt_is_left_to_the_engine(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    ran = engine.run(Request(request_id="b", tokens=tokens(6)[:-1]))
    assert ran.promised_blocks == 5


def test_what_a_device_had_before_is_kept_as_well_since_a_block_needs_its_parent(
    make: Make,
) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)), on_device=4)
    assert engine.run(Request(request_id="b", tokens=tokens(6))).brought_blocks == 6


def test_generated_tokens_are_kept_when_their_block_is_full(make: Make) -> None:
    engine = make()
    first = Request(request_id="a", tokens=tokens(2))
    engine.planner.begin(first)
    engine._hold(first, 3)
    engine._compute(first, 0, 2)
    engine.step(a=len(first.tokens))
    first.num_computed_tokens = len(first.tokens)
    for _ in range(BLOCK):
        first.tokens.append(7)
        engine._compute(first, 2, 3 if len(first.tokens) >= 3 * BLOCK else 2)
        engine.step(a=1)
        first.num_computed_tokens += 1
    engine.planner.finished("a")
    engine.step()
    ran = engine.run(Request(request_id="b", tokens=[*first.tokens, 8, 9]))
    assert ran.brought_blocks == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_transfer_params": None},
        {"kv_transfer_params": told(ns="")},
        {"kv_transfer_params": {"trunkline": {"ticket": {"ns": "zz"}}}},
        {"kv_transfer_params": {"trunkline": "x" * MAX_WISH_BYTES}},
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"resumable": True},
        {"cache_salt": None},
    ],
    ids=lambda changes: next(iter(changes)),  # an object's own text is another in each process
)
def test_a_request_that_tokens_do_not_say_all_of_or_without_a_ticket_is_left_alone(
    make: Make, changes: dict[str, Any]
) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6), **changes))
    assert engine.store.figures().host_bytes == 0
    engine.run(Request(request_id="b", tokens=tokens(6)))
    assert engine.run(Request(request_id="c", tokens=tokens(6), **changes)).promised_blocks == 0


def test_a_second_request_waits_for_what_is_being_brought_for_the_first(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    first = Request(request_id="b", tokens=tokens(6))
    engine.planner.begin(first)
    found = engine.planner.matched("b", 0)
    assert found == 6 * BLOCK
    engine.planner.allocated("b", engine._hold(first, 6), found)
    second = Request(request_id="c", tokens=tokens(6))
    engine.planner.begin(second)
    assert engine.planner.matched("c", 0) is None
    assert engine.await_load("b").blocks == 6
    assert engine.planner.matched("c", 0) == 6 * BLOCK


def test_beyond_so_many_loads_a_request_is_computed_at_once(make: Make) -> None:
    engine = make(max_loads=1)
    engine.run(Request(request_id="a", tokens=tokens(3)))
    engine.run(Request(request_id="b", tokens=tokens(3, first=900)))
    first = Request(request_id="c", tokens=tokens(3))
    engine.planner.begin(first)
    engine.planner.allocated("c", engine._hold(first, 3), engine.planner.matched("c", 0) or 0)
    engine.planner.begin(Request(request_id="d", tokens=tokens(3, first=900)))
    assert engine.planner.matched("d", 0) == 0
    assert engine.planner.figures.busy == 1
    engine.await_load("c")
    assert engine.planner.matched("d", 0) == 3 * BLOCK


def test_a_request_whose_loads_bring_nothing_is_asked_so_often_and_then_computed(
    make: Make,
) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(3)))
    request = Request(request_id="b", tokens=tokens(3))
    engine.planner.begin(request)
    engine.clock.ms += 10_000.0  # its lease is over
    for _ in range(LOADS_A_REQUEST):
        assert engine.planner.matched("b", 0) == 3 * BLOCK
        assert engine.load(request, 3 * BLOCK).blocks == 0
    assert engine.planner.matched("b", 0) == 0
    assert engine.keeper.figures.lost == LOADS_A_REQUEST * 3 * BLOCK


def test_d22_connector_what_was_evicted_between_look_up_and_use_is_a_shorter_hit(
    make: Make,
) -> None:
    engine = make(host_blocks=6)
    engine.run(Request(request_id="a", tokens=tokens(6)))
    request = Request(request_id="b", tokens=tokens(6))
    engine.planner.begin(request)
    found = engine.planner.matched("b", 0)
    assert found == 6 * BLOCK
    other = Request(request_id="c", tokens=tokens(2, first=900))
    engine._hold(other, 2)
    engine._compute(other, 0, 2)
    engine.planner.begin(other)
    plan = engine.planner.step({"c": 9}, lambda request_id: engine._held[request_id])
    engine.keeper.save(plan.saves)  # the planner has not heard of it yet
    loaded = engine.load(request, found)
    assert loaded.blocks == 4
    engine._check(request, 4)
    assert loaded.failed_ids == tuple(engine._held["b"][4:])
    assert engine.keeper.figures.lost == 2 * BLOCK


def test_damaged_memory_is_seen_and_the_block_is_gone(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    kept = [manifest for _, manifest in engine.store.resident()]
    pins = engine.store.pin(
        kept[0].owner.ns,
        [manifest.place.key for manifest in kept],
        until=engine.clock.now() + 100.0,  # type: ignore[arg-type]
    )
    entry = engine.store._catalogue.find(kept[3].place.key)
    assert entry is not None
    assert entry.slot is not None
    entry.slot.view[5] ^= 1
    engine.store.unpin(pins.token)
    ran = engine.run(Request(request_id="b", tokens=tokens(6)))
    assert (ran.promised_blocks, ran.brought_blocks) == (6, 3)
    assert engine.run(Request(request_id="c", tokens=tokens(6))).brought_blocks == 6


class _Shifting:
    """A store whose process stood still between look-up and copy: other bytes lie there now."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:  # all else is the store's
        return getattr(self._store, name)

    def pin(self, *args: Any, **options: Any) -> Pins:
        pins = self._store.pin(*args, **options)
        for block in pins.blocks[2:3]:
            entry = self._store._catalogue.find(block.manifest.place.key)
            assert entry is not None
            assert entry.slot is not None
            entry.slot.view[9] ^= 1
        return pins


def test_what_is_copied_is_compared_once_more(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    engine.keeper.store = _Shifting(engine.store)  # type: ignore[assignment]
    assert engine.run(Request(request_id="b", tokens=tokens(6))).brought_blocks == 2


# --- whose it is ---


def test_d16_connector_the_same_prompt_of_another_tenant_finds_nothing_and_of_the_same_it_does(
    make: Make,
) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    other = {
        "cache_salt": "u" * 43,
        "kv_transfer_params": told(ns="cd" * 16, tenant="tenant/u", epoch=5),
    }
    assert engine.run(Request(request_id="b", tokens=tokens(6), **other)).promised_blocks == 0
    assert engine.run(Request(request_id="c", tokens=tokens(6), **other)).brought_blocks == 6
    assert engine.run(Request(request_id="d", tokens=tokens(6))).brought_blocks == 6


def test_c58_d16_connector_blocks_of_another_namespace_are_refused_under_equal_keys(
    make: Make,
) -> None:
    """A forged ticket beside the salt of somebody else: equal keys, another namespace."""
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    forged = told(ns="cd" * 16, tenant="tenant/u", epoch=5)
    ran = engine.run(Request(request_id="b", tokens=tokens(6), kv_transfer_params=forged))
    assert (ran.promised_blocks, ran.brought_blocks) == (6, 0)


def test_d17_connector_requests_with_an_adapter_are_neither_kept_nor_served(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6), lora_request="adapter"))
    assert engine.store.figures().host_bytes == 0


def test_without_a_lease_nothing_is_kept_and_nothing_is_used(make: Make) -> None:
    engine = make(is_leased=False)
    engine.run(Request(request_id="a", tokens=tokens(6)))
    assert engine.keeper.figures.put_refused[Reason.LEASE] > 0
    engine.lease()
    engine.run(Request(request_id="b", tokens=tokens(6)))
    engine.clock.ms += 3_001.0
    ran = engine.run(Request(request_id="c", tokens=tokens(6)))
    assert (ran.promised_blocks, ran.brought_blocks) == (6, 0)
    assert engine.keeper.figures.load_refused[Reason.LEASE] == 1
    engine.lease()
    assert engine.run(Request(request_id="d", tokens=tokens(6))).brought_blocks == 6


def test_a_revision_that_the_worker_has_not_seen_is_no_reason_to_reuse(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    ahead = told(rev=10)
    ran = engine.run(Request(request_id="b", tokens=tokens(6), kv_transfer_params=ahead))
    assert ran.brought_blocks == 0


def test_what_is_condemned_is_unreachable_at_once_and_wiped(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    engine.freshness.obey(10, "tenant/t", 4)
    erasure = engine.keeper.condemn({"tenant/t": 4})
    assert erasure.condemned_blocks == 6
    ran = engine.run(Request(request_id="b", tokens=tokens(6)))
    assert ran.brought_blocks == 0
    engine.keeper._threads.submit(lambda: None).result()
    while not erasure.is_done:
        engine.store.erase(8)
    assert engine.store.figures().host_bytes == 0


def test_an_epoch_that_is_raised_while_a_load_runs_makes_it_void(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    request = Request(request_id="b", tokens=tokens(6))
    ran = engine.run(request, during=lambda: engine.freshness.obey(10, "tenant/t", 4))
    assert (ran.promised_blocks, ran.brought_blocks) == (6, 0)


def test_a_tenants_cap_holds_in_the_store_in_proportion(make: Make) -> None:
    engine = make(host_blocks=64)
    size = engine.layout.block_bytes
    capped = told(cap=16 * size)  # of 256 blocks on the device: 4 of 64 in the store
    engine.run(Request(request_id="a", tokens=tokens(8), kv_transfer_params=capped))
    assert engine.store.figures().host_bytes <= 4 * size


def test_a_reset_empties_the_store(make: Make) -> None:
    engine = make()
    engine.run(Request(request_id="a", tokens=tokens(6)))
    engine.planner.reset()
    engine.step()
    engine.step()
    assert engine.run(Request(request_id="b", tokens=tokens(6))).promised_blocks == 0


# --- what is told ---


def test_events_name_tokens_salt_and_the_host_tier_and_their_going(make: Make) -> None:
    engine = make(host_blocks=6)
    engine.run(Request(request_id="a", tokens=tokens(6)))
    [run] = engine.planner.take_events()
    assert isinstance(run, RunStored)
    assert (run.parent, run.salt, run.tier) == (None, SALT, Tier.HOST)
    assert list(run.tokens) == tokens(6)[:-1]
    engine.run(Request(request_id="b", tokens=tokens(2, first=900)))
    events = engine.planner.take_events()
    gone = [event for event in events if isinstance(event, BlockRemoved)]
    assert [event.hash for event in gone] == [run.hashes[5], run.hashes[4]]


def test_nothing_is_remembered_of_what_the_store_does_not_have(make: Make) -> None:
    engine = make(host_blocks=4)
    for turn in range(30):
        engine.run(Request(request_id=f"r{turn}", tokens=tokens(3, first=100 * turn)))
        engine.run(Request(request_id=f"s{turn}", tokens=tokens(3, first=100 * turn)))
    planner = engine.planner
    assert not planner._prompts
    assert not planner._coming
    assert not planner._running
    assert all(note.awaited == 0 for note in planner._notices._notes.values())
    assert len(planner._notices) <= 4 + len(planner._notices._late)


def test_a_step_copies_so_many_blocks_and_the_next_ones_the_rest() -> None:
    planner = Planner(block_tokens=BLOCK, transfer_key=KEY, max_saves=4)
    request = Request(request_id="a", tokens=tokens(10))
    planner.begin(request)
    ids = list(range(20))
    sizes = [len(planner.step({"a": 41 if turn == 0 else 1}, lambda _: ids).saves) for turn in (0,)]
    request.num_computed_tokens = 41
    sizes += [len(planner.step({"a": 1}, lambda _: ids).saves) for _ in range(3)]
    assert sizes == [4, 4, 2, 0]


def test_ends_that_the_gateway_does_not_fetch_are_dropped_oldest_first(make: Make) -> None:
    keeper = make().keeper
    for number in range(MAX_TOLD + 3):
        keeper._end(f"n{number}", Pulled(end=PullEnd.REJECTED, reason=Reason.BUSY))
    assert keeper.figures.untold == 3
    names = [one["name"] for _ in range(MAX_TOLD) for one in keeper.take_told()]
    assert (names[0], len(names)) == ("n3", MAX_TOLD)


def test_what_a_gateway_says_is_read_at_its_bound_and_not_beyond() -> None:
    said = told()
    said["trunkline"]["more"] = ""
    bare = len(str(said["trunkline"]).replace("'", '"').replace(", ", ",").replace(": ", ":"))
    said["trunkline"]["more"] = "x" * (MAX_WISH_BYTES - bare)
    assert read_wishes(said, KEY) is not None
    said["trunkline"]["more"] += "x"
    with pytest.raises(ValueError, match="at most"):
        read_wishes(said, KEY)


def test_d19_connector_weights_of_two_checkpoints_are_two_layouts() -> None:
    assert layout("m1").digest != layout("m2").digest
