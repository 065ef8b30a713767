"""The tool behind `make chaos` works: it tries faults, tells what came of them, leaves nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import StatisticsError

import pytest
from rows import (
    Finding,
    Row,
    Stage,
    Verdict,
    all_of,
    at_most,
    growth,
    none_of,
    percentile,
    table,
    tried,
)
from toxic import HOST, Link, Toxic

from halting import halt

TOOL = Path(__file__).with_name("chaos.py")
WAIT_S = 120.0


@contextlib.contextmanager
def begun(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The tool as a process, which is asked to end, and so ends what it started."""
    words = (sys.executable, str(TOOL), *words)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tool:
        try:
            yield tool
        finally:
            if tool.poll() is None:
                tool.terminate()


def is_alive(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for children in /proc")
def test_a_kill_loses_nothing_and_an_interrupted_run_ends_all_it_started(
    tmp_path: Path,
) -> None:
    told = tmp_path / "table.json"
    words = ("--only", "F1,F2", "--part", "", "--trials", "1", "--json", str(told))
    with begun(*words) as tool:
        assert tool.stderr is not None
        lines: list[str] = []
        for raw in tool.stderr:
            lines.append(raw.decode())
            if lines[-1].startswith("F2"):
                break  # F1 is over
        children = Path(f"/proc/{tool.pid}/task/{tool.pid}/children")
        until_s = time.monotonic() + WAIT_S
        while not (pids := children.read_text().split()):
            assert tool.poll() is None, "".join(lines)
            assert time.monotonic() < until_s, "F2 starts its fleet"
            time.sleep(0.05)
        tool.send_signal(signal.SIGTERM)
        out, _ = tool.communicate(timeout=WAIT_S)
    assert tool.returncode == 130, "".join(lines)
    assert [pid for pid in pids if is_alive(pid)] == []
    found = {row["what"]: row for row in json.loads(told.read_text())["findings"]}
    for what in (
        "kills that were not tried",
        "lost: neither answered nor told",
        "wrong, repeated or missing tokens",
        "streams that cannot go on: cut without an error frame",
    ):
        assert found.get(what, {}).get("verdict") == Verdict.PASS.value, (found, lines)
        assert what in out.decode()


def test_a_child_that_stands_still_may_be_told_again() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            halt(child.pid)
            halt(child.pid)
            child.send_signal(signal.SIGCONT)
            halt(child.pid)
            assert child.poll() is None
        finally:
            child.kill()


def test_an_unknown_fault_is_named() -> None:
    with begun("--only", "F1,F99") as tool:
        _, said = tool.communicate(timeout=WAIT_S)
    assert tool.returncode == 1
    assert "no such fault: F99" in said.decode()


def test_what_was_never_tried_or_measured_is_no_success() -> None:
    assert none_of("F1", "lost", 0, 0).verdict is Verdict.FAIL
    assert none_of("F1", "lost", 1, 10).verdict is Verdict.FAIL
    assert none_of("F1", "lost", 0, 10).verdict is Verdict.PASS
    assert all_of("F1", "complete", 0, 0).verdict is Verdict.FAIL
    assert all_of("F1", "complete", 9, 10).verdict is Verdict.FAIL
    assert at_most("F1", "gap", percentile([], 0.95), 1.0, "s").verdict is Verdict.FAIL
    assert at_most("F1", "gap", 1.0, 1.0, "s").verdict is Verdict.PASS
    assert "FAIL" in table([all_of("F1", "complete", 9, 10)])


@pytest.mark.parametrize("error", [AssertionError("no"), StatisticsError("no"), KeyError("no")])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_row_that_breaks_has_failed_and_the_next_one_is_run(
    error: Exception, is_grouped: bool
) -> None:
    def breaks(stage: Stage) -> list[Finding]:
        raise ExceptionGroup("of tasks", [error]) if is_grouped else error

    stage = Stage(fault="F1", trials=1, seconds=1.0, limit_s=1.0, seed=1, began_s=0.0)
    [finding] = tried(Row(fault="F1", title="a row", run=breaks), stage)
    assert (finding.what, finding.verdict) == ("a row", Verdict.FAIL)
    assert type(error).__name__ in finding.figure


def test_growth_is_in_percent_an_hour() -> None:
    steady = [(10.0 * at, 100.0 + at % 2) for at in range(100)]
    growing = [(36.0 * at, 100.0 + at * 0.02) for at in range(101)]  # 100 to 102 within an hour
    assert growth(steady) == pytest.approx(0.0, abs=1.0)
    assert growth(growing) == pytest.approx(1.98, abs=0.01)
    assert math.isnan(growth(growing[:2]))


# -- the proxy -------------------------------------------------------------------------------------


@pytest.fixture
def echo() -> Iterator[int]:
    """A port that says back what it hears."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(taken: socket.socket) -> None:
        with taken, contextlib.suppress(OSError):
            while data := taken.recv(1 << 16):
                taken.sendall(data)

    def accept() -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(taken,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def link(echo: int) -> Iterator[Link]:
    with Toxic() as toxic:
        yield toxic.link(f"tcp://127.0.0.1:{echo}")


def through(link: Link) -> socket.socket:
    return socket.create_connection((HOST, link.port), timeout=WAIT_S)


def heard(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            break
        data += part
    return data


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(WAIT_S)
    return False


def is_cut_off(link: Link) -> bool:
    try:
        with through(link) as connection:
            connection.sendall(b"a")
            return not connection.recv(1)
    except ConnectionError:
        return True


def test_small_pieces_and_delays_change_no_byte(link: Link) -> None:
    link.slow(0.0001, piece_bytes=7)
    words = os.urandom(5_000)
    with through(link) as connection:
        connection.sendall(words)
        assert heard(connection, len(words)) == words


@pytest.mark.parametrize(("up", "down"), [(True, True), (True, False), (False, True)])
def test_what_a_cut_link_was_given_arrives_when_it_is_whole(
    link: Link, up: bool, down: bool
) -> None:
    with through(link) as connection:
        connection.sendall(b"a")
        assert heard(connection, 1) == b"a"
        link.cut(up=up, down=down)
        connection.sendall(b"b")
        assert is_silent(connection)
        link.heal()
        assert heard(connection, 1) == b"b"


def test_a_reset_that_lasts_meets_new_connections_too_until_it_is_over(link: Link) -> None:
    with through(link) as connection:
        connection.sendall(b"a")
        assert heard(connection, 1) == b"a"
        link.reset(lasts=True)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert is_cut_off(link)
    link.heal()
    with through(link) as connection:
        connection.sendall(b"c")
        assert heard(connection, 1) == b"c"
