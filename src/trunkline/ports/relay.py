"""How a gateway hears of a worker whose events reach another gateway only.

`control/relays.py` does it; `adapters/zmq_events.py` has the gateway's own connection, and feeds.
"""

from __future__ import annotations

from typing import Protocol

from trunkline.core.records import WorkerId


class Ear(Protocol):
    """Who listens to one worker's events."""

    def relay_up(self) -> None:
        """From here on they come over another gateway, as over a new connection."""
        ...

    def relayed(self, seq: int, payload: bytes) -> None:
        """A message of the live stream, as the worker sent it."""
        ...

    def relay_down(self) -> None:
        """They come that way no more."""
        ...


class Line(Protocol):
    """What `Ear` tells of its own connection to the worker, which comes first."""

    def link(self, is_up: bool) -> None:
        """It was made, or lost."""
        ...

    def heard(self, seq: int, payload: bytes) -> None:
        """A message came on it."""
        ...

    def close(self) -> None:
        """Nobody listens to that worker here any more."""
        ...


class Relays(Protocol):
    def open(self, worker: WorkerId, ear: Ear) -> Line:
        """Its connection is not made yet."""
        ...
