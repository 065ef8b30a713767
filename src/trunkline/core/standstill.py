"""A feed that stands still at one batch, so that what is known as of it can be handed over whole.

    who tells   stands still; its slices are all as of the batch it stands at; goes on
    who asks    stands still; is told how far the other one is; goes on to that very batch and
                stands there; takes the slices in; goes on

Both know the batch by its fingerprint: of another life of the engine nothing is taken. What the
slices say is true at that batch, and what this feed knows there is true as well, so that both
together are. Batches that come meanwhile wait in the feed's buffer. Whatever else happens to the
feed (a gap, a restart, too many batches, too long a time) ends the standstill, and the feed goes on
as if there had been none. Must never: take a slice in at another batch than it is of. Read
`feed.py` for who asks before each batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from trunkline.core.handover import Rows, Standing
from trunkline.core.orphans import MAX_UNPLACED_BLOCKS
from trunkline.core.records import Instant
from trunkline.core.recovery import Recovery
from trunkline.core.residency import Residency
from trunkline.core.sequence import Sequence

MAX_STANDSTILL_MS = 10_000.0
LOOK_MS = 50.0
"""How late a feed notices at most that it may go on."""
MAX_WAITING_BATCHES = 1_024
MAX_WAITING_BYTES = 8 << 20
"""More batches than that end the standstill: what is heard now is worth more than what was."""


class Standstill:
    """Of one feed. Each standstill has a token: one that is over does nothing any more."""

    def __init__(
        self,
        sequence: Sequence,
        residency: Residency,
        recovery: Recovery,
        is_current: Callable[[], bool],
    ) -> None:
        """`is_current`: the worker is in the directory, in the life that the feed is of."""
        self._is_current = is_current
        self._sequence = sequence
        self._residency = residency
        self._recovery = recovery
        self._token = 0
        self._stop_at: int | None = None
        self._ends_at = self._look_at = Instant(0.0)
        self._unplaced = array("Q")

    # -- what the feed asks ------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        """The next batch must wait."""
        expected = self._sequence.expected
        return self._stop_at is not None and expected is not None and expected > self._stop_at

    @property
    def next_look(self) -> Instant | None:
        return None if self._stop_at is None else min(self._look_at, self._ends_at)

    def look(self, now: Instant) -> None:
        """Time has passed, or batches came: it may be enough."""
        if self._stop_at is None:
            return
        is_much = self._sequence.holds_more(MAX_WAITING_BATCHES, MAX_WAITING_BYTES)
        if now >= self._ends_at or is_much:
            self.end()
        else:
            self._look_at = Instant(now + LOOK_MS)

    def end(self) -> None:
        self._stop_at = None
        self._unplaced = array("Q")

    # -- who hands over, or takes ------------------------------------------------------------------

    def begin(self, now: Instant) -> int | None:
        """Stand still at the batch that was applied last; the token. None where another standstill
        is on, or nothing is in order now: no batch yet, some that wait, pages that are no blocks.
        """
        is_settled = (
            self._sequence.witness() is not None
            and not self._sequence.buffered_count
            and not self._residency.is_folding
        )
        expected = self._sequence.expected
        if self._stop_at is not None or not is_settled or not self._is_current():
            return None
        assert expected is not None, "a batch was applied"
        self._token += 1
        self._stop_at = expected - 1
        self._ends_at = Instant(now + MAX_STANDSTILL_MS)
        self._look_at = Instant(now + LOOK_MS)
        return self._token

    def standing(self, token: int) -> Standing | None:
        """Where it stands; None while it has to go on, and where it is over."""
        if not self.is_on(token) or not self.holds:
            return None
        place = self._sequence.place()
        if place is None:
            return None
        return Standing(seq=place[0], fingerprint=place[1], base=self.knows_since)

    def go_to(self, token: int, seq: int) -> bool:
        """Go on to a later batch and stand there; False where it is over, or is past that."""
        if not self.is_on(token) or self._stop_at is None or seq < self._stop_at:
            return False
        self._stop_at = seq
        return True

    def adopt(self, token: int, rows: Rows, unplaced: array[int], at: Standing) -> bool:
        """Take in a slice that is as of the batch at which this feed stands; False where it is
        another, where the standstill is over, or where the slice disagrees with what is known.
        """
        here = self.standing(token)
        if here is None or (here.seq, here.fingerprint) != (at.seq, at.fingerprint):
            return False
        left_out = self._residency.adopt(rows)
        if left_out is None:
            return False
        for more in (left_out, unplaced):
            self._unplaced += more[: MAX_UNPLACED_BLOCKS - len(self._unplaced)]
        return True

    def complete(self, token: int, at: Standing) -> bool:
        """All slices are in: from here on as much is known as whoever told them knew."""
        if self.standing(token) is None:
            return False
        self._residency.complete(self._unplaced)
        if at.base == 0:
            self._sequence.begin_whole(0)
        else:
            self._sequence.base = min(self._sequence.base or at.base, at.base)
        self._recovery.relearn_until = None
        self.end()
        return True

    def go_on(self, token: int) -> None:
        if self.is_on(token):
            self.end()

    def is_wanted(self) -> bool:
        """Something is missing here that another gateway may know."""
        return self.knows_since > 0 or self._residency.knows_a_salt_now()

    # -- what is known -----------------------------------------------------------------------------

    @property
    def knows_since(self) -> int:
        """From which batch on nothing is missing; 0 where all is known."""
        if self._sequence.is_whole:
            return 0
        return max(self._sequence.base or 0, 1)

    @property
    def lacks_namespaces(self) -> bool:
        """Blocks came under salts that were not known here, and were let go."""
        return self._residency.has_unknown_salts

    def unplaced(self) -> array[int]:
        """Engine hashes of blocks that are there, and that no chain of ours names."""
        return self._residency.unplaced()

    def is_on(self, token: int) -> bool:
        return self._stop_at is not None and token == self._token and self._is_current()
