"""Puts the KV plane's threads and sockets on the virtual loop and network, for one run.

Product code imports `threading`, `socket` and `ThreadPoolExecutor` by name; while a run with pulls
lasts these names stand for `fibres.py` and `kv_net.py` in the modules below, and for the real ones
again after it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from faults.fibres import Threads, put_in_place
from faults.kv_net import Sockets
from faults.network import FaultyNet
from faults.setting import Setting

from trunkline.kv import client, peers, ring, server, store, wire
from trunkline.kv import pulls as kv_pulls
from trunkline.worker import coming, lending, link, pulls

MODULES: Sequence[ModuleType] = (
    *(client, kv_pulls, peers, ring, server, store, wire),
    *(coming, lending, link, pulls),
)


@dataclass(frozen=True, slots=True)
class Plane:
    """What the KV plane of all workers stands on."""

    threads: Threads
    sockets: Sockets


@contextmanager
def kv_plane(net: FaultyNet, setting: Setting) -> Generator[Plane | None]:
    """None where nothing is pulled."""
    if setting.pulls is None:
        yield None
        return
    threads = Threads(net, setting.seed)
    sockets = Sockets(net, threads, setting.seed, room_bytes=setting.pulls.room_bytes)
    names = {"threading": threads, "socket": sockets, "ThreadPoolExecutor": threads.pool}
    with put_in_place(MODULES, names):
        yield Plane(threads, sockets)
