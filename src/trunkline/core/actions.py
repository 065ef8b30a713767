"""Everything a worker feed may ask of its shell, as plain records (outputs of the core).

The shell carries them out in order; nothing here does anything. Read `feed.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.core.records import Incarnation, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReplay:
    """Ask the publisher for every batch it still holds from `from_seq` on; this ends any earlier
    replay.

    `from_seq` is what goes over the wire. In the repair of a gap it is one *before* the first
    missing batch: the answer must begin with a batch that we know, or it comes from another life of
    the engine. Hand the answer to `replayed` and `replay_ended` with this `replay_id`.
    """

    worker: WorkerId
    replay_id: int
    from_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedUntrusted:
    """The worker's entries count for nothing from now on."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedTrusted:
    """The worker's entries count again."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedBlind:
    """Reuse is off for this worker until it registers again: it broke the protocol too often."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedCutOff:
    """Nothing has been heard of the worker for so long that all it told is forgotten."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedHeard:
    """The worker tells of its cache again, after it was cut off."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedFailed:
    """The stream cannot be followed at all (no socket, address refused); nothing more will come of
    it.
    """

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRestarted:
    """The worker's engine began a new life; what it held before is forgotten."""

    worker: WorkerId
    incarnation: Incarnation


Action = (
    RequestReplay
    | FeedUntrusted
    | FeedTrusted
    | FeedBlind
    | FeedCutOff
    | FeedHeard
    | FeedFailed
    | WorkerRestarted
)
