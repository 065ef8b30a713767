"""`benchmarks/gateways.py` with a few sessions, and how it counts them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fleet import WAIT_S

from nats_desk import binary
from trunkline.replay.records import RequestRecord, Verdict

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gateways(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script under a name of its own: the chaos tests have a module `gateways`, too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("gateways_bench", BENCHMARKS / "gateways.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def record(
    session: str,
    worker: str | None,
    *,
    tokens: int = 100,
    lost: str = "",
    reason: str = "cache-hit",
) -> RequestRecord:
    return RequestRecord(
        index=0,
        arrival_ms=0.0,
        client_late_ms=0.0,
        session=session,
        lost_reason=lost,
        status=200,
        ttft_ms=1.0,
        duration_ms=1.0,
        prompt_tokens=tokens,
        cached_tokens=50,
        output_tokens=1,
        verdict=Verdict.RIGHT,
        worker=worker,
        matched_tokens=0,
        queue_ms=0.0,
        reason=reason,
    )


def test_a_session_stayed_only_when_one_worker_answered_every_turn(
    gateways: ModuleType,
) -> None:
    records = [
        record("stays", "w1"), record("stays", "w1"),
        record("moves and returns", "w1"), record("moves and returns", "w2", reason="cache-passed"),
        record("moves and returns", "w1"),
        record("long, stays", "w2", tokens=256), record("long, stays", "w2"),
        record("unanswered", "w1"), record("unanswered", "w1", lost="reset"),
    ]  # fmt: skip
    found = gateways.counted(records, 3, spent_s=0.9)
    assert found.sessions == 4
    assert found.one_worker == 0.5
    assert found.one_worker_short == round(1 / 3, 4)
    assert (found.moved_turns, found.moved_for_less) == (2, 1)
    assert (found.requests, found.lost, found.cpu_ms) == (9, 1, 100.0)
    assert found.cached_tokens == 8 * 50


def test_sessions_grow_turn_by_turn_and_are_the_same_for_a_seed(
    gateways: ModuleType,
) -> None:
    made = gateways.sessions(5, 10, seed=1)
    assert made == gateways.sessions(5, 10, seed=1) != gateways.sessions(5, 10, seed=2)
    assert [one.arrival_ms for one in made] == sorted(one.arrival_ms for one in made)
    for number in range(5):
        turns = [one for one in made if one.session == f"s{number}"]
        assert len(turns) == 10
        for one, after in itertools.pairwise(turns):
            assert after.parts[: len(one.parts)] == one.parts
            assert after.input_tokens == sum(part.tokens for part in after.parts)


def test_a_few_sessions_play_before_one_gateway_and_three() -> None:
    """Not held to the bar: whether so few stay is left to the load of the machine."""
    binary()
    words = ["--sessions", "3", "--turns", "3", "--sessions-only", "--json"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gateways.py"), *words],
        capture_output=True, text=True, timeout=6 * WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    figures = json.loads(done.stdout)
    assert list(figures) == ["sessions 1", "sessions 3"], done.stderr
    for found in figures.values():
        assert (found["sessions"], found["requests"]) == (3, 9)
        assert (found["lost"], found["false_hits"]) == (0, 0)
        assert found["one_worker"] is not None
