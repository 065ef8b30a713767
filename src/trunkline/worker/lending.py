"""The worker's store as its pull server sees it: behind the outgoing link, and with faults on
purpose.

    asked for n blocks ─► wait until the link would be through with them ─► pinned, sent

Runs in the threads of the server. Must never: hold a pin while it waits for the link. Read
`link.py` for the model, `kv/server.py` for who asks.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

from trunkline.core.records import Instant
from trunkline.kv.records import Block, Pins
from trunkline.kv.store import BlockStore
from trunkline.ports.clock import Clock
from trunkline.worker.faults import Faults
from trunkline.worker.link import Link


class LentStore:
    """`kv.server.Lender`."""

    def __init__(
        self, store: BlockStore, *, link: Link, clock: Clock, faults: Faults, block_tokens: int
    ) -> None:
        self._store = store
        self._link = link
        self._clock = clock
        self._faults = faults
        self._block_tokens = block_tokens
        self._is_closing = threading.Event()

    def pin(
        self,
        ns: bytes,
        keys: Sequence[bytes],
        *,
        until: Instant,
        holder: str = "",
        is_verified: bool = True,
    ) -> Pins:
        if self._faults.is_pull_stalling:
            self._is_closing.wait()
        now = self._clock.now()
        _, through_at = self._link.book(len(keys) * self._block_tokens, now)
        self._is_closing.wait((through_at - now) / 1e3)
        lease = Instant(until + (through_at - now))
        pins = self._store.pin(ns, keys, until=lease, holder=holder, is_verified=is_verified)
        if self._faults.is_pull_flipping and pins.blocks:
            return dataclasses.replace(pins, blocks=(*pins.blocks[:-1], _flipped(pins.blocks[-1])))
        return pins

    def unpin(self, token: bytes) -> bool:
        return self._store.unpin(token)

    def renew(self, token: bytes, until: Instant) -> bool:
        return self._store.renew(token, until)

    def close(self) -> None:
        """Nobody waits any longer."""
        self._is_closing.set()


def _flipped(block: Block) -> Block:
    """One bit of its bytes is another; what is announced of them stays."""
    damaged = bytearray(block.data)
    damaged[len(damaged) // 2] ^= 1
    return dataclasses.replace(block, data=memoryview(damaged).toreadonly())
