"""Pulls between the connectors of two engines, over real sockets: what comes, and what does not."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator
from typing import Any

import pytest

from engine_desk import BLOCK, PATIENCE_S, SUBJECTS, Engine, Request, layout, told
from trunkline.adapters.clock import SystemClock
from trunkline.connectors.messages import StepPlan

Make = Callable[..., Engine]


@pytest.fixture
def make() -> Generator[Make]:
    made: list[Engine] = []

    def engine(name: str, **options: Any) -> Engine:
        made.append(Engine(name, clock=SystemClock(), **options))
        made[-1].server.start()
        return made[-1]

    yield engine
    for one in made:
        one.close()


def tokens(blocks: int, first: int = 100) -> list[int]:
    return list(range(first, first + blocks * BLOCK + 1))


def pulling(
    lends: Engine, pulls: Engine, name: str, blocks: int, first: int = 0, at: int = 100, **more: Any
) -> Request:
    """A request that is sent with an order for its blocks from `first` on."""
    request = Request(request_id=name, tokens=tokens(blocks, at))
    order = pulls.order(lends, request, first, blocks, **more)
    request.kv_transfer_params = told(name=f"order of {name}", pull=order)
    return request


def test_granted_blocks_come_from_the_other_engine_and_are_announced(make: Make) -> None:
    lends, pulls = make("lends"), make("pulls")
    lends.run(Request(request_id="a", tokens=tokens(6)))
    ran = pulls.run(pulling(lends, pulls, "b", 6))
    assert (ran.promised_blocks, ran.brought_blocks) == (6, 6)
    assert pulls.ended() == [("published", None, 6)]
    assert pulls.keeper.figures.from_pull == 6 * BLOCK
    [run] = pulls.planner.take_events()
    assert len(run.hashes) == 6  # type: ignore[union-attr]


def test_a_pull_goes_on_behind_what_the_device_has_and_the_store_is_given_that_first(
    make: Make,
) -> None:
    lends, pulls = make("lends"), make("pulls")
    lends.run(Request(request_id="a", tokens=tokens(6)))
    ran = pulls.run(pulling(lends, pulls, "b", 6, first=2), on_device=2)
    assert (ran.promised_blocks, ran.brought_blocks) == (4, 4)


def test_an_order_for_what_is_here_already_is_published_at_once(make: Make) -> None:
    lends, pulls = make("lends"), make("pulls")
    lends.run(Request(request_id="a", tokens=tokens(6)))
    pulls.run(Request(request_id="b", tokens=tokens(6)))
    ran = pulls.run(pulling(lends, pulls, "c", 6))
    assert ran.brought_blocks == 6
    assert pulls.keeper.figures.from_pull == 0
    on_device = pulls.run(pulling(lends, pulls, "d", 6), on_device=6)
    assert on_device.promised_blocks == 0
    assert pulls.ended() == [("published", None, 0)] * 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"destination": "somebody"}, "grant"),
        ({"source_incarnation": "another life"}, "incarnation"),
        ({"ns": bytes(16)}, "ns"),
        ({"subjects": ("fleet", "org/o"), "epochs": (1, 2)}, "grant"),
        ({"keys": bytes(32)}, "grant"),
        ({"layout": bytes(16)}, "layout"),
        ({"deadline_ms": 1}, "timeout"),
        ({"epochs": (1, 2, 2, 7)}, "grant"),
        ({"subjects": (*SUBJECTS, "user/t/x"), "epochs": (1, 2, 3, 7, 0)}, "grant"),
        ({"rev": 99}, "lease"),
    ],
    ids=str,
)
def test_a_grant_that_does_not_fit_is_refused_and_the_prompt_computed(
    make: Make, changes: dict[str, Any], reason: str
) -> None:
    lends, pulls = make("lends"), make("pulls")
    lends.run(Request(request_id="a", tokens=tokens(6)))
    ran = pulls.run(pulling(lends, pulls, "b", 6, **changes))
    assert ran.brought_blocks == 0
    [(end, why, blocks)] = pulls.ended()
    assert (end, blocks) == ("rejected", 0)
    assert why in {reason, "grant"}


def test_a_forged_grant_is_seen_by_the_scheduler_already(make: Make) -> None:
    lends, pulls = make("lends"), make("pulls")
    request = pulling(lends, pulls, "b", 6)
    assert request.kv_transfer_params is not None
    pull = request.kv_transfer_params["trunkline"]["pull"]
    pull["grant"] = pull["grant"][:-4] + "AAAA"
    assert pulls.run(request).promised_blocks == 0
    assert pulls.ended() == [("rejected", "grant", 0)]


def test_an_order_whose_blocks_do_not_follow_what_is_here_is_a_broken_chain(make: Make) -> None:
    lends, pulls = make("lends"), make("pulls")
    lends.run(Request(request_id="a", tokens=tokens(6)))
    assert pulls.run(pulling(lends, pulls, "b", 6, first=3)).promised_blocks == 0
    assert pulls.ended() == [("rejected", "chain", 0)]


def test_what_left_before_a_pull_began_is_not_put_there_from_places_that_are_still_empty(
    make: Make,
) -> None:
    """The planner counted on blocks in host memory, with the granted ones behind them."""
    lends, pulls = make("lends"), make("pulls", host_blocks=8)
    lends.run(Request(request_id="a", tokens=tokens(6)))
    pulls.run(Request(request_id="b", tokens=tokens(3)))
    request = pulling(lends, pulls, "c", 6, first=3)
    pulls.planner.begin(request)
    assert pulls.planner.matched("c", 0) == 6 * BLOCK
    pulls.store.condemn(lambda _owner: True)  # and nobody has told the planner
    assert pulls.load(request, 6 * BLOCK).blocks == 0
    assert pulls.ended() == [("rejected", "chain", 0)]
    assert pulls.store.figures().host_bytes == 0


def test_d19_d26_connector_engines_of_another_model_or_block_size_do_not_pair(make: Make) -> None:
    lends = make("lends", kind=layout("another checkpoint"))
    pulls = make("pulls")
    lends.run(Request(request_id="a", tokens=tokens(6)))
    assert pulls.run(pulling(lends, pulls, "b", 6)).brought_blocks == 0
    coarse = make("coarse", kind=layout(block_tokens=2 * BLOCK))
    assert pulls.run(pulling(coarse, pulls, "c", 6, at=500)).brought_blocks == 0
    assert [why for _, why, _ in pulls.ended()] == ["layout", "layout"]


def test_d16_connector_a_source_gives_nothing_of_another_namespace(make: Make) -> None:
    """The thief has a grant of its own namespace for the victim's keys, as a forger would."""
    lends, pulls = make("lends"), make("pulls")
    lends.run(Request(request_id="a", tokens=tokens(6)))
    thief = Request(request_id="b", tokens=tokens(6))
    order = pulls.order(
        lends, thief, 0, 6, ns=bytes.fromhex("cd" * 16),
        subjects=("fleet", "org/o", "tenant/u", "model/m"), epochs=(1, 2, 5, 7),
    )  # fmt: skip
    thief.kv_transfer_params = told(ns="cd" * 16, tenant="tenant/u", epoch=5, name="n", pull=order)
    assert pulls.run(thief).brought_blocks == 0
    assert pulls.ended() == [("rejected", "ns", 0)]


