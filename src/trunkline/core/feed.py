"""Puts one worker's event stream in order: gaps, restarts, replays, and when to believe it.

Pure: batches and the time go in, the `Directory` moves, actions come out. One picture of the
states:

    live ──gap, reconnect──► replaying ──repaired──► live     (live batches wait, in order)
      ▲                          │ lost for good: clear
      └──── pause over ──── relearning ◄── no replay, or it begins late, has a hole, takes too long
    three breaches of the protocol within ten minutes: blind, until the worker registers again

Must never: apply a live batch while a replay is open (a replayed Stored after its Removed would
come back to life), or touch a worker that has left since. Read `residency.py` for what a batch
does, `actions.py` for what the shell is asked.
"""

from __future__ import annotations

from collections.abc import Callable

from trunkline.core.actions import Action, FeedBlind, FeedCutOff, RequestReplay, WorkerRestarted
from trunkline.core.belief import Belief
from trunkline.core.directory import MAX_EVENT_AGE_MS, Directory
from trunkline.core.events import BlocksStored, EventBatch
from trunkline.core.folding import Folding
from trunkline.core.records import Instant, WorkerId
from trunkline.core.recovery import Recovery
from trunkline.core.repair import (
    DRAIN_BATCHES,
    DRAIN_BYTES,
    MAX_BUFFERED_BYTES,
    FeedLimits,
    FeedState,
    OpenReplay,
    ReplayKind,
)
from trunkline.core.residency import MAX_STRIKES, FeedStats, Residency
from trunkline.core.sequence import Sequence
from trunkline.core.standstill import Standstill


