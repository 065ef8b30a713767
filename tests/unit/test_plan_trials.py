"""Trials of a plan: the same alone and beside one another, and none is lost with its process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from trunkline.plan import trials
from trunkline.plan.trials import tried
from trunkline.plan.window import Stretch

NAMES = ("a", "b", "c", "d", "e")


def stretch(calls: int) -> Stretch:
    zeros = [0.0] * calls
    counts = [1] * calls
    return Stretch(
        at_ms=zeros, tokens=counts, outputs=counts, blocks=[[]] * calls, block_tokens=16, names=0
    )


def where(calls: Stretch, *, name: str) -> tuple[str, int, bool]:
    return name, len(calls), multiprocessing.parent_process() is not None


def killed_beside(calls: Stretch, *, name: str) -> tuple[str, int, bool]:
    if name == "c" and multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return where(calls, name=name)


def failing(_calls: Stretch, *, name: str) -> str:
    raise ValueError(name)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_cores", lambda: 2)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(("calls", "is_beside"), [(trials.FEW_CALLS, True), (9, False)])
def test_each_trial_has_the_whole_stretch_and_is_told_of_in_the_order_asked(
    calls: int, is_beside: bool
) -> None:
    steps: list[None] = []
    asked = {name: partial(where, name=name) for name in NAMES}
    found = tried(stretch(calls), asked, lambda: steps.append(None))
    assert list(found.items()) == [(name, (name, calls, is_beside)) for name in NAMES]
    assert len(steps) == len(NAMES)


@pytest.mark.usefixtures("two_cores")
def test_what_a_killed_process_owed_is_tried_here() -> None:
    steps: list[None] = []
    asked = {name: partial(killed_beside, name=name) for name in NAMES}
    found = tried(stretch(trials.FEW_CALLS), asked, lambda: steps.append(None))
    assert {name: one[:2] for name, one in found.items()} == {
        name: (name, trials.FEW_CALLS) for name in NAMES
    }
    assert found["c"][2] is False
    assert len(steps) == len(NAMES)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("calls", [trials.FEW_CALLS, 9])
def test_a_trial_that_fails_says_so_here(calls: int) -> None:
    with pytest.raises(ValueError, match="a"):
        tried(stretch(calls), {"a": partial(failing, name="a")}, lambda: None)


def at_work(calls: Stretch, *, name: str, folder: str) -> None:
    if multiprocessing.parent_process() is not None:
        (Path(folder) / f"{name}.{os.getpid()}").touch()
        time.sleep(60)


PLAN = """
import sys
sys.path[:0] = sys.argv[2:]
from functools import partial
import test_plan_trials as of
from trunkline.plan import trials
trials._cores = lambda: 2
asked = {name: partial(of.at_work, name=name, folder=sys.argv[1]) for name in of.NAMES}
if __name__ == "__main__":
    trials.tried(of.stretch(trials.FEW_CALLS), asked, lambda: None)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_beside_end_with_the_one_that_began_them(
    end: signal.Signals, tmp_path: Path
) -> None:
    plan, pids = tmp_path / "plan.py", tmp_path / "pids"
    plan.write_text(PLAN)
    pids.mkdir()
    command = [sys.executable, str(plan), str(pids), str(Path(__file__).parent)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        until(lambda: len(list(pids.iterdir())) == 2, "both are at work")
        process.send_signal(end)
        assert process.wait(30) != 0
    beside = [int(one.suffix[1:]) for one in pids.iterdir()]
    until(lambda: not any(map(_is_alive, beside)), "they have ended, too")


def until(is_so: Callable[[], bool], what: str) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError(f"not within 30 s: {what}")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_core_begins_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_cores", lambda: 1)
    found = tried(stretch(trials.FEW_CALLS), {"a": partial(where, name="a")}, lambda: None)
    assert found["a"][2] is False
