"""Has an engine drop its whole prefix cache, and says whether it did.

Engines offer it in development mode alone. An idle engine tells of it only with its next request's
events, so whoever asks clears their own view at once. Must never: touch the directory
(`membership.py` does). Read `probe.py` for one request.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.ports.worker import Endpoint, EngineKind, Fetch

RESET_PATHS = tuple(dict.fromkeys(kind.reset_path for kind in EngineKind))
"""What an engine does not know is a 404, so all can be tried."""
TIMEOUT_MS = 10_000.0


class Flushed(Enum):
    """What came of it."""

    DONE = "done"
    BUSY = "busy"
    """Requests hold blocks: nothing was dropped."""
    UNKNOWN = "unknown"
    """The engine offers no such thing."""
    FAILED = "failed"


class _Told(msgspec.Struct):
    success: bool = True


async def flush(endpoint: Endpoint, fetch: Fetch) -> Flushed:
    """Ask in each way that an engine may know."""
    for path in RESET_PATHS:
        try:
            status, body = await fetch(endpoint, "POST", path, timeout_ms=TIMEOUT_MS)
        except (WorkerLost, WorkerTimeout):
            return Flushed.FAILED
        if status in (404, 405):
            continue
        if status != 200:
            return Flushed.BUSY if status in (400, 409, 429) else Flushed.FAILED
        return Flushed.DONE if _has_succeeded(body) else Flushed.BUSY
    return Flushed.UNKNOWN


def _has_succeeded(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=_Told).success
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # a text that says that it is done
