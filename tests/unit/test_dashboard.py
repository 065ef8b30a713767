"""The Grafana dashboard: what Grafana needs of it, and that it is as the table says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from trunkline import monitoring, promql
from trunkline.errors import ConfigError
from trunkline.gateway.families import FAMILIES
from trunkline.panels import ROWS, SCHEMA_VERSION, dashboard

DEPLOY = Path(__file__).parents[2] / "deploy"


def panels() -> list[dict[str, Any]]:
    return dashboard()["panels"]


def test_the_files_in_the_repository_are_what_the_tables_say() -> None:
    for name, text in monitoring.files().items():
        assert (DEPLOY / name).read_text(encoding="utf-8") == text, "run `trunkline docs`"


def test_it_has_what_grafana_needs_to_take_it_in() -> None:
    board = json.loads(json.dumps(dashboard()))
    assert board["schemaVersion"] == SCHEMA_VERSION
    assert board["uid"]
    assert board["title"]
    numbers = [panel["id"] for panel in board["panels"]]
    assert sorted(set(numbers)) == numbers, "each panel has a number of its own"
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["legendFormat"]


def test_no_panel_lies_on_another_or_beyond_the_edge() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_titles_are_unique() -> None:
    titles = [panel.title for row in ROWS.values() for panel in row]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(
    "name",
    [
        *("reused_tokens_total", "predicted_tokens_total", "ttft_seconds", "tpot_seconds"),
        *("decision_net_gain_seconds", "false_hits_total", "queue_depth", "worker_cb_state"),
        *("kv_event_stream_untrusted", "n_minus_1_headroom", "isolation_cost_tokens_total"),
        *("revocations_total", "over_claims_total", "refusals_total"),
    ],
)
def test_what_an_operator_asks_first_is_on_it(name: str) -> None:
    shown = {
        family.name
        for row in ROWS.values()
        for panel in row
        for query in panel.queries
        for family in promql.named(query.template)
    }
    assert name in shown


def test_a_renamed_metric_breaks_the_making(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        promql, "FAMILIES", {n: f for n, f in FAMILIES.items() if n != "tpot_seconds"}
    )
    with pytest.raises(promql.UnknownName, match="tpot_seconds"):
        monitoring.files()


def test_the_command_writes_for_the_targets_that_it_is_given(tmp_path: Path) -> None:
    wish = argparse.Namespace(
        out=str(tmp_path / "new"),
        target=["10.0.0.1:29000", "[::1]:29000"],
        docs_url="https://x/ops",
    )
    assert monitoring.run(wish) == 0
    scrape = (tmp_path / "new" / monitoring.SCRAPE).read_text()
    assert '- targets: ["10.0.0.1:29000", "[::1]:29000"]' in scrape
    rules = (tmp_path / "new" / monitoring.RULES).read_text()
    assert "https://x/ops#trunklinefalsehit" in rules


@pytest.mark.parametrize("target", ["http://10.0.0.1:29000", "10.0.0.1", "10.0.0.1:29000/metrics"])
def test_a_target_that_is_none_is_refused(target: str, tmp_path: Path) -> None:
    wish = argparse.Namespace(out=str(tmp_path), target=[target], docs_url="x")
    with pytest.raises(ConfigError, match="HOST:PORT"):
        monitoring.run(wish)


def test_the_runbook_has_its_place_in_the_operations_page() -> None:
    page = (DEPLOY.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    assert monitoring.with_runbook(page) == page, "run `trunkline docs`"
    with pytest.raises(ConfigError, match="runbook"):
        monitoring.with_runbook("# A page without its place")
