"""When a pull of the simulated worker is given up: what is left of it against computing that."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from trunkline.core.profiles import PROFILES, Scheduling
from trunkline.core.records import Instant
from trunkline.worker.engine import Engine, EngineShape
from trunkline.worker.faults import Faults, FaultyFeed
from trunkline.worker.hedge import Hedge
from trunkline.worker.pulls import PullCall
from worker_tenants import BLOCK, VOCAB, tokens

HEDGE = Hedge(
    first_block=2,
    last_block=10,
    due_at=Instant(1_400),
    turn_at=Instant(1_000),
    patient_until=Instant(1_100),
    deadline=Instant(9_000),
    saved_ms=lambda first, last: (last - first) * 50.0,
)
"""Eight blocks, 400 ms to compute: as long as the pull should take from 1,000 ms on."""


def gives_up(hedge: Hedge, at_ms: float, blocks: int = 0, paced_ms: float | None = None) -> bool:
    return hedge.should_give_up(blocks, paced_ms, Instant(at_ms))


def test_what_takes_longer_on_the_link_than_computing_is_not_begun() -> None:
    now = Instant(1_000)
    assert not HEDGE.is_hopeless(now)
    later = replace(HEDGE, due_at=Instant(1_401))
    assert later.is_hopeless(now)
    assert not replace(later, turn_at=Instant(1_001)).is_hopeless(now), "others come first"
    assert not replace(later, patient_until=Instant(1_401)).is_hopeless(now)


def test_what_is_late_is_expected_to_be_late_for_as_long_again() -> None:
    assert not gives_up(HEDGE, 1_400)
    assert not gives_up(HEDGE, 1_800)
    assert gives_up(HEDGE, 1_801)
    assert not gives_up(replace(HEDGE, turn_at=Instant(1_802)), 1_801)


def test_the_rest_of_a_pull_is_compared_with_computing_the_rest() -> None:
    assert not gives_up(HEDGE, 1_500, blocks=6, paced_ms=100.0)
    assert gives_up(HEDGE, 1_500, blocks=6, paced_ms=101.0), "two blocks are left"
    assert not gives_up(HEDGE, 1_500, blocks=0, paced_ms=400.0), "eight are"


def test_nothing_is_given_up_before_its_patience_is_over_or_in_place_of_its_deadline() -> None:
    assert not gives_up(HEDGE, 1_099, paced_ms=1e6)
    assert gives_up(HEDGE, 1_100, paced_ms=1e6)
    assert gives_up(HEDGE, 8_999)
    assert not gives_up(HEDGE, 9_000)


def test_the_turn_of_a_request_is_after_what_came_before_it_is_prefilled() -> None:
    profile = replace(
        PROFILES["tiny"],
        prefill_fixed_ms=0.0,
        prefill_token_ms=1.0,
        max_batch_tokens=16,
        scheduling=Scheduling.BATCHED,
    )
    shape = EngineShape(
        profile=profile,
        time_factor=2.0,
        block_tokens=BLOCK,
        capacity_blocks=64,
        vocab_size=VOCAB,
        max_running=1,
        max_waiting=8,
    )

    async def scenario() -> None:
        engine = Engine(shape, FaultyFeed(None, Faults(), random.Random(0)), lambda job: None)
        engine.submit(tokens(64), None, 1)  # its first 16 tokens are computed in the first step
        engine.submit(tokens(40), None, 1)
        pulling = engine.submit(tokens(99), None, 1, call=PullCall(None))
        engine.submit(tokens(30), None, 1)
        assert engine.turn_ms(pulling) == (48 + 40) * 2.0
        engine.close()

    asyncio.run(scenario())
