"""What `trunkline doctor` shows of workers: the headline is never better than a line below it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trunkline import cli
from trunkline.doctor import page

NAME = "127.0.0.1:8001"


def finding(state: str, what: str = "state", subject: str = NAME) -> dict[str, Any]:
    told = {"expected": "a worker that may be chosen", "found": "unhealthy", "remedy": "look"}
    return {"what": what, "subject": subject, "state": state, **told}


def row(state: str = "ready", status: str = "ok", unfinished: str = "") -> dict[str, Any]:
    passed = [finding("ok", "reuse")] if status == "ok" else []
    check = {"status": status, "unfinished": unfinished, "findings": passed}
    return {"worker": NAME, "mode": "exact", "state": state, "detail": {"check": check}}


def test_a_worker_that_is_gone_is_wrong_and_what_it_passed_before_is_not_shown() -> None:
    lines = page([row("unhealthy")], [finding("wrong")], has_gateway=True)
    assert lines[0] == f"{NAME}: wrong (mode exact, unhealthy)"
    assert [line.split()[:2] for line in lines[1:-1]] == [["wrong", "state"]]
    assert lines[-1] == "1 tested, 1 not as they should be; 1 finding to be mended"


@pytest.mark.parametrize(
    ("worker", "states", "verdict", "bad"),
    [
        (row(), (), "ok", 0),
        (row(), ("note",), "ok", 0),
        (row(), ("note", "open"), "open", 0),
        (row(), ("open", "wrong"), "wrong", 1),
        (row(status="unknown"), ("open",), "not tested", 1),
        (row(unfinished="it took longer"), ("open",), "not tested", 1),
        (row("joining"), ("wrong",), "not reached", 1),
        (row(status="wrong"), (), "wrong", 1),
    ],
)
def test_the_headline_is_the_worst_of_all_findings(
    worker: dict[str, Any], states: tuple[str, ...], verdict: str, bad: int
) -> None:
    lines = page([worker], [finding(state) for state in states], has_gateway=True)
    assert lines[0].startswith(f"{NAME}: {verdict} (mode exact")
    assert f"1 tested, {bad} not as" in lines[-1]


def test_a_worker_that_passed_shows_what_and_what_is_not_of_a_worker_follows() -> None:
    lines = page([row()], [finding("wrong", "audit", "gateway")], has_gateway=True)
    assert lines[1].split()[:2] == ["ok", "reuse"]
    assert (lines[0].split()[1], lines[2]) == ("ok", "gateway:")


def test_before_a_start_it_says_that_workers_were_not_asked() -> None:
    lines = page([], [], has_gateway=False)
    assert "workers were not asked" in lines[0]
    assert lines[-1] == "no findings to be mended"


def test_that_workers_were_not_asked_is_in_the_json_as_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trunkline.toml"
    file.write_text("[listen]\nport = 'x'\n")
    words = ["doctor", "--config", str(file)]
    assert cli.main(words) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert cli.main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert f"note: {told['note']}" == line
    assert (told["ok"], told["workers"], len(told["findings"])) == (False, [], 1)
