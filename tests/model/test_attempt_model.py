"""Attempts of one stream, exhaustively: a client, workers that may be late, and one gateway.

A worker that is left may go on to speak, and what it said may be under way. The gateway fences an
attempt off before it reads what the client has, and asks the next one for what follows that. The
rule: the client gets tokens 0, 1, 2 in this order, none twice, none left out, whatever comes late.
Each planted break must violate it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from explorer import explore

TOKENS = 3
ATTEMPTS = 3


@dataclass(frozen=True)
class Rules:
    """What the gateway does when it leaves a worker."""

    has_fence: bool = True
    """What comes of an attempt that was left is dropped."""
    fences_first: bool = True
    """Before it reads what the client has; else in a step of its own, behind it."""
    goes_by_delivered: bool = True
    """The next one goes on behind what the client has; else behind all that its worker had said."""


class Link(NamedTuple):
    next_token: int
    """What its worker says next."""
    under_way: tuple[int, ...] = ()
    is_fenced: bool = False


class State(NamedTuple):
    links: tuple[Link, ...]
    """One for each attempt, the last one current."""
    delivered: tuple[int, ...] = ()
    plan: int | None = None
    """Where the next attempt is to begin, while it is being prepared."""


def steps_under(rules: Rules) -> Callable[[State], Iterator[tuple[str, State]]]:
    def steps(state: State) -> Iterator[tuple[str, State]]:
        for number, link in enumerate(state.links):
            if link.next_token < TOKENS:
                said = (*link.under_way, link.next_token)
                yield (
                    f"{number} says",
                    _with(
                        state, number, link._replace(next_token=link.next_token + 1, under_way=said)
                    ),
                )
            if link.under_way:
                first, *rest = link.under_way
                came = _with(state, number, link._replace(under_way=tuple(rest)))
                is_dropped = rules.has_fence and link.is_fenced
                is_over = len(state.delivered) == TOKENS
                if not is_dropped and not is_over:
                    came = came._replace(delivered=(*state.delivered, first))
                yield f"{number} comes", came
        current = len(state.links) - 1
        last = state.links[current]
        if state.plan is not None:
            fenced = _with(state, current, last._replace(is_fenced=True))
            begun = (*fenced.links, Link(next_token=state.plan))
            yield "next begins", fenced._replace(links=begun, plan=None)
        elif len(state.links) < ATTEMPTS and len(state.delivered) < TOKENS:
            begin = len(state.delivered) if rules.goes_by_delivered else last.next_token
            fenced = last._replace(is_fenced=rules.fences_first)
            yield "is left", _with(state, current, fenced)._replace(plan=begin)

    return steps


def _with(state: State, number: int, link: Link) -> State:
    links = (*state.links[:number], link, *state.links[number + 1 :])
    return state._replace(links=links)


def is_bad(state: State) -> bool:
    return state.delivered != tuple(range(len(state.delivered)))


def test_no_late_token_of_a_left_attempt_reaches_the_client() -> None:
    explored = explore(State(links=(Link(0),)), steps_under(Rules()), is_bad)
    assert explored.violation is None
    assert explored.states > 500


@pytest.mark.parametrize(
    "rules",
    [Rules(has_fence=False), Rules(fences_first=False), Rules(goes_by_delivered=False)],
    ids=["no fence", "fenced too late", "by what was said"],
)
def test_without_any_of_its_rules_one_does(rules: Rules) -> None:
    assert explore(State(links=(Link(0),)), steps_under(rules), is_bad).violation is not None
