"""The registry's log as several gateways share it, with a copy of its own for each of them.

    append   the shared log, then the copy          read   the copy, beyond it the shared log

The copy is what a gateway starts by while the shared log is away, and what brings back a shared log
whose data was lost: records that are missing there are put in again, and `owes_mend` says that the
fleet's epoch must be raised before anything is reused, since what nobody's copy holds is lost for
good. Must never: acknowledge by the copy alone, or go on where the two have gone different ways.
Read `registry.py` for who replays it, `gateways.py` for who keeps it in step.
"""

from __future__ import annotations

import asyncio

from trunkline.ports.store import (
    ChainedStore,
    SharedStore,
    StoreBehind,
    StoreConflict,
    StoreDown,
    StoreForked,
    Tip,
)

COPY_BATCH = 100
_ROUNDS = 8
"""Of several gateways that put in the same records at once."""


class MirroredStore:
    """`ports.store.Store`. Until `sync` has succeeded once, it is the copy, for reading alone."""

    def __init__(self, shared: SharedStore, copy: ChainedStore) -> None:
        self._shared = shared
        self._copy = copy
        self._lock = asyncio.Lock()
        self._moves = 0
        self.is_joined = False
        """The shared log was seen to be the copy's, in this life of the process."""
        self.owes_mend = False
        """The shared log had lost records, which were put in again: see the module."""
        self.copy_trouble = ""
        """Why the copy is behind; empty while it is not."""

    async def sync(self) -> None:
        """Bring both to the same end. Raises StoreDown, StoreForked."""
        async with self._lock:
            for _ in range(_ROUNDS):
                if await self._sync():
                    self.is_joined = True
                    return
        raise StoreDown("the shared log does not hold still")

    async def append(self, expected_rev: int, record: bytes) -> int:
        if not self.is_joined:
            raise StoreDown("the shared log was not reached since this gateway started")
        rev = await self._shared.append(expected_rev, record)
        await self._keep(rev, record)
        return rev

    async def read(self, after_rev: int, limit: int) -> list[tuple[int, bytes]]:
        if not self.is_joined or after_rev < await self._copy.head():
            return await self._copy.read(after_rev, limit)
        rows = await self._shared.read(after_rev, limit)
        for rev, record in rows:
            await self._keep(rev, record)
        return rows

    async def head(self) -> int:
        return await (self._shared if self.is_joined else self._copy).head()

    async def high_water(self) -> int:
        """One above the head where the shared log had lost records, so that it is mended."""
        high_water = max(await self._copy.high_water(), await self.head())
        return high_water + self.owes_mend

    async def close(self) -> None:
        await self._copy.close()
        await self._shared.close()

    async def _sync(self) -> bool:
        """Whether both end alike now; False where somebody else wrote meanwhile."""
        try:
            tip = await self._shared.tip()
        except StoreBehind as behind:
            tip = behind.tip
            self._shared.forget()
        kept = await self._copy.tip()
        await self._require_one_log(tip, kept)
        if self._shared.moves > self._moves:
            self._moves, self.owes_mend = self._shared.moves, True
        if tip.rev > kept.rev:
            return await self._copied(kept.rev)
        return tip.rev == kept.rev or await self._refilled(tip.rev, kept.rev)

    async def _require_one_log(self, tip: Tip, kept: Tip) -> None:
        common = min(tip.rev, kept.rev)
        there = tip.digest if common == tip.rev else await self._shared.digest_at(common)
        here = kept.digest if common == kept.rev else await self._copy.digest_at(common)
        if there != here:
            raise StoreForked(
                f"up to revision {common} the shared log is another than this gateway's copy"
            )

    async def _copied(self, kept_rev: int) -> bool:
        while rows := await self._shared.read(kept_rev, COPY_BATCH):
            for rev, record in rows:
                try:
                    await self._copy.append(rev - 1, record)
                except StoreConflict:
                    return False  # a reader brought it meanwhile
                kept_rev = rev
        self.copy_trouble = ""
        return True

    async def _refilled(self, rev: int, kept_rev: int) -> bool:
        while rows := await self._copy.read(rev, COPY_BATCH):
            for _, record in rows:
                try:
                    rev = await self._shared.append(rev, record)
                except StoreConflict:
                    return False  # another gateway's copy: what it wrote is looked at anew
                self.owes_mend = True
        return rev == kept_rev

    async def _keep(self, rev: int, record: bytes) -> None:
        """A record that is durable in the shared log goes to the copy, too. Where it cannot, the
        next `sync` brings it.
        """
        try:
            await self._copy.append(rev - 1, record)
        except StoreConflict:
            return  # there already, or behind one that is missing yet
        except StoreDown as error:
            self.copy_trouble = str(error)
