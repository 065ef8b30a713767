"""Several gateways at one registry: nothing revoked is used after the receipt, anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator

import pytest
from gateway_world import FLEET, World, begun, leased, played
from memory_bucket import snapshot

from trunkline.control import gateways
from trunkline.core.freshness import grant_ms
from virtual_loop import VirtualLoop

SCHEDULES = 300


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def world_of(seed: int, loop: VirtualLoop) -> World:
    return World(loop=loop, dice=random.Random(seed))


def play(seed: int) -> World:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(played(world_of(seed, loop)))
    finally:
        loop.close()


@pytest.mark.slow
def test_nothing_revoked_is_used_after_the_receipt_of_any_gateway() -> None:
    fenced, acked, uses = 0, 0, 0
    for seed in range(SCHEDULES):
        world = play(seed)
        assert not world.violations, f"seed {seed}: {world.violations[:3]}"
        uses += world.uses
        for receipt in world.receipts:
            fenced += any(life.startswith("g") and life != "gateway" for life in receipt.fenced)
            acked += any(life.startswith("g") and life != "gateway" for life in receipt.acked)
    assert acked > SCHEDULES // 4, "others had something to ack"
    assert fenced > SCHEDULES // 10, "others were waited for"
    assert uses > SCHEDULES * 100, "there was something to violate"


@pytest.mark.parametrize("broken", ["no wait", "late lease", "uncapped workers", "armed unread"])
def test_a_rule_that_is_broken_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "no wait":

        async def settle(self: object, rev: int, fencing: object) -> None: ...

        monkeypatch.setattr(gateways.Gateways, "settle", settle)
    elif broken == "late lease":  # counted from the answer, and by a gateway that may be slow
        monkeypatch.setattr(gateways, "LEASE_TTL_MS", 3_500.0)
    elif broken == "uncapped workers":
        monkeypatch.setattr(
            gateways.Gateways, "left_ms", lambda self: 3_000.0 if self.is_valid() else 0.0
        )
    else:

        async def caught_up(self: object) -> None: ...

        from trunkline.control.registry import Registry

        monkeypatch.setattr(Registry, "catch_up", caught_up)
    assert any(play(seed).violations for seed in range(SCHEDULES))


def test_when_all_answer_a_receipt_takes_no_wait() -> None:
    async def scenario(world: World) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await begun(world, stack, 3)
            await asyncio.sleep(5.0)
            await world.revoke(world.members[1])
            assert not world.violations
            assert world.receipts[0].ms < 100.0
            assert sorted(world.receipts[0].acked) == ["g0", "g2", "gateway"]

    loop = VirtualLoop()
    loop.run_until_complete(scenario(world_of(1, loop)))
    loop.close()


def test_one_that_is_cut_off_is_waited_for_and_reuses_nothing_then() -> None:
    async def scenario(world: World) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await begun(world, stack, 2)
            world.members[1].link.is_cut = True
            await world.revoke(world.members[0])
            assert world.receipts[0].fenced == ("g1",)
            assert 1_900.0 < world.receipts[0].ms <= grant_ms() * 1.01 + 20.0
            assert not world.members[1].gateways.is_valid()
            assert world.members[0].gateways.is_valid()
            world.members[1].link.is_cut = False
            await leased(world)
            assert not world.violations

    loop = VirtualLoop()
    loop.run_until_complete(scenario(world_of(2, loop)))
    loop.close()


@pytest.mark.parametrize("seed", range(12))
def test_after_lost_data_nobody_reuses_before_the_fleets_epoch_is_raised(seed: int) -> None:
    async def scenario(world: World) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await begun(world, stack, 3)
            older = snapshot(world.bucket)
            await world.revoke(world.members[seed % 3])
            await asyncio.sleep(world.dice.uniform(1.2, 3.0))
            before = {id(m): m.registry.table.epochs.get(FLEET, 0) for m in world.members}
            revs = [member.registry.rev for member in world.members]
            for member in world.members:
                member.link.is_cut = True
            await asyncio.sleep(4.0)
            assert not any(member.gateways.is_valid() for member in world.members)
            world.bucket.restore(older)
            for member in world.members:
                member.link.is_cut = False
            async with asyncio.timeout(60):
                while not all(member.gateways.is_valid() for member in world.members):
                    for member in world.members:
                        epoch = member.registry.table.epochs.get(FLEET, 0)
                        assert not member.gateways.is_valid() or epoch > before[id(member)]
                    await asyncio.sleep(0.002)
            await asyncio.sleep(10.0)
            assert len({member.registry.rev for member in world.members}) == 1
            assert world.members[0].registry.rev > max(revs), "revisions go on"
            assert not world.violations

    loop = VirtualLoop()
    loop.run_until_complete(scenario(world_of(seed, loop)))
    loop.close()
