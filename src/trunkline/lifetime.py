"""How long a gateway serves: from the line that says it is up, to a signal and the last stream.

And what is said where the kernel gives no port. Must never: break a stream off before its time,
unless a second signal says that nobody waits for it. Read `wiring.py` for what is served.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from trunkline.config import Config
from trunkline.errors import ConfigError
from trunkline.written import host_port

if TYPE_CHECKING:
    from trunkline.gateway.front import Front

DRAIN_MS = 10_000.0


async def until_stopped(
    say_up: Callable[[], None],
    front: Front,
    beside: Sequence[Coroutine[Any, Any, None]],
    serve_operators: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
) -> None:
    """Say that all is up; then everything that runs beside requests, until a signal."""
    stop, again = asyncio.Event(), asyncio.Event()
    stop_on_signals(stop, again)
    gc.freeze()  # what was loaded stays: to look through it takes 12 ms, amid answers
    say_up()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_operators(stop))
        housekeeping = [group.create_task(work) for work in beside]
        await stop.wait()
        await _drain(front, again)
        for task in housekeeping:
            task.cancel()


def raise_descriptors() -> None:
    """Let this process open as many files as its limit can be raised to: shells and service
    managers begin with some thousand, and each client takes one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems take less than they name
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def taken_port_named(flag: str, host: str, port: int) -> Generator[None]:
    """Turns what the kernel says of an address into what the operator can do about it."""
    try:
        yield
    except (OSError, ConfigError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use by another process; end that, or give another"
                f" port with {flag} (0 takes any free one)"
            ) from error
        if isinstance(cause, OSError) and cause.errno == errno.EACCES:
            raise ConfigError(
                f"port {port} on {host} needs more rights; give one above 1023 with {flag}"
            ) from error
        raise


def announce(bound: Config) -> None:
    """One line of JSON on stdout: we are up, and where."""
    listen = bound.listen
    admin_url = f"http://{host_port(listen.admin_host, listen.admin_port)}"
    line = {
        "url": f"http://{host_port(listen.host, listen.port)}",
        "admin_url": admin_url,
        "dashboard": f"{admin_url}/dashboard",
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def stop_on_signals(stop: asyncio.Event, again: asyncio.Event) -> None:
    """The first SIGINT or SIGTERM sets `stop`, a further one `again`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (again if stop.is_set() else stop).set()
        )


async def _drain(front: Front, again: asyncio.Event) -> None:
    """Let open streams end, unless a second signal says that nobody waits for them."""

    async def hurry() -> None:
        await again.wait()
        await front.close()

    async with asyncio.TaskGroup() as group:
        hurrying = group.create_task(hurry())
        await front.drain(DRAIN_MS)
        hurrying.cancel()
