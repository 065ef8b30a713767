"""Alert rules, by Prometheus' own tool: each fires on what it is for, and on nothing healthy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trunkline.alerts import ALERTS, Alert, rules, runbook
from trunkline.core.alarms import AlarmKind

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not here (Debian: apt-get install prometheus)"
)
OF = 'instance="g:1",job="trunkline"'
LATER = "40m"
"""Longer than any alert takes to fire."""

KINDS = [kind.value for kind in AlarmKind]
HEALTHY: Mapping[str, str] = {
    f"trunkline_build_info{{{OF}}}": "1x60",
    f"up{{{OF}}}": "1x60",
    f"trunkline_false_hits_total{{{OF}}}": "3x60",  # of long ago
    f"trunkline_bugs_total{{{OF}}}": "2x60",
    f"trunkline_metrics_dropped_total{{{OF}}}": "0x60",
    f"trunkline_panic_routing{{{OF}}}": "0x60",
    f"trunkline_revocations_pending{{{OF}}}": "0 1 0 0 1 0x56",  # each is over within a minute
    f"trunkline_audit_sinks_up{{{OF}}}": "2x60",
    f"trunkline_audit_records_dropped_total{{{OF}}}": "0x60",
    f"trunkline_gateway_lease_seconds{{{OF}}}": "2x60",
    f"trunkline_registry_lost_revisions{{{OF}}}": "0x60",
    f"trunkline_pulls_degraded{{{OF}}}": "0x60",
    f"trunkline_workers_ignoring_pulls{{{OF}}}": "0x60",
    f"trunkline_retries_denied_total{{{OF}}}": "5x60",
    f"trunkline_over_claims_total{{{OF}}}": "0+2x60",
    f"trunkline_reported_prompts_total{{{OF}}}": "0+100x60",
    f'trunkline_refusals_total{{reason="overloaded",{OF}}}': "0+2x60",
    f'trunkline_refusals_total{{reason="invalid_json",{OF}}}': "0+50x60",  # clients' own mistakes
    f'trunkline_requests_total{{route="chat",code="2xx",{OF}}}': "0+100x60",
    f'trunkline_n_minus_1_headroom{{model="m",{OF}}}': "0.4x60",
    **{
        f'trunkline_{name}{{worker="w{number}",{OF}}}': f"{value}x60"
        for number in (1, 2)
        for name, value in (
            ("worker_health", 1),
            ("worker_leaking", 0),
            ("worker_cb_state", 0),
            ("worker_degraded", 0),
            ("worker_misaligned", 0),
            ("kv_event_stream_untrusted", 0),
        )
    },
    **{f'trunkline_alarm{{kind="{kind}",worker="w1",{OF}}}': "0x60" for kind in KINDS},
}
"""A fleet of two workers that has nothing to complain of."""
W1 = f'worker="w1",{OF}'
PLANTED: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "TrunklineFalseHit": (
        {f"trunkline_false_hits_total{{{OF}}}": "3x30 4x30"},
        {f"trunkline_worker_leaking{{{W1}}}": "1x60"},
    ),
    "TrunklineNoUsableWorker": (
        {f'trunkline_worker_health{{worker="w{n}",{OF}}}': "0x60" for n in (1, 2)},
        {f'trunkline_worker_health{{worker="w{n}",{OF}}}': "_x60" for n in (1, 2)},
    ),
    "TrunklineGatewayDown": ({f"up{{{OF}}}": "0x60"},),
    "TrunklinePanicRouting": ({f"trunkline_panic_routing{{{OF}}}": "1x60"},),
    "TrunklineRevocationPending": ({f"trunkline_revocations_pending{{{OF}}}": "1x60"},),
    "TrunklineAuditSinkFailing": (
        {f"trunkline_audit_sinks_up{{{OF}}}": "0x60"},
        {f"trunkline_audit_records_dropped_total{{{OF}}}": "0x30 5x30"},
    ),
    "TrunklineLeaseLost": ({f"trunkline_gateway_lease_seconds{{{OF}}}": "0x60"},),
    "TrunklineAuditSinkLost": ({f"trunkline_audit_sinks_up{{{OF}}}": "2x5 1x55"},),
    "TrunklineNoHeadroom": ({f'trunkline_n_minus_1_headroom{{model="m",{OF}}}': "-0.1x60"},),
    "TrunklineStreamUntrusted": ({f"trunkline_kv_event_stream_untrusted{{{W1}}}": "1x60"},),
    "TrunklineOverClaims": ({f"trunkline_over_claims_total{{{OF}}}": "0+6x60"},),
    "TrunklineBreakerOpen": ({f"trunkline_worker_cb_state{{{W1}}}": "1x60"},),
    "TrunklineWorkerDegraded": (
        {f"trunkline_worker_degraded{{{W1}}}": "1x60"},
        {f"trunkline_worker_misaligned{{{W1}}}": "1x60"},
    ),
    "TrunklineWorkerAlarm": tuple(
        {f'trunkline_alarm{{kind="{kind}",worker="w1",{OF}}}': "1x60"} for kind in KINDS
    ),
    "TrunklinePullsDegraded": (
        {f"trunkline_pulls_degraded{{{OF}}}": "1x60"},
        {f"trunkline_workers_ignoring_pulls{{{OF}}}": "1x60"},
    ),
    "TrunklineRetryBudgetGone": ({f"trunkline_retries_denied_total{{{OF}}}": "0+1x60"},),
    "TrunklineRefusedShare": (
        {f'trunkline_refusals_total{{reason="overloaded",{OF}}}': "0+6x60"},
        {f'trunkline_refusals_total{{reason="worker_lost",{OF}}}': "0+6x60"},
    ),
    "TrunklineRegistryRestored": ({f"trunkline_registry_lost_revisions{{{OF}}}": "4x60"},),
    "TrunklineBugs": (
        {f"trunkline_bugs_total{{{OF}}}": "2x30 3x30"},
        {f"trunkline_metrics_dropped_total{{{OF}}}": "0x30 1x30"},
    ),
}
"""What makes each fire, in every way that it may, in place of the healthy series."""


def firing(name: str) -> str:
    return f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) > bool 0'


def asked(expression: str, at: str, *values: float) -> dict[str, Any]:
    samples = [{"labels": "{}", "value": value} for value in values]
    return {"expr": expression, "eval_time": at, "exp_samples": samples}


def case_of(series: Mapping[str, str], *questions: dict[str, Any]) -> dict[str, Any]:
    shown = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": shown, "promql_expr_test": list(questions)}


def run_tests(folder: Path, tests: list[dict[str, Any]]) -> None:
    """As `promtool test rules` has them, in a file of YAML, which JSON is."""
    (folder / "rules.yml").write_text(rules("https://docs.test/operations"))
    cases = folder / "tests.yml"
    cases.write_text(json.dumps({"rule_files": ["rules.yml"], "tests": tests}))
    ran = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(cases)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(rules("x"))
    ran = subprocess.run(
        [str(PROMTOOL), "check", "rules", "--lint-fatal", str(tmp_path / "rules.yml")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(ALERTS)} rules found" in ran.stdout


def test_nothing_is_pending_on_a_healthy_fleet_at_any_time(tmp_path: Path) -> None:
    unhealthy = 'count(ALERTS{alertname!="TrunklineRevocationPending"})'
    times = [f"{minute}m" for minute in (0, 1, 5, 10, 20, 30, 40, 59)]
    run_tests(tmp_path, [case_of(HEALTHY, *(asked(unhealthy, at) for at in times))])


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_on_what_is_planted_and_on_nothing_else(
    alert: Alert, tmp_path: Path
) -> None:
    silent = asked(firing(alert.name), LATER)
    tests = [case_of(HEALTHY, silent)]
    for series in PLANTED[alert.name]:
        assert set(series) <= {*HEALTHY, *(name for name in series if "worker_lost" in name)}
        fired = asked(firing(alert.name), LATER, 1.0)
        at_once = [] if alert.lasts == "0m" else [asked(firing(alert.name), "0m")]
        tests.append(case_of({**HEALTHY, **series}, fired, *at_once))
    run_tests(tmp_path, tests)


def test_what_is_told_names_the_worker_and_the_place_in_the_runbook(tmp_path: Path) -> None:
    [alert] = [one for one in ALERTS if one.name == "TrunklineStreamUntrusted"]
    told = {
        "exp_labels": {"severity": "warning", "worker": "w1"},
        "exp_annotations": {
            "summary": "Cache events of w1 are not believed",
            "description": alert.meaning,
            "runbook_url": "https://docs.test/operations#trunklinestreamuntrusted",
        },
    }
    case = case_of({**HEALTHY, **PLANTED[alert.name][0]})
    case["alert_rule_test"] = [{"eval_time": LATER, "alertname": alert.name, "exp_alerts": [told]}]
    run_tests(tmp_path, [case])


def test_each_alert_has_a_case_a_severity_and_a_section_with_a_remedy() -> None:
    assert list(PLANTED) == [alert.name for alert in ALERTS]
    headings = re.findall(r"^### (\w+)$", runbook(), re.MULTILINE)
    assert headings == [alert.name for alert in ALERTS]
    for alert in ALERTS:
        assert re.fullmatch(r"[0-9]+m", alert.lasts)
        assert alert.remedy
