"""Templates of expressions: what they may name, and that a renamed metric breaks them."""

from __future__ import annotations

import pytest

from trunkline.promql import UnknownName, named, promql


def test_a_metric_gets_its_prefix_and_the_matchers_of_all() -> None:
    assert promql("sum(rate(@bugs_total[5m]))") == "sum(rate(trunkline_bugs_total[5m]))"
    assert promql("@bugs_total", 'job="x"') == 'trunkline_bugs_total{job="x"}'
    assert promql('@requests_total{code="5xx"}', 'job="x"') == (
        'trunkline_requests_total{job="x", code="5xx"}'
    )


def test_a_histogram_is_named_by_its_parts() -> None:
    assert promql("rate(@ttft_seconds_bucket[1m])") == "rate(trunkline_ttft_seconds_bucket[1m])"
    assert [family.name for family in named("@ttft_seconds_sum / @ttft_seconds_count")] == [
        "ttft_seconds",
        "ttft_seconds",
    ]


@pytest.mark.parametrize(
    "template",
    [
        "rate(@never_declared_total[5m])",
        "@ttft_seconds",
        "@queue_depth_bucket",
        "@requests_total_count",
        'up{job="trunkline"}',
    ],
)
def test_what_is_not_exported_is_refused(template: str) -> None:
    with pytest.raises(UnknownName):
        promql(template)


@pytest.mark.parametrize(
    "template",
    [
        "sum by (tenant) (@requests_total)",
        '@requests_total{worker="w1"}',
        'max by (worker) (@worker_health) / on (model) @n_minus_1_headroom{reason!="x"}',
    ],
)
def test_a_label_that_none_of_the_metrics_has_is_refused(template: str) -> None:
    with pytest.raises(UnknownName):
        promql(template)


def test_labels_of_scrapes_and_of_histograms_are_known() -> None:
    assert promql("sum by (instance, job, process) (@requests_active)")
    assert promql("sum by (le, route) (@request_duration_seconds_bucket)")
