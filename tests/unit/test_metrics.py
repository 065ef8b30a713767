"""Metrics: declared once, bounded, gone with the worker, readable by a Prometheus parser."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trunkline.gateway.families import FAMILIES, PREFIX, SECONDS, Kind
from trunkline.gateway.metrics import (
    Exposition,
    Histogram,
    Sample,
    WorkerRow,
    render,
)


class Counted:
    """A source that tells what it is given."""

    def __init__(self, *samples: Sample) -> None:
        self.given = list(samples)

    def samples(self) -> Iterable[Sample]:
        return self.given


class Workers:
    def __init__(self, *rows: WorkerRow) -> None:
        self.rows = list(rows)

    def samples(self) -> Iterable[Sample]:
        for row in self.rows:
            yield from row.samples()


def scraped(*sources: Counted | Workers) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every line of a page: name and label values -> number."""
    exposition = Exposition(sources, version="1.2.3", native="pure")
    return read(render(exposition.snapshot()))


def read(page: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name.removeprefix(PREFIX), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_a_page_tells_the_build_even_without_sources() -> None:
    assert scraped()["build_info", ("pure", "1.2.3")] == 1


def test_a_worker_has_all_its_series_in_base_units() -> None:
    row = WorkerRow(
        worker="w1",
        is_healthy=True,
        model="m",
        engine="vllm",
        breaker=2,
        requests_active=3,
        queue_ms=1_500.0,
        selections_count=4,
        event_gaps_count=5,
        is_stream_silent=True,
        is_stream_untrusted=True,
    )
    page = scraped(Workers(row))
    assert page["worker_info", ("vllm", "m", "w1")] == 1
    assert page["worker_health", ("w1",)] == 1
    assert page["worker_cb_state", ("w1",)] == 2
    assert page["worker_requests_active", ("w1",)] == 3
    assert page["worker_queue_seconds", ("w1",)] == 1.5
    assert page["worker_selection_total", ("w1",)] == 4
    assert page["kv_event_sequence_gaps_total", ("w1",)] == 5
    assert page["kv_event_stream_untrusted", ("w1",)] == 1
    assert page["kv_event_stream_silent", ("w1",)] == 1
    assert page["kv_event_stream_recovering", ("w1",)] == 0


def test_c93_series_of_a_removed_worker_are_gone_at_the_next_scrape() -> None:
    workers = Workers(
        WorkerRow(worker="w1", is_healthy=True), WorkerRow(worker="w2", is_healthy=True)
    )
    exposition = Exposition([workers], version="1", native="pure")
    assert ("worker_health", ("w1",)) in read(render(exposition.snapshot()))
    del workers.rows[0]
    page = read(render(exposition.snapshot()))
    assert not any(labels == ("w1",) for _, labels in page)
    assert ("worker_health", ("w2",)) in page


def test_values_beyond_the_cap_are_added_up_under_other_and_known_ones_keep_their_label() -> None:
    cap = FAMILIES["refusals_total"].max_series
    source = Counted(*(Sample("refusals_total", 2, (f"r{i}",)) for i in range(100_000)))
    page = {labels[0]: v for (name, labels), v in scraped(source).items() if "refusals" in name}
    assert len(page) == cap + 1
    assert page["r0"] == page[f"r{cap - 1}"] == 2
    assert page["other"] == 2 * (100_000 - cap)


def test_a_fleet_larger_than_the_label_cap_is_shown_whole() -> None:
    workers = Workers(*(WorkerRow(worker=f"w{i}", is_healthy=True) for i in range(3_000)))
    page = scraped(workers)
    assert sum(name == "worker_health" for name, _ in page) == 3_000


@pytest.mark.parametrize(
    "sample",
    [
        Sample("never_declared", 1),
        Sample("requests_total", 1, ("chat",)),
        Sample("requests_total", 1, ("chat", "200", "tenant")),
        Sample("ttft_seconds", 1),
        Sample("requests_active", Histogram().view()),
    ],
)
def test_c95_a_sample_that_no_declaration_fits_is_dropped_and_counted(sample: Sample) -> None:
    page = scraped(Counted(sample, Sample("requests_active", 7)))
    assert page["metrics_dropped_total", ()] == 1
    assert page["requests_active", ()] == 7


def test_counts_of_two_sources_add_up_and_of_a_gauge_the_last_holds() -> None:
    first, second = Histogram(), Histogram()
    first.observe(0.3)
    second.observe(40.0)
    page = scraped(
        Counted(
            Sample("retries_total", 2),
            Sample("requests_active", 2),
            Sample("ttft_seconds", first.view()),
        ),
        Counted(
            Sample("retries_total", 3),
            Sample("requests_active", 3),
            Sample("ttft_seconds", second.view()),
        ),
    )
    assert page["retries_total", ()] == 5
    assert page["requests_active", ()] == 3
    assert page["ttft_seconds_count", ()] == 2
    assert page["ttft_seconds_sum", ()] == pytest.approx(40.3)


def test_a_histogram_counts_a_value_at_a_bound_inside_it_and_one_beyond_all_in_the_last() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.2, 1.0, 50.0):
        histogram.observe(value)
    page = scraped(Counted(Sample("directory_lookup_seconds", histogram.view())))
    assert page["directory_lookup_seconds_bucket", ("0.1",)] == 1
    assert page["directory_lookup_seconds_bucket", ("1",)] == 3
    assert page["directory_lookup_seconds_bucket", ("+Inf",)] == 4
    assert page["directory_lookup_seconds_count", ()] == 4


def test_a_view_does_not_change_when_counting_goes_on() -> None:
    histogram = Histogram()
    view = histogram.view()
    histogram.observe(1.0)
    assert sum(view.counts) == 0


def test_buckets_reach_an_hour() -> None:
    assert SECONDS[-1] == 3_600


def test_label_values_cannot_break_the_page() -> None:
    evil = 'a"} 1\n# HELP x \\'
    page = scraped(Counted(Sample("refusals_total", 1, (evil,))))
    assert page["refusals_total", (evil,)] == 1


def test_names_follow_the_conventions() -> None:
    for name, family in FAMILIES.items():
        assert (family.kind is Kind.COUNTER) == name.endswith("_total")
        assert not name.endswith(("_ms", "_milliseconds"))
        if family.kind is Kind.HISTOGRAM:
            assert name.endswith(("_seconds", "_bytes"))
        assert not set(family.labels) & {"tenant", "user", "prompt", "request_id", "session"}


PORTED = (
    *("requests_total", "request_duration_seconds", "ttft_seconds", "tpot_seconds"),
    *("worker_health", "worker_cb_state", "worker_requests_active", "worker_selection_total"),
    *("queue_depth", "kv_event_sequence_gaps_total", "kv_event_stream_untrusted"),
    *("prefix_indexer_size", "prefix_indexer_hit_ratio"),
)
"""What dashboards of other gateways look for, behind their prefix."""


@pytest.mark.parametrize("name", PORTED)
def test_names_that_dashboards_of_other_gateways_look_for_are_there(name: str) -> None:
    assert name in FAMILIES


def test_the_operations_page_lists_every_metric_as_it_is_declared() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    for family in FAMILIES.values():
        labels = "".join(f" `{label}`" for label in family.labels)
        row = f"| `{family.name}` | {family.kind.value}{labels} | {family.sentence} |"
        assert row in page
