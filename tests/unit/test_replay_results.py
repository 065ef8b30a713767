"""The arithmetic of results, bars and counters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from trunkline.errors import ConfigError
from trunkline.replay.bars import check_bars, check_names, flatten, parse_bars
from trunkline.replay.counters import (
    FleetCounters,
    Quantiles,
    counters_from_metrics,
    parse_metrics,
    percentile,
)
from trunkline.replay.figures import listing, specimen
from trunkline.replay.records import RequestRecord, Verdict, read_decision
from trunkline.replay.results import MAX_REASONS, RunFacts, Summary, summarise

FACTS = RunFacts(workload="W1", policy="cache_aware", wall_ms=2_000.0, time_scale=2.0)


def record(**changes: Any) -> RequestRecord:
    base = RequestRecord(
        index=0,
        arrival_ms=0.0,
        client_late_ms=0.0,
        session=None,
        lost_reason="",
        status=200,
        ttft_ms=100.0,
        duration_ms=200.0,
        prompt_tokens=100,
        cached_tokens=0,
        output_tokens=4,
        verdict=Verdict.RIGHT,
        worker=None,
        matched_tokens=None,
        queue_ms=None,
    )
    return replace(base, **changes)


def test_hits_prefill_and_losses_add_up() -> None:
    records = [
        record(cached_tokens=80),
        record(cached_tokens=0),
        record(cached_tokens=None, prompt_tokens=200),
        record(lost_reason="connection reset", cached_tokens=64, ttft_ms=None),
    ]
    summary = summarise(records, FACTS)
    assert (summary.requests, summary.lost, summary.completed) == (4, 1, 3)
    assert summary.hit_tokens_ratio == 80 / 400
    assert summary.hit_requests_ratio == 1 / 3
    assert (summary.cached_tokens, summary.prefill_tokens) == (80, 320)
    assert summary.lost_reasons == {"connection reset": 1}
    assert summary.wall_s == 2.0


def test_ttft_is_told_in_engine_time_beside_wall_time() -> None:
    summary = summarise([record(ttft_ms=float(ms)) for ms in range(1, 102)], FACTS)
    assert summary.ttft_wall_ms is not None
    assert summary.ttft_ms is not None
    assert (summary.ttft_wall_ms.p50, summary.ttft_ms.p50) == (51.0, 25.5)
    assert (summary.ttft_wall_ms.p95, summary.ttft_wall_ms.p99) == (96.0, 100.0)
    assert summary.ttft_ms.mean == 25.5


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([0.0, 10.0], 0.5) == 5.0
    assert percentile([0.0, 10.0, 20.0], 0.95) == pytest.approx(19.0)


def test_a_false_hit_counts_even_on_a_lost_request() -> None:
    records = [record(verdict=Verdict.WRONG, lost_reason="short"), record()]
    summary = summarise([*records, record(verdict=Verdict.UNCHECKED)], FACTS)
    assert (summary.false_hits, summary.answers_checked) == (1, 2)


def test_over_claims_allow_for_the_token_that_is_always_computed() -> None:
    def claim(matched: int | None, cached: int | None, prompt: int = 96) -> RequestRecord:
        return record(matched_tokens=matched, cached_tokens=cached, prompt_tokens=prompt)

    assert summarise([claim(96, 80)], FACTS).over_claims == 0
    assert summarise([claim(96, 64), claim(64, 64), claim(64, 48)], FACTS).over_claims == 2
    assert summarise([claim(None, 64), claim(64, None)], FACTS).over_claims is None
    told = FleetCounters(over_claims=7)
    assert summarise([claim(96, 64)], FACTS, told).over_claims == 7


def test_work_is_missed_prefill_by_worker_unless_the_fleet_says_otherwise() -> None:
    records = [
        record(worker="w1", cached_tokens=40),
        record(worker="w1"),
        record(worker="w2", cached_tokens=60),
        record(worker=None),
    ]
    summary = summarise(records, FACTS)
    assert summary.worker_work == {"w1": 160.0, "w2": 40.0}
    assert summary.busiest_over_mean_work == 1.6
    told = summarise(records, FACTS, FleetCounters(worker_work={"a": 1.0, "b": 3.0, "c": 2.0}))
    assert told.busiest_over_mean_work == 1.5


def test_reasons_of_loss_are_bounded() -> None:
    lost = [record(lost_reason=f"reason {i}") for i in range(MAX_REASONS + 5)]
    reasons = summarise(lost, FACTS).lost_reasons
    assert len(reasons) == MAX_REASONS + 1
    assert reasons["other"] == 5


def test_a_run_without_any_answer_has_figures_that_are_none() -> None:
    summary = summarise([], FACTS)
    assert summary.hit_tokens_ratio is None
    assert summary.ttft_ms is None
    assert summary.as_dict()["ttft_ms"] is None


def judged() -> Summary:
    baseline = summarise([record(ttft_ms=400.0)], replace(FACTS, policy="least_queue"))
    told = FleetCounters(directory_lookup_us=Quantiles(p50=10.0, p99=50.0))
    mine = summarise([record(cached_tokens=90)], FACTS, told)
    return replace(mine, baselines={"least_queue": baseline})


def test_the_json_has_the_documented_layout() -> None:
    figures = json.loads(json.dumps(judged().as_dict()))
    assert figures["workload"] == "W1"
    assert figures["policy"] == "cache_aware"
    assert figures["hit_tokens_ratio"] == 0.9
    assert set(figures["ttft_ms"]) == {"mean", "p50", "p95", "p99"}
    assert figures["directory_lookup_us"] == {"p50": 10.0, "p99": 50.0}
    assert figures["baselines"]["least_queue"]["ttft_ms"]["p99"] == 200.0
    for name in ("requests", "hit_requests_ratio", "avoided_prefill_tokens", "prefill_tokens"):
        assert isinstance(figures[name], (int, float))
    assert {"busiest_over_mean_work", "over_claims", "false_hits", "lost"} <= set(figures)


@pytest.mark.parametrize(
    ("expression", "passed"),
    [
        ("hit_tokens_ratio>=0.9", [True]),
        ("hit_tokens_ratio>0.9", [False]),
        ("hit_tokens_ratio >= 0.85, ttft_ms.p99 <= 534", [True, True]),
        ("requests==1,lost!=0", [True, False]),
        ("ttft_ms.p95<=baselines.least_queue.ttft_ms.p95", [True]),
        ("ttft_ms.p95<=0.2*baselines.least_queue.ttft_ms.p95", [False]),
        ("ttft_ms.p95<=1e3", [True]),
        ("over_claims<=0", [False]),
        ("router_queue_ms.p99<=10", [False]),
    ],
)
def test_bars_hold_or_not_and_what_is_not_measured_never_does(
    expression: str, passed: list[bool]
) -> None:
    checks = check_bars(parse_bars(expression), judged().as_dict())
    assert [check.is_passed for check in checks] == passed
    assert all(check.line.startswith(("PASS", "FAIL")[not check.is_passed]) for check in checks)


def test_fail_if_turns_the_sense_but_not_that_of_what_is_not_measured() -> None:
    bars = parse_bars("lost>0,hit_tokens_ratio>0.5,over_claims>0", is_failure=True)
    checks = check_bars(bars, judged().as_dict())
    assert [check.is_passed for check in checks] == [True, False, False]


@pytest.mark.parametrize("text", ["", "hits", "x>=", ">=3", "x=3", "x>=1 y<=2", "x>=1,,y>=2"])
def test_what_is_no_bar_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match="expected figure, one of >= <= == != > <"):
        parse_bars(text)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("hit_ratio>=0.5", "no figure 'hit_ratio'; did you mean hit_tokens_ratio?"),
        ("ttft_ms.p96<=1", "did you mean ttft_ms.p9"),
        ("lost<=weather", "bar 'lost<=weather': no figure 'weather'; `trunkline x` lists them"),
        ("lost<=2*baselines.nobody.lost", "nobody is no baseline of this run; its baselines: lq"),
        ("ttft_ms>1", "no figure 'ttft_ms'"),
        ("requests>=1,lost==0,hits>1", "no figure 'hits'"),
    ],
)
def test_a_figure_that_no_run_has_is_refused_in_one_short_line(expression: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_names(parse_bars(expression), specimen(["lq"]), "trunkline x")
    assert said in str(caught.value)
    assert "`trunkline x` lists them" in str(caught.value) or "no baseline" in str(caught.value)
    assert len(str(caught.value)) < 160


def test_every_figure_of_a_run_is_known_before_it_and_listed() -> None:
    before, after = specimen(["least_queue"]), judged().as_dict()
    measured = {name for name, value in flatten(after).items() if value is not None}
    assert {name for name in measured if "worker_work." not in name} <= set(flatten(before))
    page = listing(before)
    for name in after:
        is_named = name not in ("workload", "policy", "baselines", "worker_work", "lost_reasons")
        assert (f"\n  {name}" in page) == is_named, name
    assert "\n  ttft_ms.{mean,p50,p95,p99}\n" in page
    assert page.count("\n") < 35


def test_what_the_run_itself_names_may_be_in_a_bar_and_fails_where_it_did_not_come() -> None:
    bars = parse_bars("worker_work.w9>0,lost_reasons.reset<1")
    check_names(bars, specimen(), "trunkline x")
    assert [check.is_passed for check in check_bars(bars, judged().as_dict())] == [False, False]


METRICS = """\
# HELP trunkline_directory_lookup_seconds One look-up.
# TYPE trunkline_directory_lookup_seconds histogram
trunkline_directory_lookup_seconds_bucket{le="1e-05"} 50
trunkline_directory_lookup_seconds_bucket{le="2e-05"} 90
trunkline_directory_lookup_seconds_bucket{le="0.0001"} 100
trunkline_directory_lookup_seconds_bucket{le="+Inf"} 100
trunkline_over_claims_total 12.0
trunkline_pulled_bytes_total{source="w\\"1"} 100
trunkline_pulled_bytes_total{source="w2"} 20
trunkline_pulled_tokens_total 7
trunkline_plans_total{plan="local"} 3
trunkline_plans_total{plan="pull"} 2
trunkline_decision_net_gain_seconds 0.25
trunkline_worker_prefill_tokens_total{worker="w1"} 300
trunkline_worker_prefill_tokens_total{worker="w2"} 100
nonsense line here
trunkline_broken abc
"""
BEFORE = """\
trunkline_directory_lookup_seconds_bucket{le="1e-05"} 50
trunkline_directory_lookup_seconds_bucket{le="2e-05"} 50
trunkline_directory_lookup_seconds_bucket{le="0.0001"} 50
trunkline_directory_lookup_seconds_bucket{le="+Inf"} 50
trunkline_over_claims_total 2.0
trunkline_worker_prefill_tokens_total{worker="w1"} 100
"""


def test_gateway_metrics_become_counters_of_the_run() -> None:
    told = counters_from_metrics(METRICS)
    assert told.over_claims == 12
    assert told.transfer_bytes == 120
    assert told.pulled_tokens == 7
    assert told.plans == {"local": 3, "pull": 2}
    assert told.net_saved_ms == 250.0
    assert told.worker_work == {"w1": 300.0, "w2": 100.0}
    assert told.directory_lookup_us is not None
    assert told.directory_lookup_us.p50 == pytest.approx(10.0)
    assert told.directory_lookup_us.p99 == pytest.approx(92.0)
    assert told.kv_memory_bytes is None


def test_what_was_counted_before_the_run_is_taken_off() -> None:
    told = counters_from_metrics(METRICS, BEFORE)
    assert told.over_claims == 10
    assert told.worker_work == {"w1": 200.0, "w2": 100.0}
    assert told.directory_lookup_us is not None
    assert told.directory_lookup_us.p50 == pytest.approx(16.25)


def test_metrics_text_is_read_with_escaped_labels_and_nonsense_passed_over() -> None:
    samples = parse_metrics(METRICS)
    assert samples[5].label("source") == 'w\\"1'
    assert "trunkline_broken" not in {sample.name for sample in samples}
    assert counters_from_metrics("") == FleetCounters()


def test_decision_headers_are_read_and_odd_ones_survived() -> None:
    note = read_decision(
        "worker=w3; reason=cache-hit; matched=64/96; queue_ms=1.5; policy=cache_aware"
    )
    assert (note.worker, note.matched_tokens, note.queue_ms) == ("w3", 64, 1.5)
    assert note.reason == "cache-hit"
    for odd in ("", ";;;", "worker", "matched=x/y; queue_ms=soon", "matched=-1"):
        read = read_decision(odd)
        assert (read.worker, read.matched_tokens, read.queue_ms) == (None, None, None)
