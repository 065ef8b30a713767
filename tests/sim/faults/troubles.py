"""What goes wrong in a run, and how all of it ends when the faults are over.

Each kind is a short method; `setting.py` says when and to whom. Read `world.py` for the phases.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from faults.gate import Gate, subject_of_tenant, worker_name
from faults.kv_troubles import KvTroubles
from faults.setting import FAULTS_S, PULL_KINDS, WARM_S, Trouble
from memory_bucket import snapshot

from trunkline.errors import GatewayError

if TYPE_CHECKING:
    from faults.crew import Life
    from faults.world import World


class Troubles:
    """Carries troubles out."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_over = False
        self._kv = KvTroubles(world, self)
        self._bad_since: dict[tuple[str, str], float] = {}
        """(gateway, or empty for all; worker): who cannot serve, by the world's own knowledge, and
        since when.
        """

    def bad_for(self, gateway: str) -> dict[str, float]:
        """Workers that cannot serve this gateway, and since when."""
        found: dict[str, float] = {}
        for (whose, worker), since_s in self._bad_since.items():
            if whose in ("", gateway):
                found[worker] = min(since_s, found.get(worker, since_s))
        return found

    async def meet(self, trouble: Trouble) -> None:
        await asyncio.sleep(trouble.at_s)
        if trouble.kind in PULL_KINDS:
            await self._kv.meet(trouble)
        else:
            await self.carry_out(trouble)

    async def carry_out(self, trouble: Trouble) -> None:
        self._world.note("trouble", trouble)
        self._world.seen.met(trouble)
        await getattr(self, "_" + trouble.kind.replace("-", "_"))(trouble)

    def heal(self) -> None:
        """No faults from here on: what was stopped goes on, what was cut is whole."""
        world = self._world
        world.note("heals")
        self.is_over = True
        world.net.heal_ways()
        self._kv.heal()
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
        for gateway, worker in list(world.checks.drained):
            gate = world.gates[gateway]
            gate.machine.run(self._take_in_again, gate, worker)
        self._bad_since.clear()

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
        self._bad_since.pop(("", name), None)

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
            self._bad_since.pop(("", life.name), None)

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
        """As a worker that is asked for it: in every tier, unless it works."""
        life = self._life(trouble.who)
        if life.machine.is_dead:
            return
        storage = life.built.storage
        if storage is not None and not life.engine.running:
            life.machine.run(storage.tier.reset)
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
        """By an operator, at each gateway."""
        world, name = self._world, worker_name(trouble.who)
        for gate in self._gates_up():
            drained = sum(gateway == gate.name for gateway, _ in world.checks.drained)
            if drained + 1 < world.setting.worker_count:
                gate.machine.run(gate.members.drain, name)
                world.checks.drained[gate.name, name] = None

    def _take_in_again(self, gate: Gate, name: str) -> None:
        """On the gateway's machine."""
        gate.members.remove(name)
        gate.add_worker(int(name[1:]))
        self._world.checks.drained.pop((gate.name, name), None)

    # -- ways --------------------------------------------------------------------------------------

    async def _cut_to(self, trouble: Trouble) -> None:
        self._cut(trouble, to=True, back=False)

    async def _cut_from(self, trouble: Trouble) -> None:
        self._cut(trouble, to=False, back=True)

    async def _cut_both(self, trouble: Trouble) -> None:
        self._cut(trouble, to=True, back=True)

    def _cut(self, trouble: Trouble, *, to: bool, back: bool) -> None:
        """Between a worker and all gateways, or one."""
        net, name = self._world.net, worker_name(trouble.who)
        for gateway in self._gateways_of(trouble):
            if to:
                net.cut(gateway, name, trouble.secs)
            if back:
                net.cut(name, gateway, trouble.secs)
            key = gateway, name
            self._bad_since.setdefault(key, net.time())
            net.call_later(trouble.secs, self._bad_since.pop, key, None)

    async def _lag(self, trouble: Trouble) -> None:
        ground, name = self._world.net.ground, worker_name(trouble.who)
        gateways = self._gateways_of(trouble)
        ways = [ground.way(gateway, name) for gateway in gateways]
        ways += [ground.way(name, gateway) for gateway in gateways]
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
        world, name = self._world, worker_name(trouble.who)
        for pipe in [pipe for pipe in world.net.ground.pipes if pipe.host in world.gates]:
            if pipe.peer is not None and pipe.far.host == name:
                world.net.reset(pipe, is_torn=trouble.flag)

    def _gateways_of(self, trouble: Trouble) -> list[str]:
        """All of them, or one."""
        names = list(self._world.gates)
        return names if trouble.share < 0.5 else [names[trouble.who % len(names)]]

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
        """By an operator at one of the gateways."""
        world, tenant = self._world, trouble.who
        gate = self._gate_of(trouble)
        if gate is None:
            return

        async def order() -> None:
            subject, began_s = subject_of_tenant(tenant), world.net.time()
            world.checks.raising(tenant, gate)
            try:
                receipt = await gate.raise_epoch(subject, bars=bars)
            except GatewayError as error:
                world.note("refused", repr(error))
                world.checks.answered(tenant, gate)
                return
            world.checks.answered(tenant, gate)
            world.checks.raised(tenant, receipt, began_s, bars=bars)
            world.checks.records.acked(gate, receipt)
            if bars:
                await asyncio.sleep(trouble.secs)
                world.checks.enabling(tenant)
                try:
                    rev = await gate.enable(subject)
                except GatewayError as error:
                    world.note("refused", repr(error))
                else:
                    world.checks.records.enabled(gate, rev)

        gate.machine.run(world.net.create_task, order())

    async def _store_down(self, trouble: Trouble) -> None:
        """The registry of a gateway that has its own, else its copy; or its audit log; or both."""
        gate = self._gate_of(trouble)
        if gate is None:
            return
        draw = random.Random(f"disks {self._world.setting.seed} {trouble.at_s}")
        shelves = draw.choice(((), gate.papers.shelves, gate.papers.shelves[:1]))
        gate.store.is_down = not shelves or draw.random() < 0.5
        for shelf in shelves:
            shelf.is_down = True
        self._world.note("disks", f"{gate.name} {gate.store.is_down} {len(shelves)}")
        await asyncio.sleep(trouble.secs)
        gate.store.is_down = False
        for shelf in shelves:
            shelf.is_down = False

    # -- gateways, and what they share -------------------------------------------------------------

    async def _gateway_dies(self, trouble: Trouble) -> None:
        world, gate = self._world, self._gate_of(trouble)
        if gate is not None:
            world.kill_gate(gate)
            await asyncio.sleep(min(trouble.secs, 1.0))
            world.restart_gate(gate.name)

    async def _gateway_cut(self, trouble: Trouble) -> None:
        """From the registry."""
        common = self._world.common
        if common is not None:
            common.cut(self._name_of(trouble), trouble.secs, is_one_way=trouble.flag)

    async def _registry_away(self, trouble: Trouble) -> None:
        common = self._world.common
        if common is None:
            return
        for name in self._world.gates:
            common.cut(name, trouble.secs, is_one_way=trouble.flag)

    async def _registry_old(self, trouble: Trouble) -> None:
        """Its servers get an older state of their data back, while each gateway has all there was:
        what nobody has is lost for good, and no simulation knows what should come of it.
        """
        world, common = self._world, self._world.common
        if common is None:
            return
        older = snapshot(common.bucket)
        await asyncio.sleep(trouble.secs)
        gates, head = world.gates.values(), common.head()
        if (
            len(self._gates_up()) == len(gates)
            and not any(common.is_cut(gate.name) or gate.store.is_down for gate in gates)
            and all(len(gate.store.records) == gate.registry.rev == head for gate in gates)
            and not world.checks.waiting_for_answers
        ):
            world.note("restored", f"to place {older.last_seq} of {common.bucket.last_seq}")
            world.seen.counts["registry restored"] += 1
            common.bucket.restore(older)
            world.checks.was_raised.add(-1)  # the fleet's epoch will be

    # -- inside ------------------------------------------------------------------------------------

    def _life(self, number: int) -> Life:
        return self._world.lives[worker_name(number)]

    def _is_bad(self, number: int) -> None:
        self._bad_since.setdefault(("", worker_name(number)), self._world.net.time())

    def _gate_of(self, trouble: Trouble) -> Gate | None:
        """Which gateway it is about; None where that is not up, or it is too late."""
        name = self._name_of(trouble)
        return next((gate for gate in self._gates_up() if gate.name == name), None)

    def _name_of(self, trouble: Trouble) -> str:
        names = list(self._world.gates)
        return names[int(trouble.share * len(names))]

    def _gates_up(self) -> list[Gate]:
        if self._world.net.time() >= WARM_S + FAULTS_S:
            return []
        gates = self._world.gates.values()
        return [gate for gate in gates if gate.is_up.is_set() and not gate.machine.is_dead]
