"""`python -m trunkline.child`: one of the gateway processes that a parent starts.

It is told all it has to know on its standard input, as its neighbours are, so that a process that
is started later goes by the same settings. Nobody else has a reason to start it. Read `seat.py` for
how it differs from a gateway alone, `parent.py` for who starts it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

from trunkline import observe
from trunkline.adapters.clock import SystemClock
from trunkline.adapters.process_wire import MAX_WORD_BYTES, ProcessWire
from trunkline.cli import FAILED, MISUSED, complain
from trunkline.control.load_sync import LoadSync
from trunkline.errors import ConfigError, GatewayError
from trunkline.seat import Handed, Seat
from trunkline.settings import secret_values
from trunkline.wiring import run_gateway

LENGTH_BYTES = 4
MAX_HANDED_BYTES = 16 << 20


def main() -> int:
    if sys.stdin.isatty():
        return complain(ConfigError("this is for `trunkline serve --processes` to start"), MISUSED)
    handed = msgspec.json.decode(_read_handed(), type=Handed)
    level: Any = handed.config.observe.log_level
    shape: Any = handed.config.observe.log_format
    hidden = (*secret_values(handed.config), handed.token)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a reload is the parent's matter
    folder = handed.config.observe.log_dir
    try:
        redactor = observe.configure(
            level, shape, secrets=hidden, process=handed.number, folder=folder
        )
        return uvloop.run(_run(handed, redactor.add))
    except ConfigError as error:
        return complain(error, MISUSED)
    except GatewayError as error:
        return complain(error, FAILED)
    except OSError as error:
        return complain(error, MISUSED)


async def _run(handed: Handed, hide: Callable[[str], None]) -> int:
    if handed.ear < 0:
        return await run_gateway(handed.config, hide, Seat(handed, None))
    wire = ProcessWire(
        socket.socket(fileno=handed.ear), [socket.socket(fileno=one) for one in handed.mouths]
    )
    life = secrets.token_hex(16)
    load = LoadSync(life, wire, SystemClock(), max_word_bytes=MAX_WORD_BYTES)
    wire.open()
    try:
        return await run_gateway(handed.config, hide, Seat(handed, load))
    finally:
        wire.close()


def _read_handed() -> bytes:
    """No byte more than it: what follows on the pipe is for the loop to read."""
    length = int.from_bytes(_exactly(LENGTH_BYTES), "big")
    if length > MAX_HANDED_BYTES:
        raise ConfigError(f"{length} bytes of settings were handed over")
    return _exactly(length)


def _exactly(count: int) -> bytes:
    got = b""
    while len(got) < count:
        part = os.read(sys.stdin.fileno(), count - len(got))
        if not part:
            raise SystemExit(0)  # the parent is gone
        got += part
    return got


if __name__ == "__main__":
    sys.exit(main())
