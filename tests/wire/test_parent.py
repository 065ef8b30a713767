"""The parent of several processes before ones that are played: those that come to nothing."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from trunkline import parent
from trunkline.adapters.process_wire import wire_pair
from trunkline.config import Config, ListenConfig
from trunkline.gateway.listener import bind_admin
from trunkline.gateway.shared_port import addresses_of, hold

_PLAYED = """#!{python} -IS
import http.server, json, pathlib, socket, sys, threading, time
folder = pathlib.Path({folder!r})
size = int.from_bytes(sys.stdin.buffer.read(4), "big")
sys.stdin.buffer.read(size)
life = len(list(folder.glob("began-*")))
(folder / f"began-{{life}}").touch()
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    do_POST = do_GET
    def log_message(self, *words):
        pass
if life == 1 and (folder / "mute").exists():
    time.sleep(600)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Well)
if life != 1:
    threading.Thread(target=server.serve_forever, daemon=True).start()
print(json.dumps({{"admin_port": server.server_address[1]}}), flush=True)
if life == 1:
    time.sleep(600)
sys.stdin.buffer.readline()
print("{{}}", flush=True)
(folder / f"served-{{life}}").touch()
if life:
    sys.stdin.buffer.read()
sys.exit(3 if not life else 0)
"""
"""A process that ends once it serves; in its second life it stands still before that."""


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which the lives of a process are told."""
    script, folder = tmp_path / "played", tmp_path / "lives"
    folder.mkdir()
    script.write_text(_PLAYED.format(python=sys.executable, folder=str(folder)), "utf-8")
    script.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(parent.sys, "executable", str(script))
        patch.setattr(parent, "PAUSE_S", 0.01)
        patch.setattr(parent, "WATCH_S", 0.01)
        patch.setattr(parent, "HUNG_MS", 1_000.0)
        yield folder


@asynccontextmanager
async def running() -> AsyncIterator[tuple[asyncio.Task[int], asyncio.Event]]:
    """A parent of one process, and what ends it."""
    config = Config(listen=ListenConfig(host="127.0.0.1", port=0, admin_port=0, processes=1))
    held, wires = hold("127.0.0.1", 0), [wire_pair()]
    parts = parent.Shared(
        config=config,
        shown=config,
        addresses=addresses_of(held),
        token="token",
        root_key=bytes(32),
        wires=wires,
    )
    stop = asyncio.Event()
    made = parent.Parent(parts, bind_admin(config.listen))
    run = asyncio.create_task(made.run(stop, asyncio.Event(), None, []))
    try:
        async with asyncio.timeout(60):
            yield run, stop
    finally:
        stop.set()
        await asyncio.gather(run, return_exceptions=True)
        for one in (*held, *wires[0]):
            one.close()


async def until(is_so: Callable[[], bool], run: asyncio.Task[int]) -> None:
    while not is_so():
        assert not run.done(), run
        await asyncio.sleep(0.01)


def test_a_process_that_stands_still_before_it_serves_is_killed_as_well(played: Path) -> None:
    async def test() -> None:
        async with running() as (run, _):
            await until((played / "served-2").exists, run)

    asyncio.run(test())
    assert not (played / "served-1").exists()


def test_a_process_that_never_says_where_it_is_asked_is_killed_and_started_again(
    played: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parent, "START_S", 6.0)  # the others start in time on a slow machine, too
    monkeypatch.setattr(parent, "HUNG_MS", 600_000.0)
    (played / "mute").touch()

    async def test() -> None:
        async with running() as (run, _):
            await until((played / "served-2").exists, run)

    with caplog.at_level(logging.ERROR, "trunkline"):
        asyncio.run(test())
    assert not (played / "served-1").exists()
    told = [(record.message, vars(record)["fields"]) for record in caplog.records]
    [hung] = [fields for event, fields in told if event == "process.hung"]
    assert hung == {"process": 0, "silent_ms": 6_000.0, "meaning": "it is killed"}
    assert [fields["code"] for event, fields in told if event == "process.ended"] == [3, -9]


def test_a_process_that_is_told_to_end_before_it_serves_ends_well(
    played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "HUNG_MS", 600_000.0)

    async def test() -> None:
        async with running() as (run, stop):
            await until((played / "began-1").exists, run)
            stop.set()
            assert await run == 0

    asyncio.run(test())
    assert not (played / "served-1").exists()


def test_a_process_that_cannot_be_started_again_now_is_tried_later(
    played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, tries = asyncio.create_subprocess_exec, 0

    async def short_of_memory(*words: Any, **more: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries in (2, 3):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*words, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", short_of_memory)

    async def test() -> None:
        async with running() as (run, _):
            await until((played / "served-2").exists, run)

    asyncio.run(test())


def test_a_first_process_that_cannot_be_started_ends_all_and_says_why(
    played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def short_of_memory(*_words: Any, **_more: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", short_of_memory)

    async def test() -> None:
        async with running() as (run, _):
            done, _ = await asyncio.wait([run], timeout=30)
            assert [type(one.exception()) for one in done] == [BlockingIOError]

    asyncio.run(test())
    assert not list(played.iterdir())
