"""Pulls of the simulated worker without sockets: orders, the modelled link, queue and times."""

from __future__ import annotations

import asyncio
import json
from array import array
from dataclasses import replace
from typing import Any, cast

import pytest

from trunkline.core.profiles import Profile, Scheduling
from trunkline.core.records import Instant
from trunkline.core.transfer import (
    MAX_GRANT_BYTES,
    MAX_NAME_BYTES,
    MAX_ORDER_BYTES,
    Grant,
    PullEnd,
    Reason,
    keys_digest,
)
from trunkline.kv.client import Puller
from trunkline.kv.judge import PullHost, StoreJudge
from trunkline.kv.orders import Pulled, PullOrder
from trunkline.kv.pulls import Cancel, PullRequest, PullResult
from trunkline.kv.records import Owner
from trunkline.ports.clock import Clock
from trunkline.worker.blocks import KvSequence, Terms
from trunkline.worker.jobs import Failure, Job, Jobs, QueueFull
from trunkline.worker.link import Link
from trunkline.worker.options import AgentSwitch, WorkerOptions
from trunkline.worker.orders import HEADER, order_from
from trunkline.worker.pulls import PullCall, Pulls, PullTerms, _misfit
from trunkline.worker.requests import BadRequest, Region
from trunkline.worker.schedule import make_schedule
from worker_tenants import BLOCK, EPOCHS, NS, SUBJECTS, VOCAB, Store, ticket, tokens

PROMPT = tokens(4 * BLOCK + 6)
PUBLIC_NS = b"p" * 16
ORDER = PullOrder(grant="abc", host="h", port=1, local="", source="w")


# --- orders ---


def _order(**changes: Any) -> list[tuple[bytes, bytes]]:
    words = {"grant": "abc", "host": "::1", "port": 80, "local": "", "source": "w:1"}
    return [(HEADER, json.dumps(words | changes).encode())]


def test_an_order_is_read_and_none_is_none() -> None:
    assert order_from([(b"accept", b"*/*")]) is None
    order = order_from(_order(local="trunkline-kv-1"))
    assert order == PullOrder(
        grant="abc", host="::1", port=80, local="trunkline-kv-1", source="w:1"
    )
    assert "abc" not in repr(order)


def test_an_order_may_name_one_other_source_that_has_no_other() -> None:
    other = {"grant": "def", "host": "::2", "port": 81, "local": "", "source": "w:2"}
    order = order_from(_order(other=other))
    assert order is not None
    assert order.other == PullOrder(grant="def", host="::2", port=81, local="", source="w:2")
    useless = order_from(_order(other=other | {"port": 0}))
    assert useless is not None
    assert useless.other is not None
    assert (useless.fault, useless.other.fault) == (None, Reason.CONNECT)
    with pytest.raises(BadRequest, match="unknown field"):
        order_from(_order(other=other | {"other": other}))


def test_an_order_has_16_kib_at_most_and_the_longest_of_all_grants_fits() -> None:
    longest = "a" * ((MAX_GRANT_BYTES * 4 + 2) // 3)
    names = {"host": "h" * 255, "local": "l" * 107, "source": "ü" * (MAX_NAME_BYTES // 2)}
    order = order_from(_order(grant=longest, **names))
    assert order is not None
    assert (order.grant, order.fault) == (longest, None)
    rest = len(_order(grant="")[0][1])
    assert order_from(_order(grant="a" * (MAX_ORDER_BYTES - rest))) is not None
    with pytest.raises(BadRequest, match="at most 16384 are taken"):
        order_from(_order(grant="a" * (MAX_ORDER_BYTES - rest + 1)))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"host": ""}, Reason.CONNECT),
        ({"host": "a/b"}, Reason.CONNECT),
        ({"port": 0}, Reason.CONNECT),
        ({"port": 65_536}, Reason.CONNECT),
        ({"local": "l" * 108}, Reason.CONNECT),
        ({"source": ""}, Reason.GRANT),
        ({"source": "s" * (MAX_NAME_BYTES + 1)}, Reason.GRANT),
    ],
)
def test_an_order_that_is_of_no_use_is_the_pulls_fault(
    changes: dict[str, Any], fault: Reason
) -> None:
    order = order_from(_order(**changes))
    assert order is not None
    assert order.fault is fault


