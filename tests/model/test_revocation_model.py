"""Leases and one revocation, exhaustively: one holder, one grantor, any network, the real objects.

Time goes in ticks of one second, with the grantor's clock 1 % fast and the holder's 1 % slow. The
network delivers any message it was ever given at any time, any number of times, or never. The
holder may be suspended, restart, and reboot (its boot clock begins anew); the grantor may restart
and lose its table. The rule: once the revocation is acknowledged, the holder does not use what was
revoked. Each planted break must violate it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import pytest
from explorer import Explored, explore
from lease_states import (
    Frozen,
    Message,
    acked,
    answered,
    believes_old,
    freeze,
    granted,
    grantor_clock,
    holder_clock,
    is_complete,
    obeyed,
    revoked,
    thaw,
)

from leases_broken import (
    AcksAtOnce,
    CountsFromReceipt,
    GrantsBelowTheFloor,
    GrantsWithoutMargin,
    LowersRevisions,
    TakesOtherLives,
)
from trunkline.core.freshness import LEASE_TTL_MS, Freshness, LeaseGrants
from trunkline.core.records import BootInstant

LAST_TICK = 5
MOST_ASKS = 2


@dataclass(frozen=True)
class Rules:
    """What the model runs with; the real thing unless a break is planted."""

    freshness: type[Freshness] = Freshness
    grants: type[LeaseGrants] = LeaseGrants
    stops_in_suspend: bool = False
    """The holder reads a monotonic clock in place of the boot clock."""
    troubles: frozenset[str] = frozenset()
    """What may happen, once: `suspend`, `restart` (of the holder), `loss` (of the grantor's
    table)."""


class State(NamedTuple):
    tick: int
    life: int
    began: int
    """When the holder's boot clock began; later by the ticks that a monotonic clock stood still."""
    suspend: int
    """0 not yet, 1 is, 2 was."""
    asks: int
    asked_at: float
    holder: Frozen
    rev: int
    has_restarted: bool
    grants: Frozen
    fencing: Frozen | None
    is_acked: bool
    sent: frozenset[Message]


def initial(rules: Rules) -> State:
    return State(
        tick=0,
        life=1,
        began=0,
        suspend=0,
        asks=0,
        asked_at=-1.0,
        holder=freeze(rules.freshness("1")),
        rev=1,
        has_restarted=False,
        grants=freeze(rules.grants(BootInstant(0.0), has_earlier_life=False)),
        fencing=None,
        is_acked=False,
        sent=frozenset(),
    )


def steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    yield from _time_steps(state, rules)
    if state.suspend != 1:
        yield from _holder_steps(state, rules)
    if not state.is_acked:
        yield from _grantor_steps(state, rules)


def _time_steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    if state.tick < LAST_TICK:
        stands_still = rules.stops_in_suspend and state.suspend == 1
        later = state._replace(tick=state.tick + 1, began=state.began + stands_still)
        yield "a second passes", later
    if state.suspend == 0 and state.asks and "suspend" in rules.troubles:
        yield "the holder is suspended", state._replace(suspend=1)
    if state.suspend == 1:
        yield "the holder resumes", state._replace(suspend=2)


def _holder_steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    now = holder_clock(state.tick - state.began)
    if state.asks < MOST_ASKS and not state.is_acked and now != state.asked_at:
        holder = thaw(rules.freshness, state.holder)
        message = Message("ask", str(state.life), holder.ask(now))
        yield (
            f"it asks {message.ask}",
            state._replace(
                asks=state.asks + 1,
                asked_at=now,
                holder=freeze(holder),
                sent=state.sent | {message},
            ),
        )
    for message in sorted(state.sent):
        if message.kind == "grant":
            holder, said = _taken(rules.freshness, state.holder, message, now)
            yield f"it takes {message}: {said}", state._replace(holder=holder)
        elif message.kind == "order":
            holder = obeyed(rules.freshness, state.holder, message.rev)
            ack = Message("ack", str(state.life))
            yield "it obeys and acks", state._replace(holder=holder, sent=state.sent | {ack})
    if state.life == 1 and state.asks and "restart" in rules.troubles:
        fresh = state._replace(life=2, holder=freeze(rules.freshness("2")))
        yield "it restarts", fresh
        yield "its machine reboots", fresh._replace(began=state.tick)