class WorkerFeed:
    """The feed of one worker incarnation. The worker must be in the directory; make a new feed
    after `join`.

    Each input returns what the shell has to do. `has_backlog` says that another `tick` should
    follow soon, `next_tick` when one is due at the latest.
    """

    def __init__(
        self,
        worker: WorkerId,
        directory: Directory,
        *,
        rank: int | None = None,
        can_replay: bool = True,
        limits: FeedLimits | None = None,
        folding: Folding | None = None,
    ) -> None:
        """`folding` where the worker's pages are smaller than its blocks."""
        self.worker = worker
        self.reason = ""
        """Why the feed is not, or was last not, live."""
        self._directory = directory
        self._incarnation = directory.incarnation(worker)
        self._rank = rank
        self._can_replay = can_replay
        self._limits = limits = limits or FeedLimits()
        self._residency = Residency(
            worker,
            directory,
            max_parked_runs=limits.max_parked_runs,
            parked_ttl_ms=limits.parked_ttl_ms,
            folding=folding,
        )
        self._sequence = Sequence()
        self._replay: OpenReplay | None = None
        self._replay_count = 0
        self._is_rebuilding = False
        self._belief = Belief(worker, directory)
        self._is_blind = False
        self._recovery = Recovery(self._residency, can_replay=can_replay)
        self.standstill = Standstill(
            self._sequence, self._residency, self._recovery, self._is_current
        )
        """To be begun only while `is_settled`."""
        self._actions: list[Action] = []

    # -- what the shell and the operator may ask ---------------------------------------------------

    @property
    def stats(self) -> FeedStats:
        return self._residency.stats

    def watch(self, watcher: Callable[[BlocksStored], None] | None) -> None:
        """Have a look at each run that is stored from now on, until None is given."""
        self._residency.watcher = watcher

    @property
    def state(self) -> FeedState:
        if not self._is_current():
            return FeedState.ENDED
        if self._is_blind:
            return FeedState.BLIND
        if self._recovery.relearn_until is not None:
            return FeedState.RELEARNING
        if self._belief.is_silent:
            return FeedState.SILENT
        is_live = self.standstill.holds or not self._is_catching_up()
        return FeedState.LIVE if is_live else FeedState.REPLAYING

    @property
    def is_settled(self) -> bool:
        """What it knows is as of the last batch that it heard."""
        is_pending = self._is_rebuilding or self._is_catching_up()
        return not is_pending and self.state in (FeedState.LIVE, FeedState.RELEARNING)

    @property
    def replay_id(self) -> int | None:
        """The replay whose batches are wanted; None while there is none."""
        return None if self._replay is None else self._replay.replay_id

    @property
    def has_backlog(self) -> bool:
        """Buffered batches can be applied now: call `tick` again soon."""
        return bool(self._sequence.buffered_count) and not (self._replay or self.standstill.holds)

    @property
    def buffered_count(self) -> int:
        return self._sequence.buffered_count

    @property
    def parked_count(self) -> int:
        return self._residency.parked_count

    @property
    def next_tick(self) -> Instant | None:
        """When time alone will change something; None while nothing is pending."""
        if not self._is_current() or self._is_blind:
            return None
        # Who stands still, or waits for a replay, does nothing else.
        own = None if self.standstill.holds else self._recovery.next_due()
        own = own if self._replay is None else self._replay.deadline
        look = self.standstill.next_look
        due = (own, look, self._residency.next_expiry(), self._belief.next_due())
        return min((instant for instant in due if instant is not None), default=None)

    # -- inputs ------------------------------------------------------------------------------------

    def joined(self, now: Instant) -> list[Action]:
        """The subscription is set up: learn what the publisher's ring still holds."""
        if self._is_current():
            self._directory.note_event_age(self.worker, MAX_EVENT_AGE_MS)  # until one has come
            if self._can_replay:
                self._open(ReplayKind.LEARN, now)
        return self._finish(now)

    def live(self, batch: EventBatch, now: Instant, *, age_ms: float = 0.0) -> list[Action]:
        """A batch came in on the subscription, `age_ms` after it was sent by both ends' wall
        clocks.

        The age decides nothing but how long a decision of ours counts without confirmation.
        """
        if self._is_wanted(batch):
            self.stats.batches += 1
            self._directory.note_event_age(self.worker, age_ms)
            self._on_live(batch.seq, batch.fingerprint, batch, now)
        return self._finish(now)

    def undecodable(self, seq: int | None, now: Instant, *, fingerprint: int = 0) -> list[Action]:
        """A message came that is no batch. With a `seq` it is a gap: its removals would be lost."""
        if self._is_current() and not self._is_blind:
            self.stats.undecodable += 1
            if seq is not None:
                self._on_live(seq, fingerprint, None, now)
        return self._finish(now)

    def replayed(self, batch: EventBatch, replay_id: int, now: Instant) -> list[Action]:
        """A batch came in answer to a replay. Answers to a replay that is over are ignored."""
        if self._is_wanted(batch) and self.replay_id == replay_id:
            self._on_replayed(batch.seq, batch.fingerprint, batch, now)
        return self._finish(now)

    def replay_undecodable(
        self, seq: int | None, replay_id: int, now: Instant, *, fingerprint: int = 0
    ) -> list[Action]:
        """A message of a replay is no batch: asking again would bring the same bytes."""
        if self._is_current() and self.replay_id == replay_id:
            self.stats.undecodable += 1
            if seq is not None:
                self._on_replayed(seq, fingerprint, None, now)
        return self._finish(now)

    def replay_ended(self, replay_id: int, now: Instant) -> list[Action]:
        """The publisher has sent all it holds."""
        if self._is_current() and self.replay_id == replay_id:
            self._on_replay_ended(now)
        return self._finish(now)

    def replay_failed(self, replay_id: int, reason: str, now: Instant) -> list[Action]:
        """The replay cannot be had: no answer, no socket."""
        if self._is_current() and self.replay_id == replay_id:
            self._fail_replay(reason, now)
        return self._finish(now)

    def disconnected(self, now: Instant) -> list[Action]:
        """The connection broke: what changes there now is not heard of."""
        if self._is_current() and not self._is_blind:
            self._belief.disconnected(now)
        return self._finish(now)

    def reconnected(self, now: Instant) -> list[Action]:
        """The connection was made anew: batches may be missing, and it may be another life of the
        engine. A replay tells; without one nothing does, so that all must be learnt anew.
        """
        if self._is_current() and not self._is_blind:
            self._actions += self._belief.reconnected()
            if self._can_replay:
                self._recovery.is_recheck_due = True
            elif self._sequence.has_begun:
                self._relearn("the connection was made anew, and no replay is offered", now)
                self._sequence.begin()
        return self._finish(now)

    def tick(self, now: Instant) -> list[Action]:
        """Time has passed: expire orphans, end a replay that takes too long, work off the
        backlog.
        """
        if self._is_current() and self._replay is not None and now >= self._replay.deadline:
            self._fail_replay(f"no answer within {self._limits.replay_timeout_ms:.0f} ms", now)
        return self._finish(now)

    # -- live batches ------------------------------------------------------------------------------

    def _on_live(self, seq: int, fingerprint: int, batch: EventBatch | None, now: Instant) -> None:
        if not self._sequence.grows(seq):
            if self._sequence.is_repeat(seq, fingerprint):
                self.stats.repeats += 1
                return
            self._restart(now)
            if seq > 0 and self._can_replay:
                self._open(ReplayKind.LEARN, now)
        if self._is_catching_up():
            self._hold(seq, fingerprint, batch, now)
        elif batch is not None and self._sequence.follows(seq):
            self._apply(batch, now)
        else:
            self._on_gap(seq, fingerprint, batch, now)

    def _on_gap(self, seq: int, fingerprint: int, batch: EventBatch | None, now: Instant) -> None:
        self.stats.gaps += 1
        missing = self._sequence.expected
        self._sequence.hold(seq, fingerprint, batch)
        if self._recovery.relearn_until is not None or not self._can_replay:
            self._relearn(f"batches from {missing} on are lost (next is {seq})", now)
        else:
            self._open(ReplayKind.REPAIR, now)

    def _hold(self, seq: int, fingerprint: int, batch: EventBatch | None, now: Instant) -> None:
        self._sequence.hold(seq, fingerprint, batch)
        if self._sequence.holds_more(self._limits.max_buffered_batches, MAX_BUFFERED_BYTES):
            self.stats.overflows += 1
            self._sequence.keep_newest()
            self._relearn("too many batches wait for a replay", now)

    def _apply(self, batch: EventBatch, now: Instant) -> None:
        assert self._sequence.follows(batch.seq), "batches are applied in order"
        assert not self._is_blind
        self._sequence.advance(batch.seq, batch.fingerprint)
        if self._residency.apply(batch, now):
            self._sequence.begin_whole(batch.seq)

    def _drain(self, now: Instant) -> None:
        """Apply buffered batches as far as they follow, a bounded number of them."""
        stop_bytes = self._sequence.buffered_bytes - DRAIN_BYTES
        for _ in range(DRAIN_BATCHES):
            held = self._sequence.first_held()
            if held is None:
                self._recovery.repaired()
                return
            seq, fingerprint, batch = held
            if self._sequence.is_past(seq):
                # One that could not be decoded proves nothing: it may have been damaged on the way.
                if batch is not None and self._sequence.contradicts(seq, fingerprint):
                    self._restart(now)
                    self._open(ReplayKind.LEARN, now)
                    return
                self._sequence.release(seq)
            elif batch is not None and self._sequence.follows(seq):
                self._sequence.release(seq)
                self._apply(batch, now)
                is_enough = 0 < self._sequence.buffered_bytes <= stop_bytes
                is_over = self.standstill.holds or self._residency.strike_count >= MAX_STRIKES
                if is_enough or is_over:
                    return
            else:
                self._repair_again(now)
                return

    def _repair_again(self, now: Instant) -> None:
        if self._recovery.take_repair():
            self.stats.gaps += 1
            self._open(ReplayKind.REPAIR, now)
        else:
            self._relearn(f"batches from {self._sequence.expected} on are lost", now)

    # -- replays -----------------------------------------------------------------------------------

    def _open(self, kind: ReplayKind, now: Instant) -> None:
        self.standstill.end()
        witness = self._sequence.witness()
        if kind is ReplayKind.REPAIR and witness is None:
            kind = ReplayKind.LEARN
        if kind is ReplayKind.LEARN:
            self._sequence.begin(keep_buffer=True)
            self._is_rebuilding = True
        from_seq = witness if kind is ReplayKind.REPAIR and witness is not None else 0
        self._replay_count += 1
        self.stats.replays += 1
        self._replay = OpenReplay(
            self._replay_count, kind, from_seq, now, self._limits.replay_timeout_ms
        )
        self._actions.append(
            RequestReplay(worker=self.worker, replay_id=self._replay_count, from_seq=from_seq)
        )

    def _on_replayed(
        self, seq: int, fingerprint: int, batch: EventBatch | None, now: Instant
    ) -> None:
        replay = self._replay
        assert replay is not None
        replay.note_progress(now)
        if self._sequence.contradicts(seq, fingerprint):
            self._restart(now)
            self._open(ReplayKind.LEARN, now)
            return
        if not replay.has_begun:
            replay.has_begun = True
            self._begin_replay(replay, seq, now)
        if self._sequence.is_past(seq):
            return
        if not self._sequence.follows(seq):
            self._relearn_from_replay(f"the replay has no batch {self._sequence.expected}", now)
        if batch is not None:
            self._apply(batch, now)
            return
        self._relearn_from_replay(f"batch {seq} cannot be decoded, replayed neither", now)
        self._sequence.advance(seq, fingerprint)
        if self._residency.undecodable() >= MAX_STRIKES:
            self._go_blind(f"{MAX_STRIKES} batches in a row cannot be decoded, the last is {seq}")

    def _begin_replay(self, replay: OpenReplay, seq: int, now: Instant) -> None:
        """The first batch of a replay shows whether it reaches back far enough."""
        match replay.kind:
            case ReplayKind.REPAIR:
                if seq > replay.from_seq:
                    self.stats.late_replays += 1
                    self._relearn_from_replay(
                        f"the replay begins at batch {seq}, asked for was {replay.from_seq}", now
                    )
            case ReplayKind.LEARN:
                self.stats.late_replays += seq > 0
                self._recovery.has_ring_start = True
            case ReplayKind.RESYNC:
                base = self._sequence.base
                if base is not None and seq > base:
                    # We know more than the publisher still holds: go on with what we have.
                    self._recovery.is_resync_useless = True
                    return
                self._residency.clear()
                self._begin_from_ring()

    def _on_replay_ended(self, now: Instant) -> None:
        replay, self._replay = self._replay, None
        assert replay is not None
        if replay.has_begun or replay.kind is ReplayKind.RESYNC:
            return
        is_idle = self._sequence.buffered_count == 0
        if replay.kind is ReplayKind.LEARN:
            # Nothing was published when it was served: if what waits is not batch 0, some is lost.
            self._sequence.expect_first()
            return
        if is_idle:
            # Not even the batch that we know: the publisher began anew and has not come so far yet.
            self._restart(now)
            self._open(ReplayKind.LEARN, now)
        else:
            self._relearn("the replay is empty", now)

    def _fail_replay(self, reason: str, now: Instant) -> None:
        replay, self._replay = self._replay, None
        assert replay is not None
        self.stats.replay_failures += 1
        is_told = replay.has_begun and self._sequence.has_reached_held()  # all but its end
        is_harmless = is_told or (replay.kind is ReplayKind.RESYNC and not self._is_rebuilding)
        if not is_harmless:
            self._relearn(f"replay from {replay.from_seq}: {reason}", now)

    # -- losing and regaining trust ----------------------------------------------------------------

    def _relearn(self, reason: str, now: Instant) -> None:
        """Drop all that is known and follow the stream from its last unbroken stretch on."""
        self._lose_all(reason, now)
        self._replay = None
        self._is_rebuilding = self._recovery.has_ring_start = False
        self._recovery.repaired()
        self._sequence.begin_at_tail()

    def _relearn_from_replay(self, reason: str, now: Instant) -> None:
        """Drop all that is known and learn from the rest of the open replay instead."""
        self._lose_all(reason, now)
        self._begin_from_ring()

    def _begin_from_ring(self) -> None:
        self._sequence.begin(keep_buffer=True)
        self._is_rebuilding = self._recovery.has_ring_start = True

    def _lose_all(self, reason: str, now: Instant) -> None:
        self.reason = reason
        self.standstill.end()
        self.stats.relearned += 1
        self._residency.clear()
        self._recovery.lost(now)

    def _restart(self, now: Instant) -> None:
        """The stream tells of another life of the engine."""
        self.stats.restarts += 1
        self.reason = "the worker's engine began anew"
        self.standstill.end()
        self._incarnation = self._directory.restart(self.worker)
        self._residency.forget_orphans()
        self._sequence.begin()
        self._replay = None
        self._is_rebuilding = False
        self._recovery.restarted(now)
        self._actions.append(WorkerRestarted(worker=self.worker, incarnation=self._incarnation))

    def _go_blind(self, reason: str) -> None:
        self._is_blind = True
        self.reason = reason
        self._residency.clear()
        self._sequence.begin()
        self._replay = None
        self._belief.show(False, reason)
        self._actions.append(FeedBlind(worker=self.worker, reason=reason))

    # -- after each input --------------------------------------------------------------------------

    def _finish(self, now: Instant) -> list[Action]:
        if self._is_current() and not self._is_blind:
            self._residency.expire(now)
            self.standstill.look(now)
            self._doubt(now)
            if self.has_backlog:
                self._drain(now)
            if self._residency.strike_count >= MAX_STRIKES:
                self._go_blind(f"{MAX_STRIKES} strikes, the last: {self._residency.strike_reason}")
            elif not self._is_catching_up():
                self._settle(now)
            self._show_trust()
        actions, self._actions = self._actions, []
        return actions

    def _settle(self, now: Instant) -> None:
        """Nothing is pending: what was rebuilt is whole, and there is time for a resync."""
        self._is_rebuilding = False
        kind = self._recovery.next_replay(now)
        if kind is not None:
            self.stats.resyncs += kind is ReplayKind.RESYNC
            self._open(kind, now)

    def _show_trust(self) -> None:
        is_believed = (
            self._recovery.relearn_until is None and not self._is_rebuilding and not self._is_blind
        )
        self._actions += self._belief.show(is_believed, self.reason)

    def _doubt(self, now: Instant) -> None:
        """Of what was told before the connection broke, the more the longer that is ago."""
        for action in self._belief.look(now):
            self._actions.append(action)
            if isinstance(action, FeedCutOff):
                self._relearn(action.reason, now)

    def _is_catching_up(self) -> bool:
        is_waiting = self._sequence.buffered_count > 0 or self.standstill.holds
        return self._replay is not None or is_waiting

    def _is_current(self) -> bool:
        directory, worker = self._directory, self.worker
        return directory.knows(worker) and directory.incarnation(worker) == self._incarnation

    def _is_wanted(self, batch: EventBatch) -> bool:
        if not self._is_current():
            self.stats.after_leave += 1
            return False
        if None not in (self._rank, batch.rank) and batch.rank != self._rank:
            self.stats.wrong_rank += 1
            return False
        return not self._is_blind
