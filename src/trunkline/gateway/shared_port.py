"""One port of several processes: the kernel gives each new connection to one of them.

Every process binds a socket of its own with SO_REUSEPORT, so that connections are spread evenly
(one socket that all accept from gives nearly all of a burst to whoever wakes first), and those of a
process that ended go to the others. Who holds the port listens on nothing. Must never: share a port
with strangers. Read `parent.py` for who holds it.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trunkline.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a socket is bound, as it can be handed to another process."""

    family: int
    place: tuple[str | int, ...]


def hold(host: str, port: int) -> list[socket.socket]:
    """Sockets that keep the port for our processes, and listen on nothing. Raises OSError where
    somebody has it already, ConfigError where the system has no such sockets.
    """
    if sys.platform != "linux":
        raise ConfigError("processes above 1 needs Linux, whose kernel shares a port out evenly")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    held: list[socket.socket] = []
    try:
        for family, _, _, _, place in dict.fromkeys(found):
            if held and not port:  # the kernel chose one for the first: all have it
                place = (place[0], held[0].getsockname()[1], *place[2:])
            if place[1]:
                # Without the option first: with it, another gateway on the port would go unseen.
                _bound(family, place, is_shared=False).close()
            held.append(_bound(family, place, is_shared=True))
    except OSError:
        for one in held:
            one.close()
        raise
    return held


def addresses_of(held: Sequence[socket.socket]) -> list[Address]:
    return [Address(family=one.family, place=tuple(one.getsockname())) for one in held]


def sockets_at(addresses: Sequence[Address]) -> list[socket.socket]:
    """Further sockets at addresses that are held; whoever serves on them makes them listen."""
    return [_bound(one.family, one.place, is_shared=True) for one in addresses]


def _bound(family: int, place: Any, *, is_shared: bool) -> socket.socket:  # Any: by family
    # Named TCP, as asyncio switches Nagle's algorithm off on such sockets only.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(tuple(place))
    except OSError:
        made.close()
        raise
    return made
