"""Nothing that was revoked is used after the ack, in ten thousand unkind schedules."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from revocation_world import World, again, played

from leases_broken import AcksAtOnce, GrantsBelowTheFloor, GrantsWithoutMargin, LowersRevisions
from trunkline.core.freshness import LEASE_TTL_MS, LeaseGrants, grant_ms
from trunkline.core.records import BootInstant
from virtual_loop import VirtualLoop

SCHEDULES = 10_000
COMMIT_MS = 12.0
"""The registry of these worlds takes up to 10 ms for a commit; timers are a millisecond late."""


@pytest.fixture(name="loop")
def a_virtual_loop() -> Iterator[VirtualLoop]:
    logging.disable(logging.WARNING)
    loop = VirtualLoop()
    yield loop
    loop.close()
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_nothing_revoked_is_used_after_the_ack(
    loop: VirtualLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.process_time()
    longest_ms, could_use, cut_off = 0.0, 0, 0
    for seed in range(SCHEDULES):
        world = played(seed, loop)
        assert not world.violations, again(world)
        assert world.receipt is not None, again(world)
        could_use += world.could_use_at_commit > 0
        cut_off += world.was_cut_off
        if not world.was_cut_off and not world.was_suspended:
            longest_ms = max(longest_ms, world.receipt.ms)
            assert world.receipt.ms <= grant_ms() + COMMIT_MS, again(world)
    assert could_use > SCHEDULES // 3, "there was too little to violate"
    assert cut_off > SCHEDULES // 20, "too few restarts of the registry"
    with capsys.disabled():
        print(  # noqa: T201  # figures of the run
            f"\n{SCHEDULES} schedules: 0 uses after the ack, longest ack {longest_ms:.0f} ms, "
            f"{could_use} with something to use, {cut_off} registry restarts, "
            f"{time.process_time() - began_s:.1f} s of CPU"
        )


def a_violation(loop: VirtualLoop, schedules: int, **broken: Any) -> World | None:
    worlds = (played(seed, loop, **broken) for seed in range(schedules))
    return next((world for world in worlds if world.violations), None)


def granting(kind: Callable[..., LeaseGrants]) -> Callable[[BootInstant, bool], LeaseGrants]:
    return lambda began_at, earlier: kind(began_at, has_earlier_life=earlier)


@pytest.mark.parametrize("kind", [GrantsWithoutMargin, GrantsBelowTheFloor, AcksAtOnce])
def test_schedules_notice_a_grantor_that_breaks_a_rule(
    kind: type[LeaseGrants], loop: VirtualLoop
) -> None:
    assert a_violation(loop, 3_000, make_grants=granting(kind)) is not None


def test_schedules_notice_a_holder_that_lowers_revisions(loop: VirtualLoop) -> None:
    assert a_violation(loop, 3_000, make_freshness=LowersRevisions) is not None


def test_a_silent_fleet_is_fenced_in_one_grant_time(loop: VirtualLoop) -> None:
    worlds = [played(seed, loop) for seed in range(400)]
    silent = [w for w in worlds if w.receipt and w.receipt.fenced and not w.was_cut_off]
    assert len(silent) > 40
    for world in silent:
        assert world.receipt is not None
        is_in_time = world.receipt.ms <= grant_ms() + COMMIT_MS
        assert is_in_time or world.was_suspended, again(world)
    assert max(w.receipt.ms for w in silent if w.receipt) > LEASE_TTL_MS


def test_a_schedule_is_the_same_again(loop: VirtualLoop) -> None:
    first, second = played(11, loop), played(11, loop)
    assert [line.split("  ", 1)[1] for line in first.story] == [
        line.split("  ", 1)[1] for line in second.story
    ]