# --- what a grant must fit ---


def _grant(sequence: KvSequence, first: int, last: int, **changes: Any) -> Grant:
    made: dict[str, Any] = {
        "source": "s",
        "source_incarnation": "1",
        "destination": "d",
        "destination_incarnation": "2",
        "ns": NS,
        "subjects": SUBJECTS,
        "epochs": EPOCHS,
        "rev": 9,
        "layout": bytes(16),
        "first_block": first,
        "block_count": last - first,
        "keys": keys_digest(b"".join(sequence.hashes[first:last])),
        "max_bytes": 1 << 20,
        "deadline_ms": 1,
        "nonce": bytes(16),
    }
    return Grant(**made | changes)


def _sketch(*regions: Region, tags: tuple[bytes, ...] = ()) -> KvSequence:
    store = Store()
    store.lease()
    return store.cache.sketch(PROMPT, "salt", Terms(ticket=ticket(regions=tags), regions=regions))


def _without(kind: str) -> dict[str, Any]:
    pairs = [pair for pair in zip(SUBJECTS, EPOCHS, strict=True) if not pair[0].startswith(kind)]
    return {"subjects": tuple(s for s, _ in pairs), "epochs": tuple(e for _, e in pairs)}


def test_a_grant_of_the_callers_blocks_stands_on_all_that_the_ticket_stands_on() -> None:
    sequence = _sketch()
    assert _misfit(_grant(sequence, 0, 4), sequence) is None
    assert _misfit(_grant(sequence, 1, 3), sequence) is None
    assert _misfit(_grant(sequence, 0, 4, **_without("public")), sequence) is None
    assert _misfit(_grant(sequence, 0, 4, **_without("user")), sequence) is Reason.GRANT
    raised = (EPOCHS[0] + 1, *EPOCHS[1:])
    assert _misfit(_grant(sequence, 0, 4, epochs=raised), sequence) is Reason.GRANT


def test_a_grant_of_a_public_beginning_stands_on_its_part_of_the_ticket() -> None:
    sequence = _sketch(Region(blocks=2, salt="public"), tags=(PUBLIC_NS,))
    own = {"subjects": ("fleet", "public/p", "model/m"), "epochs": (1, 6, 7)}
    assert _misfit(_grant(sequence, 0, 2, ns=PUBLIC_NS, **own), sequence) is None
    less = {"subjects": ("fleet", "model/m"), "epochs": (1, 7)}
    assert _misfit(_grant(sequence, 0, 2, ns=PUBLIC_NS, **less), sequence) is Reason.GRANT
    rootless = {"subjects": ("public/p", "model/m"), "epochs": (6, 7)}
    assert _misfit(_grant(sequence, 0, 2, ns=PUBLIC_NS, **rootless), sequence) is Reason.GRANT
    assert _misfit(_grant(sequence, 0, 3, ns=PUBLIC_NS, **own), sequence) is Reason.NS
    assert _misfit(_grant(sequence, 2, 4, ns=PUBLIC_NS, **own), sequence) is Reason.NS
    assert _misfit(_grant(sequence, 2, 4), sequence) is None


def test_a_grant_for_more_than_the_prompt_has_does_not_fit() -> None:
    sequence = _sketch()
    longer = replace(_grant(sequence, 0, 4), block_count=5)
    assert _misfit(longer, sequence) is Reason.GRANT


