"""Who holds which blocks, and for how long: runs under tokens that are used once.

Must never: hold a block for ever, or let a token release twice. Not safe for threads by itself:
the store's lock is around every call. Read `store.py` next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trunkline.core.records import Instant
from trunkline.kv.catalogue import Catalogue
from trunkline.kv.deadlines import Deadlines
from trunkline.kv.entries import Entry, Holding

TOKEN_BYTES = 16


@dataclass(slots=True, eq=False)
class _Pin:
    entries: list[Entry]
    holder: str
    holdings: set[Holding]
    """Of the entries."""

    @property
    def is_reachable(self) -> bool:
        """Whether all of it can be found. Known without a look at each, as it is asked for every
        chunk that is sent: what leaves the index takes along what is behind it.
        """
        is_revoked = any(holding.erasure is not None for holding in self.holdings)
        return not is_revoked and self.entries[-1].is_reachable


class PinTable:
    """At most `max_pins` runs at a time."""

    def __init__(
        self, catalogue: Catalogue, draw: Callable[[int], bytes], *, max_pins: int
    ) -> None:
        self._catalogue = catalogue
        self._draw = draw
        self._max_pins = max_pins
        self._pins: dict[bytes, _Pin] = {}
        self._holders: dict[str, dict[bytes, None]] = {}
        self._ends = Deadlines()
        self.expired_count = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def is_full(self) -> bool:
        return len(self._pins) >= self._max_pins

    def hold(self, entries: Sequence[Entry], until: Instant, holder: str) -> bytes:
        """The token of a run that is held from now on."""
        assert entries
        assert not self.is_full
        token = self._draw(TOKEN_BYTES)
        assert token not in self._pins
        for entry in entries:
            self._catalogue.pin(entry)
        holdings = {entry.holding for entry in entries}
        self._pins[token] = _Pin(list(entries), holder, holdings)
        self._holders.setdefault(holder, {})[token] = None
        self._ends.add(token, until)
        return token

    def is_live(self, token: bytes) -> bool:
        return token in self._pins

    def merge(self, token: bytes, other: bytes) -> bool:
        """Hold two runs under the first token; False where that ran out or is not all to be found
        any more, and the other is given back.
        """
        first = self._pins.get(token)
        if first is None or other not in self._pins or not first.is_reachable:
            self.release(other)
            return False
        self._ends.drop(other)
        pin = self._pins.pop(other)
        self._forget_holder(pin.holder, other)
        first.entries.extend(pin.entries)
        first.holdings |= pin.holdings
        return True

    def shorten(self, token: bytes, count: int) -> bool:
        """Hold only so many leading blocks of a run; False where nothing is held any more."""
        pin = self._pins.get(token)
        if pin is None:
            return False
        for entry in pin.entries[count:]:
            self._catalogue.unpin(entry)
        del pin.entries[count:]
        if not pin.entries:
            self.release(token)
        return bool(pin.entries)

    def release(self, token: bytes) -> bool:
        """False where nothing is held under that token."""
        if token not in self._pins:
            return False
        self._ends.drop(token)
        self._drop(token)
        return True

    def release_holder(self, holder: str) -> int:
        """How many runs it still held."""
        tokens = list(self._holders.get(holder, ()))
        for token in tokens:
            self.release(token)
        return len(tokens)

    def renew(self, token: bytes, until: Instant) -> bool:
        """False where it ran out; and where a block of it was taken out of the index or condemned:
        it is held until its end, but no longer.
        """
        pin = self._pins.get(token)
        if pin is None or not pin.is_reachable:
            return False
        self._ends.extend(token, until)
        return True

    def expire(self, now: Instant) -> None:
        for token in self._ends.due(now):
            self.expired_count += 1
            self._drop(token)

    def _drop(self, token: bytes) -> None:
        pin = self._pins.pop(token)
        for entry in pin.entries:
            self._catalogue.unpin(entry)
        self._forget_holder(pin.holder, token)

    def _forget_holder(self, holder: str, token: bytes) -> None:
        tokens = self._holders[holder]
        del tokens[token]
        if not tokens:
            del self._holders[holder]
