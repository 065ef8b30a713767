"""What is heard of a worker's cache: its event feeds, or their silence, and the mode that leaves.

Owns the feeds of one life and the words about them. Must never: change the fleet, or ask the
worker. Read `member.py` for who starts and ends it, `silence.py` for workers that say nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from trunkline.control.discovery import Facts
from trunkline.control.parts import MemberParts
from trunkline.control.silence import NO_EVENTS, Silence
from trunkline.control.views import Mode
from trunkline.core.actions import (
    Action,
    FeedBlind,
    FeedCutOff,
    FeedFailed,
    FeedHeard,
    FeedTrusted,
    FeedUntrusted,
    RequestReplay,
    WorkerRestarted,
)
from trunkline.core.feed import WorkerFeed
from trunkline.core.records import WorkerId
from trunkline.ports.worker import EventSource

_FOLLOWS = "follows the worker's cache events"


class Hearing:
    """One for a worker; `begin` and `end` with each of its lives."""

    def __init__(
        self,
        name: str,
        parts: MemberParts,
        *,
        on_mode: Callable[[], None],
        on_restart: Callable[[], None],
    ) -> None:
        """`on_mode` is called when the mode became another, `on_restart` when its events tell of a
        new life.
        """
        self.mode = Mode.CONNECTING
        self.reason = "not reached yet"
        """Why it is in this mode."""
        self.feeds: dict[WorkerId, WorkerFeed] = {}
        self._name = name
        self._parts = parts
        self._on_mode = on_mode
        self._on_restart = on_restart
        self._silence = Silence()
        self._cut_off: set[WorkerId] = set()
        """Ranks of which nothing has been heard for minutes."""

    def begin(self, facts: Facts) -> None:
        """A life that announces these sources of events, or says why there are none."""
        self.mode = Mode.EXACT if facts.sources else Mode.APPROXIMATE
        self.reason = _FOLLOWS if facts.sources else facts.no_events

    def end(self) -> None:
        self.feeds = {}
        self._silence = Silence()
        self._cut_off.clear()

    def follow(self, worker: WorkerId, source: EventSource) -> None:
        self.feeds[worker] = self._parts.make_feed(worker, source)

    @property
    def is_silent(self) -> bool:
        """It announced events, answers, and sends none."""
        return self.reason == NO_EVENTS

    def take_digests(self) -> bool:
        """A heartbeat with checkpoint keys came; True for the first."""
        if self.mode is Mode.DIGEST:
            return False
        self.mode, self.reason = Mode.DIGEST, "sends heartbeats with checkpoint keys"
        return True

    def answered(self, worker: WorkerId) -> None:
        """A request ended well there: with blocks that we expect there, an event should come."""
        feed = self.feeds.get(worker)
        expected_blocks = self._parts.directory.predicted_count(worker) if feed else 0
        if feed and self._silence.answered(feed, expected_blocks) and self.mode is Mode.EXACT:
            self._parts.log.warning("worker.no_events", worker=worker)
            self._set(Mode.APPROXIMATE, NO_EVENTS)

    def listen(self) -> None:
        """Exact again when the first batch came after all."""
        if self.is_silent and self._silence.is_over(self.feeds):
            self._silence = Silence()
            self._parts.log.info("worker.events_came", worker=self._name)
            self._set(Mode.EXACT, _FOLLOWS)

    def on_action(self, action: Action) -> None:
        """What a feed says of the worker as a whole."""
        log = self._parts.log
        match action:
            case FeedFailed():
                # Nothing more will come: learn from our own routing instead (C103).
                # What was learnt can no longer be corrected.
                self._parts.directory.clear(action.worker)
                self._set(Mode.APPROXIMATE, action.reason)
                log.warning("feed.failed", worker=action.worker, why=action.reason)
            case FeedBlind():
                self.mode, self.reason = Mode.BLIND, action.reason
                log.warning("feed.blind", worker=action.worker, why=action.reason)
            case FeedCutOff():
                log.warning("feed.cut_off", worker=action.worker, why=action.reason)
                self._set(Mode.APPROXIMATE, action.reason)
                self._cut_off.add(action.worker)
            case FeedHeard():
                log.info("feed.heard_again", worker=action.worker)
                self._cut_off.discard(action.worker)
                if not self._cut_off and self.mode is Mode.APPROXIMATE:
                    self._set(Mode.EXACT, _FOLLOWS)
            case FeedUntrusted():
                feed = self.feeds.get(action.worker)
                is_lost = feed is None or bool(feed.reason)  # else it just begins to learn
                write = log.warning if is_lost else log.info
                write("feed.untrusted", worker=action.worker, why=action.reason)
            case FeedTrusted():
                log.info("feed.trusted", worker=action.worker)
            case WorkerRestarted():
                log.info("worker.restarted", worker=action.worker)
                self._on_restart()
            case RequestReplay():
                raise AssertionError("the runner carries out replays itself")

    def _set(self, mode: Mode, reason: str) -> None:
        self.mode, self.reason = mode, reason
        self._on_mode()
