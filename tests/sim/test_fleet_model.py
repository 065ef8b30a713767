"""The fleet model: the acceptance bars on real traces, what disturbs a run, and isolation."""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from trunkline.adapters.clock import SystemClock
from trunkline.core.links import LinkProfile, gbit_per_s
from trunkline.errors import ConfigError
from trunkline.replay.bars import flatten
from trunkline.replay.workloads import find_workload, load_workload
from trunkline.sim import command
from trunkline.sim.model import FleetModel, ModelOptions
from trunkline.sim.outcome import Outcome

TRACES = Path(__file__).resolve().parents[2] / "traces"


def simulate(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and figures of one `trunkline simulate ... --json`."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    out = io.StringIO()
    code = command.run(
        parser.parse_args([*words, "--json"]),
        traces_dir=TRACES,
        clock=SystemClock(),
        out=out,
        progress_out=io.StringIO(),
    )
    return code, json.loads(out.getvalue())


def run_model(workload: str, **options: Any) -> tuple[FleetModel, Outcome]:
    model = FleetModel(find_workload(workload), ModelOptions(**options), lambda: 0.0)
    return model, model.run(load_workload(workload, traces_dir=TRACES))


@pytest.mark.parametrize(
    "words",
    [("W1",), ("W1", "--load", "1.4"), ("W2",), ("W3",), ("W4",), ("W5",)],
    ids=" ".join,
)
def test_an_acceptance_workload_passes_its_bars(words: tuple[str, ...]) -> None:
    code, figures = simulate(*words)
    missed = [bar for bar, verdict in figures["bars"].items() if verdict != "pass"]
    assert missed == []
    assert code == 0
    assert set(figures["baselines"]) == {"round_robin", "least_queue"}
    assert figures["limit"]["hit_tokens_ratio"] >= figures["hit_tokens_ratio"]


@pytest.fixture(scope="module")
def undisturbed_hits() -> float:
    return simulate("W1", "--no-baselines")[1]["hit_tokens_ratio"]


@pytest.mark.parametrize(
    ("words", "points"),
    [
        (("--event-delay-ms", "5000"), 1.0),
        (("--event-delay-ms", "120000"), 2.0),
        (("--event-loss", "0.1"), 2.0),
    ],
    ids=["5 s late", "120 s late", "10 % lost"],
)
def test_a_disturbed_directory_costs_few_hits(
    words: tuple[str, ...], points: float, undisturbed_hits: float
) -> None:
    code, figures = simulate("W1", "--no-baselines", *words)
    assert code == 0
    assert figures["hit_tokens_ratio"] >= undisturbed_hits - points / 100.0
    assert figures["false_hits"] == 0


def test_lost_batches_are_noticed_and_repaired() -> None:
    _, figures = simulate("W1-smoke", "--no-baselines", "--event-loss", "0.1")
    assert figures["feed_gaps"] > 0
    assert figures["feed_replays"] > 16, "one to learn for each worker, and repairs"
    assert figures["directory_agrees"] == 1


def test_a_killed_worker_loses_no_request_and_is_not_used_after_its_lease() -> None:
    code, figures = simulate("W1-smoke", "--no-baselines", "--kill-worker-at", "0.5")
    assert code == 0
    assert figures["lost"] == 0
    assert figures["requests"] == 918
    assert figures["retried"] > 0, "somebody was sent there before it was known"
    assert figures["used_after_lease"] == 0


def test_two_tenants_with_the_same_prompts_share_nothing() -> None:
    """Each prompt comes twice, under two tenants in turn; the second finds nothing of the first."""
    requests = load_workload("W1-smoke", traces_dir=TRACES)[:200]
    doubled = [request for request in requests for _ in range(2)]
    options = ModelOptions(isolate="tenants", event_delay_ms=0.0)
    model = FleetModel(find_workload("W1-smoke"), options, lambda: 0.0)
    both = model.run(doubled)
    alone = FleetModel(find_workload("W1-smoke"), ModelOptions(event_delay_ms=0.0), lambda: 0.0)
    one = alone.run(requests)
    assert both.false_hits == 0
    assert both.directory_blocks == 2 * one.directory_blocks, "two roots, nothing in common"
    assert both.hit_tokens < 0.2 * both.input_tokens, "far below the half that repeats would give"


def test_one_namespace_would_have_shared_what_two_tenants_do_not() -> None:
    requests = load_workload("W1-smoke", traces_dir=TRACES)[:200]
    doubled = [request for request in requests for _ in range(2)]
    options = ModelOptions(event_delay_ms=0.0)
    shared = FleetModel(find_workload("W1-smoke"), options, lambda: 0.0).run(doubled)
    assert shared.hit_tokens > 0.45 * shared.input_tokens, "every second prompt is a repeat"


@pytest.mark.nightly  # `test_two_tenants.py` has such a pair at each run
def test_a_namespace_a_session_costs_agents_at_most_half_a_point() -> None:
    """Over three seeds: the draw of a few cold placements alone moves a run by 0.2 points."""
    costs: list[float] = []
    for seed in ("0", "1", "2"):
        _, shared = simulate("W2", "--no-baselines", "--seed", seed)
        words = ("--no-baselines", "--isolate", "session", "--seed", seed)
        _, isolated = simulate("W2", *words)
        assert isolated["false_hits"] == 0
        costs.append(shared["hit_tokens_ratio"] - isolated["hit_tokens_ratio"])
    assert sum(costs) / len(costs) <= 0.005, costs


def test_the_same_seed_gives_the_same_run() -> None:
    _, first = run_model("W2-smoke", seed=3, event_loss=0.05)
    _, second = run_model("W2-smoke", seed=3, event_loss=0.05)
    assert first.ttft_ms == second.ttft_ms
    assert first.work_ms == second.work_ms


def test_without_delay_or_loss_the_directory_never_promises_too_much() -> None:
    _, outcome = run_model("W2-smoke", event_delay_ms=0.0)
    assert outcome.over_claims == 0
    assert outcome.directory_agrees


def test_a_false_hit_would_be_counted() -> None:
    """The check itself: a cache whose blocks were swapped under their keys is found out."""
    model = FleetModel(find_workload("W2-smoke"), ModelOptions(policy="round_robin"), lambda: 0.0)
    requests = load_workload("W2-smoke", traces_dir=TRACES)
    model.run(requests[:100])
    for worker in model._workers.values():  # the truth is swapped, as no code of ours could
        blocks = worker.cache.device._blocks
        for key in blocks:
            blocks[key] += 1
    model.run(requests[100:200])
    assert model.outcome.false_hits > 0


@pytest.mark.parametrize(
    "words",
    [
        ("W1", "--event-loss", "1.5"),
        ("W1", "--kill-worker-at", "2"),
        ("W1", "--event-delay-ms", "-1"),
    ],
)
def test_options_out_of_bounds_are_refused_by_name(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[1]):
        simulate(*words)


def test_fail_if_turns_a_figure_into_an_exit_code() -> None:
    words = ("W2-smoke", "--no-baselines", "--fail-if", "ttft_ms.p99>1")
    assert simulate(*words)[0] == 1


def test_a_figure_that_no_run_has_is_refused_before_the_run() -> None:
    stream = io.StringIO()
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for expression, said in (
        ("hit_ratio<1", "did you mean hit_tokens_ratio?"),
        ("weather>0", "`trunkline simulate --figures` lists them"),
        ("lost>baselines.random.lost", "random is no baseline of this run"),
    ):
        args = parser.parse_args(["W2-smoke", "--fail-if", expression])
        with pytest.raises(ConfigError, match=re.escape(said)):
            command.run(
                args, traces_dir=TRACES, clock=SystemClock(), out=stream, progress_out=stream
            )
    assert stream.getvalue() == "", "no model ran"


def test_every_figure_of_a_run_is_known_before_it() -> None:
    _, figures = simulate("W2-smoke")
    del figures["bars"]
    assert set(flatten(figures)) == set(flatten(command._specimen(figures["baselines"])))


PULL_SETTINGS: list[Any] = [  # Any: rows, and rows with marks
    ("W6",),
    ("W1", "--link-gbit", "25"),
    ("W3", "--link-gbit", "25"),
    ("W3", "--link-gbit", "25", "--host-factor", "8"),
    *(
        pytest.param(words, marks=pytest.mark.nightly)
        for words in (
            *((workload, "--link-gbit", "25") for workload in ("W2", "W4", "W6")),
            *((workload, "--link-gbit", "100") for workload in ("W1", "W2", "W3", "W4", "W6")),
            ("W1", "--link-gbit", "25", "--host-factor", "8"),
        )
    ),
]


@pytest.mark.parametrize("words", PULL_SETTINGS, ids=" ".join)
def test_moving_kv_passes_its_bars(words: tuple[str, ...]) -> None:
    code, figures = simulate(*words)
    missed = [bar for bar, verdict in figures["bars"].items() if verdict != "pass"]
    assert missed == []
    assert code == 0
    assert len(figures["bars"]) > 3, "beside what must always hold"
    assert (figures["transfer_bytes"] > 0) == ("--link-gbit" in words)
    if "--link-gbit" in words:
        assert figures["pulls"]["failed"] <= 0.04 * figures["pulls"]["count"]
        assert figures["transfer_bytes"] == figures["pulls"]["tokens"] * (128 << 10)


def test_all_three_plans_occur_and_a_hot_prefix_cools_down_by_eviction() -> None:
    figures = simulate("W6", "--link-gbit", "25", "--no-baselines")[1]
    assert all(figures["plans"].values())
    assert figures["hot_copies"] == {"most": 16, "end": 0}
    assert figures["baselines"] == {}


def test_copies_are_bounded() -> None:
    many = simulate("W6", "--link-gbit", "100", "--no-baselines")[1]["pulls"]["tokens"]
    few = simulate("W6", "--link-gbit", "100", "--no-baselines", "--max-copies", "1")[1]["pulls"]
    assert few["count"] == 0 < many


def test_a_source_that_dies_costs_time_and_no_request() -> None:
    requests = load_workload("W4", traces_dir=TRACES)[:300]
    failed = 0
    for at_ms in range(100, 2_000, 100):
        links = LinkProfile(bytes_per_ms=gbit_per_s(10.0))
        options = ModelOptions(links=links, kill_worker_at_ms=float(at_ms))
        model = FleetModel(find_workload("W4"), options, lambda: 0.0)
        outcome = model.run(requests)
        failed += outcome.failed_pulls
        assert (outcome.lost, outcome.false_hits, outcome.used_after_lease) == (0, 0, 0)
        assert len(outcome.ttft_ms) == len(requests)
        assert outcome.directory_agrees
        assert not any(worker.ready or worker.jobs for worker in model._workers.values())
    assert failed > 0


def test_tenants_pull_nothing_of_one_another() -> None:
    links = LinkProfile(bytes_per_ms=gbit_per_s(25.0))
    _, outcome = run_model("W2-smoke", links=links, isolate="tenants")
    assert outcome.pulls > 0
    assert outcome.false_hits == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--link-gbit", "0"),
        ("--link-gbit", "-5"),
        ("--host-factor", "-1"),
        ("--host-factor", "1001"),
        ("--kv-kib-per-token", "0"),
        ("--max-copies", "0"),
    ],
    ids=" ".join,
)
def test_flags_of_movement_have_bounds_and_name_themselves(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        simulate("W1-smoke", *words)
