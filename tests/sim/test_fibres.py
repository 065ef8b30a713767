"""Threads and sockets of machines on the virtual loop: they wait, stop and die with these."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.fibres import Threads
from faults.kv_net import PORT, Sockets, address_of
from faults.kv_plane import MODULES, kv_plane
from faults.machines import Machine
from faults.network import FaultyNet
from faults.runs import played
from faults.setting import setting_of

HERE = Path(__file__).resolve().parent
TICK = struct.pack("@ll", 0, 50_000)
_RUN = """
from faults.runs import played
from faults.setting import setting_of
for seed in (2, 3, 12):
    print(seed, played(setting_of(seed, pulls=True)).digest)
"""


class Pair:
    """`w0` listens in one thread and writes down what comes; `w1` sends from another."""

    def __init__(self, *, room_bytes: int = 1 << 16) -> None:
        self.net = FaultyNet(1)
        self.threads = Threads(self.net, 1)
        self.sockets = Sockets(self.net, self.threads, 1, room_bytes=room_bytes)
        self.source, self.target = Machine("w1"), Machine("w0")
        self.heard: list[tuple[float, bytes]] = []
        self.target.run(self._start, self._listen)

    def _start(self, work: Callable[[], None]) -> None:
        self.threads.Thread(target=work, name="work").start()

    def _listen(self) -> None:
        listener = self.sockets.create_server((address_of("w0"), 0), backlog=4)
        listener.settimeout(5.0)
        connected, _ = listener.accept()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TICK)
        view = memoryview(bytearray(4))
        while True:
            try:
                count = connected.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            except OSError as error:
                self.note(type(error).__name__.encode())
                return
            self.note(bytes(view[:count]))
            if not count:
                return

    def note(self, what: bytes) -> None:
        self.heard.append((round(self.net.time(), 2), what))

    def connect(self) -> Any:
        made = self.sockets.create_connection((address_of("w0"), PORT), 1.0)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TICK)
        return made

    def play(self, send: Callable[[Any], None], meanwhile: Callable[[], None]) -> list[Any]:
        """What is heard in three seconds; `meanwhile` is done after one."""

        async def wait() -> None:
            self.source.run(self._start, lambda: send(self.connect()))
            await asyncio.sleep(1.0)
            meanwhile()
            await asyncio.sleep(2.0)

        try:
            self.net.run_until_complete(wait())
            assert not self.net.stray_errors
            return list(self.heard)
        finally:
            self.threads.close()
            self.net.close()

    def sleep(self, secs: float) -> None:
        """In a thread."""
        self.threads.Event().wait(secs)


def nothing() -> None:
    pass


def test_what_one_thread_sends_another_receives_late_and_in_order() -> None:
    pair = Pair()

    def send(connected: Any) -> None:
        assert connected.sendmsg([b"ab", b"cd"]) == 4
        pair.sleep(0.5)
        assert connected.sendmsg([b"ef", b"gh"]) == 4
        connected.close()

    assert pair.play(send, nothing) == [(0.0, b"abcd"), (0.5, b"efgh"), (0.5, b"")]


def test_a_thread_of_a_machine_that_is_stopped_goes_on_where_it_was() -> None:
    pair = Pair()

    def stop() -> None:
        pair.net.stop_machine(pair.target)
        pair.net.call_later(1.0, pair.net.resume_machine, pair.target)

    def send(connected: Any) -> None:
        for number in range(3):
            pair.sleep(0.6)
            connected.sendmsg([b"%04d" % number])

    assert pair.play(send, stop) == [(0.6, b"0000"), (2.0, b"0001"), (2.0, b"0002")]


def test_a_thread_of_a_machine_that_is_dead_runs_no_line_more() -> None:
    pair = Pair()

    def send(connected: Any) -> None:
        for number in range(3):
            pair.sleep(0.6)
            connected.sendmsg([b"%04d" % number])

    def die() -> None:
        pair.net.die(pair.source)

    assert pair.play(send, die) == [(0.6, b"0000"), (1.0, b"ConnectionResetError")]


def test_who_sends_more_than_is_read_waits_for_room_a_tick_at_most() -> None:
    pair = Pair(room_bytes=8)
    tried: list[tuple[float, int]] = []

    def send(connected: Any) -> None:
        pair.net.cut("w1", "w0", 0.5)
        for _ in range(4):
            try:
                count = connected.sendmsg([bytes(100)])
            except BlockingIOError:
                count = -1
            tried.append((round(pair.net.time(), 2), count))

    pair.play(send, nothing)
    assert tried == [(0.0, 8), (0.0, 8), (0.05, -1), (0.1, -1)]


def test_nobody_waits_with_a_lock() -> None:
    pair = Pair()
    seen: list[str] = []

    def send(_connected: Any) -> None:
        try:
            with pair.threads.Lock():
                pair.sleep(0.1)
        except AssertionError as error:
            seen.append(str(error))

    pair.play(send, nothing)
    assert seen == ["work waits and holds a lock"]


def test_a_loop_that_would_wait_for_a_thread_is_an_error() -> None:
    threads = Pair().threads
    with pytest.raises(AssertionError, match="a loop would wait"):
        threads.Event().wait(1.0)


def test_an_error_that_ends_a_thread_is_one_that_nobody_caught() -> None:
    pair = Pair()

    def send(_connected: Any) -> None:
        raise ValueError("planted")

    with pytest.raises(AssertionError):
        pair.play(send, nothing)
    assert pair.net.stray_errors == ["thread work: ValueError('planted')"]


def test_no_more_threads_of_a_pool_run_than_may() -> None:
    pair = Pair()
    running: list[int] = [0]

    async def wait() -> list[int]:
        loop = asyncio.get_running_loop()
        pool = pair.threads.pool(2, "few")

        def work(number: int) -> int:
            running[0] += 1
            assert running[0] <= 2
            pair.sleep(0.1)
            running[0] -= 1
            return number

        began = [loop.run_in_executor(pool, work, number) for number in range(5)]
        return list(await asyncio.gather(*began))

    try:
        task = pair.target.run(pair.net.create_task, wait())
        assert pair.net.run_until_complete(task) == [0, 1, 2, 3, 4]
        assert 0.3 <= pair.net.time() < 0.31
    finally:
        pair.threads.close()
        pair.net.close()


def test_the_modules_have_their_own_threads_again_after_a_run() -> None:
    before = [dict(module.__dict__) for module in MODULES]
    net = FaultyNet(1)
    with kv_plane(net, setting_of(1, pulls=True)) as plane:
        assert plane is not None
        changed = [
            module
            for module, names in zip(MODULES, before, strict=True)
            if any(module.__dict__[name] is not names[name] for name in names)
        ]
        assert changed == list(MODULES)
    net.close()
    assert [dict(module.__dict__) for module in MODULES] == before
    assert threading.Lock is MODULES[0].__dict__["threading"].Lock


@pytest.mark.slow
def test_a_seed_with_pulls_is_the_same_run_in_every_process() -> None:
    def digests(hash_seed: str) -> str:
        path = f"{HERE}:{HERE.parent}"
        env = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path, "PATH": "/usr/bin:/bin"}
        asked = [sys.executable, "-c", _RUN]
        return subprocess.run(asked, capture_output=True, text=True, check=True, env=env).stdout

    first = digests("1")
    assert first == digests("4711")
    assert first.splitlines()[0] == f"2 {played(setting_of(2, pulls=True)).digest}"
