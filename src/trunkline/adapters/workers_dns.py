"""Workers that a name stands for: each of its addresses (A and AAAA) is one, at one port.

As a headless service in Kubernetes or a record of Consul has them. Asked at a bounded rate, one
look-up at a time; where there is no answer, or an empty one, the last good one stays. Service
records (SRV) are not read: the standard library has no way to ask for them. Read
`ports/workers.py` next.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Any

from trunkline.ports.workers import NamedWorker
from trunkline.written import host_port

Resolve = Callable[[str, int], Awaitable[Sequence[tuple[Any, ...]]]]
"""As `getaddrinfo` answers."""


class WorkersDns:
    """The `WorkerSource` of one name."""

    def __init__(
        self, host: str, port: int, *, interval_s: float, resolve: Resolve | None = None
    ) -> None:
        self.name = f"dns {host}:{port}"
        self._host = host
        self._port = port
        self._interval_s = interval_s
        self._resolve = resolve or _resolve

    async def run(
        self, tell: Callable[[Sequence[NamedWorker]], None], on_trouble: Callable[[str], None]
    ) -> None:
        while True:
            try:
                # Without a limit of ours: a thread that asks cannot be ended, and the next question
                # would take another one.
                found = await self._resolve(self._host, self._port)
            except (OSError, UnicodeError) as error:
                on_trouble(f"{self._host} has no address: {error}")
            else:
                addresses = sorted({_address(entry) for entry in found}, key=_order)
                if addresses:
                    tell([_named(address, self._port) for address in addresses])
                else:
                    on_trouble(f"{self._host} has no address")
            await asyncio.sleep(self._interval_s)


async def _resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _address(entry: tuple[Any, ...]) -> str:
    return str(entry[4][0]).partition("%")[0]  # a scope is of this machine alone


def _order(address: str) -> tuple[int, int]:
    parsed = ip_address(address)
    return parsed.version, int(parsed)


def _named(address: str, port: int) -> NamedWorker:
    return NamedWorker(url=f"http://{host_port(address, port)}", is_found=True)
