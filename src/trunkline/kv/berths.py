"""The stagings of a store, each until it is published or given back.

    open ──► staged ──(publish: closing)──► closed
               │ time is over, or its writer cannot be stopped
               ▼
           quarantined ──(told that nobody writes any more)──► closed

Must never: give memory away that somebody may still write to. Not safe for threads by itself: the
store's lock is around every call. Read `store.py` next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from trunkline.core.records import Instant
from trunkline.kv.catalogue import Catalogue
from trunkline.kv.deadlines import Deadlines
from trunkline.kv.entries import Erasure
from trunkline.kv.records import Owner
from trunkline.kv.staging import Staging


@dataclass(slots=True, eq=False)
class Berth:
    """One staging, and what the store thinks of it."""

    staging: Staging
    is_closing: bool = False
    """Being published: its token is used."""
    is_quarantined: bool = False
    is_over: bool = False
    """Quarantined because its time ended: `abandon` says that nobody writes any more."""
    erasure: Erasure | None = None


class Berths:
    """All stagings that have memory."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._berths: dict[bytes, Berth] = {}
        self._ends = Deadlines()

    def open(self, staging: Staging) -> None:
        assert staging.token not in self._berths
        self._catalogue.census.staged += len(staging.slots)
        self._berths[staging.token] = Berth(staging)
        self._ends.add(staging.token, staging.until)

    def begin(self, token: bytes) -> Berth | None:
        """Use the token to publish; None where it was used, or its time is over."""
        berth = self._berths.get(token)
        if berth is None or berth.is_closing or berth.is_quarantined:
            return None
        berth.is_closing = True
        self._ends.drop(token)
        return berth

    def abandon(self, token: bytes, *, is_written_to: bool) -> bool:
        """Give it back, or set it aside while somebody may write to it; False where it was used."""
        berth = self._berths.get(token)
        if berth is None or berth.is_closing or berth.is_quarantined is not berth.is_over:
            return False
        if not berth.is_over:
            self._ends.drop(token)
        if is_written_to:
            self._set_aside(berth)
            berth.is_over = False
        else:
            self.close(berth)
        return True

    def unquarantine(self, token: bytes) -> bool:
        berth = self._berths.get(token)
        if berth is None or not berth.is_quarantined or berth.is_over:
            return False
        self.close(berth)
        return True

    def expire(self, now: Instant) -> None:
        for token in self._ends.due(now):
            berth = self._berths[token]
            self._set_aside(berth)
            berth.is_over = True

    def condemn(self, is_stale: Callable[[Owner], bool], erasure: Erasure) -> None:
        for berth in self._berths.values():
            if berth.erasure is None and is_stale(berth.staging.owner):
                berth.erasure = erasure
                erasure.aborted += 1
                erasure.condemn(len(berth.staging.slots), self._catalogue.block_bytes)

    def close(self, berth: Berth, taken: Collection[int] = ()) -> None:
        """Its slots, but those by index that became blocks, are nobody's any more."""
        census = self._catalogue.census
        for index, slot in enumerate(berth.staging.slots):
            if index in taken:
                continue
            if berth.is_quarantined:
                census.quarantined -= 1
            else:
                census.staged -= 1
            self._catalogue.vacate(slot, berth.staging.owner, berth.erasure)
        del self._berths[berth.staging.token]

    def _set_aside(self, berth: Berth) -> None:
        if not berth.is_quarantined:
            berth.is_quarantined = True
            self._catalogue.census.staged -= len(berth.staging.slots)
            self._catalogue.census.quarantined += len(berth.staging.slots)
