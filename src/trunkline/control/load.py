"""How busy a worker says it is: found out where it tells, read there from then on (C11).

Owns the choice among the endpoints that engines have. Must never: guess where nothing is told.
Read `engine.py` for what they answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trunkline.control.engine import (
    CacheFacts,
    LoadReport,
    parse_cache,
    parse_json_load,
    parse_metrics_load,
)
from trunkline.observe import EventLog

LOAD_PATHS = ("/metrics", "/load", "/v1/loads", "/get_load", "/get_loads")
"""vLLM's two, SGLang's of today and of before (it has metrics where it was told to), and that of
routers in front of it.
"""


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
                return Reading(report=report, cache=cache)
        self._path = None
        if not self.is_unknown:
            self.is_unknown = True
            self._log.warning("worker.load_unknown", worker=self._name, tried=" ".join(LOAD_PATHS))
        return Reading(report=None, cache=cache)
