"""The disk below registry and audit log fills up under a gateway with tenants: F13."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ground
from crowd import Ask, Crowd
from fleet import Gateway, free_port, processes, until
from rows import HEARTBEAT_S, Finding, Row, Stage, at_least, held, none_of
from vanish import may_unshare

MOUNT = """
mount -t tmpfs -o size=2m tmpfs "$0"
exec "$@"
"""


def full_disk(stage: Stage) -> list[Finding]:
    """State folder on a disk of its own that is full for a while; then the gateway is killed."""
    if not may_unshare():
        return [held("F13", "a disk of its own for the state folder", "mounted",
                     "mounting is not allowed here", is_met=False)]  # fmt: skip
    acknowledged, refused, tried = list[str](), 0, 0
    with tempfile.TemporaryDirectory() as folder, processes() as started:
        fleet = ground.workers(started, 2)
        words = (
            *("--state-dir", folder, "--port", str(free_port())),
            *("--admin-port", str(free_port())),
        )
        gateway = ground.gateway(
            started,
            [worker.url for worker in fleet],
            *words,
            under=("unshare", "-m", "sh", "-c", MOUNT, folder),
        )
        acknowledged += [key for _ in range(5) if (key := _new_key(gateway))]
        with Crowd([gateway.url], _short, clients=8, key=acknowledged[0]) as crowd:
            time.sleep(2 * HEARTBEAT_S)
            began_s = time.monotonic()
            with _filled(gateway, folder):
                for _ in range(20):
                    key = _new_key(gateway)
                    tried += 1
                    refused += not key
                    acknowledged += [key] if key else []
                time.sleep(stage.phase_s(10.0))
                ended_s = time.monotonic()
            stage.say(f"disk full: {refused} of {tried} grants refused")
            again = until(lambda: _new_key(gateway), "it grants again", 60)
            acknowledged.append(again)
        meanwhile = crowd.since(began_s, ended_s)
        # Killed, and started again on what the disk has: its mount lives in its namespace alone.
        kept = Path(folder) / "kept"
        _save(gateway, folder, kept)
        gateway.process.kill()
        again_words = ("--state-dir", str(kept), *words[2:])
        later = ground.gateway(started, [worker.url for worker in fleet], *again_words)
        unknown = [key for key in acknowledged if not _is_known(later, key)]
    stage.say(f"{len(acknowledged)} keys were acknowledged")
    return [
        none_of("F13", "acknowledged keys lost after the disk was full and a kill", len(unknown),
                len(acknowledged)),
        none_of("F13", "requests without their whole answer while it was full",
                sum(not o.is_whole for o in meanwhile), len(meanwhile)),
        at_least("F13", "grants refused while it was full (fail closed)", refused, 1, ""),
    ]  # fmt: skip


def _short(number: int, turn: int) -> Ask:
    return Ask(prompt=tuple(range(600 + number, 700 + number)), tokens=4)


def _new_key(gateway: Gateway) -> str:
    """Empty where it was refused."""
    body = {"tenant": "acme", "create_tenant": True, "user": ""}
    answer = gateway.admin("/keys", "POST", json=body)
    return answer.json()["key"] if answer.status_code == 201 else ""


def _is_known(gateway: Gateway, key: str) -> bool:
    headers = {"authorization": f"Bearer {key}"}
    return gateway.complete([700, 701, 702], headers=headers).status == 200


def _seen(gateway: Gateway, folder: str) -> Path:
    """The folder as the gateway sees it."""
    return Path(f"/proc/{gateway.process.child.pid}/root{folder}")


@contextmanager
def _filled(gateway: Gateway, folder: str) -> Iterator[None]:
    ballast = _seen(gateway, folder) / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    file.write(os.urandom(size))
            except OSError:
                continue
    yield
    ballast.unlink()


def _save(gateway: Gateway, folder: str, kept: Path) -> None:
    """What a crash would leave on a disk: the files as the kernel has them."""
    gateway.process.send(signal.SIGSTOP)  # nothing is written while it is copied
    for path in sorted(_seen(gateway, folder).rglob("*")):
        target = kept / path.relative_to(_seen(gateway, folder))
        if path.is_dir():
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif path.is_file():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
            target.chmod(path.stat().st_mode & 0o777)


ROWS = (Row(fault="F13", title="the disk of the state folder is full", run=full_disk),)
