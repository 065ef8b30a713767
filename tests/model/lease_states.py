"""The real leases as states of a model: frozen to tuples, and thawed for one step.

Few of them are different in the hundreds of thousands of states that they are parts of, and a step
of one makes the same of the same: each is made once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeVar

from trunkline.core.freshness import Fencing, Freshness, Grant, LeaseGrants
from trunkline.core.records import BootInstant

TICK_MS = 1_000.0
SUBJECT = "tenant/a"
GRANTOR_RATE, HOLDER_RATE = 1.01, 0.99
"""The worst pair: the holder believes longest, the grantor waits shortest."""

Frozen = tuple[Any, ...]
Kind = TypeVar("Kind", Freshness, LeaseGrants, Fencing)


class Message(NamedTuple):
    """Sent once, delivered never, once or any number of times, whenever."""

    kind: str
    holder: str
    ask: str = ""
    rev: int = 0


def freeze(thing: Freshness | LeaseGrants | Fencing) -> Frozen:
    values: list[Any] = []
    for slot in _slots(type(thing)):
        value: Any = getattr(thing, slot)
        values.append(tuple(value.items()) if isinstance(value, dict) else value)
    return tuple(values)


def thaw(kind: type[Kind], frozen: Frozen) -> Kind:
    thing = kind.__new__(kind)
    for slot, value in zip(_slots(kind), frozen, strict=True):
        setattr(thing, slot, dict(value) if isinstance(value, tuple) else value)
    return thing


@cache
def _slots(kind: type) -> list[str]:
    """In a fixed order, those of the parents first."""
    return [slot for part in reversed(kind.__mro__) for slot in getattr(part, "__slots__", ())]


def grantor_clock(tick: int) -> BootInstant:
    return BootInstant(tick * TICK_MS * GRANTOR_RATE)


def holder_clock(ticks: int) -> BootInstant:
    """`ticks` since its boot clock began."""
    return BootInstant(ticks * TICK_MS * HOLDER_RATE)


def epochs_at(rev: int) -> dict[str, int]:
    """Revision 1 is before the revocation, 2 is the revocation."""
    return {SUBJECT: 1} if rev >= 2 else {}


def granted(message: Message, ttl_ms: float) -> Grant:
    return Grant(ask=message.ask, rev=message.rev, ttl_ms=ttl_ms, epochs=epochs_at(message.rev))


@cache
def believes_old(kind: type[Freshness], holder: Frozen, now: BootInstant) -> bool:
    """Whether a block from before the revocation would be used now."""
    freshness = thaw(kind, holder)
    return freshness.is_valid(now) and freshness.epoch(SUBJECT) == 0


@cache
def obeyed(kind: type[Freshness], holder: Frozen, rev: int) -> Frozen:
    freshness = thaw(kind, holder)
    freshness.obey(rev, SUBJECT, 1)
    return freeze(freshness)


@cache
def answered(
    kind: type[LeaseGrants], grants: Frozen, ask: Message, rev: int, now: BootInstant
) -> tuple[Frozen, Grant | None]:
    """What the grantor says to who asks."""
    grantor = thaw(kind, grants)
    grant = grantor.grant(ask.holder, ask.ask, rev=rev, epochs=epochs_at(rev), now=now)
    return freeze(grantor), grant


@cache
def revoked(kind: type[LeaseGrants], grants: Frozen, now: BootInstant) -> tuple[Frozen, Frozen]:
    """The grantor once it fences revision 2, and that fencing."""
    grantor = thaw(kind, grants)
    fencing = grantor.fencing(2, now)
    return freeze(grantor), freeze(fencing)


@cache
def acked(fencing: Frozen, holder: str) -> Frozen:
    waiting = thaw(Fencing, fencing)
    waiting.ack(holder)
    return freeze(waiting)


@cache
def is_complete(fencing: Frozen, now: BootInstant) -> bool:
    return thaw(Fencing, fencing).is_complete(now)
