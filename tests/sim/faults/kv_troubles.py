"""What goes wrong between workers that pull KV from one another, and in the middle of a pull.

A pull is short, so what is to come in the middle of one waits for it: until its threads have waited
so many times. Read `troubles.py` for all other troubles.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from faults.fibres import Fibre
from faults.gate import worker_name
from faults.setting import FAULTS_S, WARM_S, Trouble

if TYPE_CHECKING:
    from faults.troubles import Troubles
    from faults.world import World

MOST_WAITS = 24
"""Of the threads of pulls, until something happens."""
HELD_S = 0.15
MID_PULL = {"kv-crash": "crash", "kv-stop": "stop", "kv-revoke": "revoke"}
"""What happens in the middle of a pull. The worker is the one whose thread it is."""


@dataclass(slots=True)
class _Fuse:
    """Counts waits of pulls, and says where the last one was."""

    left: int
    burnt: asyncio.Event = field(default_factory=asyncio.Event)
    worker: str = ""


class KvTroubles:
    """Carries them out."""

    def __init__(self, world: World, troubles: Troubles) -> None:
        self._world = world
        self._troubles = troubles
        self._fuses: list[_Fuse] = []
        if world.plane is not None:
            world.plane.threads.on_wait = self._waits

    async def meet(self, trouble: Trouble) -> None:
        if trouble.kind in MID_PULL or trouble.kind == "kv-reset":
            await self._in_mid_pull(trouble)
            return
        self._world.note("trouble", trouble)
        await getattr(self, "_" + trouble.kind.removeprefix("kv-"))(trouble)

    def heal(self) -> None:
        if self._world.plane is not None:
            self._world.plane.sockets.flipping.clear()

    async def _in_mid_pull(self, trouble: Trouble) -> None:
        fuse = _Fuse(1 + int(trouble.share * MOST_WAITS))
        self._fuses.append(fuse)
        try:
            async with asyncio.timeout(max(0.0, WARM_S + FAULTS_S - self._world.net.time())):
                await fuse.burnt.wait()
        except TimeoutError:
            return
        finally:
            self._fuses.remove(fuse)
        if trouble.kind == "kv-reset":
            self._world.note("trouble", replace(trouble, who=int(fuse.worker[1:])))
            self._break(fuse.worker, is_torn=trouble.flag)
            return
        kind = MID_PULL[trouble.kind]
        if kind == "revoke":  # the order comes in before the rest of the blocks does
            self._cut_off(fuse.worker, HELD_S + trouble.share * HELD_S, is_one_way=False)
        who = self._whose(trouble.who) if kind == "revoke" else int(fuse.worker[1:])
        self._world.seen.counts[f"{kind} in mid-pull"] += 1
        await self._troubles.carry_out(replace(trouble, kind=kind, who=who))

    def _whose(self, otherwise: int) -> int:
        """The tenant for whom something is being pulled."""
        for life in self._world.lives.values():
            for job in life.engine._jobs.pulling:
                if job.call is not None and job.call.names and job.terms.ticket is not None:
                    return int(job.terms.ticket.tenant, 16) - 1
        return otherwise

    def _waits(self, fibre: Fibre) -> None:
        if not self._fuses or fibre.name != "kv-pull":
            return
        life = self._world.lives.get(fibre.machine.name)
        if life is None or life.machine is not fibre.machine or not life.is_pulling:
            return
        for fuse in self._fuses:
            fuse.left -= 1
            if fuse.left == 0:
                fuse.worker = life.name
                fuse.burnt.set()

    async def _cut(self, trouble: Trouble) -> None:
        self._cut_off(worker_name(trouble.who), trouble.secs, is_one_way=trouble.flag)

    def _cut_off(self, name: str, secs: float, *, is_one_way: bool) -> None:
        """What this worker says to others is cut, and maybe what they say to it."""
        net = self._world.net
        for other in self._others(int(name[1:])):
            net.cut(name, other, secs)
            if not is_one_way:
                net.cut(other, name, secs)

    async def _lag(self, trouble: Trouble) -> None:
        ground, name = self._world.net.ground, worker_name(trouble.who)
        ways = [ground.way(name, other) for other in self._others(trouble.who)]
        ways += [ground.way(other, name) for other in self._others(trouble.who)]
        for way in ways:
            way.latency_s += 0.2 * trouble.share
            way.jitter_s += 0.2 * trouble.share
        await asyncio.sleep(trouble.secs)
        if not self._troubles.is_over:
            for way in ways:
                way.latency_s -= 0.2 * trouble.share
                way.jitter_s -= 0.2 * trouble.share

    def _break(self, name: str, *, is_torn: bool) -> None:
        """All connections between it and other workers; torn: in the middle of what is sent."""
        world, others = self._world, self._others(int(name[1:]))
        for pipe in list(world.net.ground.pipes):
            ends = {pipe.host, pipe.far.host}
            if name in ends and not ends.isdisjoint(others):
                torn = world.net.ground.torn
                world.net.reset(pipe, is_torn=is_torn)
                world.seen.counts["pull torn in mid-frame"] += world.net.ground.torn - torn

    async def _flip(self, trouble: Trouble) -> None:
        """Of what it sends to others some bits arrive flipped."""
        plane, name = self._world.plane, worker_name(trouble.who)
        if plane is not None:
            plane.sockets.flipping[name] = trouble.share
            await asyncio.sleep(trouble.secs)
            plane.sockets.flipping.pop(name, None)

    async def _corrupt(self, trouble: Trouble) -> None:
        """One bit in each of some blocks behind the device."""
        life, truth = self._world.lives[worker_name(trouble.who)], self._world.truth.kv
        if life.built.storage is None or truth is None:
            return
        store = life.built.storage.tier.store
        resident = [manifest.place.key for _, manifest in store.resident()]
        for key in resident[:: max(1, int(1 / max(trouble.share, 0.1)))]:
            found: Any = store._catalogue.find(key)
            view, before = found.slot.view, bytes(found.slot.view)
            view[len(view) // 2] ^= 4
            truth.damages(before, bytes(view))

    def _others(self, number: int) -> list[str]:
        count = self._world.setting.worker_count
        return [worker_name(other) for other in range(count) if other != number]
