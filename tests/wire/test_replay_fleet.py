"""`trunkline replay` and `trunkline demo --serve` as a user runs them, on real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

COMMAND = [sys.executable, "-m", "trunkline"]
SMALL = [
    *("replay", "W2-smoke", "--requests", "60", "--workers", "2"),
    *("--tokens-per-block", "16", "--max-output-tokens", "4", "--time-scale", "0.02"),
]


def run(*words: str, timeout_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], str]:
    """One small run over both fleets: figures and terminal text."""
    path = tmp_path_factory.mktemp("replay") / "figures.json"
    policies = ["--policies", "cache_aware,round_robin"]
    done = run(*SMALL, *policies, "--json", str(path), "--bar", "false_hits==0")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


def test_a_replay_reports_every_figure_of_the_mission(
    report: tuple[dict[str, object], str],
) -> None:
    figures, text = report
    assert figures["requests"] == 60
    assert figures["lost"] == 0
    assert figures["false_hits"] == 0
    assert figures["answers_checked"] == 60
    for name in (
        "hit_requests_ratio", "hit_tokens_ratio", "avoided_prefill_tokens", "prefill_tokens",
        "directory_lookup_us", "transfer_bytes", "router_queue_ms", "ttft_ms", "kv_memory_bytes",
        "busiest_over_mean_work", "over_claims",
    ):  # fmt: skip
        assert figures[name] is not None, name
    assert "FALSE HITS   0" in text


def test_the_cache_aware_run_reuses_more_than_round_robin(
    report: tuple[dict[str, object], str],
) -> None:
    figures, _ = report
    baselines = figures["baselines"]
    assert isinstance(baselines, dict)
    assert figures["avoided_prefill_tokens"] > baselines["round_robin"]["avoided_prefill_tokens"]


def test_a_missed_bar_is_exit_code_1() -> None:
    words = ["--requests", "4", "--policies", "round_robin", "--fail-if", "requests>0"]
    done = run(*SMALL, *words)
    assert done.returncode == 1
    assert "FAIL" in done.stdout


def test_a_worker_that_cannot_start_is_said_so_and_leaves_nothing_behind() -> None:
    done = run(*SMALL, "--policies", "round_robin", "--tokens-per-block", "17")
    assert done.returncode != 0
    assert "block_size is 17" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def served() -> object:
    words = ["demo", "--serve", "--workers", "2", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_demo_fleet_greets_answers_and_ends_in_order(served: subprocess.Popen[str]) -> None:
    assert served.stdout is not None
    greeting = ""
    for line in served.stdout:
        greeting += line
        if "Ctrl-C" in line:
            break
    found = re.search(r"curl -i (http://127\.0\.0\.1:\d+)/v1/chat/completions", greeting)
    assert found is not None, greeting
    assert "as one tenant" in greeting
    assert "trunkline keys create --tenant acme --create-tenant" in greeting
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "trunkline-sim", "max_tokens": 3, "messages": messages}
    answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 200
    assert answer.headers["x-trunkline-decision"].startswith("worker=127.0.0.1:")
    children = children_of(served.pid)
    assert len(children) == 3, "a gateway and two workers"
    served.send_signal(signal.SIGTERM)
    assert served.wait(timeout=60.0) == 0
    assert served.stdout.read().splitlines()[-1] == "served 1 request, stopped"
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_a_taken_port_is_said_once_and_without_a_second_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("demo", "--serve", "--workers", "1", "--port", str(port))
    assert done.returncode == 1
    said = f"trunkline: gateway did not start: port {port} on 127.0.0.1 is in use"
    assert done.stderr.startswith(said), done.stderr
    assert "--port" in done.stderr


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--requests", "0"), "--requests is 0"),
        (("--html", "/nonexistent/x.html"), "cannot be written"),
        (("--json", "/nonexistent/x.json"), "cannot be written"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(words: tuple[str, ...], said: str) -> None:
    done = run("replay", "W2-smoke", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
