"""What goes wrong in a run, and how all of it ends when the faults are over.

Each kind is a short method; `setting.py` says when and to whom. Read `world.py` for the phases.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from faults.gate import HOST, subject_of_tenant, worker_name
from faults.setting import FAULTS_S, WARM_S, Trouble

from trunkline.errors import GatewayError

if TYPE_CHECKING:
    from faults.crew import Life
    from faults.world import World


class Troubles:
    """Carries troubles out."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_over = False
        self.bad_since: dict[str, float] = {}
        """Workers that cannot serve, by the world's own knowledge, and since when."""
        self.drained: dict[str, None] = {}

    async def meet(self, trouble: Trouble) -> None:
        await asyncio.sleep(trouble.at_s)
        self._world.note("trouble", trouble)
        self._world.seen.met(trouble)
        carry_out = getattr(self, "_" + trouble.kind.replace("-", "_"))
        await carry_out(trouble)

    def heal(self) -> None:
        """No faults from here on: what was stopped goes on, what was cut is whole."""
        world = self._world
        world.note("heals")
        self.is_over = True
        world.net.heal_ways()
        world._set_ways()
        for spoiler in world.air.spoilers.values():
            spoiler.lost = spoiler.doubled = spoiler.broken = spoiler.replay_batches_lost = 0.0
            spoiler.loses_replays = False
        for name, life in world.lives.items():
            if life.machine.is_dead:
                self._revive(int(name[1:]))
            elif life.machine.is_stopped:
                self._resume(life)
            life.switches.refuses = life.switches.hangs = False
        for name in self.drained:
            world.gate.machine.run(self._take_in_again, name)
        self.bad_since.clear()

    # -- workers -----------------------------------------------------------------------------------

    async def _crash(self, trouble: Trouble) -> None:
        world, number = self._world, trouble.who
        if self._life(number).machine.is_dead:
            return
        world.kill_worker(number, is_silent=trouble.flag)
        self._is_bad(number)
        await asyncio.sleep(min(trouble.secs, 2.5))
        self._revive(number)

    def _revive(self, number: int) -> None:
        world = self._world
        if not self._life(number).machine.is_dead:
            return
        name = worker_name(number)
        for pipe in list(world.net.ground.pipes):  # a new kernel knows nothing of old connections
            if pipe.far.machine is self._life(number).machine:
                pipe.break_off(ConnectionResetError("its machine began anew"))
        world.start_worker(number)
        self.bad_since.pop(name, None)

    async def _stop(self, trouble: Trouble) -> None:
        life = self._life(trouble.who)
        if life.machine.is_dead or life.machine.is_stopped:
            return
        self._world.net.stop_machine(life.machine)
        self._is_bad(trouble.who)
        await asyncio.sleep(trouble.secs)
        self._resume(life)

    def _resume(self, life: Life) -> None:
        if life.machine.is_stopped and not life.machine.is_dead:
            self._world.net.resume_machine(life.machine)
            self.bad_since.pop(life.name, None)

    async def _slow(self, trouble: Trouble) -> None:
        life = self._life(trouble.who)
        factor = 10.0
        life.slow_down(factor)
        await asyncio.sleep(trouble.secs)
        life.slow_down(1.0 / factor)

    async def _refuse(self, trouble: Trouble) -> None:
        life = self._life(trouble.who)
        life.switches.refuses = True
        await asyncio.sleep(trouble.secs)
        life.switches.refuses = False

    async def _hang(self, trouble: Trouble) -> None:
        life = self._life(trouble.who)
        life.switches.hangs = True
        await asyncio.sleep(trouble.secs)
        life.switches.hangs = False

    async def _cache_reset(self, trouble: Trouble) -> None:
        life = self._life(trouble.who)
        if not life.machine.is_dead:
            life.machine.run(life.engine.reset)

    async def _corrupt(self, trouble: Trouble) -> None:
        """One bit in each of some resident blocks."""
        life = self._life(trouble.who)
        resident = [b for copies in life.engine.cache._resident.values() for b in copies]
        for block in resident[:: max(1, int(1 / max(trouble.share, 0.1)))]:
            spoilt = bytearray(block.kv)
            spoilt[len(spoilt) // 2] ^= 4
            block.kv = spoilt

    async def _drain(self, trouble: Trouble) -> None:
        name = worker_name(trouble.who)
        gate = self._world.gate
        if self._is_gate_up() and len(self.drained) + 1 < self._world.setting.worker_count:
            self.drained[name] = None
            gate.machine.run(gate.members.drain, name)
            self._world.checks.drained(name)

    def _take_in_again(self, name: str) -> None:
        """On the gateway's machine."""
        gate = self._world.gate
        gate.members.remove(name)
        gate.add_worker(int(name[1:]))
        self._world.checks.taken_in(name)

    # -- ways --------------------------------------------------------------------------------------

    async def _cut_to(self, trouble: Trouble) -> None:
        self._cut(trouble, to=True, back=False)

    async def _cut_from(self, trouble: Trouble) -> None:
        self._cut(trouble, to=False, back=True)

    async def _cut_both(self, trouble: Trouble) -> None:
        self._cut(trouble, to=True, back=True)

    def _cut(self, trouble: Trouble, *, to: bool, back: bool) -> None:
        net, name = self._world.net, worker_name(trouble.who)
        if to:
            net.cut(HOST, name, trouble.secs)
        if back:
            net.cut(name, HOST, trouble.secs)
        self._is_bad(trouble.who)
        net.call_later(trouble.secs, self.bad_since.pop, name, None)

    async def _lag(self, trouble: Trouble) -> None:
        ground, name = self._world.net.ground, worker_name(trouble.who)
        ways = [ground.way(HOST, name), ground.way(name, HOST)]
        for way in ways:
            way.latency_s += 0.5 * trouble.share
            way.jitter_s += trouble.share
        await asyncio.sleep(trouble.secs)
        if not self.is_over:
            for way in ways:
                way.latency_s -= 0.5 * trouble.share
                way.jitter_s -= trouble.share

    async def _reset(self, trouble: Trouble) -> None:
        """Of the connections to a worker, some break; torn: in the middle of what is sent."""
        net, name = self._world.net, worker_name(trouble.who)
        for pipe in [pipe for pipe in net.ground.pipes if pipe.host == HOST]:
            if pipe.peer is not None and pipe.far.host == name:
                net.reset(pipe, is_torn=trouble.flag)

    # -- events ------------------------------------------------------------------------------------

    async def _events_lost(self, trouble: Trouble) -> None:
        spoiler = self._world.air.spoiler(worker_name(trouble.who))
        spoiler.lost = trouble.share
        await asyncio.sleep(trouble.secs)
        spoiler.lost = 0.0

    async def _events_doubled(self, trouble: Trouble) -> None:
        spoiler = self._world.air.spoiler(worker_name(trouble.who))
        spoiler.doubled = trouble.share
        await asyncio.sleep(trouble.secs)
        spoiler.doubled = 0.0

    async def _events_broken(self, trouble: Trouble) -> None:
        spoiler = self._world.air.spoiler(worker_name(trouble.who))
        spoiler.broken = trouble.share / 3
        await asyncio.sleep(trouble.secs)
        spoiler.broken = 0.0

    async def _events_cut(self, trouble: Trouble) -> None:
        for subscription in list(self._world.air.subscriptions):
            if subscription.follows(worker_name(trouble.who)):
                subscription.drop_connection()

    async def _replay_lost(self, trouble: Trouble) -> None:
        spoiler = self._world.air.spoiler(worker_name(trouble.who))
        spoiler.lost = trouble.share
        spoiler.loses_replays = trouble.share > 0.5
        spoiler.replay_batches_lost = 0.3
        await asyncio.sleep(trouble.secs)
        spoiler.loses_replays, spoiler.replay_batches_lost, spoiler.lost = False, 0.0, 0.0

    # -- what operators do -------------------------------------------------------------------------

    async def _revoke(self, trouble: Trouble) -> None:
        await self._raise(trouble, bars=True)

    async def _invalidate(self, trouble: Trouble) -> None:
        await self._raise(trouble, bars=False)

    async def _raise(self, trouble: Trouble, *, bars: bool) -> None:
        """By an operator at the gateway of that moment."""
        world, gate, tenant = self._world, self._world.gate, trouble.who
        if not self._is_gate_up():
            return

        async def order() -> None:
            subject = subject_of_tenant(tenant)
            world.checks.raising(tenant)
            try:
                receipt = await gate.raise_epoch(subject, bars=bars)
            except GatewayError as error:
                world.note("refused", repr(error))
                world.checks.answered(tenant)
                return
            world.checks.answered(tenant)
            world.checks.raised(tenant, receipt, bars=bars)
            if bars:
                await asyncio.sleep(trouble.secs)
                world.checks.enabling(tenant)
                try:
                    await gate.enable(subject)
                except GatewayError as error:
                    world.note("refused", repr(error))

        gate.machine.run(world.net.create_task, order())

    async def _store_down(self, trouble: Trouble) -> None:
        store = self._world.gate.store
        store.is_down = True
        await asyncio.sleep(trouble.secs)
        store.is_down = False

    async def _gateway_dies(self, trouble: Trouble) -> None:
        world = self._world
        if not self._is_gate_up():
            return
        self.drained.clear()
        world.kill_gate()
        await asyncio.sleep(min(trouble.secs, 1.0))
        world.restart_gate()

    # -- inside ------------------------------------------------------------------------------------

    def _life(self, number: int) -> Life:
        return self._world.lives[worker_name(number)]

    def _is_bad(self, number: int) -> None:
        name = worker_name(number)
        self.bad_since.setdefault(name, self._world.net.time())

    def _is_gate_up(self) -> bool:
        gate = self._world.gate
        is_late = self._world.net.time() >= WARM_S + FAULTS_S
        return gate.is_up.is_set() and not gate.machine.is_dead and not is_late