def test_revoked_at_the_source_alone_it_gives_nothing_more(make: Make) -> None:
    lends, pulls = make("lends"), make("pulls")
    lends.run(Request(request_id="a", tokens=tokens(6)))
    lends.freshness.obey(10, "tenant/t", 4)
    lends.keeper.condemn({"tenant/t": 4})
    assert pulls.run(pulling(lends, pulls, "b", 6)).brought_blocks == 0
    assert pulls.ended() == [("rejected", "epoch", 0)]


def test_d27_connector_a_source_that_restarted_is_another_life(make: Make) -> None:
    lends, pulls = make("lends"), make("pulls")
    request = pulling(lends, pulls, "b", 6)
    reborn = make("reborn")
    reborn.run(Request(request_id="a", tokens=tokens(6)))
    assert request.kv_transfer_params is not None
    request.kv_transfer_params["trunkline"]["pull"]["port"] = reborn.server.address[1]
    assert pulls.run(request).brought_blocks == 0
    assert pulls.ended() == [("rejected", "incarnation", 0)]


def test_a_dead_source_costs_a_recompute_and_a_second_one_is_asked(make: Make) -> None:
    dead, lends, pulls = make("dead"), make("lends"), make("pulls")
    lends.run(Request(request_id="a", tokens=tokens(6, 500)))
    request = pulling(dead, pulls, "b", 6)
    dead.server.close()
    assert pulls.run(request).brought_blocks == 0
    assert pulls.ended() == [("rejected", "connect", 0)]
    again = pulling(dead, pulls, "c", 6, at=500)
    assert again.kv_transfer_params is not None
    pull = again.kv_transfer_params["trunkline"]["pull"]
    pull["other"] = pulls.order(lends, again, 0, 6)
    assert pulls.run(again).brought_blocks == 6
    assert pulls.ended() == [("published", None, 6)]


