"""The exit fence, exhaustively: one answer on its way through a worker and a gateway.

The worker checks before it uses a block, and may be stopped between the two for as long as it
likes; then only the gateway can keep the answer in. It drops what was admitted under older epochs
than its own, and everything while it has no lease of its own, in the same step as the write. The
rule: nothing made of what was revoked leaves after the ack. Each planted break must violate it.

What the model does not hold, and nothing can: a gateway stopped inside that one step.
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
    SUBJECT,
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

from trunkline.core.freshness import LEASE_TTL_MS, Freshness, LeaseGrants
from trunkline.core.records import BootInstant

LAST_TICK = 4
HOLDERS = ("worker", "gateway")


@dataclass(frozen=True)
class Rules:
    """What the gateway does before it writes."""

    checks_epochs: bool = True
    checks_lease: bool = True
    in_one_step: bool = True
    """The checks and the write."""


class State(NamedTuple):
    tick: int
    worker: Frozen
    gateway: Frozen
    rev: int
    grants: Frozen
    fencing: Frozen | None
    is_acked: bool
    answer: str
    """Of the request: admitted, checked (by the worker), out (of it), passed (by the gateway),
    written, late (written after the ack), dropped."""
    sent: frozenset[Message]


def initial() -> State:
    """Both have just asked for their leases."""
    holders = {name: Freshness(name) for name in HOLDERS}
    asks = {Message("ask", name, holder.ask(holder_clock(0))) for name, holder in holders.items()}
    return State(
        tick=0,
        worker=freeze(holders["worker"]),
        gateway=freeze(holders["gateway"]),
        rev=1,
        grants=freeze(LeaseGrants(BootInstant(0.0), has_earlier_life=False)),
        fencing=None,
        is_acked=False,
        answer="admitted",
        sent=frozenset(asks),
    )


def steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    if state.answer in ("written", "late", "dropped"):
        return
    if state.tick < LAST_TICK:
        yield "a second passes", state._replace(tick=state.tick + 1)
    yield from _answer_steps(state, rules)
    if not state.is_acked:
        yield from _grantor_steps(state)
    yield from _message_steps(state)


def _answer_steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    now = holder_clock(state.tick)
    if state.answer == "admitted":
        if believes_old(Freshness, state.worker, now):
            # It is not asked again: what its lease becomes no longer matters, its ack does.
            left = frozenset(m for m in state.sent if (m.kind, m.holder) != ("grant", "worker"))
            yield "the worker checks", state._replace(answer="checked", worker=(), sent=left)
    elif state.answer == "checked":
        yield "the worker uses and sends", state._replace(answer="out")
    elif state.answer == "out":
        gateway = thaw(Freshness, state.gateway)
        is_current = gateway.epoch(SUBJECT) == 0 or not rules.checks_epochs
        is_fresh = gateway.is_valid(now) or not rules.checks_lease
        if not is_current or not is_fresh:
            yield "the gateway drops it", state._replace(answer="dropped")
        elif rules.in_one_step:
            yield "the gateway checks and writes", _written(state)
        else:
            yield "the gateway checks", state._replace(answer="passed")
    elif state.answer == "passed":
        yield "the gateway writes", _written(state)


def _written(state: State) -> State:
    return state._replace(answer="late" if state.is_acked else "written")


def _message_steps(state: State) -> Iterator[tuple[str, State]]:
    for message in sorted(state.sent):
        has_checked = message.holder == "worker" and not state.worker
        if message.kind == "order" and has_checked:
            after = state._replace(sent=state.sent | {Message("ack", "worker")})
            yield "the worker acks", after
        elif message.kind == "grant" and not has_checked:
            taken = _taken(getattr(state, message.holder), message)
            yield f"taken: {message}", _holding(state, message.holder, taken)
        elif message.kind == "order":
            holder = obeyed(Freshness, getattr(state, message.holder), message.rev)
            ack = Message("ack", message.holder)
            after = _holding(state, message.holder, holder)
            yield f"the {message.holder} acks", after._replace(sent=state.sent | {ack})


@cache
def _taken(holder: Frozen, message: Message) -> Frozen:
    freshness = thaw(Freshness, holder)
    freshness.take(granted(message, LEASE_TTL_MS))
    return freeze(freshness)


def _holding(state: State, name: str, holder: Frozen) -> State:
    return state._replace(worker=holder) if name == "worker" else state._replace(gateway=holder)


def _grantor_steps(state: State) -> Iterator[tuple[str, State]]:
    now = grantor_clock(state.tick)
    for message in sorted(state.sent):
        if message.kind == "ask":
            grants, grant = answered(LeaseGrants, state.grants, message, state.rev, now)
            assert grant is not None
            sent = state.sent | {Message("grant", message.holder, message.ask, grant.rev)}
            after = state._replace(grants=grants, sent=sent)
            yield f"granted to the {message.holder} at {grant.rev}", after
        elif message.kind == "ack" and state.fencing:
            fencing = acked(state.fencing, message.holder)
            yield f"the ack of the {message.holder}", state._replace(fencing=fencing)
    if state.rev == 1:
        grants, fencing = revoked(LeaseGrants, state.grants, now)
        orders = {Message("order", name, "", 2) for name in HOLDERS}
        after = state._replace(rev=2, grants=grants, fencing=fencing)
        yield "revoke", after._replace(sent=state.sent | orders)
    if state.fencing and is_complete(state.fencing, now):
        left = frozenset(message for message in state.sent if message.kind == "grant")
        after = state._replace(is_acked=True, grants=(), fencing=None, sent=left)
        yield "ACKNOWLEDGED", after


def explored(rules: Rules) -> Explored[State]:
    return explore(initial(), lambda state: steps(state, rules), lambda s: s.answer == "late")


@pytest.mark.slow
def test_nothing_revoked_leaves_after_the_ack_in_any_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    began_s = time.process_time()
    found = explored(Rules())
    assert found.violation is None, "\n".join(found.violation)
    assert found.states > 10_000
    with capsys.disabled():
        print(  # noqa: T201  # figures of the run
            f"\nexit fence: {found.states} states, no violation, "
            f"{time.process_time() - began_s:.1f} s of CPU"
        )


BREAKS = {
    "no exit fence": Rules(checks_epochs=False, checks_lease=False),
    "the epochs alone are checked": Rules(checks_lease=False),
    "the lease alone is checked": Rules(checks_epochs=False),
    "the checks are a step of their own": Rules(in_one_step=False),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_fence_lets_it_out(name: str) -> None:
    found = explored(BREAKS[name])
    assert found.violation is not None
    assert "the worker checks" in found.violation
    assert "ACKNOWLEDGED" in found.violation
