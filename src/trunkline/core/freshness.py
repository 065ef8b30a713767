"""How long a holder may believe its epochs, and when a revocation is provably in force everywhere.

    holder                                  grantor
    ask (nonce : boot time) ------------->  now + 3.13 s: until when it may still be believing
    valid from the ASK on, 3 s  <---------  grant (ask, rev, epochs)

A holder (a worker, or a gateway apart from the registry) uses nothing without a valid lease. Each
side reads its own boot clock, so that only clock *rates* matter: the holder counts from when it
asked, the grantor from when it granted, and longer by 1 % and 100 ms. A change of epochs is in
force once every holder that could still believe older ones has acked, or its lease has run out.

Must never: read a clock, lower a revision or an epoch, arm a lease by a late answer. What the
tables hold is in `epochs.py`; `control/revocation.py` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from trunkline.core.epochs import Subject
from trunkline.core.records import BootInstant

LEASE_TTL_MS = 3_000.0
LEASE_BEAT_MS = 1_000.0
"""A holder is granted anew this often: it may miss one beat and goes on reusing."""

RATE_MARGIN = 1.01
SLACK_MS = 100.0
"""Two clocks that run 1 % off, each its own way, differ by 61 ms in 3 s; (3 s x 1.01 + 100 ms) /
1.01 is 38 ms past the 3 s / 0.99 that the slowest holder believes."""

MAX_ASKS = 8
"""Asks of a holder that wait for their grant. At the bound the oldest is forgotten: its grant arms
nothing, and a newer one is on its way."""

MAX_HOLDERS = 8_192
"""Leases that a grantor keeps in mind: twice the workers of a gateway, for those that left. At the
bound nobody new is granted one: a worker without a lease recomputes."""


def grant_ms(ttl_ms: float = LEASE_TTL_MS) -> float:
    """How long a grantor must take a lease for alive that it granted now."""
    return ttl_ms * RATE_MARGIN + SLACK_MS


class Verb(Enum):
    """Two ways to make what is cached unreachable."""

    INVALIDATE = "invalidate"
    """Running requests finish on what they hold, and publish nothing."""
    REVOKE = "revoke"
    """Running requests are aborted, new ones refused until the subject is enabled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a holder is told: from `rev` on the epoch of `subject` is `epoch`."""

    rev: int
    subject: Subject
    epoch: int
    verb: Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The answer to one ask: the epochs as of `rev` may be believed for `ttl_ms` from that ask."""

    ask: str
    rev: int
    ttl_ms: float
    epochs: Mapping[str, int] = field(default_factory=dict[str, int])
    """Subject to epoch, all that were ever raised; empty for a holder that is at `rev` already."""


class Taken(Enum):
    """What a holder made of a grant. Only `ARMED` changes anything."""

    ARMED = "armed"
    OTHER_LIFE = "other-life"
    """It answers an ask of an earlier life, whose boot clock and table are not ours."""
    UNKNOWN_ASK = "unknown-ask"
    """Never asked, answered before, or older than one that was answered."""
    BEHIND = "behind"
    """Its revision is below the one seen."""


class Freshness:
    """The holder's side: what it has seen, and until when it may go by it. Starts with no lease."""

    __slots__ = ("_asks", "_boot_nonce", "_ends_at", "_epochs", "_last_ask_ms", "_rev", "_ttl_ms")

    def __init__(self, boot_nonce: str, *, ttl_ms: float = LEASE_TTL_MS) -> None:
        assert boot_nonce, "a life without a nonce takes the grants of any other"
        assert ":" not in boot_nonce, "an ask is <nonce>:<ms>"
        self._boot_nonce = boot_nonce
        self._ttl_ms = ttl_ms
        self._rev = 0
        self._epochs: dict[str, int] = {}
        self._asks: dict[str, BootInstant] = {}
        """When each open ask was sent, oldest first."""
        self._last_ask_ms = -math.inf
        self._ends_at = BootInstant(-math.inf)

    @property
    def boot_nonce(self) -> str:
        return self._boot_nonce

    @property
    def rev(self) -> int:
        """The revision that all known epochs are complete to."""
        return self._rev

    @property
    def ends_at(self) -> BootInstant:
        """When the lease runs out; minus infinity before the first."""
        return self._ends_at

    def is_valid(self, boot: BootInstant) -> bool:
        """Whether anything may be reused or published now. Ask in the same step as the use."""
        return boot < self._ends_at

    def may_use(self, min_rev: int, boot: BootInstant) -> bool:
        """`is_valid`, and nothing changed up to `min_rev` is unknown here."""
        return self.is_valid(boot) and self._rev >= min_rev

    def epoch(self, subject: str) -> int:
        return self._epochs.get(subject, 0)

    def is_current(self, subjects: Iterable[str], epochs: Iterable[int]) -> bool:
        """Whether none of these subjects was raised past (or is below) the epoch beside it."""
        known = self._epochs  # asked for each block: no call for each of its subjects
        for subject, epoch in zip(subjects, epochs, strict=True):
            if known.get(subject, 0) != epoch:
                return False
        return True

    def ask(self, boot: BootInstant) -> str:
        """A new ask, sent now. A lease that answers it counts from `boot`."""
        shown_ms = max(round(boot, 3), self._last_ask_ms + 0.001)  # two asks never look the same
        self._last_ask_ms = shown_ms
        ask = f"{self._boot_nonce}:{shown_ms:.3f}"
        self._asks[ask] = boot
        if len(self._asks) > MAX_ASKS:
            del self._asks[next(iter(self._asks))]
        return ask

    def take(self, grant: Grant) -> Taken:
        """Believe what a grant says, from when its ask was sent. At most our own `ttl_ms`."""
        if grant.ask.rpartition(":")[0] != self._boot_nonce:
            return Taken.OTHER_LIFE
        if grant.ask not in self._asks:
            return Taken.UNKNOWN_ASK
        if grant.rev < self._rev:
            return Taken.BEHIND
        asked_at = self._asks[grant.ask]
        for ask in list(self._asks):  # those before it could only shorten the lease
            del self._asks[ask]
            if ask == grant.ask:
                break
        for subject, epoch in grant.epochs.items():
            self._raise(subject, epoch)
        self._rev = grant.rev
        ends_at = BootInstant(asked_at + min(grant.ttl_ms, self._ttl_ms))
        self._ends_at = max(self._ends_at, ends_at)
        return Taken.ARMED

    def obey(self, rev: int, subject: str, epoch: int) -> None:
        """Take a change of one epoch. The revision follows only where none was missed between: the
        epochs of those come with the next grant.
        """
        self._raise(subject, epoch)
        if rev == self._rev + 1:
            self._rev = rev

    def _raise(self, subject: str, epoch: int) -> None:
        if epoch > self._epochs.get(subject, 0):
            self._epochs[subject] = epoch


