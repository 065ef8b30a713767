"""Every state of a small model, breadth first, until a rule is violated or there are no more."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

State = TypeVar("State", bound=Hashable)
MAX_STATES = 4_000_000


@dataclass(frozen=True)
class Explored(Generic[State]):
    states: int
    violation: list[str] | None
    """The steps to the nearest one."""


def explore(
    initial: State,
    steps: Callable[[State], Iterable[tuple[str, State]]],
    is_bad: Callable[[State], bool],
) -> Explored[State]:
    """All states that `steps` (name and successor) reach from `initial`; ends at a bad one."""
    gc.disable()  # nothing here is a cycle, and a million tuples are slow to look through
    try:
        return _explored(initial, steps, is_bad)
    finally:
        gc.enable()


def _explored(
    initial: State,
    steps: Callable[[State], Iterable[tuple[str, State]]],
    is_bad: Callable[[State], bool],
) -> Explored[State]:
    came_from: dict[State, tuple[State, str] | None] = {initial: None}
    frontier = [initial]
    while frontier:
        reached: list[State] = []
        for state in frontier:
            if is_bad(state):
                return Explored(len(came_from), _way_to(state, came_from))
            for name, successor in steps(state):
                if successor not in came_from:
                    came_from[successor] = (state, name)
                    reached.append(successor)
        assert len(came_from) < MAX_STATES, "the model is too large for a test"
        frontier = reached
    return Explored(len(came_from), None)


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    way: list[str] = []
    step = came_from[state]
    while step is not None:
        state, name = step
        way.append(name)
        step = came_from[state]
    return way[::-1]
