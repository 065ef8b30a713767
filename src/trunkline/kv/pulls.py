"""What a pull is asked with, how another thread ends it, and what it says at its end.

Read `client.py` for how it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trunkline.core.records import Instant
from trunkline.core.transfer import PullEnd, Reason
from trunkline.kv.peers import Connection, PeerOptions, Source
from trunkline.kv.records import Owner, Place
from trunkline.kv.wire import interrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """Bounds of one destination."""

    max_pulls: int = 8
    """At a time; a further one is refused, not queued."""
    stall_ms: float = 2_000.0
    """Less than one chunk in this time, and the pull ends."""
    peers: PeerOptions = field(default_factory=PeerOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What is to be pulled, and until when."""

    grant: str
    source: Source
    places: tuple[Place, ...]
    owner: Owner
    deadline: Instant
    saved_ms: float = 0.0
    """What one of the blocks saves against computing it, for the order of eviction."""
    should_give_up: Callable[[int, float | None], bool] | None = None
    """Asked at every wait with the whole blocks so far and the ms that the rest may take at the
    pace so far, None where nothing came yet: whether to compute it instead.
    """
    on_progress: Callable[[int], None] | None = None
    """Told after each whole verified block how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """How one pull ended. `blocks` leading ones are visible here now."""

    end: PullEnd
    reason: Reason | None
    """Why not all of them; None where all are."""
    blocks: int
    bytes: int
    """Verified, published or not."""
    ms: float
    setup_ms: float
    """Until the source's manifests were here."""
    verify_ms: float


class Cancel:
    """Ends one pull from another thread, at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._connection: Connection | None = None

    def cancel(self) -> None:
        with self._lock:
            self._is_set = True
            if self._connection is not None:
                interrupt(self._connection.channel.socket)

    @property
    def is_cancelled(self) -> bool:
        return self._is_set

    @contextmanager
    def ends(self, connection: Connection) -> Generator[None]:
        """While it lasts, `cancel` ends every wait on this connection."""
        with self._lock:
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFigures:
    pulls: int
    open_pulls: int
    overdue_pulls: int
    """Open past their deadline: must be 0."""
    bytes_in: int
    blocks_in: int
    verify_ms: float
    ended: dict[tuple[PullEnd, Reason | None], int]
