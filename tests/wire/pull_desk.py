"""Two workers' stores with a pull between them, on a clock that only moves when a test moves it.

Waits look at that clock at every tick of the system, so that time-outs are decided by the test.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import SystemRandom

from kv_desk import LAYOUT, Desk, StillClock, chain, owner
from trunkline.core.records import Instant
from trunkline.core.transfer import (
    Grant,
    PullEnd,
    Reason,
    hash_scheme,
    keys_digest,
)
from trunkline.kv.client import Puller
from trunkline.kv.peers import PeerOptions, Source
from trunkline.kv.pulls import Cancel, PullOptions, PullRequest, PullResult
from trunkline.kv.records import Layout, Owner, Place
from trunkline.kv.server import PullServer, ServerOptions
from trunkline.kv.wire import Identity

KEY = bytes(range(32))
OWNER = owner("a")
TICK_MS = 5.0
STALL_MS = 300.0
"""By the test's clock."""
DEADLINE_MS = 5_000.0


def identity(worker: str, incarnation: str = "i1", layout: Layout = LAYOUT) -> Identity:
    scheme = hash_scheme(layout.block_tokens)
    return Identity(worker=worker, incarnation=incarnation, scheme=scheme)


@dataclass
class Host:
    """The worker around a store: what it says about a grant can be changed in the middle."""

    reason: Reason | None = None
    asked: int = 0
    at_ask: Callable[[int], object] | None = None

    def fault(self, grant: Grant) -> Reason | None:
        del grant
        self.asked += 1
        if self.at_ask is not None:
            self.at_ask(self.asked)
        return self.reason


@dataclass
class Ends:
    """A source `w1` with blocks, a destination `w2` without, and one clock."""

    block_count: int = 3
    layout: Layout = LAYOUT
    is_local: bool = False
    server_options: ServerOptions = field(default_factory=lambda: SERVER)
    pull_options: PullOptions = field(default_factory=lambda: PULLER)
    clock: StillClock = field(default_factory=StillClock)
    whose: Owner = OWNER
    source_host: Host = field(default_factory=Host)
    host: Host = field(default_factory=Host)

    def __post_init__(self) -> None:
        room = max(8, self.block_count)
        self.draw = SystemRandom()  # local addresses are the machine's: no two runs share one
        self.source = Desk(layout=self.layout, clock=self.clock, host_blocks=room)
        self.destination = Desk(
            layout=self.layout, clock=self.clock, host_blocks=room, staging_blocks=room
        )
        self.places = chain(self.whose, 0, self.block_count)
        self.source.put(self.places, self.whose)
        self.server = PullServer(
            self.source.store,
            self.layout,
            identity("w1", layout=self.layout),
            KEY,
            self.clock,
            self.server_options,
            host=self.source_host,
            draw=self.draw.randbytes,
        )
        self.puller = Puller(
            self.destination.store,
            self.layout,
            identity("w2", layout=self.layout),
            KEY,
            self.clock,
            self.pull_options,
            host=self.host,
            draw=self.draw.randbytes,
        )

    def at(self, address: tuple[str, int] | None = None) -> Source:
        host, port = address or self.server.address
        local = self.server.local_address if self.is_local and address is None else ""
        return Source(worker="w1", incarnation="i1", host=host, port=port, local=local)

    def grant(self, places: Sequence[Place] | None = None, **changes: object) -> Grant:
        places = self.places if places is None else places
        plain = Grant(
            source="w1",
            source_incarnation="i1",
            destination="w2",
            destination_incarnation="i1",
            ns=self.whose.ns,
            subjects=self.whose.subjects,
            epochs=self.whose.epochs,
            rev=0,
            layout=self.layout.digest,
            first_block=places[0].index,
            block_count=len(places),
            keys=keys_digest(b"".join(place.key for place in places)),
            max_bytes=len(places) * self.layout.block_bytes,
            deadline_ms=int(self.clock.ms + DEADLINE_MS),
            nonce=self.draw.randbytes(16),
        )
        return replace(plain, **changes)  # type: ignore[arg-type]  # any field

    def request(
        self, source: Source | None = None, grant: Grant | None = None, **changes: object
    ) -> PullRequest:
        plain = PullRequest(
            grant=(grant or self.grant()).signed(KEY),
            source=source or self.at(),
            places=tuple(self.places),
            owner=self.whose,
            deadline=Instant(self.clock.ms + DEADLINE_MS),
        )
        return replace(plain, **changes)  # type: ignore[arg-type]  # any field

    def pull(self, request: PullRequest | None = None, cancel: Cancel | None = None) -> PullResult:
        result = self.puller.pull(request or self.request(), cancel)
        self.check(result)
        return result

    def check(self, result: PullResult) -> None:
        """What holds after every pull: what is visible is right, and nothing is left over."""
        assert self.destination.hits(self.places, self.whose) == result.blocks
        assert (result.end is PullEnd.PUBLISHED) is (result.blocks > 0)
        figures = self.destination.store.figures()
        assert (figures.staged_bytes, figures.quarantined_bytes) == (0, 0)
        self.destination.check_sums()
        assert self.puller.figures.open_pulls == 0

    def settled(self) -> None:
        """The source, too, holds nothing for anybody; its threads may need a moment for that."""
        wait_until(lambda: self.source.store.figures().pinned_bytes == 0)
        wait_until(lambda: self.server.figures.open_pulls == 0)
        self.source.check_sums()


PEERS = PeerOptions(tick_ms=TICK_MS, is_local_used=True, connect_ms=5_000.0)
PATIENT = PullOptions(stall_ms=1e9, peers=PEERS)
"""For tests in which the source's end moves the clock, however far ahead of this end it is."""
SERVER = ServerOptions(tick_ms=TICK_MS, stall_ms=STALL_MS)
PULLER = PullOptions(stall_ms=STALL_MS, peers=PEERS)


@contextlib.contextmanager
def running(ends: Ends) -> Iterator[Ends]:
    """Listen, and at the end see that no thread or file is left."""
    threads, files = threading.active_count(), open_files()
    ends.server.start()
    try:
        yield ends
    finally:
        ends.puller.close()
        ends.server.close()
    # A thread that has said farewell may still be on its way out, here and in earlier tests.
    wait_until(lambda: threading.active_count() <= threads and open_files() <= files)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Another thread brings it about; the run's own time-out is the end of a vain wait."""
    pause = threading.Event()
    while not is_so():
        pause.wait(0.002)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
