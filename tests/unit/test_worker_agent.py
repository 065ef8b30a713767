"""The agent over two ranks without a socket: its bounds, slices of erasing, and jobs that begin
anew.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from trunkline.core.freshness import Freshness, Grant, Taken
from trunkline.core.profiles import Profile, Scheduling
from trunkline.core.records import BootInstant
from trunkline.kv.holder import MAX_SUBJECTS
from trunkline.kv.records import Kept, Owner
from trunkline.kv.tickets import Ticket
from trunkline.ports.publisher import BlockEvent, BlockRemoved, CacheCleared, RunStored
from trunkline.worker.agent import Agent
from trunkline.worker.api import on_bad_request
from trunkline.worker.blocks import Stamp, Terms
from trunkline.worker.engine import ERASE_SLICE_BLOCKS, Engine, EngineShape
from trunkline.worker.faults import Faults, FaultyFeed
from trunkline.worker.fence import Fence, Reason
from trunkline.worker.jobs import Job, Jobs
from trunkline.worker.requests import BadRequest
from trunkline.worker.schedule import make_schedule
from trunkline.worker.tiers import place_of
from worker_tenants import (
    BLOCK,
    BLOCK_BYTES,
    EPOCHS,
    NS,
    SUBJECTS,
    VOCAB,
    Store,
    right,
    ticket,
    tokens,
)

Json = dict[str, Any]


class Published:
    """Keeps what is published instead of sending it."""

    endpoint = replay_endpoint = topic = ""
    buffer_batches = 0

    def __init__(self) -> None:
        self.batches: list[list[BlockEvent]] = []

    def publish(self, events: Any, *, is_sent: bool = True) -> None:
        self.batches.append(list(events))

    def close(self) -> None:
        pass


def _profile(scheduling: Scheduling = Scheduling.BATCHED) -> Profile:
    return Profile(
        name="quick",
        prefill_fixed_ms=1,
        prefill_token_ms=0.001,
        prefill_context_ms=0,
        decode_token_ms=0.1,
        kv_bytes_per_token=1,
        max_batch_tokens=1 << 20,
        scheduling=scheduling,
        source="made up for this test",
    )


def _shape(capacity: int) -> EngineShape:
    return EngineShape(
        profile=_profile(),
        time_factor=1,
        block_tokens=BLOCK,
        capacity_blocks=capacity,
        vocab_size=VOCAB,
        max_running=8,
        max_waiting=8,
    )


class Bench:
    """Two ranks, their agent and an HTTP client of it; the boot clock stands at 1 s."""

    def __init__(
        self, *, capacity: int = 1_024, max_subjects: int = MAX_SUBJECTS, max_erasures: int = 99
    ) -> None:
        self.fence = Fence(freshness=Freshness("ab"), boot=lambda: BootInstant(1_000.0))
        self.published = [Published(), Published()]
        shape = _shape(capacity)
        self.engines = [
            Engine(shape, FaultyFeed(one, Faults(), random.Random(0)), lambda job: None, self.fence)
            for one in self.published
        ]
        self.agent = Agent(
            engines=self.engines,
            fence=self.fence,
            max_subjects=max_subjects,
            max_erasures=max_erasures,
        )
        app = Starlette(routes=self.agent.routes(), exception_handlers={BadRequest: on_bad_request})
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker")

    async def lease(self, **changes: Any) -> httpx.Response:
        ask = self.fence.freshness.ask(self.fence.boot())
        table = dict(zip(SUBJECTS, EPOCHS, strict=True))
        grant = {"ask": ask, "rev": 9, "ttl_ms": 3_000, "epochs": table} | changes
        return await self.http.post("/trunkline/lease", json={"grant": grant})

    async def order(self, rev: int, subject: str, epoch: int, verb: str = "revoke") -> Json:
        body = {"rev": rev, "subject": subject, "epoch": epoch, "verb": verb}
        answer = await self.http.post("/trunkline/revoke", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def fill(self, rank: int, prompt: array[int], asked: Ticket | None) -> None:
        terms = Terms(ticket=asked)
        job = self.engines[rank].submit(prompt, "salt", 1, terms)
        await job.wait_beyond(0)
        assert job.answer[:1] == right(prompt, 1)

    async def erased(self, rev: int) -> Json:
        while True:
            answer = (await self.http.get(f"/trunkline/erased?rev={rev}")).json()
            if answer["done"]:
                return answer
            await asyncio.sleep(0)


def _on(bench: Bench, play: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60):
            await play()
        for engine in bench.engines:
            engine.close()

    asyncio.run(whole())


def test_an_order_reaches_all_ranks_and_its_receipt_sums_them() -> None:
    bench = Bench()

    async def play() -> None:
        await bench.lease()
        await bench.fill(0, tokens(64), ticket())
        await bench.fill(1, tokens(32), ticket())
        await bench.fill(1, tokens(32), None)
        ack = await bench.order(10, "tenant/t", 4)
        assert ack["condemned_blocks"] == 6
        assert [engine.cache.resident_blocks for engine in bench.engines] == [0, 2]
        assert (await bench.erased(10))["blocks"] == 6

    _on(bench, play)


@pytest.mark.parametrize("place", range(8), ids=SUBJECTS)
def test_blocks_of_each_kind_of_subject_are_condemned(place: int) -> None:
    bench = Bench()

    async def play() -> None:
        await bench.lease()
        await bench.fill(0, tokens(64), ticket())
        lower = await bench.order(10, SUBJECTS[place], EPOCHS[place])
        assert lower["condemned_blocks"] == 0, "the epoch is the one it was kept under"
        ack = await bench.order(11, SUBJECTS[place], EPOCHS[place] + 1)
        assert ack["condemned_blocks"] == 4

    _on(bench, play)


def test_the_fleet_covers_what_came_without_a_ticket_too() -> None:
    bench = Bench()

    async def play() -> None:
        await bench.fill(0, tokens(64), None)
        job = bench.engines[0].submit(tokens(16), None, 10_000)
        await job.wait_beyond(0)
        ack = await bench.order(1, "fleet", 1)
        assert ack["aborted"] == 1
        assert ack["condemned_blocks"] >= 4 + 1
        assert job.failure is not None

    _on(bench, play)


def test_erasing_goes_in_slices_between_which_others_have_their_turn() -> None:
    blocks = 3 * ERASE_SLICE_BLOCKS
    bench = Bench(capacity=blocks + 1)

    async def play() -> None:
        await bench.lease()
        await bench.fill(0, tokens(blocks * BLOCK), ticket())
        bench.published[0].batches.clear()
        await bench.order(10, "tenant/t", 4)
        done = await bench.erased(10)
        assert done == {
            "rev": 10,
            "done": True,
            "blocks": blocks,
            "bytes": {"device": blocks * 1_024},
        }

    _on(bench, play)
    sizes = [len(batch) for batch in bench.published[0].batches]
    assert sizes == [ERASE_SLICE_BLOCKS] * 3
    assert all(isinstance(one, BlockRemoved) for one in bench.published[0].batches[0])


def test_the_bytes_of_an_erased_block_are_overwritten_not_only_let_go() -> None:
    store = Store()
    store.lease()
    prompt = tokens(64)
    sequence = store.admitted(prompt, ticket())
    store.cache.compute(sequence, 64)
    kept = [block.kv for block in sequence.blocks]
    store.cache.release(sequence)
    assert all(any(kv) for kv in kept)
    store.cache.condemn(lambda stamp: True, None)
    assert all(any(kv) for kv in kept)
    store.cache.erase(3)
    assert [any(kv) for kv in kept].count(True) == 1
    store.cache.erase(3)
    assert not any(any(kv) for kv in kept)


def test_a_place_that_is_needed_before_its_turn_is_erased_at_once() -> None:
    store = Store(capacity=5)
    store.lease()
    store.run(tokens(64), ticket())
    store.cache.condemn(lambda stamp: True, None)
    store.cache.take_events()
    assert store.run(tokens(64, first=900), ticket()) == 0
    removed = [one for one in store.cache.take_events() if isinstance(one, BlockRemoved)]
    assert len(removed) == 3, "one place was clean"


def test_receipts_are_bounded_and_the_oldest_that_is_complete_goes_first() -> None:
    bench = Bench(max_erasures=2)

    async def play() -> None:
        await bench.lease()
        for rank in (0, 1):
            await bench.fill(rank, tokens(64), ticket())
        holding = bench.engines[0].submit(tokens(70), "salt", 10_000, Terms(ticket=ticket()))
        await holding.wait_beyond(0)
        await bench.order(10, "tenant/t", 4, "invalidate")
        await bench.order(11, "org/o", 9)
        await bench.order(12, "model/m", 9)
        told = [
            (await bench.http.get(f"/trunkline/erased?rev={rev}")).status_code
            for rev in (10, 11, 12)
        ]
        assert told == [200, 404, 200]

    _on(bench, play)


def test_the_table_of_subjects_is_bounded_and_a_grant_beyond_it_arms_nothing() -> None:
    bench = Bench(max_subjects=len(SUBJECTS) + 1)

    async def play() -> None:
        assert (await bench.lease()).status_code == 200
        assert (await bench.lease(epochs={"tenant/x": 1})).status_code == 200
        beyond = await bench.lease(epochs={"tenant/y": 1}, rev=10)
        assert beyond.status_code == 400
        assert bench.fence.freshness.rev == 9
        again = await bench.lease(epochs={"tenant/x": 2}, rev=10)
        assert again.status_code == 200
        body = {"rev": 11, "subject": "tenant/y", "epoch": 1, "verb": "revoke"}
        assert (await bench.http.post("/trunkline/revoke", json=body)).status_code == 400

    _on(bench, play)
    assert MAX_SUBJECTS == 65_536


def test_condemning_does_not_look_at_the_blocks_of_others() -> None:
    store = Store()
    store.lease()
    for number in range(3):
        asked = ticket(ns=bytes([number]) * 16)
        store.run(tokens(64), asked, salt=str(number))
    seen: list[Stamp] = []

    def is_stale(stamp: Stamp) -> bool:
        seen.append(stamp)
        return False

    store.cache.condemn(is_stale, None)
    assert len(seen) == 3


# Jobs under a fence: what begins anew, and what never fits.


class Rank:
    """Jobs and a schedule on a made-up clock; the boot clock is moved by the test."""

    def __init__(self, scheduling: Scheduling, *, capacity: int = 64) -> None:
        self.store = Store(capacity=capacity)
        self.store.lease()
        self.events: list[list[BlockEvent]] = []
        self.jobs = Jobs(
            self.store.cache,
            vocab_size=VOCAB,
            max_running=8,
            max_waiting=8,
            observe=lambda job: None,
            publish=self.events.append,
        )
        self.schedule = make_schedule(_profile(scheduling), self.jobs, time_factor=1.0)
        self.now = 0.0

    def add(self, prompt: array[int], wanted: int, asked: Ticket) -> Job:
        job = Job(
            prompt=prompt,
            salt="salt",
            wanted_tokens=wanted,
            arrived_at=self.now,
            terms=Terms(ticket=asked),
        )
        self.jobs.add(job)
        self.schedule.start(self.now)
        return job

    def finish(self) -> None:
        while (due := self.schedule.due()) is not None:
            self.now = max(self.now, due)
            self.schedule.run(self.now)
            self.schedule.start(self.now)


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_hits_that_may_not_stand_at_the_first_token_are_computed(scheduling: Scheduling) -> None:
    rank = Rank(scheduling)
    prompt = tokens(70)
    warm = rank.add(prompt, 1, ticket())
    rank.finish()
    job = rank.add(prompt, 8, ticket())
    assert job.cached_tokens == 64
    rank.store.boot_ms += 3_000
    rank.finish()
    assert (warm.is_over, job.is_over, job.cached_tokens) == (True, True, 0)
    assert job.answer == right(prompt, 8)
    assert job.first_token_at - job.started_at >= 0.001, "the first token waits for the prefill"
    assert rank.jobs.totals.hit == 0
    assert rank.jobs.totals.queried == 140
    assert rank.store.refused() == {Reason.LEASE: 1}
    assert not rank.jobs.running
    assert not rank.jobs.waiting


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_a_job_begins_anew_once_and_the_second_time_needs_no_check(scheduling: Scheduling) -> None:
    rank = Rank(scheduling)
    prompt = tokens(70)
    rank.add(prompt, 1, ticket())
    rank.finish()
    job = rank.add(prompt, 1, ticket())
    assert job.sequence is not None
    kv = job.sequence.blocks[0].kv
    assert isinstance(kv, bytearray)
    kv[5] ^= 1
    rank.finish()
    assert (job.answer, job.cached_tokens) == (right(prompt, 1), 0)
    assert rank.store.refused() == {Reason.SUM: 1}


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_what_others_floors_leave_no_room_for_is_told_so_and_blocks_nobody(
    scheduling: Scheduling,
) -> None:
    rank = Rank(scheduling, capacity=16)
    owner = ticket(tenant="a" * 32, floor=12)
    other = ticket(ns=bytes(16), tenant="b" * 32)
    rank.add(tokens(12 * BLOCK), 1, owner)
    rank.finish()
    large = rank.add(tokens(8 * BLOCK, first=900), 1, other)
    small = rank.add(tokens(2 * BLOCK, first=900), 1, other)
    rank.finish()
    assert large.failure is not None
    assert large.failure.status == 503
    assert (large.is_over, large.emitted) == (True, 0)
    assert (small.failure, small.emitted) == (None, 1)


def test_a_grant_that_is_taken_twice_is_of_an_unknown_ask() -> None:
    store = Store()
    freshness = store.fence.freshness
    grant = Grant(ask=freshness.ask(store.fence.boot()), rev=1, ttl_ms=3_000)
    assert [freshness.take(grant), freshness.take(grant)] == [Taken.ARMED, Taken.UNKNOWN_ASK]


def test_a_reset_is_told_before_what_came_behind_the_device_since() -> None:
    """Told after it, whoever hears both would believe that it was dropped, too."""
    store = Store(capacity=8, host=32)
    store.lease()
    published = Published()
    feed = FaultyFeed(published, Faults(), random.Random(0))
    engine = Engine(_shape(8), feed, lambda job: None, store.fence, store.behind)
    sequence = engine.cache.sketch(tokens(2 * BLOCK), "salt", Terms(ticket=ticket()))
    store.behind.await_pull(sequence, 0, 2)
    assert engine.reset()
    owner = Owner(ns=NS, subjects=SUBJECTS, epochs=EPOCHS, domain="")
    for index in range(2):
        place = place_of(sequence, index)
        assert isinstance(store.behind.store.put(place, owner, bytes(BLOCK_BYTES)), Kept)
    store.behind.flush()
    engine.tell()
    [told] = published.batches
    assert [type(event) for event in told] == [CacheCleared, RunStored]
    engine.close()
