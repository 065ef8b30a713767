"""The registry's own server, where the machine has too little of something."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest

from trunkline.adapters import nats_process
from trunkline.adapters.nats_process import NatsProcess
from trunkline.observe import EventLog


def test_a_server_that_cannot_be_started_again_now_is_tried_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process | None]()

    async def short_of_memory(*words: Any, **more: Any) -> asyncio.subprocess.Process:
        started.append(None)
        if len(started) in (2, 3):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started[-1] = made = await start(*words, **more)
        return made

    monkeypatch.setattr(asyncio, "create_subprocess_exec", short_of_memory)
    monkeypatch.setattr(nats_process, "PAUSE_S", 0.01)

    async def test() -> None:
        server = NatsProcess(tmp_path, secrets.token_bytes, EventLog("test"))
        await server.start()
        keeping = asyncio.create_task(server.keep())
        try:
            first = started[0]
            assert first is not None
            first.kill()
            async with asyncio.timeout(60):
                while len(started) < 4 or started[3] is None:
                    assert not keeping.done(), keeping
                    await asyncio.sleep(0.01)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await server.stop()

    asyncio.run(test())
