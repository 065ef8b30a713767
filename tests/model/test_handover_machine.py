"""One engine, two gateways that hear it through lossy streams, and what one tells the other of it.

The twin is the engine's own cache. Batches get lost and repeated on either way, replays overlap,
begin late or never come, the engine begins anew, a gateway does, and in between, at any moment, one
takes in what the other knows. At rest neither may ever claim a block that the engine does not hold;
and who says that it knows all must know all.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Generator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_feed_machine import (
    CHAINS,
    DEPTH,
    NAMESPACE,
    WORKER,
    Engine,
    EngineMachine,
    true_keys,
)

from trunkline.core.actions import Action, RequestReplay
from trunkline.core.directory import Directory
from trunkline.core.events import CacheEvent, EventBatch
from trunkline.core.feed import FeedLimits, FeedState, WorkerFeed
from trunkline.core.handover import Rows, Standing
from trunkline.core.records import Instant

SLICE_ROWS = 2
Told = tuple[Standing, list[Rows], "array[int]"]


class Ear:
    """A gateway: what it hears of the engine, and what it makes of it."""

    def __init__(self, engine: Engine, now: Instant, *, can_replay: bool) -> None:
        self.engine = engine
        self.directory = Directory(max_blocks=10_000)
        self.directory.admit_namespace(NAMESPACE)
        self.directory.join(WORKER, block_tokens=2)
        limits = FeedLimits(max_buffered_batches=16, max_parked_runs=8, replay_timeout_ms=500.0)
        self.feed = WorkerFeed(WORKER, self.directory, limits=limits, can_replay=can_replay)
        self.wire: deque[EventBatch | None] = deque()
        self.asked: RequestReplay | None = None
        self.answer: deque[EventBatch | None] | None = None
        self.do(self.feed.joined(now))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RequestReplay):
                self.asked, self.answer = action, None

    def deliver(self, now: Instant, *, times: int = 1) -> None:
        batch = self.wire.popleft()
        for _ in range(times if batch is not None else 1):
            self.do(self.feed.reconnected(now) if batch is None else self.feed.live(batch, now))

    def serve_replay(self) -> None:
        assert self.asked is not None
        self.answer = deque(b for b in self.engine.ring if b.seq >= self.asked.from_seq)
        self.answer.append(None)

    def receive_replay(self, count: int, now: Instant) -> None:
        asked = self.asked
        assert asked is not None
        for _ in range(count):
            if not self.answer or self.asked is not asked:
                return
            batch = self.answer.popleft()
            if batch is None:
                self.asked = self.answer = None
                self.do(self.feed.replay_ended(asked.replay_id, now))
            else:
                self.do(self.feed.replayed(batch, asked.replay_id, now))

    def claimed(self) -> set[bytes]:
        held = self.directory.held_keys(WORKER)
        return {held[i : i + 32] for i in range(0, len(held), 32)}


def _nothing() -> Generator[None, None, None]:
    yield from ()


class HandoverMachine(EngineMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = Instant(0.0)
        self.ears = [Ear(self.engine, self.now, can_replay=True) for _ in range(2)]
        self.steps = _nothing()
        self.handover_count = 0

    # -- the engine --------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        self.engine.begin()
        for ear in self.ears:
            ear.wire.append(None)
            ear.answer = None  # the old life's publisher answers nobody any more

    def send(self, *events: CacheEvent) -> None:
        batch = self.engine.publish(*events)
        for ear in self.ears:
            ear.wire.append(batch)

    # -- the ways to the gateways ------------------------------------------------------------------

    @rule(at=st.integers(0, 1), times=st.integers(1, 2))
    def deliver(self, at: int, times: int) -> None:
        if self.ears[at].wire:
            self.ears[at].deliver(self.now, times=times)

    @rule(at=st.integers(0, 1))
    def lose(self, at: int) -> None:
        if self.ears[at].wire and self.ears[at].wire[0] is not None:
            self.ears[at].wire.popleft()

    @rule(at=st.integers(0, 1))
    def serve_replay(self, at: int) -> None:
        if self.ears[at].asked is not None and self.ears[at].answer is None:
            self.ears[at].serve_replay()

    @rule(at=st.integers(0, 1), count=st.integers(1, 4))
    def receive_replay(self, at: int, count: int) -> None:
        if self.ears[at].answer:
            self.ears[at].receive_replay(count, self.now)

    @rule(ms=st.sampled_from([1.0, 100.0, 600.0, 6_000.0, 70_000.0]))
    def wait(self, ms: float) -> None:
        self.now = Instant(self.now + ms)
        for ear in self.ears:
            ear.do(ear.feed.tick(self.now))
            due = ear.feed.next_tick
            if ear.feed.standstill.holds and due is not None:
                assert due > self.now, "it would be asked again and again"

    @rule(at=st.integers(0, 1), can_replay=st.sampled_from([True, True, False]))
    def gateway_restarts(self, at: int, can_replay: bool) -> None:
        self.steps.close()
        self.ears[at] = Ear(self.engine, self.now, can_replay=can_replay)

    # -- the handover, as `control/siblings.py` goes about it --------------------------------------

    @rule(to=st.integers(0, 1))
    def begin(self, to: int) -> None:
        self.steps.close()
        self.steps = self._hand_over(self.ears[1 - to], self.ears[to])

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            next(self.steps, None)

    def _hand_over(self, teller: Ear, asker: Ear) -> Generator[None, None, None]:
        if not (asker.feed.is_settled and asker.feed.standstill.is_wanted()):
            return
        asking = asker.feed.standstill.begin(self.now)
        if asking is None:
            return
        try:
            here = asker.feed.standstill.standing(asking)
            yield
            told = None
            if here is not None:
                told = yield from self._tell(teller, here)
            if told is None or not asker.feed.standstill.go_to(asking, told[0].seq):
                return
            at, pieces, unplaced = told
            while asker.feed.standstill.standing(asking) is None:
                if not asker.feed.standstill.is_on(asking):
                    return
                yield
            for rows in pieces:
                if not asker.feed.standstill.adopt(asking, rows, array("Q"), at):
                    return
                yield
            if not asker.feed.standstill.adopt(asking, Rows(packed=b"", tags=()), unplaced, at):
                return
            yield
            self.handover_count += asker.feed.standstill.complete(asking, at)
        finally:
            asker.feed.standstill.go_on(asking)

    def _tell(self, teller: Ear, here: Standing) -> Generator[None, None, Told | None]:
        token = None
        for _ in range(30):
            token = self._stood(teller, here)
            if token is not None:
                break
            yield
        if token is None:
            return None
        feed = teller.feed
        try:
            at = feed.standstill.standing(token)
            assert at is not None
            pieces: list[Rows] = []
            unplaced = feed.standstill.unplaced()
            start = 0
            while start >= 0:
                pieces.append(teller.directory.export(WORKER, start, SLICE_ROWS))
                start = pieces[-1].next_start
                yield
                if feed.standstill.standing(token) != at or feed.state is not FeedState.LIVE:
                    return None
            return at, pieces, unplaced
        finally:
            feed.standstill.go_on(token)

    def _stood(self, teller: Ear, here: Standing) -> int | None:
        feed = teller.feed
        is_sure = feed.is_settled and feed.state is FeedState.LIVE and not feed.parked_count
        since = feed.standstill.knows_since
        if not is_sure or not (since == 0 or since < here.base):
            return None
        token = feed.standstill.begin(self.now)
        if token is not None:
            at = feed.standstill.standing(token)
            if at is not None and at.seq >= here.seq:
                return token
            feed.standstill.go_on(token)
        return None

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def bounds_hold(self) -> None:
        for ear in self.ears:
            assert ear.feed.buffered_count <= 17
            assert ear.feed.state is not FeedState.BLIND

    def settle(self, ear: Ear) -> None:
        for _ in range(2_000):
            if ear.wire:
                ear.deliver(self.now)
            elif ear.asked is not None and ear.answer is None:
                ear.serve_replay()
            elif ear.answer:
                ear.receive_replay(10, self.now)
            elif ear.feed.has_backlog:
                self.wait(1.0)
            elif ear.feed.next_tick is not None:
                self.now = max(self.now, ear.feed.next_tick)
                self.wait(1.0)
            else:
                return
        raise AssertionError("the feed never comes to rest")

    def teardown(self) -> None:
        for _ in range(20):
            next(self.steps, None)
        for ear in self.ears:
            self.settle(ear)
        # One more batch shows what was lost at the very end of the stream.
        self.send(self.engine.store(0, 0, 1))
        for ear in self.ears:
            self.settle(ear)
        truth = true_keys(self.engine)
        for ear in self.ears:
            assert ear.feed.state is FeedState.LIVE
            assert ear.claimed() <= truth, "claims blocks that the engine does not hold"
            if ear.feed.standstill.knows_since == 0:
                assert ear.claimed() == truth, "says that it knows all, and does not"


TestHandover = HandoverMachine.TestCase
TestHandover.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def random_run(machine: HandoverMachine, rng: random.Random, steps: int) -> None:
    """Longer than Hypothesis would go. One of the two hears well, so that it has something to tell;
    the other one does not, and begins anew again and again.
    """
    for _ in range(steps):
        at = rng.randrange(2)
        match rng.randrange(20):
            case 0 | 1 | 2:
                machine.store(rng.randrange(CHAINS), rng.randrange(DEPTH), rng.randint(1, DEPTH))
            case 3 | 4 if machine.engine.copies:
                machine.remove(rng.randrange(1_000))
            case 5 if rng.random() < 0.05:
                machine.restart()
            case 6 if rng.random() < 0.05:
                machine.lose(1)
            case 7 if rng.random() < 0.2:
                machine.gateway_restarts(1, rng.random() < 0.8)
            case 8 | 9 | 10 | 11 | 12 | 13:
                machine.deliver(1, rng.choice([1, 1, 2]))
            case 14 | 15:
                machine.serve_replay(at)
                machine.receive_replay(at, rng.randint(1, 4))
            case 16:
                machine.wait(rng.choice([1.0, 10.0, 600.0]))
            case 17 if rng.random() < 0.3:
                machine.begin(rng.choice([0, 1, 1, 1]))
            case _:
                machine.step(rng.randint(1, 4))
        machine.deliver(0, 1)
        machine.bounds_hold()
    machine.teardown()


@pytest.mark.parametrize("seed", range(20))
def test_a_long_random_run_ends_with_the_truth_on_both_sides(seed: int) -> None:
    machine = HandoverMachine()
    random_run(machine, random.Random(seed), 1_000)
    truth = true_keys(machine.engine)
    assert all(ear.claimed() <= truth for ear in machine.ears)


def test_handovers_come_to_their_end_in_such_runs() -> None:
    count = 0
    for seed in range(10):
        machine = HandoverMachine()
        random_run(machine, random.Random(seed), 1_000)
        count += machine.handover_count
    assert count >= 5
