"""Alarms of workers: promises of cache that do not come true, times that cannot be predicted,
silence, and orders that nobody heeds.

    over-claims         a quarter of the last promises was broken; ends at a tenth
    calibration-drift   half of the last first tokens took twice or half as long; ends at a quarter
    silent              nothing is heard of its cache, or of it, for 10 s; ends after 5 s of news
    unheeded-pulls      it took no notice of what it was told to pull (`heed.py`)

The first two look at the last `WINDOW_ANSWERS` answers of a worker that are younger than
`WINDOW_MS`; fewer than `MIN_ANSWERS` of them say nothing, and end what they began. Calibration
follows a worker that becomes four times slower within some twenty answers, which is no alarm; what
it cannot follow is one. Must never: read a clock, or keep anything of a worker that left. Read
`control/alarm_watch.py` for who looks and writes it down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from trunkline.core.decision import Decision
from trunkline.core.records import Instant, WorkerId

WINDOW_ANSWERS = 64
MIN_ANSWERS = 32
"""Calibration of a worker whose profile is four times off is through before these are."""
WINDOW_MS = 300_000.0
BROKEN_SHARE = 0.25
"""Of what was promised of one prompt; less is an eviction at the end of a prefix."""
CLAIMS_BEGIN, CLAIMS_END = 0.25, 0.10
OFF_FACTOR, OFF_FLOOR_MS = 2.0, 50.0
"""A time is off where it is wrong by this factor, and by so much: short ones are noise."""
DRIFT_BEGIN, DRIFT_END = 0.5, 0.25
SILENT_BEGIN_MS, SILENT_END_MS = 10_000.0, 5_000.0


class AlarmKind(Enum):
    OVER_CLAIMS = "over-claims"
    DRIFT = "calibration-drift"
    SILENT = "silent"
    UNHEEDED = "unheeded-pulls"


EXPECTED: Mapping[AlarmKind, str] = {
    AlarmKind.OVER_CLAIMS: "workers that reuse what their events promise",
    AlarmKind.DRIFT: "first tokens within half and twice the predicted time",
    AlarmKind.SILENT: "news of its cache and of itself",
    AlarmKind.UNHEEDED: "a worker that pulls what it is told to",
}
REMEDY: Mapping[AlarmKind, str] = {
    AlarmKind.OVER_CLAIMS: "look for lost events (drops, a proxy between) and for who resets its"
    " cache; `trunkline doctor` tests it",
    AlarmKind.DRIFT: "give the gateway a --profile of that engine; look for other work on its"
    " machine",
    AlarmKind.SILENT: "see that it runs, and that the gateway reaches its events and it the"
    " gateway's heartbeat path",
    AlarmKind.UNHEEDED: "is its connector loaded, and of this version? It computes what it was to"
    " pull",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    kind: AlarmKind
    worker: WorkerId
    since: Instant
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmEnd:
    alarm: Alarm
    lasted_ms: float


class _Window:
    """Good and bad answers, the newest ones."""

    __slots__ = ("_bad_count", "_kept")

    def __init__(self) -> None:
        self._kept: deque[tuple[Instant, bool]] = deque()
        self._bad_count = 0

    def note(self, now: Instant, *, is_bad: bool) -> None:
        self._kept.append((now, is_bad))
        self._bad_count += is_bad
        if len(self._kept) > WINDOW_ANSWERS:
            self._drop()

    def may_begin(self, share: float) -> bool:
        """Whether the share of the bad ones may be as much, once the old ones are left out."""
        return self._bad_count >= share * MIN_ANSWERS

    def share(self, now: Instant) -> float | None:
        """Of the bad ones; None for too few."""
        while self._kept and self._kept[0][0] <= now - WINDOW_MS:
            self._drop()
        count = len(self._kept)
        return self._bad_count / count if count >= MIN_ANSWERS else None

    def _drop(self) -> None:
        self._bad_count -= self._kept.popleft()[1]


@dataclass(slots=True, kw_only=True)
class _Track:
    """What is kept of one worker."""

    claims: _Window = field(default_factory=_Window)
    times: _Window = field(default_factory=_Window)
    silent_since: Instant | None = None
    heard_since: Instant | None = None

    def is_calm(self) -> bool:
        """Nothing can begin, where nothing is on: a look need not count."""
        is_few = not self.claims.may_begin(CLAIMS_BEGIN) and not self.times.may_begin(DRIFT_BEGIN)
        return is_few and self.silent_since is None


class AlarmBook:
    """One for a fleet."""

    def __init__(self) -> None:
        self._tracks: dict[WorkerId, _Track] = {}
        self._active: dict[tuple[WorkerId, AlarmKind], Alarm] = {}

    def __len__(self) -> int:
        """Workers that something is kept of."""
        return len(self._tracks)

    def promised(self, decision: Decision, reused_tokens: int, now: Instant) -> None:
        """A good answer tells how much its worker reused."""
        expected = decision.expected_tokens
        if expected:
            is_broken = expected - reused_tokens >= expected * BROKEN_SHARE
            self._track(decision.worker).claims.note(now, is_bad=is_broken)

    def timed(
        self, worker: WorkerId, predicted_ms: float, observed_ms: float, now: Instant
    ) -> None:
        """A first token came."""
        low, high = sorted((predicted_ms, observed_ms))
        is_off = high - low >= OFF_FLOOR_MS and high >= OFF_FACTOR * low
        self._track(worker).times.note(now, is_bad=is_off)

    def forget(self, worker: WorkerId) -> None:
        """What its answers said is of a life that is over."""
        track = self._tracks.get(worker)
        if track is not None:
            track.claims, track.times = _Window(), _Window()

    def of(self, workers: Iterable[WorkerId]) -> tuple[Alarm, ...]:
        """Those that are on."""
        pairs = ((worker, kind) for worker in workers for kind in AlarmKind)
        return tuple(self._active[pair] for pair in pairs if pair in self._active)

    def look(
        self,
        here: Collection[WorkerId],
        unheard: Mapping[WorkerId, str],
        unheeding: Collection[WorkerId],
        now: Instant,
    ) -> list[Alarm | AlarmEnd]:
        """Which began and which ended since the look before. `here` are the workers there are,
        `unheard` says of which nothing is heard and why, `unheeding` take no notice of orders.
        """
        changes: list[Alarm | AlarmEnd] = []
        for worker in [one for one in self._tracks if one not in here]:
            del self._tracks[worker]
        for worker, kind in [pair for pair in self._active if pair[0] not in here]:
            changes += self._turn(worker, kind, "", now)
        alarmed = {worker for worker, _ in self._active}
        for worker in here:
            track = self._tracks.get(worker)
            is_told = worker in unheard or worker in unheeding or worker in alarmed
            if not is_told and (track is None or track.is_calm()):
                continue  # nearly all of them, nearly always
            track = track or self._track(worker)
            changes += self._turn(
                worker, AlarmKind.OVER_CLAIMS, self._claims(worker, track, now), now
            )
            changes += self._turn(worker, AlarmKind.DRIFT, self._drift(worker, track, now), now)
            why = self._silence(worker, track, unheard.get(worker, ""), now)
            changes += self._turn(worker, AlarmKind.SILENT, why, now)
            why = "it takes no notice of what it is told to pull" if worker in unheeding else ""
            changes += self._turn(worker, AlarmKind.UNHEEDED, why, now)
        return changes

    # -- one kind each: why it is on, empty where it is off ----------------------------------------

    def _claims(self, worker: WorkerId, track: _Track, now: Instant) -> str:
        share = track.claims.share(now)
        if not self._is_beyond(worker, AlarmKind.OVER_CLAIMS, share, CLAIMS_BEGIN, CLAIMS_END):
            return ""
        return f"{share:.0%} of its last promises of cache did not come true"

    def _drift(self, worker: WorkerId, track: _Track, now: Instant) -> str:
        share = track.times.share(now)
        if not self._is_beyond(worker, AlarmKind.DRIFT, share, DRIFT_BEGIN, DRIFT_END):
            return ""
        return f"{share:.0%} of its last first tokens came at twice or half the predicted time"

    def _is_beyond(
        self, worker: WorkerId, kind: AlarmKind, share: float | None, begin: float, end: float
    ) -> bool:
        if share is None:
            return False
        return share > end if (worker, kind) in self._active else share >= begin

    def _silence(self, worker: WorkerId, track: _Track, why: str, now: Instant) -> str:
        active = self._active.get((worker, AlarmKind.SILENT))
        if why:
            track.heard_since = None
            track.silent_since = now if track.silent_since is None else track.silent_since
            is_long = now - track.silent_since >= SILENT_BEGIN_MS
            return why if is_long or active else ""
        track.silent_since = None
        track.heard_since = now if track.heard_since is None else track.heard_since
        is_over = now - track.heard_since >= SILENT_END_MS
        return active.why if active is not None and not is_over else ""

    # -- inside ------------------------------------------------------------------------------------

    def _track(self, worker: WorkerId) -> _Track:
        track = self._tracks.get(worker)
        if track is None:
            track = self._tracks[worker] = _Track()
        return track

    def _turn(
        self, worker: WorkerId, kind: AlarmKind, why: str, now: Instant
    ) -> Iterator[Alarm | AlarmEnd]:
        active = self._active.get((worker, kind))
        if why and active is None:
            alarm = Alarm(kind=kind, worker=worker, since=now, why=why)
            self._active[worker, kind] = alarm
            yield alarm
        elif active is not None and not why:
            del self._active[worker, kind]
            yield AlarmEnd(alarm=active, lasted_ms=now - active.since)
