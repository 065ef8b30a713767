"""Revoking at real workers: leases and orders over sockets, one stopped, one of stock."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from single import PROMPT, WAIT_S, Running, cached, worker

from halting import halt
from trunkline.adapters.clock import SystemClock
from trunkline.control.book import Check
from trunkline.control.changes import EpochRaised, Intent, SubjectEnabled
from trunkline.control.holders import HolderParts, WorkerHolder
from trunkline.control.probe import fetch, post
from trunkline.control.receipts import Erase, Erasure, Fence, HolderAck, Receipt
from trunkline.control.revocation import HERE, Revoker, RevokerParts
from trunkline.core.epochs import EpochTable, Subject, SubjectKind
from trunkline.core.freshness import LeaseGrants
from trunkline.observe import EventLog
from trunkline.ports.worker import Endpoint

ACME = Subject(kind=SubjectKind.TENANT, path="t")
ME = Intent(actor="officer", reason="test")


class Ledger:
    """A registry and an audit log that are always up."""

    def __init__(self) -> None:
        self.table = EpochTable()

    async def commit(
        self, change: EpochRaised | SubjectEnabled, intent: Intent, check: Check | None = None
    ) -> int:
        assert isinstance(change, EpochRaised)
        rev = self.table.rev + 1
        self.table = self.table.raised(ACME, change.epoch, rev=rev, bars=change.bars)
        return rev

    async def intent(self, action: str, subject: Subject, intent: Intent) -> None: ...
    async def outcome(self, receipt: Receipt, intent: Intent) -> None: ...
    async def erased(self, erasure: Erasure, intent: Intent) -> None: ...


@asynccontextmanager
async def revoking(*workers: Running) -> AsyncGenerator[tuple[Revoker, list[WorkerHolder]]]:
    ledger, clock, log = Ledger(), SystemClock(), EventLog("test-revocation")
    grants = LeaseGrants(clock.boot(), has_earlier_life=False)
    shared = HolderParts(
        table=lambda: ledger.table, grants=grants, fetch=fetch, post=post, clock=clock, log=log
    )
    holders = [WorkerHolder(f"w{n}", endpoint(one), shared) for n, one in enumerate(workers)]
    parts = RevokerParts(
        registry=ledger,
        grants=grants,
        holders=lambda: holders,
        here=lambda order: HolderAck(life=HERE),
        audit=ledger,
        clock=clock,
        log=log,
    )
    async with Revoker(parts) as revoker, asyncio.TaskGroup() as group:
        loops = [group.create_task(holder.run()) for holder in holders]
        await eventually(lambda: all(h.is_granted() or h.is_stock for h in holders))
        yield revoker, holders
        for task in loops:
            task.cancel()


def endpoint(running: Running) -> Endpoint:
    url = running.http.base_url
    return Endpoint(host=url.host, port=url.port or 80, host_header=url.netloc.decode())


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110  # it is another process that changes
            await asyncio.sleep(0.01)


def ticket(epoch: int, rev: int) -> dict[str, str]:
    """As a gateway would send it, before and after the epoch of the tenant was raised."""
    epochs = [0, 0, epoch, 0, 0, 0, 0, 0]
    subjects = ["fleet", "org/o", "tenant/t", "user/t/u", "key_class/k", "public/p", "model/m"]
    words: dict[str, Any] = {
        "ns": f"{epoch:032x}",
        "epochs": epochs,
        "rev": rev,
        "tenant": "a" * 32,
        "subjects": subjects,
    }
    return {"x-trunkline-ticket": json.dumps(words)}


def cached_tokens(running: Running, epoch: int, rev: int) -> int:
    body = {"prompt": PROMPT, "max_tokens": 2, "cache_salt": f"{epoch:043d}"}
    answer = running.http.post("/v1/completions", json=body, headers=ticket(epoch, rev))
    assert answer.status_code == 200, answer.text
    return cached(answer.json())


@pytest.fixture(autouse=True)
def _quiet() -> None:  # pyright: ignore[reportUnusedFunction]  # a fixture
    logging.getLogger("test-revocation").setLevel(logging.CRITICAL)


async def in_thread(work: Callable[[], int]) -> int:
    return await asyncio.to_thread(work)


async def reuse(running: Running, epoch: int, rev: int) -> None:
    """Until what was left there is used: not while a lease has run out."""
    async with asyncio.timeout(WAIT_S):
        while await in_thread(lambda: cached_tokens(running, epoch, rev)) != 64:
            ...


def test_what_a_worker_holds_is_condemned_acked_and_erased() -> None:
    async def scenario(running: Running) -> None:
        async with revoking(running) as (revoker, _):
            await reuse(running, 0, 0)
            receipt = await revoker.revoke(ACME, ME)
            assert receipt.acked[0] == HERE
            assert receipt.acked[1].startswith("w0#")
            assert receipt.fenced == ()
            assert receipt.condemned_blocks >= 4
            assert receipt.condemned_bytes["device"] > 0
            assert (receipt.fence, receipt.erase) == (Fence.WORKER, Erase.NAMESPACE)
            assert await in_thread(lambda: cached_tokens(running, 0, 0)) == 0
            await eventually(lambda: any(r.erasures for r in revoker.receipts.latest()))
            kept = revoker.receipts.latest()[0]
            await eventually(lambda: revoker.receipts.latest()[0].erasures[0].is_done)
            assert kept.rev == receipt.rev

    with worker() as running:
        asyncio.run(scenario(running))


def test_a_stopped_worker_is_fenced_and_serves_nothing_old_when_it_wakes() -> None:
    async def scenario(running: Running) -> None:
        async with revoking(running) as (revoker, holders):
            await reuse(running, 0, 0)
            halt(running.process.pid)
            receipt = await revoker.invalidate(ACME, ME)
            assert receipt.acked == (HERE,)
            assert len(receipt.fenced) == 1
            running.process.send_signal(signal.SIGCONT)
            assert await in_thread(lambda: cached_tokens(running, 0, 0)) == 0
            await eventually(lambda: holders[0].rev_seen == 1)
            await reuse(running, 1, 1)  # which begins when the next lease has come

    with worker() as running:
        try:
            asyncio.run(scenario(running))
        finally:
            running.process.send_signal(signal.SIGCONT)


def test_a_worker_without_an_agent_is_no_holder() -> None:
    async def scenario(stock: Running) -> None:
        async with revoking(stock) as (revoker, holders):
            assert holders[0].is_stock
            receipt = await revoker.revoke(ACME, ME)
            assert (receipt.acked, receipt.fenced) == ((HERE,), ())
            assert (receipt.fence, receipt.erase) == (Fence.GATEWAY, Erase.RESTART)

    with worker("--agent", "off") as stock:
        asyncio.run(scenario(stock))
