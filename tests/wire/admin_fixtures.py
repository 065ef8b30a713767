"""Fixtures of the admin port: one with a key and one without, each fresh for a test.

A test module takes them in with `pytest_plugins`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from admin_port import KEY, AdminPort, serving


@pytest.fixture(scope="module")
def _keyed() -> Iterator[AdminPort]:
    with serving(KEY) as served:
        yield served


@pytest.fixture
def port(_keyed: AdminPort) -> AdminPort:
    """With a key, and a client that has it."""
    return _keyed.fresh()


@pytest.fixture(scope="module")
def _open() -> Iterator[AdminPort]:
    with serving() as served:
        yield served


@pytest.fixture
def open_port(_open: AdminPort) -> AdminPort:
    """On loopback, without a key."""
    return _open.fresh()
