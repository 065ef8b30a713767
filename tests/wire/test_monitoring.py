"""The real Prometheus before a gateway with traffic: all questions of dashboard and alerts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from fleet import STOP_S, WAIT_S, Processes, processes, text_of, until
from tenants import SHAPES, Tenants, tenants

from loopback import free_port
from trunkline.alerts import ALERTS, JOB
from trunkline.monitoring import SCRAPE, files
from trunkline.panels import ROWS, Panel, Query

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="prometheus is not here (Debian: apt-get install prometheus)",
)

UNTOUCHED = frozenset(
    {
        ("Pulls", "{{end}} {{reason}}"), ("Pulls", "wrong bytes"), ("Pulls", "unheeded"),
        ("Traces", "taken"), ("Traces", "{{why}}"),
        ("Leases and registry", "own lease s"),
    }
)  # fmt: skip
"""What is there only with pulls, a collector of traces, or a registry that gateways share."""


OF_A_LOADED_MACHINE = frozenset(
    {
        *("TrunklineOverClaims", "TrunklineWorkerAlarm", "TrunklineWorkerDegraded"),
        *("TrunklineStreamUntrusted", "TrunklineRevocationPending", "TrunklineAuditSinkLost"),
    }
)
"""A worker whose lease ran out for want of CPU reuses nothing, and so on: rightly told of."""


@dataclass(slots=True, kw_only=True)
class Watched:
    """A gateway with tenants, and the Prometheus that scrapes it."""

    fleet: Tenants
    url: str
    turns: int = 0

    def ask(self, expression: str) -> list[dict[str, object]]:
        """The samples; an expression that Prometheus does not take fails the test."""
        expression = expression.replace("$__rate_interval", "2m")
        expression = expression.replace("$job", JOB).replace("$instance", ".*")
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=WAIT_S)
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        assert answer.json()["status"] == "success"
        return answer.json()["data"]["result"]

    def play(self) -> None:
        """Some of everything, so that each counter grows between two scrapes."""
        self.turns += 1
        shared = text_of(600, "shared")
        for tenant in ("acme", "bolt"):
            caller = self.fleet.caller(tenant)
            for shape in SHAPES:
                caller.ask(shape, f"{shared} {self.turns}")
            bad = {"authorization": f"Bearer {caller.key}", "content-type": "application/json"}
            self.fleet.gateway.client.post("/v1/completions", content="{", headers=bad)
        self.fleet.gateway.post("/v1/completions", {"prompt": "x"}, {"authorization": "Bearer y"})
        self.fleet.raised("invalidate", "tenant/bolt")


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module")
def watched(started: Processes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    workers = started.workers(2, "--profile", "tiny")
    fleet = tenants(started, [worker.url for worker in workers], folder, "--profile", "tiny")
    target, port = fleet.gateway.admin_url.removeprefix("http://"), free_port()
    for name, text in files(targets=[target]).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        quick = "scrape_interval: 15s", "scrape_interval: 500ms"
        path.write_text(text.replace(*quick) if name == SCRAPE else text)
    with open(folder / "prometheus.log", "w") as log:  # closed behind the process
        server = subprocess.Popen(
            [
                str(PROMETHEUS), f"--config.file={folder / SCRAPE}",
                f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            made = Watched(fleet=fleet, url=f"http://127.0.0.1:{port}")
            until(lambda: _is_up(made), "Prometheus scrapes the gateway")
            yield made
        finally:
            server.terminate()
            server.wait(STOP_S)


def _is_up(watched: Watched) -> bool:
    try:
        if httpx.get(f"{watched.url}/-/ready", timeout=WAIT_S).status_code != 200:
            return False  # it starts
        return bool(watched.ask(f'up{{job="{JOB}"}} == 1'))
    except httpx.TransportError:
        return False


def questions() -> Iterator[tuple[Panel, Query]]:
    for row in ROWS.values():
        for panel in row:
            for query in panel.queries:
                yield panel, query


def test_every_panel_shows_what_traffic_touches(watched: Watched) -> None:
    wanted = {
        (panel.title, query.legend): query.expression
        for panel, query in questions()
        if (panel.title, query.legend) not in UNTOUCHED
    }

    def missing() -> list[tuple[str, str]]:
        return [name for name, expression in wanted.items() if not watched.ask(expression)]

    def all_are_there() -> bool:
        watched.play()
        return not missing()

    try:
        until(all_are_there, "every panel has data")
    except AssertionError as error:
        raise AssertionError(f"no data on {missing()}") from error
    empty = [
        query.expression for panel, query in questions() if (panel.title, query.legend) in UNTOUCHED
    ]
    assert not [expression for expression in empty if watched.ask(expression)]


def test_shares_are_shares_and_what_two_tenants_send_alike_is_the_cost_of_isolation(
    watched: Watched,
) -> None:
    def value(title: str, legend: str) -> float:
        [query] = [q for panel, q in questions() if (panel.title, q.legend) == (title, legend)]
        [sample] = watched.ask(query.expression)
        return float(str(sample["value"][1]))  # type: ignore[index]  # as Prometheus answers

    watched.play()
    reused = until(lambda: value("Prompt tokens reused", "reused"), "something was reused")
    assert 0.0 < reused < 1.0
    cost = until(
        lambda: watched.ask('sum(trunkline_isolation_cost_tokens_total{scope="tenant"}) > 0'),
        "what one tenant sent, the other might have reused",
    )
    assert cost


def test_every_alert_is_evaluated_and_none_fires_on_a_good_fleet(watched: Watched) -> None:
    for alert in ALERTS:
        assert not watched.ask(alert.expression) or alert.name in OF_A_LOADED_MACHINE, alert.name
    loaded = httpx.get(f"{watched.url}/api/v1/rules", timeout=WAIT_S).json()["data"]["groups"]
    rules = {rule["name"]: rule for group in loaded for rule in group["rules"]}
    assert list(rules) == [alert.name for alert in ALERTS]
    assert {rule["lastError"] for rule in rules.values() if "lastError" in rule} <= {""}


def test_promtool_has_nothing_against_the_page(watched: Watched) -> None:
    page = watched.fleet.gateway.admin("/metrics").content
    ran = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=page, capture_output=True, timeout=WAIT_S
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_c93_series_of_a_removed_worker_are_gone_at_the_next_scrape(
    started: Processes, watched: Watched
) -> None:
    """Last in this file: it takes a worker away."""
    gateway = watched.fleet.gateway
    name = next(iter(gateway.workers()))
    question = f'trunkline_worker_health{{worker="{name}"}}'
    assert name in gateway.admin("/metrics").text
    assert watched.ask(question)
    assert gateway.admin(f"/workers/{name}", "DELETE").status_code == 202
    until(lambda: name not in gateway.workers(), "it is gone")
    assert name not in gateway.admin("/metrics").text
    until(lambda: not watched.ask(question), "Prometheus shows it no more")
