"""The self-test on real processes: what each way of being wrong is called, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import WAIT_S, Gateway, Process, Processes, processes, text_of, until
from tenants import tenants

TINY = ("--profile", "tiny")
TESTED = (*TINY, "--no-disable-self-test")


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


def doctor(gateway: Gateway, *words: str) -> tuple[int, str]:
    """Exit code and output of `trunkline doctor`."""
    url = gateway.process.ready["admin_url"]
    command = [sys.executable, "-m", "trunkline", "doctor", *words, "--admin-url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    return done.returncode, done.stdout + done.stderr


def checked(gateway: Gateway, process: Process) -> dict[str, Any]:
    answer = gateway.admin(f"/workers/{process.name}/check", "POST", timeout=2 * WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wrong(row: dict[str, Any]) -> dict[str, str]:
    findings = row["detail"]["check"]["findings"]
    return {f["what"]: f["found"] for f in findings if f["state"] == "wrong"}


def test_a_fleet_with_which_all_is_well_passes_and_what_it_holds_is_understood(
    started: Processes,
) -> None:
    workers = started.workers(2, *TINY)
    gateway = started.gateway([w.url for w in workers], *TESTED)
    code, text = doctor(gateway)
    assert code == 0, text
    assert "2 tested, 0 not as they should be" in text
    code, text = doctor(gateway, workers[0].url, "--json")
    told = json.loads(text)
    assert (code, told["ok"], len(told["workers"])) == (0, True, 1)
    [row] = told["workers"]
    assert (row["mode"], row["detail"]["check"]["result"]) == ("exact", "exact")
    states = {f["what"]: f["state"] for f in row["detail"]["check"]["findings"]}
    assert states == dict.fromkeys(
        ("text", "chat", "block size", "events", "block keys", "reuse", "isolation"), "ok"
    )
    code, text = doctor(gateway, "no-such.toml")
    assert (code, "no worker called no-such.toml" in text) == (1, True), text
    assert "--config no-such.toml" in text
    assert gateway.metric("worker_misaligned") == gateway.metric("worker_leaking") == 0
    prompt = text_of(200, "after the test")
    assert (gateway.chat(prompt).cached, gateway.chat(prompt).cached > 0) == (0, True)


@pytest.mark.parametrize(
    ("fault", "what", "found", "mode"),
    [
        ("other-tokens", "text", "others from number 1 on", "approximate"),
        ("other-tokens", "chat", "others from number 1 on", "approximate"),
        ("wrong-events", "block keys", "other tokens", "approximate"),
        ("no-events", "events", "no events since start", "approximate"),
        ("no-usage-details", "reuse", "none, so that no promise", "exact"),
        ("no-prefix-cache", "reuse", "it keeps no prefixes", "blind"),
        ("ignore-salt", "isolation", "48 of 57", "blind"),
    ],
)
def test_each_way_of_being_wrong_has_its_line_and_what_it_leaves(
    started: Processes, fault: str, what: str, found: str, mode: str
) -> None:
    """Among them c57 (events that never come) and c46 (other tokens)."""
    worker = started.worker(*TINY, "--fault", fault)
    gateway = started.gateway([worker.url], *TESTED)
    row = checked(gateway, worker)
    assert found in wrong(row)[what]
    assert row["mode"] == mode
    code, text = doctor(gateway)
    assert (code, "1 not as they should be" in text) == (1, True)
    assert gateway.metric("worker_misaligned", worker=worker.name) == 1
    assert gateway.chat("it serves all the same").status == 200
    log = gateway.process.log()
    assert f"alignment.{what.replace(' ', '_')} worker={worker.name}" in log
    worker.stop()


def test_c54_a_block_size_that_events_contradict_is_theirs(started: Processes) -> None:
    worker = started.worker(*TINY, "--fault", "told-block-size:64")
    gateway = started.gateway([worker.url], *TESTED)
    until(lambda: gateway.worker(worker)["detail"]["block_tokens"] == 16, "the size of its events")
    until(lambda: checked(gateway, worker)["detail"]["check"]["status"] == "ok", "it is exact then")
    prompt = text_of(200, "sizes")
    gateway.chat(prompt)
    until(lambda: gateway.chat(prompt).predicted > 0, "its blocks are known")
    worker.stop()


def test_c55_workers_that_name_blocks_differently_are_told_of_and_still_exact(
    started: Processes,
) -> None:
    odd, even = started.worker(*TINY, "--fault", "other-hashes"), started.worker(*TINY)
    gateway = started.gateway([odd.url, even.url], *TESTED)
    for worker in (even, odd):
        row = checked(gateway, worker)
        assert (row["mode"], row["detail"]["check"]["status"]) == ("exact", "ok")
    notes = [f for f in row["detail"]["check"]["findings"] if f["state"] == "note"]
    assert [note["found"] for note in notes] == [f"another than {even.name} has"]
    code, text = doctor(gateway)
    assert code == 0, text


def test_a_worker_that_ignores_salts_gets_no_tenants_requests(
    started: Processes, tmp_path: Path
) -> None:
    leaking = started.worker(*TINY, "--fault", "ignore-salt")
    sound = started.worker(*TINY)
    held = tenants(started, [leaking.url, sound.url], tmp_path, "--no-disable-self-test", ready=1)
    gateway = held.gateway
    until(lambda: gateway.worker(leaking)["state"] == "isolation-failed", "the leak is found")
    assert "cache_salt" in gateway.worker(leaking)["reason"]
    assert gateway.metric("worker_leaking", worker=leaking.name) == 1
    assert "ERROR" in next(
        line for line in gateway.process.log().splitlines() if "alignment.isolation" in line
    )
    ann = held.caller("acme", "ann")
    for number in range(6):
        assert ann.answer(text_of(60, number)).status == 200
    assert gateway.worker(leaking)["requests_active"] == 0
    assert gateway.metric("worker_selection_total", worker=leaking.name) == 0
    gateway.wait_quiet()
    done = gateway.admin(f"/workers/{sound.name}/reset", "POST")
    assert done.status_code == 202, done.text
    records = gateway.admin("/audit?limit=50").json()["records"]
    assert "workers.reset" in {record["action"] for record in records}, "on record"
    decision = gateway.admin("/decisions?limit=1").json()["decisions"][0]
    assert decision["excluded"] == {leaking.name: "isolation-failed"}


def test_a_reset_that_we_asked_for_is_forgotten_at_once(started: Processes) -> None:
    worker = started.worker(*TINY)
    gateway = started.gateway([worker.url], *TINY)
    prompt = text_of(300, "to be reset")
    gateway.chat(prompt)
    gateway.wait_held(worker, 10)
    gateway.wait_quiet()
    done = gateway.admin(f"/workers/{worker.name}/reset", "POST")
    assert (done.status_code, done.json()["state"]) == (202, "reset")
    assert gateway.rank(worker)["held_blocks"] == 0
    again = gateway.chat(prompt)
    assert (again.predicted, again.cached) == (0, 0)
    assert gateway.admin("/workers/nobody:1/reset", "POST").status_code == 404
    assert gateway.admin("/workers/nobody:1/check", "POST").status_code == 404