def test_the_fence_is_asked_about_blocks_and_grants() -> None:
    store = Store()
    owner = Owner(ns=NS, subjects=SUBJECTS, epochs=EPOCHS)
    grant = _grant(_sketch(), 0, 4)
    judge, host = StoreJudge(store.fence), PullHost(store.fence)
    assert (judge.fault(owner), host.fault(grant)) == (Reason.LEASE, Reason.LEASE)
    store.lease()
    assert (judge.fault(owner), host.fault(grant)) == (None, None)
    assert host.fault(replace(grant, rev=10)) is Reason.LEASE, "a change was not seen here"
    store.lease(10, **{SUBJECTS[3]: EPOCHS[3] + 1})
    assert (judge.fault(owner), host.fault(grant)) == (Reason.EPOCH, Reason.EPOCH)
    store.boot_ms += 10_000
    assert (judge.fault(owner), host.fault(grant)) == (Reason.LEASE, Reason.LEASE)


# --- calls and the link ---


KEY = bytes(32)


class _Nobody:
    """A puller that finds nothing."""

    asked = 0

    def pull(self, request: PullRequest, cancel: Cancel) -> PullResult:
        self.asked += 1
        return PullResult(
            end=PullEnd.REJECTED,
            reason=Reason.MISS,
            blocks=0,
            bytes=0,
            ms=0.0,
            setup_ms=0.0,
            verify_ms=0.0,
        )

    def close(self) -> None:
        pass


def _fetched(
    store: Store,
    link: Link,
    *,
    is_left: bool = False,
    leaves_when_booked: bool = False,
    saved_ms: float = 1e9,
    **changes: Any,
) -> Pulled:
    """What becomes of a pull of the prompt's first four blocks, on that link."""
    nobody = _Nobody()
    pulls = Pulls(
        store.behind,
        cast("Puller", nobody),
        transfer_key=KEY,
        clock=cast("Clock", store),
        link=link,
        host=PullHost(store.fence),
        terms=PullTerms(
            block_tokens=BLOCK,
            token_bytes=1,
            setup_ms=1.0,
            patience_ms=100.0,
            saved_ms=lambda first, last: saved_ms,
        ),
    )
    terms = Terms(ticket=ticket())
    sequence = store.cache.sketch(PROMPT, "salt", terms)
    grant = _grant(sequence, 0, 4, **{"deadline_ms": 1_100} | changes).signed(KEY)

    async def scenario() -> Pulled:
        call = PullCall(replace(ORDER, grant=grant))
        if is_left:
            call.cancel()
        before = link.free_at
        async with asyncio.TaskGroup() as group:
            group.create_task(pulls.fetch(call, store.cache, PROMPT, "salt", terms))
            if leaves_when_booked:
                await asyncio.sleep(0)  # a turn of the loop: it waits for its turn on the link
                assert link.free_at > before
                call.cancel()
        assert call.pulled is not None
        return call.pulled

    pulled = asyncio.run(asyncio.wait_for(scenario(), 5))
    pulls.close()
    assert nobody.asked == (pulled.reason is Reason.MISS)
    return pulled


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nothing", (PullEnd.REJECTED, Reason.MISS)),
        ("a full link", (PullEnd.REJECTED, Reason.BUSY)),
        ("a client that left", (PullEnd.CANCELLED, Reason.CLIENT)),
        ("a raised epoch", (PullEnd.REJECTED, Reason.EPOCH)),
        ("an old grant", (PullEnd.REJECTED, Reason.GRANT)),
    ],
)
def test_a_pull_that_will_come_to_nothing_takes_nothing_of_the_link(
    what: str, expected: tuple[PullEnd, Reason]
) -> None:
    store, link = Store(host=32), Link(0.001)
    store.lease()
    if what == "a full link":
        link.book(99_500, Instant(1_000))  # until 1,099.5, and the set-up is 1 ms
    if what == "a raised epoch":
        store.lease(10, **{SUBJECTS[2]: EPOCHS[2] + 1})
    deadline_ms = 1_000 if what == "an old grant" else 1_100
    is_left = what == "a client that left"
    pulled = _fetched(store, link, is_left=is_left, deadline_ms=deadline_ms)
    assert (pulled.end, pulled.reason) == expected
    assert link.free_at == (1_099.5 if what == "a full link" else min(link.free_at, 1_000.0))


