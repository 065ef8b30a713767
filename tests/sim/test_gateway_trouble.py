"""What a gateway that cannot join the others says of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
from gateway_world import Link, World

from trunkline.adapters.nats_board import NatsBoard
from virtual_loop import VirtualLoop


def test_secrets_that_are_not_the_fleets_are_named_also_by_a_gateway_that_began_without_nats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: World) -> None:
        async with contextlib.AsyncExitStack() as stack:
            link: Any = Link(world)  # stands for a bucket
            await NatsBoard(link, [("root", b"the fleet's")]).join()
            late = await world.join(stack)
            # Before its first beat, as after a start by the copy alone.
            late.store.is_joined = False
            late.gateways._parts.board = NatsBoard(link, [("root", b"another")])
            await asyncio.sleep(5.0)
            assert not late.gateways.is_valid()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(scenario(World(loop=loop, dice=random.Random(1))))
    finally:
        loop.close()
    said = [record for record in caplog.records if "are not the fleet's" in str(vars(record))]
    assert [(record.msg, record.levelname) for record in said] == [("control.out", "ERROR")]
