"""Fixtures of a simulated worker and gateways before it, the same for all tests of a module.

A test module takes them in with `pytest_plugins`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import KEY, TINY, Gateway, Process, Processes, processes


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module")
def simulated(started: Processes) -> Process:
    return started.worker(*TINY, "--blocks", "65536")


@pytest.fixture(scope="module")
def gateway(started: Processes, simulated: Process) -> Gateway:
    return started.gateway([simulated.url], *TINY)


@pytest.fixture(scope="module")
def locked(started: Processes, simulated: Process) -> Gateway:
    """One that asks its clients for a key."""
    return started.gateway([simulated.url], *TINY, "--api-key", KEY)
