"""The digest feed: a short report to the gateway every second.

Says which labelled prefixes are still resident, how full the memory is and how busy the worker. A
post that fails is counted and not repeated: the next one says more. Read `labels.py` for where the
labels come from.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from trunkline.worker.engine import Engine
from trunkline.worker.labels import LabelBook


@dataclass(slots=True, kw_only=True)
class HeartbeatTotals:
    """Posts since start."""

    accepted: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Builds one rank's reports. `counter` starts at 1 and never goes back within a
    `boot_nonce`."""

    worker_id: str
    boot_nonce: str
    engine: Engine
    labels: LabelBook
    max_running: int

    def report(self, counter: int) -> dict[str, Any]:
        busy = self.engine.running + self.engine.waiting
        return {
            "worker": self.worker_id,
            "boot_nonce": self.boot_nonce,
            "counter": counter,
            "checkpoints": self.labels.resident(),
            "complete": self.labels.is_complete,
            "memory": round(self.engine.cache.used_share, 4),
            "load": round(min(1.0, busy / self.max_running), 4),
            "block_size": self.engine.cache.block_tokens,
        }


@dataclass(slots=True, kw_only=True)
class Heart:
    """Posts the reports of all ranks until it is cancelled."""

    url: str
    key: str = field(repr=False)
    interval_s: float
    reporters: list[Reporter]
    totals: HeartbeatTotals

    async def beat(self) -> None:
        counter = 0
        while True:
            counter += 1
            for reporter in self.reporters:
                body = msgspec.json.encode(reporter.report(counter))
                is_accepted = await post(self.url, self.key, body, self.interval_s)
                self.totals.accepted += is_accepted
                self.totals.failed += not is_accepted
            await asyncio.sleep(self.interval_s)


async def post(url: str, key: str, body: bytes, timeout_s: float) -> bool:
    """One HTTP/1.1 POST of JSON; True for a status below 300."""
    parts = urlsplit(url)
    target = parts.path or "/"
    if parts.query:
        target += "?" + parts.query
    head = (
        f"POST {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                writer.write(head.encode("latin-1") + body)
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    words = status_line.split()
    return len(words) > 1 and words[1].startswith(b"2")
