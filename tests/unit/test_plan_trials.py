"""Trials of a plan: the same alone and beside one another, and none is lost with its process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial

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


def test_one_core_begins_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_cores", lambda: 1)
    found = tried(stretch(trials.FEW_CALLS), {"a": partial(where, name="a")}, lambda: None)
    assert found["a"][2] is False