def test_a_pull_that_would_come_later_than_computing_takes_nothing_of_the_link() -> None:
    store, link = Store(host=32), Link(1.0)
    store.lease()
    link.book(1_000, Instant(1_000))
    done_ms = 1_000 + 1 + 4 * BLOCK
    pulled = _fetched(store, link, saved_ms=done_ms - 1, deadline_ms=9_000)
    assert (pulled.end, pulled.reason) == (PullEnd.CANCELLED, Reason.GIVEN_UP)
    assert link.free_at == 2_000.0
    pulled = _fetched(store, Link(1.0), saved_ms=0.0, deadline_ms=9_000)
    assert pulled.reason is Reason.MISS, "65 ms are within its patience"


def test_a_client_that_leaves_while_its_pull_waits_for_the_link_gives_the_turn_back() -> None:
    store, link = Store(host=32), Link(1.0)
    store.lease()
    link.book(600_000, Instant(1_000))
    pulled = _fetched(store, link, leaves_when_booked=True, deadline_ms=700_000)
    assert (pulled.end, pulled.reason) == (PullEnd.CANCELLED, Reason.CLIENT)
    assert link.free_at == 601_000.0


# --- the queue ---


class Bench:
    """Jobs over a cache with host memory behind it, driven by hand."""

    def __init__(self, scheduling: Scheduling = Scheduling.FIFO, max_waiting: int = 4) -> None:
        self.store = Store(capacity=32, host=64)
        self.store.lease()
        # 64 tokens of 1 MiB take 100 ms from host memory at 0.625 GiB/s.
        profile = Profile(
            name="bench",
            prefill_fixed_ms=5,
            prefill_token_ms=1,
            prefill_context_ms=0,
            decode_token_ms=10,
            kv_bytes_per_token=1 << 20,
            max_batch_tokens=64,
            scheduling=scheduling,
            source="made up for this test",
            host_gib_per_s=0.625,
        )
        self.jobs = Jobs(
            self.store.cache,
            vocab_size=VOCAB,
            max_running=1,
            max_waiting=max_waiting,
            observe=lambda job: None,
            publish=lambda events: None,
        )
        self.schedule = make_schedule(profile, self.jobs, time_factor=1.0)
        self.now = 0.0

    def job(self, prompt: array[int] = PROMPT, call: PullCall | None = None) -> Job:
        terms = Terms(ticket=ticket())
        job = Job(
            prompt=prompt,
            salt="salt",
            wanted_tokens=1,
            arrived_at=self.now,
            terms=terms,
            call=call,
        )
        self.jobs.add(job)
        return job

    def run(self) -> None:
        self.schedule.start(self.now)
        while (due := self.schedule.due()) is not None:
            self.now = due
            self.schedule.run(self.now + 1e-9)
            self.schedule.start(self.now)


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_what_comes_from_host_memory_costs_its_copy(scheduling: Scheduling) -> None:
    bench = Bench(scheduling)
    bench.job()
    bench.run()
    bench.store.crowd_out()
    bench.store.crowd_out()
    began, again = bench.now, bench.job()
    bench.run()
    assert (again.cached_tokens, again.loaded_tokens) == (64, 64)
    assert bench.now - began == pytest.approx(0.100 + 0.005 + 0.006)
    on_device = bench.job()
    began = bench.now
    bench.run()
    assert (on_device.cached_tokens, on_device.loaded_tokens) == (64, 0)
    assert bench.now - began == pytest.approx(0.005 + 0.006)
    assert (bench.jobs.totals.hit, bench.jobs.totals.loaded) == (128, 64)


