"""The holders of epochs among the workers: one for each, from when it is added until it is removed.

A worker keeps its lease whether or not it is healthy or in the fleet: what it holds can be used
until its lease has run out. Read `holders.py` for one, `revocation.py` for who asks for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trunkline.control.holders import HolderParts, OnPulls, WorkerHolder
from trunkline.control.supervised import Supervised
from trunkline.ports.worker import Endpoint


class Holdings(Supervised):
    """An async context manager: leaving it ends all lease loops. Bound: the workers there are."""

    def __init__(self, parts: HolderParts) -> None:
        super().__init__()
        self._parts = parts
        self._holders: dict[str, WorkerHolder] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}

    def add(self, name: str, endpoint: Endpoint) -> None:
        """A worker is here: keep its lease alive. One that was here under this name is let go."""
        self.remove(name)
        holder = self._holders[name] = WorkerHolder(name, endpoint, self._parts)
        self._loops[name] = self.begin(holder.run(), f"lease of {name}")

    def remove(self, name: str) -> None:
        """It was removed: it is granted nothing any more, and its last lease runs out."""
        if self._holders.pop(name, None) is not None:
            self._loops.pop(name).cancel()

    def listen(self, on_pulls: OnPulls) -> None:
        """Who is told what leases say of pulls: see `HolderParts.on_pulls`."""
        self._parts.on_pulls = on_pulls

    def find(self, name: str) -> WorkerHolder | None:
        return self._holders.get(name)

    def all(self) -> Sequence[WorkerHolder]:
        return list(self._holders.values())

    def renew(self) -> None:
        """The epochs are others: bring them to everybody at once."""
        for holder in self._holders.values():
            holder.renew()
