"""How a fault is planted, and looked for. Read `planted.py` for all there are."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from faults.runs import Played, played
from faults.setting import setting_of
from faults.wrongs import Wrong

MAX_SEEDS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One break, and the checks of which one must see it."""

    name: str
    found_by: tuple[str, ...]
    swaps: tuple[tuple[Any, str, Callable[[Wrong], Wrong]], ...]
    """(owner, attribute, the right one -> a wrong one)"""
    kinds: tuple[str, ...] = ()
    """Under which faults it matters; none for those that the seed draws."""
    changes: tuple[tuple[str, object], ...] = ()
    """Of the setting, where it needs one."""
    gateways: int = 1
    pulls: bool = False
    """Whether workers pull from one another."""
    first_seed: int = 0
    """Where it is looked for first: what needs much to come together is not sought from 0 on."""

    @contextmanager
    def __call__(self) -> Generator[None]:
        with ExitStack() as stack:
            for owner, attribute, wrong in self.swaps:
                right = owner.__dict__[attribute]
                stack.callback(setattr, owner, attribute, right)
                setattr(owner, attribute, wrong(right))
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Caught:
    """How a planted fault was found; `run` is None where it was not."""

    planted: Planted
    seeds: int
    run: Played | None


def catch(planted: Planted, max_seeds: int = MAX_SEEDS) -> Caught:
    """Run seeds until one of the named checks sees it."""
    for seed in range(planted.first_seed, planted.first_seed + max_seeds):
        drawn = setting_of(seed, planted.kinds, planted.gateways, pulls=planted.pulls)
        setting = replace(drawn, **dict(planted.changes))
        run = played(setting, planted, lines=20)
        if any(invariant in planted.found_by for invariant, _ in run.violations):
            return Caught(planted=planted, seeds=seed + 1 - planted.first_seed, run=run)
    return Caught(planted=planted, seeds=max_seeds, run=None)


def row_of(caught: Caught) -> str:
    """A line of the table."""
    name, run = caught.planted.name, caught.run
    if run is None:
        return f"{name:62}  NOT FOUND in {caught.seeds} seeds"
    which, what = next(v for v in run.violations if v[0] in caught.planted.found_by)
    return f"{name:62}  {which:4}  {caught.seeds:2} seeds  {what[:80]}"
