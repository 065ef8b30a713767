"""The worker's store as its pull server sees it: behind the outgoing link, and with faults on
purpose.

    asked for n blocks ─► some are to be computed here ─► wait until they are in the store
                       ─► m are here ─► wait until the link would be through with m ─► pinned, sent
                                     │                └─ the peer left: its turn is given back
                                     └─ not before the grant is over: busy, nothing is booked

Runs in the threads of the server. Must never: hold a pin while it waits for the link, or wait for a
peer that is gone. Read
`link.py` for the model, `kv/server.py` for who asks.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence

from trunkline.core.records import Instant
from trunkline.core.transfer import Reason
from trunkline.kv.records import Block, Pins, always
from trunkline.kv.store import BlockStore
from trunkline.ports.clock import Clock
from trunkline.worker.coming import TICK_MS, Coming
from trunkline.worker.faults import Faults
from trunkline.worker.link import Link

LEASE_MS = 5_000.0
"""A pin ends this long after bytes moved last. The server gives a peer up long before."""
_LEFT = Pins(token=b"", blocks=(), reason=Reason.LOST)


class LentStore:
    """`kv.server.Lender`. `until` is to be the end of the grant: so long a pull may wait for the
    link. What is pinned then is pinned for `LEASE_MS`.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        link: Link,
        clock: Clock,
        faults: Faults,
        block_tokens: int,
        coming: Coming,
    ) -> None:
        self._store = store
        self._link = link
        self._clock = clock
        self._faults = faults
        self._block_tokens = block_tokens
        self.coming = coming
        self._is_closing = threading.Event()

    def pin(
        self,
        ns: bytes,
        keys: Sequence[bytes],
        *,
        until: Instant,
        holder: str = "",
        is_verified: bool = True,
        is_wanted: Callable[[], bool] = always,
    ) -> Pins:
        if self._faults.is_pull_stalling and not self._wait(Instant(math.inf), is_wanted):
            return _LEFT
        here = self._computed(ns, keys, until, is_wanted)
        if here.reason is Reason.LOST:
            return _LEFT
        if not here.blocks:
            return here
        found, now = keys[: len(here.blocks)], self._clock.now()
        booked = self._link.book(len(found) * self._block_tokens, now, through_by=until)
        if booked is None:
            return Pins(token=b"", blocks=(), reason=Reason.BUSY)
        if not self._wait(booked[1], is_wanted):
            self._link.give_back(booked, self._clock.now())
            return _LEFT
        pins = self._store.pin(
            ns, found, until=self._lease(until), holder=holder, is_verified=is_verified
        )
        pins = dataclasses.replace(pins, reason=pins.reason or here.reason)
        if self._faults.is_pull_flipping and pins.blocks:
            return dataclasses.replace(pins, blocks=(*pins.blocks[:-1], _flipped(pins.blocks[-1])))
        return pins

    def unpin(self, token: bytes) -> bool:
        return self._store.unpin(token)

    def renew(self, token: bytes, until: Instant) -> bool:
        return self._store.renew(token, self._lease(until))

    def close(self) -> None:
        """Nobody waits any longer."""
        self._is_closing.set()
        self.coming.close()

    def _computed(
        self, ns: bytes, keys: Sequence[bytes], until: Instant, is_wanted: Callable[[], bool]
    ) -> Pins:
        """What of it is here, once nothing that is missing is to be computed. Holds nothing."""
        while True:
            here = self._store.pin(ns, keys, until=until, is_verified=False)
            if here.token:
                self._store.unpin(here.token)
            if here.reason is not Reason.MISS:
                return here
            missing = keys[len(here.blocks)]
            reason = self.coming.wait(ns, missing, until=until, is_wanted=is_wanted)
            if reason is not None:
                return dataclasses.replace(here, token=b"", reason=reason)

    def _wait(self, until: Instant, is_wanted: Callable[[], bool]) -> bool:
        """Until then, or until this worker ends; False where the peer left before."""
        while not self._is_closing.is_set():
            left_ms = until - self._clock.now()
            if left_ms <= 0.0:
                break
            if not is_wanted():
                return False
            self._is_closing.wait(min(left_ms, TICK_MS) / 1e3)
        return True

    def _lease(self, until: Instant) -> Instant:
        return Instant(min(until, self._clock.now() + LEASE_MS))


def _flipped(block: Block) -> Block:
    """One bit of its bytes is another; what is announced of them stays."""
    damaged = bytearray(block.data)
    damaged[len(damaged) // 2] ^= 1
    return dataclasses.replace(block, data=memoryview(damaged).toreadonly())
