"""The holders of epochs among the workers: one for each, from when it is added until it is removed.

A worker keeps its lease whether or not it is healthy or in the fleet: what it holds can be used
until its lease has run out. Read `holders.py` for one, `revocation.py` for who asks for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from trunkline.control.holders import HolderParts, WorkerHolder
from trunkline.ports.worker import Endpoint


class Holdings:
    """An async context manager: leaving it ends all lease loops. Bound: the workers there are."""

    def __init__(self, parts: HolderParts) -> None:
        self._parts = parts
        self._holders: dict[str, WorkerHolder] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks.values():
            task.cancel()
        await self._group.__aexit__(None, None, None)

    def begin(self, name: str, endpoint: Endpoint) -> None:
        """A worker is here: keep its lease alive. One that was here under this name is let go."""
        self.end(name)
        holder = self._holders[name] = WorkerHolder(name, endpoint, self._parts)
        self._tasks[name] = self._group.create_task(holder.run(), name=f"lease of {name}")

    def end(self, name: str) -> None:
        """It was removed: it is granted nothing any more, and its last lease runs out."""
        if self._holders.pop(name, None) is not None:
            self._tasks.pop(name).cancel()

    def find(self, name: str) -> WorkerHolder | None:
        return self._holders.get(name)

    def all(self) -> Sequence[WorkerHolder]:
        return list(self._holders.values())

    def renew(self) -> None:
        """The registry's table is another: bring it to everybody at once."""
        for holder in self._holders.values():
            holder.renew()
