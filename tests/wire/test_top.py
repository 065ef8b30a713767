"""`trunkline top` in a terminal of its own, before a real gateway that goes and comes back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from fleet import STOP_S, WAIT_S, Gateway, Process, Processes, processes, text_of

from loopback import free_port

TINY = ("--profile", "tiny")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Tty:
    """A child in a pseudo-terminal; what it drew last."""

    def __init__(self, *words: str, colour: bool = False) -> None:
        self._main, worker = pty.openpty()
        self._worker = worker
        self.resize(80, 24)
        self.before = termios.tcgetattr(worker)
        environment = {name: value for name, value in os.environ.items() if "TRUNKLINE" not in name}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        if not colour:
            environment["NO_COLOR"] = "1"
        self.child = subprocess.Popen(
            [sys.executable, "-m", "trunkline", "top", *words],
            stdin=worker,
            stdout=worker,
            stderr=worker,
            env=environment,
            start_new_session=True,
        )
        self.raw = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._worker, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def read(self, wait_s: float = 0.05) -> None:
        while select.select([self._main], [], [], wait_s)[0]:
            try:
                self.raw += os.read(self._main, 65_536).decode("utf-8", "replace")
            except OSError:
                return
            self.raw = self.raw[-400_000:]

    @property
    def frame(self) -> list[str]:
        """The lines of the last frame that is whole."""
        whole = self.raw.rpartition("\x1b[J")[0].rpartition("\x1b[H")[2]
        return re.split(r"\r*\n", _ESCAPES.sub("", whole))

    def until(self, text: str) -> list[str]:
        ends_at = time.monotonic() + WAIT_S
        while not any(text in line for line in self.frame):
            assert self.child.poll() is None, self.raw[-2_000:]
            assert time.monotonic() < ends_at, (text, self.frame)
            self.read()
        return self.frame

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def ended(self) -> int:
        ends_at = time.monotonic() + STOP_S
        while self.child.poll() is None:
            assert time.monotonic() < ends_at, self.frame
            self.read()
        self.read()
        return self.child.returncode

    def is_restored(self) -> bool:
        """The screen and the modes of before."""
        modes = termios.tcgetattr(self._worker)
        return self.raw.rstrip().endswith("\x1b[?25h\x1b[?1049l") and modes == self.before

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait(STOP_S)
        os.close(self._main)
        os.close(self._worker)


@contextlib.contextmanager
def top(gateway: Gateway, *words: str, colour: bool = False) -> Iterator[Tty]:
    tty = Tty("--admin-url", gateway.admin_url, "--interval-secs", "0.1", *words, colour=colour)
    try:
        yield tty
    finally:
        tty.close()


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module")
def workers(started: Processes) -> list[Process]:
    return started.workers(2, *TINY)


@pytest.fixture(scope="module")
def gateway(started: Processes, workers: list[Process]) -> Gateway:
    made = started.gateway([w.url for w in workers])
    for number in range(4):
        made.chat(text_of(200, number % 2))
    made.wait_quiet()
    return made


def test_it_draws_the_fleet_sorts_by_keys_follows_the_size_and_leaves_the_terminal_as_it_was(
    gateway: Gateway, workers: list[Process]
) -> None:
    with top(gateway) as tty:
        shown = tty.until("hit tokens")
        assert len(shown) <= 24
        assert all(len(line) <= 80 for line in shown)
        assert any("2 workers, 2 ready" in line for line in shown)
        names = sorted(worker.name for worker in workers)
        assert [line.split()[0] for line in shown[-2:]] == names
        tty.press("w")
        tty.until("by worker ")
        tty.press("w")
        assert [line.split()[0] for line in tty.until("reversed")[-2:]] == names[::-1]
        tty.resize(60, 7)
        tty.child.send_signal(signal.SIGWINCH)
        shown = tty.until("more")
        assert len(shown) <= 7
        assert all(len(line) <= 60 for line in shown)
        tty.press("q")
        assert tty.ended() == 0
        assert tty.is_restored()
        assert "\x1b[31m" not in tty.raw
        assert "\x1b[1m" not in tty.raw, "NO_COLOR"


def test_it_ends_on_a_signal_with_the_terminal_as_it_was(gateway: Gateway) -> None:
    with top(gateway, colour=True) as tty:
        tty.until("hit tokens")
        assert "\x1b[1m" in tty.raw
        tty.child.send_signal(signal.SIGTERM)
        assert tty.ended() == 130
        assert tty.is_restored()


def test_a_gateway_that_is_gone_is_said_and_its_return_is_seen(
    started: Processes, workers: list[Process]
) -> None:
    flags = ("--admin-port", str(free_port()))
    gateway = started.gateway([workers[0].url], *flags)
    with top(gateway) as tty:
        tty.until("1 worker, 1 ready")
        gateway.process.stop()
        assert any(workers[0].name in line for line in tty.until("gateway gone"))
        started.gateway([workers[0].url], *flags)
        ends_at = time.monotonic() + WAIT_S
        while any("gateway gone" in line for line in tty.frame):
            assert time.monotonic() < ends_at
            tty.read()
        tty.until("1 worker, 1 ready")
        tty.press("q")
        assert tty.ended() == 0


def printed(gateway: Gateway, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "trunkline", "top", "--admin-url", gateway.admin_url, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    return done.returncode, done.stdout, done.stderr


def test_one_frame_for_scripts_as_text_and_as_json(
    gateway: Gateway, workers: list[Process]
) -> None:
    code, out, _ = printed(gateway, "--once", "--sort", "load")
    assert (code, "\x1b" in out) == (0, False)
    assert all(worker.name in out for worker in workers)
    code, out, _ = printed(gateway, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["fleet"]["hit_tokens"] > 0
    assert (told["fleet"]["false_hits"], told["fleet"]["leaking"]) == (0, 0)
    assert told["fleet"]["ttft_p50_ms"] > 0
    row = next(one for one in told["workers"] if one["hit_share"])
    assert row["kv_share"] > 0
    assert (row["running"], row["waiting"]) == (0, 0)


def test_without_a_terminal_or_a_gateway_it_says_so(gateway: Gateway) -> None:
    code, _, err = printed(gateway)
    assert (code, "--once" in err) == (2, True)
    code, _, err = printed(gateway, "--once", "--admin-url", "http://127.0.0.1:9")
    assert (code, "no gateway answers" in err) == (1, True)
    assert printed(gateway, "--interval-secs", "0.01")[0] == 2
