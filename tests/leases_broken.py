"""Leases with one rule broken each, for showing that models and schedules would notice."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trunkline.core.freshness import Freshness, Grant, LeaseGrants, Taken
from trunkline.core.records import BootInstant


class CountsFromReceipt(Freshness):
    """A lease from when the grant came, not from when it was asked for; the test sets `now`."""

    __slots__ = ("now",)

    def __init__(self, boot_nonce: str) -> None:
        super().__init__(boot_nonce)
        self.now = BootInstant(0.0)

    def take(self, grant: Grant) -> Taken:
        taken = super().take(grant)
        if taken is Taken.ARMED:
            self._ends_at = max(self._ends_at, BootInstant(self.now + self._ttl_ms))
        return taken


class TakesOtherLives(Freshness):
    """Believes the answer to an ask of any life, counted from the time written in it."""

    __slots__ = ()

    def take(self, grant: Grant) -> Taken:
        nonce, _, asked_ms = grant.ask.rpartition(":")
        if nonce != self.boot_nonce:
            self._asks[grant.ask] = BootInstant(float(asked_ms))
            kept, self._boot_nonce = self._boot_nonce, nonce
            try:
                return super().take(grant)
            finally:
                self._boot_nonce = kept
        return super().take(grant)


class LowersRevisions(Freshness):
    """Believes the newest message, not the newest revision."""

    __slots__ = ()

    def take(self, grant: Grant) -> Taken:
        is_known = grant.ask in self._asks
        if is_known and grant.rev < self._rev:
            self._rev = grant.rev
            self._epochs = dict(grant.epochs)
        return super().take(grant)


class GrantsWithoutMargin(LeaseGrants):
    """Takes the holder's three seconds for its own."""

    __slots__ = ()

    def __init__(
        self, began_at: BootInstant, *, has_earlier_life: bool = True, ttl_ms: float = 3_000.0
    ) -> None:
        super().__init__(began_at, has_earlier_life=has_earlier_life, ttl_ms=ttl_ms)
        self._grant_ms = ttl_ms
        if has_earlier_life:
            self._clear_from = BootInstant(began_at + ttl_ms)


class GrantsBelowTheFloor(LeaseGrants):
    """Renews what was believed before the commit."""

    __slots__ = ()

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
        """As if the table was still the one before the newest change."""
        self._floor_rev = 0
        rev = max(0, rev - 1)
        return super().grant(holder, ask, rev=rev, epochs={}, now=now, most_ms=most_ms)


class AcksAtOnce(LeaseGrants):
    """Forgets that an earlier life of it may have granted."""

    __slots__ = ()

    def __init__(self, began_at: BootInstant, *, has_earlier_life: bool = True) -> None:
        super().__init__(began_at, has_earlier_life=False)
