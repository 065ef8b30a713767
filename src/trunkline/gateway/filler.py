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

from trunkline.core.directory import Directory
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.keys import KeyChain, chain
from trunkline.core.publics import PublicPrefix
from trunkline.core.records import NamespaceTag, WorkerId
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.gateway.contracts import Grant
from trunkline.gateway.errands import Errand, Errands
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.publics import PublicPrefixes
from trunkline.observe import EventLog
from trunkline.ports.worker import Target

BEAT_S = 0.5
TIMEOUT_MS = 60_000.0
_MAX_CHAINS = 512
"""Twice the prefixes that the data plane takes (`core/publics.py`)."""
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
    errands: Errands
    log: EventLog


@dataclass(frozen=True, slots=True)
class _Missing:
    """A prefix that a worker does not hold, and the grant to fill it under."""

    state: WorkerState
    target: Target
    prefix: PublicPrefix
    grant: Grant


class Filler:
    """Give it a task for `run`. A beat costs a look-up for each registered prefix and block size;
    keys are made once for each namespace.
    """

    def __init__(self, parts: FillerParts) -> None:
        self._parts = parts
        self._paused: dict[tuple[WorkerId, str], int] = {}
        self._keys: dict[tuple[NamespaceTag, str], KeyChain] = {}
        self.filled = 0
        """Prefixes filled since start, each worker for itself."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - prefixes can wait, the gateway goes on
                self._parts.log.error("public.not_filled", cause=error)

    async def look(self) -> int:
        """Fill whatever is missing now; how many were."""
        before = self.filled
        self._paused = {name: left - 1 for name, left in self._paused.items() if left > 1}
        await self._make_keys()
        # Looked for anew each time: grants and workers may have changed while one was filled.
        while (missing := self._missing()) is not None:
            # Paused in either case: events tell a little later that it is there.
            self._paused[missing.state.worker, missing.prefix.public_id] = PAUSE_BEATS
            await self._fill(missing)
        return self.filled - before

    async def _make_keys(self) -> None:
        """With a pause after each: those of a long prefix take a millisecond."""
        for block_tokens in {state.block_tokens for state, _ in self._sharing()}:
            for prefix, grant in list(self._parts.publics.live(block_tokens)):
                count = len(self._keys)
                self._keys_of(prefix, grant, block_tokens)
                if len(self._keys) != count:
                    await asyncio.sleep(0)

    def _missing(self) -> _Missing | None:
        """The first worker that lacks a prefix and is not to be left alone."""
        sharing = self._sharing()
        for block_tokens in {state.block_tokens for state, _ in sharing}:
            for prefix, grant in self._parts.publics.live(block_tokens):
                keys = self._keys_of(prefix, grant, block_tokens)
                if keys is None:
                    continue
                held = self._parts.directory.match(keys).device
                for state, target in sharing:
                    is_short = state.block_tokens == block_tokens and held[state.slot] < len(keys)
                    if is_short and (state.worker, prefix.public_id) not in self._paused:
                        return _Missing(state, target, prefix, grant)
        return None

    def _sharing(self) -> list[tuple[WorkerState, Target]]:
        """Workers that can keep a public beginning apart from what follows."""
        sharing: list[tuple[WorkerState, Target]] = []
        for state in self._parts.fleet.states():
            target = self._parts.target_of(state.worker)
            if state.is_leaking or target is None or target.agent is None:
                continue
            if target.agent.has_salt_regions:
                sharing.append((state, target))
        return sharing

    def _keys_of(self, prefix: PublicPrefix, grant: Grant, block_tokens: int) -> KeyChain | None:
        """Of its whole blocks; None where nothing of it can be shared."""
        namespace = self._parts.namespaces.namespace(grant, block_tokens)
        if namespace is None or prefix.token_count < block_tokens:
            return None
        name = (namespace.tag, prefix.public_id)
        if name not in self._keys:
            if len(self._keys) >= _MAX_CHAINS:
                self._keys.clear()
            self._keys[name] = chain(namespace, _whole(prefix, block_tokens))
        return self._keys[name]

    async def _fill(self, missing: _Missing) -> None:
        parts, state, target, grant = self._parts, missing.state, missing.target, missing.grant
        errand = Errand(
            target=target,
            block_tokens=state.block_tokens,
            grant=grant,
            tokens=_whole(missing.prefix, state.block_tokens),
            timeout_ms=TIMEOUT_MS,
        )
        try:
            status, _ = await parts.errands.run(errand)
        except (WorkerLost, WorkerTimeout) as error:
            parts.log.warning("public.not_filled", worker=state.worker, why=str(error))
            return
        if status == 200:
            self.filled += 1
            return
        parts.log.warning("public.not_filled", worker=state.worker, why=f"it answered {status}")


def _whole(prefix: PublicPrefix, block_tokens: int) -> array[int]:
    tokens = array("I", prefix.tokens)
    return tokens[: len(tokens) // block_tokens * block_tokens]