@cache
def _taken(
    kind: type[Freshness], frozen: Frozen, message: Message, now: BootInstant
) -> tuple[Frozen, str]:
    holder = thaw(kind, frozen)
    if isinstance(holder, CountsFromReceipt):
        holder.now = now
    taken = holder.take(granted(message, LEASE_TTL_MS))
    return freeze(holder), taken.value


def _grantor_steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    now = grantor_clock(state.tick)
    for message in sorted(state.sent):
        if message.kind == "ask":
            grants, grant = answered(rules.grants, state.grants, message, state.rev, now)
            if grant is not None:
                sent = state.sent | {Message("grant", message.holder, message.ask, grant.rev)}
                yield (
                    f"the grantor grants {message.ask} at {grant.rev}",
                    state._replace(grants=grants, sent=sent),
                )
        elif message.kind == "ack" and state.fencing and not state.is_acked:
            fencing = acked(state.fencing, message.holder)
            yield f"the ack of {message.holder} arrives", state._replace(fencing=fencing)
    if state.rev == 1:
        yield "revoke", _enforced(state._replace(rev=2), rules)
    if state.fencing and not state.is_acked and is_complete(state.fencing, now):
        # What is granted from here on is at the new revision, and can only teach the new epoch:
        # the grants that are on their way are what is left to fear.
        left = frozenset(message for message in state.sent if message.kind == "grant")
        yield "ACKNOWLEDGED", state._replace(is_acked=True, grants=(), fencing=None, sent=left)
    if not state.has_restarted and not state.is_acked and "loss" in rules.troubles:
        grants = rules.grants(now, has_earlier_life=True)
        anew = state._replace(has_restarted=True, grants=freeze(grants))
        yield "the grantor restarts", _enforced(anew, rules) if state.fencing else anew


def _enforced(state: State, rules: Rules) -> State:
    grants, fencing = revoked(rules.grants, state.grants, grantor_clock(state.tick))
    sent = state.sent | {Message("order", "", "", 2)}
    return state._replace(grants=grants, fencing=fencing, sent=sent)


def explored(rules: Rules) -> Explored[State]:
    def uses_after_the_ack(state: State) -> bool:
        if not state.is_acked or state.suspend == 1:
            return False
        now = holder_clock(state.tick - state.began)
        return believes_old(rules.freshness, state.holder, now)

    return explore(initial(rules), lambda state: steps(state, rules), uses_after_the_ack)


RUNS = ({"suspend"}, {"restart"}, {"loss"})


@pytest.mark.slow
@pytest.mark.parametrize("troubles", RUNS, ids=lambda run: "+".join(sorted(run)))
def test_no_use_after_the_ack_in_any_state(
    troubles: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.process_time()
    found = explored(Rules(troubles=frozenset(troubles)))
    assert found.violation is None, "\n".join(found.violation)
    assert found.states > 10_000
    with capsys.disabled():
        print(  # noqa: T201  # figures of the run
            f"\nleases, {'+'.join(sorted(troubles))}: {found.states} states, no violation, "
            f"{time.process_time() - began_s:.1f} s of CPU"
        )


RESTART, LOSS, SUSPEND = (frozenset({name}) for name in ("restart", "loss", "suspend"))
BREAKS = {
    "counts from receipt": Rules(freshness=CountsFromReceipt),
    "takes the grant of another life": Rules(freshness=TakesOtherLives, troubles=RESTART),
    "lowers the revision": Rules(freshness=LowersRevisions),
    "waits without the margin": Rules(grants=GrantsWithoutMargin),
    "renews below the revision": Rules(grants=GrantsBelowTheFloor),
    "acks at once after a restart": Rules(grants=AcksAtOnce, troubles=LOSS),
    "a clock that stops in suspend": Rules(stops_in_suspend=True, troubles=SUSPEND),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_violates_it(name: str) -> None:
    found = explored(BREAKS[name])
    assert found.violation is not None
    assert "ACKNOWLEDGED" in found.violation