class LeaseGrants:
    """The grantor's side: who may still be believing, and until when by the grantor's own clock.

    A holder is one *life* of a process (`name#nonce`): what the next life acks says nothing about
    an earlier one that may only be paused. A grantor that lost this table (`has_earlier_life`)
    takes everybody for believing through one whole grant time. `began_at`: when this life began,
    before it granted or committed anything.
    """

    __slots__ = ("_clear_from", "_floor_rev", "_grant_ms", "_ttl_ms", "_until")

    def __init__(
        self,
        began_at: BootInstant,
        *,
        has_earlier_life: bool = True,
        ttl_ms: float = LEASE_TTL_MS,
    ) -> None:
        self._ttl_ms = ttl_ms
        self._grant_ms = grant_ms(ttl_ms)
        self._until: dict[str, BootInstant] = {}
        self._floor_rev = 0
        self._clear_from = BootInstant(began_at + self._grant_ms) if has_earlier_life else began_at

    def raise_floor(self, rev: int) -> None:
        """A change is committed: no lease is granted or renewed below it from here on."""
        self._floor_rev = max(self._floor_rev, rev)

    def grant(
        self,
        holder: str,
        ask: str,
        *,
        rev: int,
        epochs: Mapping[str, int],
        now: BootInstant,
        most_ms: float = math.inf,
    ) -> Grant | None:
        """A grant to be sent now, for at most `most_ms`: what is left of the grantor's own lease,
        where it has one. None below the floor, or for a new holder at the bound.
        """
        if rev < self._floor_rev:
            return None
        if holder not in self._until and len(self._until) >= MAX_HOLDERS:
            self._drop_ended(now)
            if len(self._until) >= MAX_HOLDERS:
                return None
        until = BootInstant(now + self._grant_ms)
        self._until[holder] = max(self._until.get(holder, until), until)
        return Grant(ask=ask, rev=rev, ttl_ms=min(self._ttl_ms, most_ms), epochs=epochs)

    def until(self, holder: str, now: BootInstant) -> BootInstant | None:
        """Until when it may be believing what it was granted so far; None if it is not."""
        until = self._until.get(holder)
        return until if until is not None and until > now else None

    def fencing(self, rev: int, now: BootInstant) -> Fencing:
        """Who has to ack `rev` before it is in force. Raises the floor: what is granted from here
        on is at `rev` or above, and not waited for.
        """
        self.raise_floor(rev)
        self._drop_ended(now)
        return Fencing(rev=rev, until=self._until, clear_from=self._clear_from)

    def _drop_ended(self, now: BootInstant) -> None:
        self._until = {name: until for name, until in self._until.items() if until > now}


class Fencing:
    """One change on its way into force: each believing holder acks, or its lease runs out."""

    __slots__ = ("_acked", "_clear_from", "_until", "rev")

    def __init__(
        self, *, rev: int, until: Mapping[str, BootInstant], clear_from: BootInstant
    ) -> None:
        self.rev = rev
        self._until = dict(until)
        self._clear_from = clear_from
        self._acked: dict[str, None] = {}

    def require(self, holder: str) -> None:
        """This one has no lease that could run out: only its ack will do."""
        self._until[holder] = BootInstant(math.inf)

    def expect(self, holder: str, until: BootInstant) -> None:
        """One more has to ack, unless its lease has run out by then."""
        self._until[holder] = max(self._until.get(holder, until), until)

    def ack(self, holder: str) -> None:
        self._acked[holder] = None

    @property
    def acked(self) -> tuple[str, ...]:
        return tuple(self._acked)

    def silent(self) -> tuple[str, ...]:
        """Those who were believing and have not acked."""
        return tuple(name for name in self._until if name not in self._acked)

    def complete_at(self) -> BootInstant:
        """When it is in force if nobody else acks."""
        ends = (self._until[name] for name in self.silent())
        return max(self._clear_from, max(ends, default=self._clear_from))

    def is_complete(self, now: BootInstant) -> bool:
        """Whether nobody can use what was revoked any more."""
        return now >= self.complete_at()
