"""Warming up a worker that has just come: it pulls what is hot before it takes requests.

A worker that comes while others serve is kept out
of choices until it has pulled these from them, or its time is over. A request of the gateway's own
carries each pull, under the ticket of that grant, so that what was revoked meanwhile is refused by
both workers. Must never: warm what its asker could not use. Read `hot.py` for
what is hot, `pulls.py` for orders.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from trunkline.core.directory import Directory
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.records import Instant, WorkerId
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.gateway.errands import Errand, Errands
from trunkline.gateway.hot import HotPrompt
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.pulls import PullDesk, PullPlan, pull_address
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock
from trunkline.ports.worker import PullAddress, Target

WARM_MS = 10_000.0
"""The longest that a worker is kept out for it."""
BEAT_S = 0.1


@dataclass(slots=True, kw_only=True)
class WarmerParts:
    """What a warmer works with."""

    desk: PullDesk
    namespaces: Namespaces
    directory: Directory
    fleet: Fleet
    target_of: Callable[[WorkerId], Target | None]
    errands: Errands
    clock: Clock
    log: EventLog


class Warmer:
    """Give it a task for `run`. A beat costs a look at each worker."""

    def __init__(self, parts: WarmerParts) -> None:
        self._parts = parts
        self._known: dict[WorkerId, WorkerState] = {}
        """Workers that were looked at, each in the life that it was seen in."""
        self._until: dict[WorkerId, Instant] = {}
        """Those that are kept out, until when at the latest."""
        self.warmed = 0
        """Beginnings that workers took over since start."""

    async def run(self) -> None:
        """Until cancelled; whoever is kept out then is so no longer."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for state in self.look():
                        group.create_task(self._warm_up(state))
                    await asyncio.sleep(BEAT_S)
        finally:
            for worker in self._until:
                self._parts.fleet.update(worker, is_warming=False)

    def look(self) -> list[WorkerState]:
        """Workers that came since the last look, while others serve and something is hot: they are
        kept out from now on.
        """
        parts, now = self._parts, self._parts.clock.now()
        states = parts.fleet.states()
        before, self._known = self._known, {state.worker: state for state in states}
        came = [state for state in states if before.get(state.worker) is not state]
        if not before or len(came) == len(states):
            return []  # nobody else could serve, or be a source
        chosen = [s for s in came if parts.desk.hot.hottest(now, s.block_tokens)]
        for state in chosen:
            self._until[state.worker] = Instant(now + WARM_MS)
            parts.fleet.update(state.worker, is_warming=True)
        return chosen

    async def _warm_up(self, state: WorkerState) -> None:
        worker, parts = state.worker, self._parts
        try:
            async with asyncio.timeout(WARM_MS / 1e3):
                here = await self._address(state)
                for prompt in parts.desk.hot.hottest(parts.clock.now(), state.block_tokens):
                    await self._take_over(state, here, prompt)
        except TimeoutError:
            parts.log.info("worker.not_warm", worker=worker, within_ms=WARM_MS)
        except Exception as error:  # noqa: BLE001 - it may serve all the same
            parts.log.error("worker.not_warm", cause=error, worker=worker)
        finally:
            self._until.pop(worker, None)
            parts.fleet.update(worker, is_warming=False)

    async def _address(self, state: WorkerState) -> PullAddress:
        """Its first lease says where it pulls to."""
        while True:
            address = pull_address(self._parts.target_of(state.worker))
            if address is not None:
                return address
            await asyncio.sleep(BEAT_S)

    async def _take_over(self, state: WorkerState, here: PullAddress, prompt: HotPrompt) -> None:
        parts, keys, grant = self._parts, prompt.keys, prompt.grant
        if not parts.namespaces.keeps(grant, keys.block_tokens):
            return  # revoked, or of no use any more
        match = parts.directory.match(keys)
        pulling = [
            (other, address)
            for other in parts.fleet.states()
            if (address := pull_address(parts.target_of(other.worker))) is not None
        ]
        # What lies on disk is not lent, and what is only predicted would be waited for.
        there = [min(pair) for pair in zip(match.expected, match.resident, strict=True)]
        found = parts.desk.source_tokens(there, keys, pulling, len(keys))
        first_block = match.resident[state.slot]
        source, address = max(pulling, key=lambda one: found[one[0].slot], default=(state, here))
        last_block = found[source.slot] // keys.block_tokens
        stakes = parts.namespaces.stakes(grant, keys.block_tokens)
        target = parts.target_of(state.worker)
        if stakes is None or target is None or source is state or last_block <= first_block:
            return
        plan = PullPlan(
            source=source.worker,
            destination=state.worker,
            first_block=first_block,
            last_block=last_block,
        )
        ends = {source.worker: address, state.worker: here}
        order = parts.desk.order(plan, stakes, keys, prompt.tokens, ends.get)
        if order is None:
            return
        # The last token is always computed: one more than what is pulled.
        lead = prompt.tokens[: last_block * keys.block_tokens] + array("I", [0])
        errand = Errand(
            target=target,
            block_tokens=keys.block_tokens,
            grant=grant,
            tokens=lead,
            timeout_ms=WARM_MS,
            order=order,
        )
        try:
            status, _ = await parts.errands.run(errand)
        except (WorkerLost, WorkerTimeout) as error:
            parts.log.info("worker.not_warm", worker=state.worker, why=str(error))
            return
        self.warmed += status == 200
