"""What `trunkline top` shows: it fits, it sorts, and it computes what it says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline import top_frame
from trunkline.gateway.families import FAMILIES
from trunkline.top import painted
from trunkline.top_frame import (
    MAX_ALARM_LINES,
    SORTS,
    Line,
    Order,
    Screen,
    Snapshot,
    Style,
    fleet_of,
    frame,
    quantile_ms,
    snapshot_of,
    sorted_rows,
)

METRICS = """# HELP trunkline_worker_leaking 1 if it reused KV across salts: an alarm.
# HELP trunkline_requests_total Finished requests
trunkline_requests_total{route="chat",code="2xx"} 30
trunkline_requests_total{route="chat",code="4xx"} 10
trunkline_requests_active 3
trunkline_prompt_tokens_total 1000
trunkline_reused_tokens_total 600
trunkline_recomputed_tokens_total 100
trunkline_over_claims_total 2
trunkline_false_hits_total 0
trunkline_worker_leaking{worker="a"} 0
trunkline_ttft_seconds_bucket{le="0.1"} 5
trunkline_ttft_seconds_bucket{le="0.5"} 10
trunkline_ttft_seconds_bucket{le="+Inf"} 10
"""


def worker(name: str = "10.0.0.1:8000", **more: Any) -> dict[str, Any]:
    detail = {
        "load": {"running": 2, "waiting": 1, "memory": 0.5},
        "reuse": {"prompt_tokens": 100, "reused_tokens": 75},
        "ranks": [{"held_blocks": 50}],
        "capacity_blocks": 200,
        "alarms": [],
    }
    fields = {
        "worker": name,
        "state": "ready",
        "mode": "exact",
        "breaker": "closed",
        "queue_ms": 12.4,
    }
    detail |= {key: more.pop(key) for key in list(more) if key in detail}
    return fields | more | {"detail": detail}


def seen(*workers: dict[str, Any], metrics: str = METRICS, at_s: float = 100.0) -> Snapshot:
    return snapshot_of(workers, metrics, at_s)


def lines(now: Snapshot | None, before: Snapshot | None = None, **screen: Any) -> list[str]:
    return [line.text for line in frame(now, before, Screen(width=80, **screen))]


def test_a_worker_has_its_line_with_all_that_it_tells() -> None:
    text = lines(seen(worker()))[-1]
    told = ["12", "2", "1", "75", "25", "closed"]
    assert text.split() == ["10.0.0.1:8000", "ready", "exact", *told]
    none = worker(load=None, reuse={"prompt_tokens": 0, "reused_tokens": 0}, capacity_blocks=None)
    assert lines(seen(none))[-1].split()[4:8] == ["-", "-", "-", "-"]


def test_the_fleet_is_added_up_since_the_start_and_over_the_last_seconds() -> None:
    before = seen(worker())
    first = fleet_of(before, None)
    assert (first.requests_per_s, first.hit_share, first.hit_tokens) == (None, 0.5, 500)
    assert (first.ttft_p50_ms, first.requests_active, first.leaking) == (100.0, 3, 0)
    later = METRICS.replace(" 30", " 80").replace(" 1000", " 2000").replace(" 600", " 1500")
    now = seen(worker(), metrics=later, at_s=105.0)
    fleet = fleet_of(now, before)
    assert (fleet.requests_per_s, fleet.hit_share, fleet.window_s) == (10.0, 0.9, 5.0)
    assert fleet.ttft_p50_ms is None, "nothing was answered meanwhile"


def test_counters_that_fell_are_of_another_life_of_the_gateway() -> None:
    now = seen(worker(), metrics=METRICS.replace(" 30", " 1"), at_s=101.0)
    assert fleet_of(now, seen(worker())).window_s is None


@pytest.mark.parametrize(("share", "ms"), [(0.25, 50.0), (0.5, 100.0), (0.75, 300.0), (1.0, 500.0)])
def test_a_quantile_lies_between_its_bounds(share: float, ms: float) -> None:
    assert quantile_ms({0.1: 5, 0.5: 10, float("inf"): 10}, share) == pytest.approx(ms)
    assert quantile_ms({float("inf"): 0}, share) is None
    assert quantile_ms({0.1: 0, float("inf"): 10}, share) == 100.0


def test_each_key_sorts_and_the_same_again_turns_round() -> None:
    rows = seen(
        worker("b:1", queue_ms=5.0),
        worker("a:1", queue_ms=9.0, state="unhealthy"),
        worker("c:1", queue_ms=1.0, reuse={"prompt_tokens": 4, "reused_tokens": 4}),
    ).rows

    def names(order: Order) -> list[str]:
        return [row.worker[0] for row in sorted_rows(rows, order)]

    assert names(Order("w")) == ["a", "b", "c"]
    assert names(Order("w").pressed("w")) == ["c", "b", "a"]
    assert names(Order("w").pressed("w").pressed("l")) == ["a", "b", "c"]
    assert names(Order("h")) == ["c", "a", "b"]
    assert names(Order("s")) == ["a", "b", "c"], "who is not well comes first"
    assert set(SORTS).isdisjoint({"q"})


def test_rows_that_do_not_fit_are_counted() -> None:
    now = seen(*(worker(f"w{number}:1") for number in range(100)))
    shown = lines(now, height=24)
    assert len(shown) == 24
    table = [text for text in shown if text.startswith("w")]
    assert shown[-1] == f"and {100 - len(table)} more"
    fits = seen(*(worker(f"w{number}:1") for number in range(len(table) + 1)))
    assert "more" not in lines(fits, height=24)[-1], "as many as there is room for"
    assert sum(text.startswith("w") for text in lines(now)) == 100


def test_alarms_stand_above_the_table_and_are_bounded() -> None:
    alarm = {"kind": "silent", "lasts_s": 12, "why": "nothing is heard"}
    now = seen(*(worker(f"w{number}:1", alarms=[alarm]) for number in range(5)))
    shown = lines(now)
    told = [text for text in shown if text.startswith("! w") and "silent for 12 s" in text]
    assert len(told) == MAX_ALARM_LINES
    assert "! and 2 more alarms: trunkline doctor has all" in shown
    assert sum(text.startswith("! w") for text in shown) == MAX_ALARM_LINES + 5


def test_a_gateway_that_is_gone_is_said_to_be_with_and_without_an_earlier_word() -> None:
    assert lines(None, gone="refused")[1] == "gateway gone: refused; asking again"
    shown = lines(seen(worker()), gone="refused")
    assert shown[2] == "what follows is what it said last"
    assert shown[-1].startswith("10.0.0.1:8000")


def test_false_hits_are_shown_in_red() -> None:
    now = seen(worker(), metrics=METRICS.replace("false_hits_total 0", "false_hits_total 1"))
    [line] = [one for one in frame(now, None, Screen(width=80)) if "false hits 1" in one.text]
    assert line.style is Style.BAD


@given(
    st.integers(1, 200),
    st.integers(1, 60),
    st.lists(st.text(min_size=1, max_size=200), max_size=30),
    st.text(max_size=300),
)
def test_a_frame_fits_and_steers_no_terminal(
    width: int, height: int, names: list[str], gone: str
) -> None:
    alarm = {"kind": "silent", "lasts_s": 1, "why": gone}
    now = seen(*(worker(name, alarms=[alarm]) for name in names))
    made = frame(now, None, Screen(width=width, height=height, gone=gone, url="http://x:1"))
    assert len(made) <= max(1, height)
    assert all(len(line.text) <= width and line.text.isprintable() for line in made)


def test_without_colours_there_are_none_and_the_last_line_ends_no_line() -> None:
    made = [Line("one", Style.BAD), Line("two")]
    assert painted(made, has_colour=False) == "\x1b[Hone\x1b[K\r\ntwo\x1b[K\x1b[J"
    assert "\x1b[31mone\x1b[0m" in painted(made, has_colour=True)


def test_the_json_has_the_fleet_and_each_worker() -> None:
    told = seen(worker()).as_json()
    assert told["fleet"]["hit_tokens"] == 500
    assert told["workers"][0]["kv_share"] == 0.25


def test_every_metric_that_is_read_is_exported() -> None:
    read = (*top_frame._COUNTED, *top_frame._GAUGES, top_frame._TTFT.removesuffix("_bucket"))
    assert set(read) <= set(FAMILIES)
