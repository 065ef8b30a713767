"""Pulls that wait at their source for what its prompts are still to compute."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import pytest

from trunkline.core.profiles import Profile, Scheduling
from trunkline.core.records import Instant
from trunkline.core.transfer import Reason
from trunkline.kv.records import Pins
from trunkline.ports.clock import Clock
from trunkline.worker.blocks import Terms
from trunkline.worker.coming import MAX_LOOKED_AT, MAX_WAITS, Coming, Prompt
from trunkline.worker.faults import Faults
from trunkline.worker.jobs import Failure, Job, Jobs
from trunkline.worker.lending import LentStore
from trunkline.worker.link import Link
from trunkline.worker.orders import PullOrder
from trunkline.worker.pulls import PullCall
from trunkline.worker.schedule import make_schedule
from worker_tenants import BLOCK, NS, VOCAB, Store, ticket, tokens

PROMPT = tokens(4 * BLOCK + 6)
LATE = Instant(60_000)
ORDER = PullOrder(grant="", host="127.0.0.1", port=1, local="", source="w9")


class Desk:
    """A worker with host memory whose first token a test gives; who pulls from it has a thread."""

    def __init__(self) -> None:
        self.store = Store(host=64)
        self.store.lease()
        clock = cast("Clock", self.store)
        self.coming = Coming(clock, block_tokens=BLOCK)
        self.lent = LentStore(
            self.store.behind.store,
            link=Link(0.0),
            clock=clock,
            faults=Faults(),
            block_tokens=BLOCK,
            coming=self.coming,
        )
        self.threads = ThreadPoolExecutor(MAX_WAITS + 1)
        self.keys = self.store.cache.sketch(PROMPT, "salt", Terms(ticket=ticket())).hashes[:4]

    def announced(self, prompt: array[int] = PROMPT) -> Prompt:
        return self.coming.add(prompt, "salt", Terms(ticket=ticket()))

    def compute(self, prompt: array[int] = PROMPT) -> None:
        sequence = self.store.admitted(prompt, ticket())
        self.store.cache.compute(sequence, len(prompt))
        self.store.cache.release(sequence)

    def pull(
        self, *, ns: bytes = NS, is_wanted: Callable[[], bool] = lambda: True, until: Instant = LATE
    ) -> Future[Pins]:
        return self.threads.submit(
            lambda: self.lent.pin(ns, self.keys, until=until, is_wanted=is_wanted)
        )

    def until_waiting(self, count: int) -> None:
        beat = threading.Event()
        while self.coming.wait_count != count:
            beat.wait(0.001)


@contextmanager
def desk() -> Iterator[Desk]:
    made = Desk()
    try:
        yield made
    finally:
        made.lent.close()
        made.threads.shutdown()
        assert made.coming.wait_count == 0
        assert made.store.behind.store.figures().staged_bytes == 0


def told(pins: Pins) -> tuple[int, Reason | None]:
    return len(pins.blocks), pins.reason


def test_a_pull_of_what_is_being_computed_gets_it_when_it_is() -> None:
    with desk() as source:
        prompt = source.announced()
        pull = source.pull()
        source.until_waiting(1)
        source.compute()
        source.coming.end(prompt)
        assert told(pull.result()) == (4, None)


def test_who_waits_for_a_prompt_that_is_cancelled_is_told_at_once() -> None:
    with desk() as source:
        prompt = source.announced()
        pull = source.pull()
        source.until_waiting(1)
        source.coming.end(prompt)
        assert told(pull.result()) == (0, Reason.MISS)
        assert told(source.pull().result()) == (0, Reason.MISS)


def test_where_a_further_prompt_has_the_block_that_one_is_waited_for_then() -> None:
    with desk() as source:
        first, second = source.announced(), source.announced(tokens(2 * BLOCK))
        pull = source.pull()
        source.until_waiting(1)
        source.coming.end(first)
        source.until_waiting(1)
        source.compute(tokens(2 * BLOCK))
        source.coming.end(second)
        assert told(pull.result()) == (2, Reason.MISS)


def test_beyond_the_bound_of_waits_what_is_there_is_lent_and_the_rest_is_busy() -> None:
    with desk() as source:
        source.compute(tokens(2 * BLOCK))
        prompt = source.announced()
        pulls = [source.pull() for _ in range(MAX_WAITS)]
        source.until_waiting(MAX_WAITS)
        assert told(source.pull().result()) == (2, Reason.BUSY)
        source.compute()
        source.coming.end(prompt)
        assert [told(pull.result()) for pull in pulls] == [(4, None)] * MAX_WAITS
        assert told(source.pull().result()) == (4, None)


def test_a_peer_that_leaves_gives_its_place_back() -> None:
    with desk() as source:
        source.announced()
        has_left = threading.Event()
        pull = source.pull(is_wanted=lambda: not has_left.is_set())
        source.until_waiting(1)
        has_left.set()
        assert told(pull.result()) == (0, Reason.LOST)
        source.until_waiting(0)


def test_nobody_waits_longer_than_its_grant() -> None:
    with desk() as source:
        source.announced()
        pull = source.pull(until=Instant(2_000.0))
        source.until_waiting(1)
        source.store.boot_ms = 2_000.0
        assert told(pull.result()) == (0, Reason.TIMEOUT)


def test_a_worker_that_ends_lets_nobody_wait() -> None:
    with desk() as source:
        source.announced()
        pull = source.pull()
        source.until_waiting(1)
        source.lent.close()
        assert told(pull.result()) == (0, Reason.CLOSING)


def test_what_another_namespace_is_to_compute_is_not_waited_for() -> None:
    with desk() as source:
        source.announced()
        assert source.pull(ns=bytes(16)).result().reason is Reason.MISS
        others = source.coming.add(PROMPT, "pepper", Terms(ticket=ticket(ns=b"o" * 16)))
        stock = source.coming.add(PROMPT, "salt", Terms())
        assert others.names(BLOCK)[0] != source.keys[0]
        assert not stock.is_of(NS)


def test_a_block_is_looked_for_in_so_many_prompts_and_no_more() -> None:
    with desk() as source:
        for number in range(MAX_LOOKED_AT):
            source.announced(tokens(BLOCK, first=1_000 + number))
        beyond = source.announced()
        assert told(source.pull().result()) == (0, Reason.MISS)
        source.coming.end(next(iter(source.coming._prompts)))
        pull = source.pull()
        source.until_waiting(1)
        source.coming.end(beyond)
        assert told(pull.result()) == (0, Reason.MISS)


class Bench:
    """The jobs of one rank, and what they say is coming."""

    def __init__(self, scheduling: Scheduling) -> None:
        self.store = Store(host=64)
        self.store.lease()
        self.coming = Coming(cast("Clock", self.store), block_tokens=BLOCK)
        self.jobs = Jobs(
            self.store.cache,
            vocab_size=VOCAB,
            max_running=1,
            max_waiting=8,
            observe=lambda job: None,
            publish=lambda events: None,
            coming=self.coming,
        )
        profile = Profile(
            name="bench",
            prefill_fixed_ms=5,
            prefill_token_ms=1,
            prefill_context_ms=0,
            decode_token_ms=10,
            kv_bytes_per_token=1,
            max_batch_tokens=BLOCK,
            scheduling=scheduling,
            source="made up for this test",
        )
        self.schedule = make_schedule(profile, self.jobs, time_factor=1.0)
        self.now = 0.0

    def job(self, prompt: array[int] = PROMPT, call: PullCall | None = None) -> Job:
        terms = Terms(ticket=ticket())
        job = Job(
            prompt=prompt, salt="salt", wanted_tokens=2, arrived_at=0.0, terms=terms, call=call
        )
        self.jobs.add(job)
        return job

    def step(self) -> None:
        self.schedule.start(self.now)
        due = self.schedule.due()
        assert due is not None
        self.now = due
        self.schedule.run(self.now + 1e-9)


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_a_prompt_is_coming_until_its_first_token_and_lent_no_sooner(
    scheduling: Scheduling,
) -> None:
    bench = Bench(scheduling)
    job = bench.job()
    assert len(bench.coming) == 1
    while not job.emitted:
        assert (len(bench.coming), bench.store.host_bytes()) == (1, 0)
        bench.step()
    assert (len(bench.coming), bench.store.host_bytes()) == (0, 4 * BLOCK * 64)
    while not job.is_over:
        bench.step()
    assert bench.store.host_bytes() == 4 * BLOCK * 64


@pytest.mark.parametrize("scheduling", list(Scheduling))
@pytest.mark.parametrize("is_running", [False, True])
def test_a_prompt_that_is_cancelled_is_not_coming_and_was_never_lent(
    scheduling: Scheduling, is_running: bool
) -> None:
    bench = Bench(scheduling)
    job, next_job = bench.job(), bench.job(tokens(BLOCK + 1, first=2_000))
    if is_running:
        bench.schedule.start(bench.now)
    bench.jobs.fail(job, Failure(status=500, message="revoked"))
    assert list(bench.coming._prompts) == [next_job.coming]
    assert bench.store.host_bytes() == 0


def test_a_prompt_that_waits_for_a_pull_itself_is_coming_when_that_has_ended() -> None:
    bench = Bench(Scheduling.FIFO)
    job = bench.job(call=PullCall(ORDER))
    assert len(bench.coming) == 0
    bench.jobs.pulled(job)
    assert len(bench.coming) == 1
    bench.jobs.abort(job)
    assert len(bench.coming) == 0
