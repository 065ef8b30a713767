"""`trunkline doctor` before real engines: sound ones pass, and one whose connector mixes tenants up
is found out and given no tenant's request.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import WAIT_S, Gateway, Processes, text_of, until
from tenants import tenants
from vllm_engines import Engine

from conftest import Figures, Lab

CHECK_S = 2 * WAIT_S
TESTED = "--no-disable-self-test"


def doctor(gateway: Gateway, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and what it says of each worker."""
    url = gateway.process.ready["admin_url"]
    command = [sys.executable, "-m", "trunkline", "doctor", "--json", *words, "--admin-url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)
    told = json.loads(done.stdout)
    return done.returncode, {row["worker"]: row for row in told["workers"]}


def states(row: dict[str, Any]) -> dict[str, str]:
    return {one["what"]: one["state"] for one in row["detail"]["check"]["findings"]}


@pytest.fixture(scope="module")
def leaky(lab: Lab) -> Iterator[Engine]:
    """Its connector keeps KV by token ids alone, whatever the salt."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(lab.folder / "kv")},
    }
    engine = lab.engine(
        "leaky",
        *("--disable-hybrid-kv-cache-manager", "--kv-transfer-config", json.dumps(connector)),
    )
    lab.start(engine)
    yield engine
    engine.stop()


def test_sound_engines_pass_and_are_exact_with_all_that_was_looked_at(
    lab: Lab, engines: list[Engine], started: Processes, figures: Figures
) -> None:
    urls = [engine.url for engine in engines]
    gateway = started.gateway(urls, "--model-path", str(lab.model), TESTED)
    code, rows = doctor(gateway)
    for engine in engines:
        row = rows[engine.worker]
        # One of the two has hashes of its own, which is worth a note and no more.
        looked_at = {what: state for what, state in states(row).items() if what != "hashes"}
        topics = ("text", "chat", "block size", "events", "block keys", "reuse", "isolation")
        assert looked_at == dict.fromkeys(topics, "ok"), row["detail"]["check"]
        assert row["mode"] == "exact"
    assert code == 0
    figures.add("doctor, two sound engines", "all ok", "all ok")


def test_doctor_finds_the_tenant_leak_of_a_connector_and_reuse_is_refused(
    lab: Lab,
    engines: list[Engine],
    leaky: Engine,
    started: Processes,
    tmp_path: Path,
    figures: Figures,
) -> None:
    flags = ("--model-path", str(lab.model), TESTED)
    held = tenants(started, [leaky.url, engines[0].url], tmp_path, *flags, ready=1)
    gateway = held.gateway
    code, rows = doctor(gateway, leaky.url)
    row = rows[leaky.worker]
    assert code == 1
    assert states(row)["isolation"] == "wrong", row["detail"]["check"]
    assert (row["state"], row["mode"]) == ("isolation-failed", "blind")
    [isolation] = [f for f in row["detail"]["check"]["findings"] if f["what"] == "isolation"]
    figures.add("tokens that its connector leaked", isolation["found"], "0")

    sound = engines[0].worker
    until(lambda: gateway.workers()[sound]["state"] == "ready", "the other one may be chosen")
    prompt = text_of(300, "between tenants")
    callers = [held.caller(tenant) for tenant in ("acme", "globex")]
    cached: list[int] = []
    for caller in (*callers, callers[0]):
        answer = caller.answer(prompt, model="tiny")
        assert answer.status == 200
        cached.append(answer.cached)
    assert cached[:2] == [0, 0], "nothing goes from one tenant to another"
    assert cached[2] > 0, "and each meets its own"
    assert gateway.metric("worker_selection_total", worker=leaky.worker) == 0


def test_where_all_are_one_tenant_the_leaking_engine_serves_and_nothing_counts_there(
    lab: Lab, leaky: Engine, started: Processes
) -> None:
    gateway = started.gateway([leaky.url], "--model-path", str(lab.model), TESTED)
    code, rows = doctor(gateway)
    assert (code, rows[leaky.worker]["mode"], rows[leaky.worker]["state"]) == (1, "blind", "ready")
    prompt = text_of(200, "one tenant")
    for _ in range(2):
        answer = gateway.complete(prompt, model="tiny")
        assert (answer.status, answer.predicted) == (200, 0)


def test_c20_a_reset_that_the_gateway_asks_an_idle_engine_for_is_known_at_once(
    lab: Lab, engines: list[Engine], started: Processes
) -> None:
    """The engine itself tells of it only with its next request."""
    engine = engines[0]
    gateway = started.gateway([engine.url], "--model-path", str(lab.model))
    prompt = text_of(300, "c20 reset")
    gateway.complete(prompt, model="tiny")
    until(lambda: gateway.complete(prompt, model="tiny").predicted > 0, "its blocks are known")
    gateway.wait_quiet()
    done = gateway.admin(f"/workers/{engine.worker}/reset", "POST")
    assert done.status_code == 202, done.text
    held = gateway.workers()[engine.worker]["detail"]["ranks"][0]["held_blocks"]
    answer = gateway.complete(prompt, model="tiny")
    assert (held, answer.predicted, answer.cached) == (0, 0, 0)


def test_c20_a_paused_engine_is_left_alone_until_it_goes_on(
    lab: Lab, engines: list[Engine], started: Processes
) -> None:
    paused, other = engines
    gateway = started.gateway([paused.url, other.url], "--model-path", str(lab.model))

    def state() -> str:
        return gateway.workers()[paused.worker]["state"]

    assert httpx.post(f"{paused.url}/pause", params={"mode": "keep"}, timeout=WAIT_S).is_success
    try:
        until(lambda: state() == "asleep", "the pause was seen")
        for number in range(4):
            answer = gateway.complete(text_of(40, f"pause {number}"), model="tiny")
            assert (answer.status, answer.worker) == (200, other.worker)
    finally:
        assert httpx.post(f"{paused.url}/resume", timeout=WAIT_S).is_success
    until(lambda: state() == "ready", "it goes on")