def test_a_job_waits_for_its_pull_while_others_run_and_then_has_the_place_it_came_for() -> None:
    async def scenario() -> None:
        bench = Bench()
        pulling = bench.job(tokens(40, first=900), PullCall(ORDER))
        bench.now = 0.001
        running = bench.job(tokens(40, first=1_200))
        bench.schedule.start(bench.now)
        bench.now = 0.002
        waiting = bench.job(tokens(40, first=1_500))
        assert running in bench.jobs.running
        assert list(bench.jobs.waiting) == [waiting]
        bench.jobs.pulled(pulling)
        assert list(bench.jobs.waiting) == [pulling, waiting]
        assert not bench.jobs.pulling
        bench.run()
        assert all(job.is_over for job in (pulling, running, waiting))
        assert pulling.first_token_at < waiting.first_token_at

    asyncio.run(scenario())


def test_jobs_that_pull_count_for_the_bound_of_the_queue() -> None:
    async def scenario() -> None:
        bench = Bench(max_waiting=2)
        bench.job(call=PullCall(ORDER))
        bench.job(call=PullCall(ORDER))
        with pytest.raises(QueueFull, match="2 requests wait"):
            bench.job()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_job_that_is_over_ends_its_pull_and_is_not_queued_by_it(is_failed: bool) -> None:
    async def scenario() -> None:
        bench = Bench()
        call = PullCall(ORDER)
        job = bench.job(call=call)
        if is_failed:
            bench.jobs.fail(job, Failure(status=500, message="revoked"))
        else:
            bench.jobs.abort(job)
        assert call.cancelled.is_cancelled
        assert job.is_over
        await call.pause(60_000)  # ends at once
        bench.jobs.pulled(job)
        assert not bench.jobs.waiting

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("first_block", "blocks", "lifted", "expected"),
    [(0, 4, 0, (64, 0)), (2, 1, 0, (16, 0)), (3, 9, 0, (16, 0)), (0, 0, 48, (0, 48))],
)
def test_avoided_tokens_are_counted_by_where_they_came_from(
    first_block: int, blocks: int, lifted: int, expected: tuple[int, int]
) -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.job()
        bench.run()
        bench.store.crowd_out()
        bench.store.crowd_out()
        call = PullCall(ORDER)
        job = bench.job(call=call)
        call.lifted_tokens = lifted
        call.pulled = Pulled(
            end=PullEnd.PUBLISHED,
            reason=None,
            first_block=first_block,
            blocks=blocks,
            tokens=blocks * BLOCK,
        )
        bench.jobs.pulled(job)
        bench.run()
        totals = bench.jobs.totals
        assert totals.loaded == 64
        assert (totals.pulled, totals.lifted) == expected

    asyncio.run(scenario())


def test_what_became_of_a_pull_is_told_as_json() -> None:
    pulled = Pulled(
        end=PullEnd.REJECTED, reason=Reason.DIGEST, blocks=2, tokens=32, bytes=64, ms=1.23456
    )
    assert json.loads(pulled.told()) == {
        "end": "rejected",
        "reason": "digest",
        "blocks": 2,
        "tokens": 32,
        "bytes": 64,
        "ms": 1.235,
    }


# --- options ---


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"transfer_key_file": "k"}, "transfer_key_file needs host_blocks"),
        ({"host_blocks": 1, "agent": AgentSwitch.OFF}, "host_blocks needs the agent"),
        ({"host_blocks": 1, "disk_blocks": 1}, "disk_blocks and disk_dir go together"),
        ({"host_blocks": 1, "disk_dir": "d"}, "disk_blocks and disk_dir go together"),
        ({"disk_blocks": 1, "disk_dir": "d"}, "disk_blocks needs host_blocks"),
        ({"eviction": "x"}, "eviction 'x' is not one of lru"),
        ({"link_gbit": 0}, "link_gbit is 0, allowed are 0.001 to 10000"),
        ({"pull_patience_ms": 0}, "pull_patience_ms is 0, allowed are 1 to 600000"),
    ],
)
def test_options_that_do_not_go_together_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkerOptions(**wrong)
