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
from trunkline.control.health import UNHEARD_SECS
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

SILENT_SECS = 1.5
"""A worker that leaves its readings unanswered for so long, and gives no token meanwhile, is
silent. With a reading each second that is two and a half of them after its last word, so that whom
nobody may choose from the third one on is out in time, also at a gateway that is a little late.
One lost reading is not enough for it: a packet that opens a connection is sent again after one
second, and a reading that fails sooner is followed by another one at once.
"""
LATE_SECS = SILENT_SECS - UNHEARD_SECS
"""From then on its health is in doubt: when it is silent, its probe should have said something."""
_LOOK_SECS = 0.25

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
        self.last: LoadReport | None = None
        """What it said last; None where it says nothing."""
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
                self.last = replace(report, is_paused=await self._is_paused())
                return Reading(report=self.last, cache=cache)
        self._path = self.last = None
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
    """It leaves readings unanswered, and no token comes."""

    _quiet_ms: int = field(init=False, default=0)
    """How long it has left questions unanswered since its last word, pauses after readings that
    failed included. One that fails is no word from it.
    """
    _is_late: bool = field(init=False, default=False)

    async def run(self) -> None:
        """Until cancelled."""
        interval_secs = self.parts.health.load_interval_secs
        while True:
            reading = await self._read()
            if reading is None:
                self._take(_NOTHING)  # its health probe says so
                if self.entries.is_healthy() and not self._judge():
                    await self._listen(asyncio.sleep(min(interval_secs, _LOOK_SECS)))
                    continue
            else:
                self._take(reading.report or _NOTHING)
                if reading.cache is not None and self._is_other(reading.cache):
                    self.on_other()
            await asyncio.sleep(interval_secs)

    def _is_other(self, cache: CacheFacts) -> bool:
        """Restarted with other settings (C24), or between two probes, so that none failed."""
        if cache.block_tokens is not None and cache != self.cache:
            return True
        return self.reader.is_younger(cache.started_s, self.cache.started_s)

    async def _read(self) -> Reading | None:
        """One reading; None where it failed."""
        reading = asyncio.ensure_future(self.reader.read())
        try:
            while not reading.done():
                self._judge()
                await self._listen(asyncio.wait([reading], timeout=_LOOK_SECS))
            found = reading.result()
        except (WorkerLost, WorkerTimeout):
            return None
        finally:
            reading.cancel()
        self._quiet_ms = 0
        self._judge()
        return found

    async def _listen(self, wait: Awaitable[object]) -> None:
        """Count a wait, unless a token came. What it took beyond two looks is not counted: this
        process had no time, and an answer may be here that it has not read.
        """
        began_at, tokens = self.parts.clock.now(), self.pace.tokens
        await wait
        # Whole ones: timers are early or late by less, and so many looks are no more than that.
        waited_ms = min(round(self.parts.clock.now() - began_at), int(2_000 * _LOOK_SECS))
        self._quiet_ms = self._quiet_ms + waited_ms if tokens == self.pace.tokens else 0

    def _judge(self) -> bool:
        """Whether it is silent by now."""
        was_late, self._is_late = self._is_late, self._quiet_ms >= LATE_SECS * 1_000.0
        if self._is_late and not was_late:
            self.on_late()
        is_silent = self._quiet_ms >= SILENT_SECS * 1_000.0
        self._note(is_silent=is_silent)
        return is_silent

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
