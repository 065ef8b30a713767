"""How long a worker is doubted after a loss, and when a resync is worth its price.

A resync clears a worker and replays the publisher's ring from its beginning, since copies are
counted and a replay over live state would count twice. It helps only where the ring reaches
further back than what we began with. Owns times and flags, no action. Read `feed.py` next.
"""

from __future__ import annotations

from trunkline.core.records import Instant
from trunkline.core.repair import MAX_REPAIRS, Pause, ReplayKind
from trunkline.core.residency import Residency

RELEARN_PAUSE_MS = 1_000.0
MAX_RELEARN_PAUSE_MS = 60_000.0
RESYNC_PAUSE_MS = 60_000.0
MAX_RESYNC_PAUSE_MS = 3_600_000.0
SALT_CHECK_MS = 1_000.0


class Recovery:
    """One feed's doubts. `relearn_until` is None while there are none."""

    def __init__(self, residency: Residency, *, can_replay: bool) -> None:
        self.relearn_until: Instant | None = None
        self.has_ring_start = False
        """We began with the oldest batch of the ring: it only moves on from there."""
        self.is_resync_useless = False
        """The ring begins later than we did: we know more than the publisher can tell."""
        self.is_recheck_due = False
        """A replay has to show that nothing was missed."""
        self._repair_count = 0
        self._residency = residency
        self._can_replay = can_replay
        self._relearn_pause = Pause(RELEARN_PAUSE_MS, MAX_RELEARN_PAUSE_MS)
        self._calm_at = Instant(0.0)
        self._resync_pause = Pause(RESYNC_PAUSE_MS, MAX_RESYNC_PAUSE_MS)
        self._resync_at = Instant(0.0)
        self._salt_check_at = Instant(0.0)

    def lost(self, now: Instant) -> None:
        """Everything known was dropped. Losses in a row lengthen the doubt."""
        self.is_resync_useless = False
        if self.relearn_until is not None:
            return
        if now >= self._calm_at:
            self._relearn_pause.reset()
        self.relearn_until = Instant(now + self._relearn_pause.take())
        self._calm_at = Instant(self.relearn_until + MAX_RELEARN_PAUSE_MS)

    def restarted(self, now: Instant) -> None:
        """Another life of the engine: the doubts were about the old one."""
        self.relearn_until = None
        self._repair_count = 0
        self.has_ring_start = self.is_resync_useless = False
        self._resync_at = now
        self._resync_pause.reset()

    def take_repair(self) -> bool:
        """Whether to ask once more for what is missing in one stretch of buffered batches."""
        self._repair_count += 1
        can_try = self._can_replay and self.relearn_until is None
        return can_try and self._repair_count <= MAX_REPAIRS

    def repaired(self) -> None:
        """Nothing is missing in it any more, or it was given up."""
        self._repair_count = 0

    def next_replay(self, now: Instant) -> ReplayKind | None:
        """Nothing is pending: the doubt ends if its time is over; what there is time for now."""
        if self.relearn_until is not None and now >= self.relearn_until:
            self.relearn_until = None
        if self.is_recheck_due:
            self.is_recheck_due = False
            return ReplayKind.REPAIR
        return ReplayKind.RESYNC if self.take_resync(now) else None

    def take_resync(self, now: Instant) -> bool:
        """Whether to resync now; if so, the next one waits for a minute, then two, four, ..."""
        if not self._may_resync() or now < self._resync_at or not self._wants_resync(now):
            return False
        self._residency.has_lost_orphans = False
        self._resync_at = Instant(now + self._resync_pause.take())
        return True

    def next_due(self) -> Instant | None:
        """When time alone changes something here."""
        if self.relearn_until is not None:
            return self.relearn_until
        if self._may_resync() and self._has_curable_orphans():
            return self._resync_at
        if self._may_resync() and self._residency.has_unknown_salts:
            return max(self._resync_at, self._salt_check_at)
        return None

    def _may_resync(self) -> bool:
        is_possible = self._can_replay and not self.is_resync_useless
        return is_possible and self.relearn_until is None

    def _wants_resync(self, now: Instant) -> bool:
        if self._has_curable_orphans():
            return True
        if now < self._salt_check_at:
            return False
        self._salt_check_at = Instant(now + SALT_CHECK_MS)
        return self._residency.knows_a_salt_now()

    def _has_curable_orphans(self) -> bool:
        """A run was given up whose parent the publisher may still hold."""
        return self._residency.has_lost_orphans and not self.has_ring_start
