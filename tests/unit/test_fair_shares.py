"""Shares of tenants in a full fleet, in virtual time: floods, weights, cached prompts, idleness."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter

import pytest
from fair_world import LONG, Policy, World, fresh, prefill_ms
from picker_bench import BLOCK

from trunkline.gateway.fair_line import TICK_S


@pytest.mark.parametrize("seed", range(8))
def test_a_flood_of_long_prompts_costs_a_quiet_tenant_no_more_than_its_fair_share(
    seed: int,
) -> None:
    """64 prompts of up to 4,000 tokens at once, against a tenant that asks one at a time.

    The bound. In the line: room comes within the longest prefill L, since no worker had more than
    `room_ms` ahead when it was sent its last; and then it is the quiet tenant's turn after at most
    one of the flood's, another L; and a tick. Behind it: less than `room_ms` at a worker with room.
    And its own prefill. Without the line it waits for all that was there before it.
    """
    room_ms, workers = 30.0, 4

    async def run(*, has_line: bool) -> tuple[list[float], list[float]]:
        dice = random.Random(seed)
        world = World(workers, room_ms=room_ms, has_line=has_line)
        for number in range(64):
            world.ask("flood", fresh(number, dice.randrange(2_000, LONG)), at_ms=1_000.0)
        quiet = [
            world.ask("quiet", fresh(1_000 + n, 400), at_ms=1_001.0 + n * dice.uniform(20.0, 30.0))
            for n in range(10)
        ]
        await world.run()
        world.assert_clean()
        return [q.waited_ms for q in quiet], [q.ttft_ms for q in quiet]

    longest_ms = prefill_ms(LONG)
    wait_bound_ms = 2 * longest_ms + TICK_S * 1_000.0
    ttft_bound_ms = wait_bound_ms + room_ms + prefill_ms(400)
    waits_ms, ttfts_ms = asyncio.run(run(has_line=True))
    _, without_ms = asyncio.run(run(has_line=False))
    assert max(waits_ms) <= wait_bound_ms
    assert max(ttfts_ms) <= ttft_bound_ms
    assert max(without_ms) > 2 * ttft_bound_ms


@pytest.mark.parametrize("flood", [64, 512])
def test_the_length_of_a_flood_plays_no_part_in_what_others_wait(flood: int) -> None:
    async def run() -> float:
        world = World(2, room_ms=30.0)
        for number in range(flood):
            world.ask("flood", fresh(number), at_ms=1_000.0)
        quiet = [world.ask("quiet", fresh(5_000 + n, 400), at_ms=1_003.0) for n in range(4)]
        await world.run()
        return max(q.ttft_ms for q in quiet)

    # Four at once: the fourth is behind three turns of the flood more than the first.
    assert asyncio.run(run()) <= (2 + 3) * prefill_ms(LONG) + 30.0 + 20.0 + prefill_ms(400)


def test_weights_one_to_three_get_one_to_three_of_the_uncached_tokens() -> None:
    async def run() -> Counter[str]:
        dice = random.Random(9)
        world = World(4, room_ms=30.0)
        world.policies["b"] = Policy(weight=3.0)
        for number in range(800):
            tenant = "b" if number % 2 else "a"
            world.ask(tenant, fresh(number, dice.randrange(2_000, LONG)), at_ms=1_000.0)
        await world.run()
        got: Counter[str] = Counter()
        waited = [served for served in world.order if served.waited_ms > 0.0]
        for served in waited[: len(waited) // 2]:  # while both wait
            got[served.tenant] += served.uncached_tokens
        return got

    got = asyncio.run(run())
    assert got["b"] / got["a"] == pytest.approx(3.0, rel=0.03)


def test_a_request_whose_prompt_is_cached_costs_its_tenant_little() -> None:
    """3,200 tokens in common that are there, against as many that are not: turns by what is
    computed, not by what is asked.
    """

    async def run() -> Counter[str]:
        world = World(1, room_ms=20.0)
        prefix = list(range(1_000_000, 1_000_000 + 200 * BLOCK))
        world.ask("cached", array("I", prefix), at_ms=0.0)
        for number in range(200):
            world.ask("cached", array("I", [*prefix, *range(number, number + 80)]), at_ms=5_000.0)
            world.ask("computed", fresh(number, 200 * BLOCK + 80), at_ms=5_000.0)
        await world.run()
        waited = [served for served in world.order if served.waited_ms > 0.0]
        last = max(n for n, served in enumerate(waited) if served.tenant == "cached")
        return Counter(served.tenant for served in waited[: last + 1])

    turns_of = asyncio.run(run())
    assert turns_of["cached"] > 190
    # 3,280 tokens against 80: one turn of the other for each forty.
    assert turns_of["computed"] <= 200 * 96 / 3_280 + 2


@pytest.mark.parametrize("seed", range(5))
def test_nobody_starves_whatever_the_weights_and_the_others_do(seed: int) -> None:
    """A request that finds nothing of its own tenant waiting is passed by at most
    w_other / w_own x (its tenant's last one) + one entry, of each other tenant.
    """
    dice = random.Random(seed)
    weights = {f"t{n}": dice.choice((0.1, 1.0, 1.0, 5.0)) for n in range(6)}

    async def run() -> World:
        world = World(2, room_ms=30.0)
        for tenant, weight in weights.items():
            world.policies[tenant] = Policy(weight=weight)
        for number in range(300):
            tenant = f"t{min(int(dice.expovariate(0.6)), 5)}"
            tokens = dice.choice((100, 1_000, LONG))
            world.ask(tenant, fresh(number, tokens), at_ms=1_000.0 + dice.random() * 2_000.0)
        await world.run()
        world.assert_clean()
        return world

    world = asyncio.run(run())
    assert len(world.order) == 300
    for served in world.order:
        own_waiting = [
            other
            for other in world.order
            if other.tenant == served.tenant
            and other is not served
            and other.came_ms <= served.came_ms < other.sent_ms
        ]
        if own_waiting or served.waited_ms == 0.0:
            continue
        passed: Counter[str] = Counter()
        for other in world.order:
            if other.tenant != served.tenant and served.came_ms < other.sent_ms < served.sent_ms:
                passed[other.tenant] += other.uncached_tokens
        for tenant, tokens in passed.items():
            ratio = weights[tenant] / weights[served.tenant]
            assert tokens <= ratio * LONG + LONG, (served, tenant, tokens)


def test_the_line_keeps_the_workers_as_busy_as_they_are_without_it() -> None:
    async def ends_at(*, has_line: bool) -> float:
        dice = random.Random(4)
        world = World(4, room_ms=30.0, has_line=has_line)
        for number in range(400):
            tokens = dice.choice((100, 1_000, LONG))
            world.ask("abcd"[number % 4], fresh(number, tokens), at_ms=1_000.0)
        await world.run()
        return max(served.begun_ms for served in world.served)

    with_line, without = (asyncio.run(ends_at(has_line=h)) for h in (True, False))
    # Both end within one long prefill of the work divided by the workers.
    assert with_line <= without + prefill_ms(LONG)


def test_the_same_calls_at_the_same_times_give_the_same_order() -> None:
    async def order() -> list[tuple[str, float]]:
        dice = random.Random(2)
        world = World(3, room_ms=30.0)
        for number in range(200):
            at_ms = 1_000.0 + dice.random() * 500.0
            world.ask("abc"[dice.randrange(3)], fresh(number, dice.randrange(50, LONG)), at_ms)
        await world.run()
        return [(served.tenant, served.sent_ms) for served in world.order]

    assert asyncio.run(order()) == asyncio.run(order())
