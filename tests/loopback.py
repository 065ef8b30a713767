"""Ports of the loopback address for processes whose address must be known before they start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port for an address that must be known beforehand. It lies below those that the kernel
    hands out (from 32,768 on), so that nobody is given it before it is used.
    """
    dice = random.SystemRandom()
    while True:
        port = dice.randrange(10_000, 32_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
