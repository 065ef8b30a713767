"""Fills public prefixes: the one who writes them, at every worker that can share them.

A look now and then at what is registered and where it lies; where it is missing, a request of the
gateway's own, with exactly those tokens, in a namespace that is nobody's. So no tenant can poison a
public prefix, and whether one is warm says nothing about who used it. What a worker evicts is
filled again. One request at a time, so that filling costs the fleet little. Must never: fill by a
tenant's request, or send text. Read `publics.py` for who is served from it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from trunkline.core.directory import Directory
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.keys import chain
from trunkline.core.publics import PublicPrefix
from trunkline.core.records import WorkerId
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.gateway.contracts import Grant
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.publics import PublicPrefixes
from trunkline.observe import EventLog
from trunkline.ports.worker import Post, Target

BEAT_S = 0.5
TIMEOUT_MS = 60_000.0
PAUSE_BEATS = 20
"""A worker that did not take a prefix is left alone for so many beats."""


@dataclass(slots=True, kw_only=True)
class FillerParts:
    """What a filler works with."""

    publics: PublicPrefixes
    namespaces: Namespaces
    directory: Directory
    fleet: Fleet
    target_of: Callable[[WorkerId], Target | None]
    served_model: Callable[[], str]
    post: Post
    log: EventLog


class Filler:
    """Give it a task for `run`. Bound: workers times registered prefixes looked at in each beat."""

    def __init__(self, parts: FillerParts) -> None:
        self._parts = parts
        self._paused: dict[tuple[WorkerId, str], int] = {}
        self.filled = 0
        """Prefixes filled since start, each worker for itself."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            await self.look()

    async def look(self) -> int:
        """Fill whatever is missing now; how many requests that took."""
        parts = self._parts
        before = self.filled
        self._paused = {name: left - 1 for name, left in self._paused.items() if left > 1}
        for state in parts.fleet.states():
            target = parts.target_of(state.worker)
            if target is None or target.agent is None or not target.agent.has_salt_regions:
                continue
            for prefix, grant in list(parts.publics.live(state.block_tokens)):
                name = (state.worker, prefix.public_id)
                if name not in self._paused and not self._is_there(state, prefix, grant):
                    # Paused in either case: events tell a little later that it is there.
                    self._paused[name] = PAUSE_BEATS
                    await self._fill(state, target, prefix, grant)
        return self.filled - before

    def _whole(self, prefix: PublicPrefix, block_tokens: int) -> array[int]:
        tokens = array("I", prefix.tokens)
        return tokens[: len(tokens) // block_tokens * block_tokens]

    def _is_there(self, state: WorkerState, prefix: PublicPrefix, grant: Grant) -> bool:
        tokens = self._whole(prefix, state.block_tokens)
        namespace = self._parts.namespaces.namespace(grant, state.block_tokens)
        if not tokens or namespace is None:
            return True  # shorter than a block: nothing of it can be shared
        keys = chain(namespace, tokens)
        return self._parts.directory.match(keys).device[state.slot] >= len(keys)

    async def _fill(
        self, state: WorkerState, target: Target, prefix: PublicPrefix, grant: Grant
    ) -> None:
        parts = self._parts
        body = {
            "cache_salt": parts.namespaces.salt(grant, state.block_tokens),
            "model": parts.served_model(),
            "prompt": self._whole(prefix, state.block_tokens).tolist(),
            "max_tokens": 1,
            "temperature": 0,
        }
        ticket = ("x-trunkline-ticket", parts.namespaces.ticket(grant, state.block_tokens))
        try:
            status, _ = await parts.post(
                target.endpoint,
                "/v1/completions",
                msgspec.json.encode(body),
                timeout_ms=TIMEOUT_MS,
                headers=(*target.headers, ticket),
            )
        except (WorkerLost, WorkerTimeout) as error:
            parts.log.warning("public.not_filled", worker=state.worker, why=str(error))
            return
        if status == 200:
            self.filled += 1
            return
        parts.log.warning("public.not_filled", worker=state.worker, why=f"it answered {status}")
