"""`trunkline serve` as an operator starts and stops it: ports, and what it says in the end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fleet import Processes, processes

TINY = ("--profile", "tiny")


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_that_is_in_use_is_named_with_its_flag_and_the_remedy(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = {"--port": "0", "--admin-port": "0", flag: port}
        command = [sys.executable, "-m", "trunkline", "serve", "--log-level", "error"]
        command += ["--auth", "off"]
        done = subprocess.run(
            [*command, *(word for pair in words.items() for word in pair)],
            capture_output=True,
            text=True,
            timeout=120.0,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"trunkline: port {port} on 127.0.0.1 is in use by another process; end that, or give"
        f" another port with {flag} (0 takes any free one)\n"
    )
    assert done.stdout == ""


def test_the_ports_that_the_kernel_picked_are_in_the_shown_settings(started: Processes) -> None:
    gateway = started.gateway([], *TINY, ready=0)
    shown = gateway.admin("/config").json()["listen"]
    assert gateway.url == f"http://127.0.0.1:{shown['port']}"
    assert gateway.admin_url == f"http://127.0.0.1:{shown['admin_port']}"


def test_a_gateway_that_stops_says_how_many_requests_it_served(started: Processes) -> None:
    worker = started.worker(*TINY)
    gateway = started.gateway([worker.url], *TINY)
    for _ in range(3):
        assert gateway.chat("hello").status == 200
    gateway.process.send(signal.SIGTERM)
    assert gateway.process.stop() == 0
    (line,) = [line for line in gateway.process.log().splitlines() if "gateway.stopped" in line]
    assert line.endswith("served_requests=3")