def test_d24_d25_d28_connector_a_source_that_says_nothing_is_given_up_in_time(make: Make) -> None:
    """It accepts and is stuck: the load ends by its own clock, and the engine computes."""
    pulls, lends = make("pulls", max_pull_ms=300.0, stall_ms=600_000.0), make("lends")
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        in_a_minute = int(pulls.clock.wall() * 1e3 + 59_000)
        request = pulling(lends, pulls, "b", 6, deadline_ms=in_a_minute)
        assert request.kv_transfer_params is not None
        pull = request.kv_transfer_params["trunkline"]["pull"]
        pull["port"] = stuck.getsockname()[1]
        assert pulls.run(request).brought_blocks == 0
    assert pulls.ended() == [("rejected", "timeout", 0)]
    assert pulls.puller.figures.open_pulls == pulls.puller.figures.overdue_pulls == 0
    assert pulls.store.figures().staged_bytes == 0


def test_a_client_that_leaves_ends_its_pull(make: Make) -> None:
    pulls, lends = make("pulls"), make("lends")
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        request = pulling(lends, pulls, "b", 6)
        assert request.kv_transfer_params is not None
        request.kv_transfer_params["trunkline"]["pull"]["port"] = stuck.getsockname()[1]
        pulls.planner.begin(request)
        found = pulls.planner.matched("b", 0)
        pulls.planner.allocated("b", pulls._hold(request, 6), found or 0)
        pulls.step()
        stuck.settimeout(PATIENCE_S)
        held, _ = stuck.accept()  # it waits for an answer now
        pulls.planner.finished("b")
        assert pulls.await_load("b").blocks == 0
        held.close()
    [(end, reason, _)] = pulls.ended()
    assert (end, reason) == ("cancelled", "client")


def test_an_error_of_ours_ends_the_load_and_the_engine_computes(make: Make) -> None:
    engine = make("broken")
    engine.run(Request(request_id="a", tokens=tokens(6)))

    def fails(block_id: int, data: bytearray) -> None:
        raise OSError("no such place")

    engine.device.write = fails  # type: ignore[method-assign]
    assert engine.run(Request(request_id="b", tokens=tokens(6))).brought_blocks == 0
    assert engine.store.figures().pins == 0


def test_a_plan_without_anything_does_nothing(make: Make) -> None:
    engine = make("idle")
    engine.keeper.begin(StepPlan())
    engine.keeper.save(())
    assert engine.keeper.drain().is_empty
