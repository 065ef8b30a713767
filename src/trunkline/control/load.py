"""How busy a worker says it is: found out where it tells, read there from then on (C11).

Owns the choice among the endpoints that engines have, and what a reading means for the worker's
places in the fleet: full, asleep, paused, or silent where none comes. Must never: guess where
nothing is told. Read `engine.py` for what they answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from trunkline.control.engine import (
    CacheFacts,
    LoadReport,
    parse_cache,
    parse_json_load,
    parse_metrics_load,
    parse_pause,
)
from trunkline.control.entries import Entries
from trunkline.control.parts import MemberParts
from trunkline.core.pace import Pace
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.observe import EventLog

LOAD_PATHS = ("/metrics", "/load", "/v1/loads", "/get_load", "/get_loads")
"""vLLM's two, SGLang's of today and of before (it has metrics where it was told to), and that of
routers in front of it.
"""
PAUSE_PATH = "/is_paused"
"""Of engines in development mode; others are not paused."""

SILENT_SECS = 2.0
"""A worker that leaves a reading unanswered for so long, and gives no token meanwhile, is silent.
With a reading each second that is three of them after its last word."""
LATE_SECS = SILENT_SECS / 2.0
"""From then on its health is in doubt: when it is silent, its probe should have said something."""
_LOOK_SECS = SILENT_SECS / 4.0

_NOTHING = LoadReport(running=0, waiting=None, memory_ratio=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at a worker. None where it does not say."""

    report: LoadReport | None
    cache: CacheFacts | None = None


class LoadReader:
    """The load of one worker."""

    def __init__(
        self, name: str, get: Callable[[str], Awaitable[tuple[int, bytes]]], log: EventLog
    ) -> None:
        """`get(path)` asks the worker; what it raises goes through."""
        self._name = name
        self._get = get
        self._log = log
        self._path: str | None = None
        self._tells_pause = True
        self._youngest_s: float | None = None
        self.is_unknown = False
        """It answers nowhere; said once, until it does."""

    async def read(self) -> Reading:
        """Ask where it answered last; else try each way an engine may have."""
        cache: CacheFacts | None = None
        for path in (self._path,) if self._path else LOAD_PATHS:
            status, body = await self._get(path)
            if status != 200:
                continue
            if path == "/metrics":
                report, cache = parse_metrics_load(body), parse_cache(body)
            else:
                report = parse_json_load(body)
            if report is not None:
                self._path, self.is_unknown = path, False
                is_paused = await self._is_paused()
                return Reading(report=replace(report, is_paused=is_paused), cache=cache)
        self._path = None
        if not self.is_unknown:
            self.is_unknown = True
            self._log.warning("worker.load_unknown", worker=self._name, tried=" ".join(LOAD_PATHS))
        return Reading(report=None, cache=cache)

    def is_younger(self, started_s: float | None, joined_s: float | None) -> bool:
        """Whether the process that told last began after that which told when the worker joined,
        and after all that told since: where several answer in turn, each is news once.
        """
        if started_s is None or joined_s is None:
            return False
        youngest_s = joined_s if self._youngest_s is None else max(joined_s, self._youngest_s)
        self._youngest_s = max(youngest_s, started_s)
        return started_s > youngest_s

    async def _is_paused(self) -> bool:
        """What was sent to a paused engine would wait there for as long as it is."""
        if not self._tells_pause:
            return False
        status, body = await self._get(PAUSE_PATH)
        told = parse_pause(body) if status == 200 else None
        self._tells_pause = told is not None
        return bool(told)


@dataclass(slots=True, kw_only=True)
class LoadWatch:
    """Reads the load of one life of a worker, and enters it where choices are made."""

    reader: LoadReader
    entries: Entries
    parts: MemberParts
    cache: CacheFacts
    """As it was when the worker joined."""
    pace: Pace
    on_other: Callable[[], None] = field(repr=False)
    """It is another than it was."""
    on_read: Callable[[], None] = field(repr=False)
    on_late: Callable[[], None] = field(repr=False)
    """A reading is late, and no token comes."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                reading = await self._heard()
            except (WorkerLost, WorkerTimeout):
                self._take(_NOTHING)  # its health probe says so
            else:
                self._take(reading.report or _NOTHING)
                if reading.cache is not None and self._is_other(reading.cache):
                    self.on_other()
            await asyncio.sleep(self.parts.health.load_interval_secs)

    def _is_other(self, cache: CacheFacts) -> bool:
        """Restarted with other settings (C24), or between two probes, so that none failed."""
        if cache.block_tokens is not None and cache != self.cache:
            return True
        return self.reader.is_younger(cache.started_s, self.cache.started_s)

    async def _heard(self) -> Reading:
        """One reading. As long as it is waited for and no token comes either, the worker is silent;
        one that fails is no word from it.
        """
        reading = asyncio.ensure_future(self.reader.read())
        quiet_secs = 0.0
        try:
            while not reading.done():
                tokens = self.pace.tokens
                await asyncio.wait([reading], timeout=_LOOK_SECS)
                has_moved = tokens != self.pace.tokens
                quiet_secs = 0.0 if has_moved else quiet_secs + _LOOK_SECS
                if reading.done():
                    break
                if has_moved or quiet_secs >= SILENT_SECS:
                    self._note(is_silent=not has_moved)
                elif quiet_secs == LATE_SECS:
                    self.on_late()
            found = await reading
        finally:
            reading.cancel()
        self._note(is_silent=False)
        return found

    def _note(self, *, is_silent: bool) -> None:
        if self.parts.health.disable_gray_detection or is_silent == self.entries.is_silent():
            return
        self.entries.set_silent(is_silent=is_silent)
        write = self.parts.log.warning if is_silent else self.parts.log.info
        write("gray.silent" if is_silent else "gray.heard", worker=" ".join(self.entries.workers))

    def _take(self, report: LoadReport) -> None:
        states = self.entries.states()
        if len(states) == 1:
            # What is not known is not held against it: no foreign queue.
            states[0].queue.correct(report.waiting or 0)
        for worker in self.entries.workers if report.is_asleep else ():
            # A sleeping engine has dropped its cache and publishes nothing about it (C20). A paused
            # one may have kept it; if not, its first events say so.
            self.parts.directory.clear(worker)
        self.entries.set_asleep(is_asleep=report.is_asleep or report.is_paused)
        if not self.entries.is_beating():
            self.entries.set_full(is_full=self.parts.is_full(report.memory_ratio or 0.0, 0.0))
        self.on_read()
