"""What one worker's events do to the directory: place runs, park orphans, count copies, keep
strikes.

The order of the batches is none of its business; `feed.py` hands them over in order and decides
what a strike or a lost orphan leads to. Must never: attach an orphan to a root, or raise on what a
worker says. Read `feed.py` next.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from trunkline.core.directory import Directory
from trunkline.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BlocksUnnamed,
    EventBatch,
)
from trunkline.core.folding import Folding, Unfolded
from trunkline.core.handover import Rows
from trunkline.core.orphans import Orphans
from trunkline.core.outcomes import StoreOutcome
from trunkline.core.records import Instant, Tier, WorkerId

MAX_UNKNOWN_SALTS = 1_024
MAX_STRIKES = 3
STRIKE_MS = 600_000.0
"""How long a breach counts: a few oddities in a life of weeks are no reason to disbelieve."""


@dataclass(slots=True, kw_only=True)
class FeedStats:
    """Counters of one feed, from its beginning; metrics are made of them."""

    batches: int = 0
    """Live batches received, repeats included."""
    repeats: int = 0
    gaps: int = 0
    replays: int = 0
    replay_failures: int = 0
    late_replays: int = 0
    """Replays whose first batch came after the one asked for: the publisher had overwritten it."""
    relearned: int = 0
    """Times that all entries were dropped because batches are lost for good."""
    resyncs: int = 0
    handovers: int = 0
    """Times that another gateway told all that it knew of the worker."""
    handed_over_blocks: int = 0
    restarts: int = 0
    overflows: int = 0
    """Times that the buffer of live batches was full during a replay."""
    undecodable: int = 0
    wrong_rank: int = 0
    after_leave: int = 0
    """Inputs that came for a worker that has left or registered anew; nothing was done."""
    stored_blocks: int = 0
    removed_blocks: int = 0
    removed_unknown: int = 0
    cleared: int = 0
    parked: int = 0
    parked_joined: int = 0
    parked_dropped: int = 0
    unplaced: int = 0
    """Runs dropped because they descend from blocks that have no place."""
    unnamed: int = 0
    """Blocks with media, prompt embeddings or an adapter: resident, in no chain of ours."""
    unknown_salt: int = 0
    wrong_block_size: int = 0
    conflicts: int = 0
    full: int = 0
    bad_events: int = 0
    ignored_events: int = 0


class Residency:
    """The directory's view of one worker, as its event stream moves it."""

    def __init__(
        self,
        worker: WorkerId,
        directory: Directory,
        *,
        max_parked_runs: int,
        parked_ttl_ms: float,
        folding: Folding | None = None,
    ) -> None:
        """`folding` where the worker's pages are smaller than its blocks."""
        self.stats = FeedStats()
        self._strikes: deque[Instant] = deque(maxlen=MAX_STRIKES)
        self.strike_reason = ""
        self.has_lost_orphans = False
        """A run was given up since this was last set to False: a resync might find its parent."""
        self.watcher: Callable[[BlocksStored], None] | None = None
        """Told of each run that was stored, as whole blocks, before it gets its place."""
        self._worker = worker
        self._directory = directory
        self._orphans = Orphans(max_parked_runs=max_parked_runs, parked_ttl_ms=parked_ttl_ms)
        self._undecodable_in_a_row = 0
        self._unknown_salts: dict[str, None] = {}
        self._folding = folding

    @property
    def parked_count(self) -> int:
        return len(self._orphans)

    @property
    def unplaced_count(self) -> int:
        return self._orphans.unplaced_count

    @property
    def has_unknown_salts(self) -> bool:
        return bool(self._unknown_salts)

    def apply(self, batch: EventBatch, now: Instant) -> bool:
        """Take in the events of a batch, in order; whether the worker dropped all before, so that
        all is known that it holds.
        """
        self._undecodable_in_a_row = 0
        cleared_before = self.stats.cleared
        for event in batch.events:
            match event:
                case BlocksStored():
                    self._on_stored(event, now)
                case BlocksRemoved():
                    self._on_removed(event)
                case AllBlocksCleared():
                    self.stats.cleared += 1
                    self.clear()
                case BlocksUnnamed():
                    self._note_unnamed(event.hashes)
                case _:
                    assert_never(event)
        self.stats.ignored_events += batch.ignored_count
        if batch.bad_count:
            self.stats.bad_events += batch.bad_count
            self.strike(f"batch {batch.seq} has {batch.bad_count} events that make no sense", now)
        return self.stats.cleared > cleared_before

    def undecodable(self) -> int:
        """A batch was given up as it could not be decoded; how many in a row by now."""
        self._undecodable_in_a_row += 1
        return self._undecodable_in_a_row

    def clear(self) -> None:
        """The worker holds nothing, or nothing is known of what it holds."""
        self._directory.clear(self._worker)
        self._orphans.clear()
        self._unknown_salts.clear()

    def forget_orphans(self) -> None:
        """The worker's engine is another one; the directory knows already."""
        self._orphans.clear()
        self._unknown_salts.clear()
        self.has_lost_orphans = False
        if self._folding is not None:
            self._folding.clear()

    # -- what another gateway knows ----------------------------------------------------------------

    @property
    def is_folding(self) -> bool:
        """Pages are taken together to blocks here: what is known of them cannot be handed over."""
        return self._folding is not None

    def unplaced(self) -> array[int]:
        return self._orphans.unplaced()

    def adopt(self, rows: Rows) -> array[int] | None:
        """Take in a slice of what another gateway knows at this very batch; the hashes of what has
        no place here, or None where it disagrees, or there is no room.
        """
        if self.parked_count:
            self._unpark(rows)
        outcome, left_out = self._directory.adopt(self._worker, rows)
        if outcome is not StoreOutcome.STORED:
            return None
        self.stats.handed_over_blocks += rows.count - len(left_out)
        return left_out

    def _unpark(self, rows: Rows) -> None:
        """What waits here for its parent is among the copies that are told of it: counted twice, it
        would outlive its removal.
        """
        for name in rows.hashes():
            for tier in Tier:
                while self._orphans.remove(name, tier):
                    pass

    def complete(self, unplaced: array[int]) -> None:
        """What was taken in is all that the other one knew. What waited here for a parent is in it,
        or has no place.
        """
        self.stats.handovers += 1
        self._orphans.clear()
        self._orphans.add_unplaced(unplaced)
        self.has_lost_orphans = False
        for salt in [salt for salt in self._unknown_salts if self._directory.knows_salt(salt)]:
            del self._unknown_salts[salt]

    @property
    def strike_count(self) -> int:
        """Breaches of the protocol that counted when the last one came; at most three."""
        return len(self._strikes)

    def strike(self, reason: str, now: Instant) -> None:
        """Note a breach of the protocol."""
        while self._strikes and self._strikes[0] <= now - STRIKE_MS:
            self._strikes.popleft()
        self._strikes.append(now)
        self.strike_reason = reason

    def expire(self, now: Instant) -> None:
        """Give up the orphans whose parents did not come in time."""
        dropped_count = self._orphans.expire(now)
        if dropped_count:
            self.stats.parked_dropped += dropped_count
            self.has_lost_orphans = True

    def next_expiry(self) -> Instant | None:
        return self._orphans.next_expiry()

    def knows_a_salt_now(self) -> bool:
        """Whether a salt that was unknown when its blocks came has been admitted since."""
        return any(self._directory.knows_salt(salt) for salt in self._unknown_salts)

    # -- stored ------------------------------------------------------------------------------------

    def _on_stored(self, event: BlocksStored, now: Instant) -> None:
        if not event.hashes or len(event.tokens) != len(event.hashes) * event.block_tokens:
            self.stats.bad_events += 1
            self.strike(
                f"a run has {len(event.tokens)} tokens "
                f"for {len(event.hashes)} blocks of {event.block_tokens}",
                now,
            )
            return
        names = set(event.hashes)
        if len(names) < len(event.hashes) or event.parent in names:
            self.stats.conflicts += 1
            self.strike("a block is its own ancestor", now)
            return
        if event.adapter is not None:
            self._note_unnamed(event.hashes)
            return
        folding = self._folding
        if folding is not None and event.block_tokens == folding.page_tokens:
            folded = folding.stored(event)
            if isinstance(folded, Unfolded):
                if folded is Unfolded.ORPHAN:
                    self.stats.parked_dropped += 1
                    self.has_lost_orphans = True
                return
            event = folded
        if self.watcher is not None:
            self.watcher(event)
        waiting = deque([event])
        while waiting:
            run = waiting.popleft()
            if self._place(run, now):
                joined = self._orphans.take_children(run.hashes)
                self.stats.parked_joined += len(joined)
                waiting.extend(joined)

    def _note_unnamed(self, hashes: array[int]) -> None:
        """Blocks that are resident, and that no prompt of ours may count on."""
        self.stats.unnamed += len(hashes)
        self._orphans.add_unplaced(hashes)

    def _place(self, run: BlocksStored, now: Instant) -> bool:
        """Put one run where it belongs; True when all of it is in the directory."""
        match self._directory.stored(self._worker, run):
            case StoreOutcome.STORED:
                self.stats.stored_blocks += len(run.hashes)
                self._orphans.drop_unplaced(run.hashes)
                return True
            case StoreOutcome.UNKNOWN_PARENT:
                self._park(run, now)
            case StoreOutcome.UNKNOWN_SALT:
                self.stats.unknown_salt += 1
                self._orphans.add_unplaced(run.hashes)
                if run.salt is not None and len(self._unknown_salts) < MAX_UNKNOWN_SALTS:
                    self._unknown_salts[run.salt] = None
            case StoreOutcome.WRONG_BLOCK_SIZE:
                self.stats.wrong_block_size += 1
                self._orphans.add_unplaced(run.hashes)
                # Slower tiers may store several blocks as one: no breach, only of no use.
                if run.tier is Tier.DEVICE:
                    self.strike(
                        f"blocks of {run.block_tokens} tokens, registered with another size", now
                    )
            case StoreOutcome.CONFLICT:
                self.stats.conflicts += 1
                self.strike("one engine hash names two different blocks", now)
            case StoreOutcome.FULL:
                self.stats.full += 1
                self._orphans.add_unplaced(run.hashes)
        return False

    def _park(self, run: BlocksStored, now: Instant) -> None:
        assert run.parent is not None, "a run at the root is never an orphan"
        if self._orphans.is_unplaced(run.parent):
            self.stats.unplaced += 1
            self._orphans.add_unplaced(run.hashes)
        elif self._orphans.park(run, now):
            self.stats.parked += 1
        else:
            self.stats.parked_dropped += 1
            self.has_lost_orphans = True
            self._orphans.add_unplaced(run.hashes)

    # -- removed -----------------------------------------------------------------------------------

    def _on_removed(self, event: BlocksRemoved) -> None:
        hashes = event.hashes
        if self.parked_count:
            hashes = array("Q", (h for h in hashes if not self._removed_parked(h, event.tier)))
        known_count = self._directory.removed(
            self._worker, BlocksRemoved(hashes=hashes, tier=event.tier)
        )
        self.stats.removed_blocks += known_count
        if self._folding is None:  # else most are pages that name no block
            self.stats.removed_unknown += len(hashes) - known_count
        self._orphans.drop_unplaced(event.hashes)

    def _removed_parked(self, engine_hash: int, tier: Tier) -> bool:
        """Take one copy of a block that is parked too, the directory's copy first."""
        if not self._orphans.names(engine_hash, tier):
            return False
        single = BlocksRemoved(hashes=array("Q", (engine_hash,)), tier=tier)
        if not self._directory.removed(self._worker, single):
            self._orphans.remove(engine_hash, tier)
        self.stats.removed_blocks += 1
        return True
