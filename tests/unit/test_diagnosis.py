"""What is said of workers by what is known of each: bounds, majorities, and what is left unsaid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trunkline.checkup import ailments_of_peers
from trunkline.config import Config, LimitsConfig
from trunkline.control.diagnosis import MAX_CLOCK_OFF_S, ailments_of_workers
from trunkline.control.gateways import PeerView
from trunkline.control.views import CheckView, MemberView, Mode, RankView
from trunkline.control.visit import Visit, clock_off_s
from trunkline.core.ailment import Ailment
from trunkline.core.alignment import Examination, State
from trunkline.core.decision import Exclusion
from trunkline.core.records import WorkerId
from trunkline.ports.worker import Endpoint, EngineKind
from trunkline.sound_settings import ailments_of

WELL = CheckView(examination=Examination(), unfinished="")


def view(name: str = "w0:1", **more: Any) -> MemberView:
    rank = RankView(
        worker=WorkerId(name),
        incarnation=1,
        in_flight=0,
        queue_ms=0.0,
        scale=1.0,
        held_blocks=0,
        predicted_blocks=0,
        believed_share=1.0,
        held_in_tiers={},
        feed_state=more.pop("feed_state", "live"),
        feed_stats={},
    )
    fields: dict[str, Any] = {
        "name": name,
        "url": f"http://{name}",
        "mode": Mode.EXACT,
        "reason": "",
        "exclusion": None,
        "is_draining": False,
        "breaker": 0,
        "block_tokens": 16,
        "capacity_blocks": 100,
        "model_id": "m",
        "engine": EngineKind.VLLM,
        "engine_version": "0.32.0",
        "max_model_len": 4_096,
        "degraded": (),
        "ranks": (rank,),
        "labels": {},
        "check": WELL,
        "endpoint": Endpoint(host="10.0.0.1", port=1, host_header=name),
    }
    return MemberView(**fields | more)


def found(
    *views: MemberView, keeps_apart: bool = False, **visits: Visit
) -> list[tuple[str, str, State]]:
    """Subject, kind and state of each. `visits`: of `w0:1` by `w0`."""
    seen = {name: visits[name[:2]] for one in views if (name := one.name)[:2] in visits}
    made: list[Ailment] = ailments_of_workers(views, seen, idle_ms=4_000.0, keeps_apart=keeps_apart)
    return [(one.subject, one.what, one.state) for one in made]


def test_a_worker_in_order_has_none_visited_or_not() -> None:
    assert found(view()) == []
    visit = Visit(version="0.32.0", clock_off_s=0.0, asks_for_key=True)
    assert found(view(), view("w1:1"), w0=visit) == []


@pytest.mark.parametrize(("off_s", "count"), [(5.0, 0), (-5.0, 0), (5.1, 1), (-5.1, 1)])
def test_a_clock_is_wrong_beyond_its_bound_in_both_directions(off_s: float, count: int) -> None:
    assert MAX_CLOCK_OFF_S == 5.0
    assert len(found(view(), w0=Visit(clock_off_s=off_s))) == count


@pytest.mark.parametrize(
    ("date", "off_s"),
    [
        (b"Sat, 01 Jan 2000 00:00:10 GMT", 0.0),
        (b"Sat, 01 Jan 2000 00:00:09 GMT", 0.0),
        (b"Sat, 01 Jan 2000 00:00:08 GMT", 0.0),
        (b"Sat, 01 Jan 2000 00:00:00 GMT", -8.0),
        (b"Sat, 01 Jan 2000 00:00:20 GMT", 9.0),
        (b"", None),
        (b"\xff\xff", None),
        (b"yesterday", None),
    ],
)
def test_a_date_that_came_between_two_moments_says_how_far_a_clock_is_off(
    date: bytes, off_s: float | None
) -> None:
    assert clock_off_s(date, 946_684_810.0, 946_684_811.0) == off_s


def test_of_workers_of_one_model_the_shorter_and_the_older_are_told() -> None:
    old = view("w1:1", max_model_len=2_048, engine_version="0.31.9")
    other = view("w2:1", model_id="n", max_model_len=16, engine_version="0.33.0")
    assert found(view(), old, other) == [
        ("w1:1", "context", State.WRONG),
        ("w1:1", "version", State.WRONG),
        ("w1:1", "version", State.NOTE),
    ]
    assert found(view(max_model_len=None), view("w1:1", engine_version="nightly")) == []


def test_a_worker_that_asks_for_no_key_is_wrong_where_it_has_one() -> None:
    seen = Visit(asks_for_key=False)
    assert found(view(), w0=seen) == [("w0:1", "worker port", State.NOTE)]
    assert found(view(), keeps_apart=True, w0=seen) == [("w0:1", "worker port", State.OPEN)]
    keyed = Endpoint(host="10.0.0.1", port=1, host_header="w0:1", api_key="k")
    assert found(view(endpoint=keyed), w0=seen) == [("w0:1", "worker port", State.WRONG)]


def test_of_a_worker_that_is_not_here_only_why_is_said() -> None:
    away = view(ranks=(), reason="refused", degraded=("load",))
    assert found(away, w0=Visit(clock_off_s=99.0)) == [("w0:1", "reach", State.WRONG)]
    assert found(replace(away, is_other_model=True)) == [("w0:1", "model", State.WRONG)]


def test_c11_c57_a_worker_that_tells_no_load_or_whose_stream_is_down_is_told() -> None:
    assert found(view(degraded=("load",))) == [("w0:1", "load", State.WRONG)]
    assert found(view(feed_state="silent")) == [("w0:1", "stream", State.WRONG)]
    assert found(view(is_replayable=False)) == [("w0:1", "replay", State.WRONG)]


def test_a_worker_that_was_not_tested_to_the_end_is_open_and_one_that_drains_a_note() -> None:
    none = CheckView(examination=None, unfinished="")
    assert found(view(check=none)) == [("w0:1", "test", State.OPEN)]
    assert found(view(exclusion=Exclusion.DRAINING)) == [("w0:1", "state", State.NOTE)]
    assert found(view(exclusion=Exclusion.BREAKER)) == [("w0:1", "state", State.WRONG)]
    assert found(view(exclusion=Exclusion.WARMING)) == []


def test_descriptors_are_counted_for_clients_and_workers() -> None:
    limits = LimitsConfig(max_connections=1_000, max_concurrent_requests=10_000)
    config = Config(limits=limits)
    needed = 1_000 + 10 * 8 + 256
    assert ailments_of(config, needed, 10) == []
    assert ailments_of(config, None, 10) == []
    [one] = ailments_of(config, needed - 1, 10)
    assert (one.what, f"ulimit -n {needed}" in one.remedy) == ("descriptors", True)


@pytest.mark.parametrize(
    ("version", "off_s", "found"),
    [
        ("1.2", 0.1, []),
        ("1.2", -5.0, []),
        ("", None, []),
        ("1.1", 0.0, ["version"]),
        ("1.2", 5.5, ["clock"]),
        ("1.3", -6.0, ["version", "clock"]),
    ],
)
def test_gateways_of_another_release_or_time_are_told(
    version: str, off_s: float | None, found: list[str]
) -> None:
    peer = PeerView(life="gateway/host-2#af31", version=version, clock_off_s=off_s)
    made = list(ailments_of_peers([peer], "1.2"))
    assert [one.what for one in made] == found
    assert all(one.subject == "gateway/host-2" for one in made)
