"""What a revoker does with holders that ack, fail, are silent or gone, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from trunkline.control.book import Book, Check, subject_of
from trunkline.control.changes import EpochRaised, Intent, SubjectEnabled
from trunkline.control.outbox import MAX_PENDING, Outbox
from trunkline.control.receipts import (
    MAX_RECEIPTS,
    AuditState,
    Erase,
    Erasure,
    Fence,
    HolderAck,
    Receipt,
    ReceiptBook,
)
from trunkline.control.revocation import (
    HERE,
    MAX_FOLLOWED,
    MAX_RUNNING,
    MAX_RUNNING_OF_ONE,
    MAX_RUNNING_OF_TENANTS,
    Revoker,
    RevokerParts,
)
from trunkline.core.epochs import EpochTable, Subject, SubjectKind
from trunkline.core.freshness import LeaseGrants, Order, Verb, grant_ms
from trunkline.errors import AccessEnded, AuditDown, Busy, RegistryDown, WorkerLost, WorkerTimeout
from trunkline.observe import EventLog
from virtual_loop import LoopClock, VirtualLoop

ACME = Subject(kind=SubjectKind.TENANT, path="a" * 32)
ME = Intent(actor="officer", reason="test")
LOG = EventLog("test-revocation")


def user(number: int) -> Subject:
    return Subject(kind=SubjectKind.USER, path=f"{'a' * 32}/{number}")


@dataclass
class Ledger:
    """Registry and audit log in one."""

    table: EpochTable = field(default_factory=EpochTable)
    is_store_down: bool = False
    is_audit_down: bool = False
    written: list[str] = field(default_factory=list[str])
    book: Book = field(default_factory=Book)

    async def commit(
        self, change: EpochRaised | SubjectEnabled, intent: Intent, check: Check | None = None
    ) -> int:
        await asyncio.sleep(0.001)
        if check is not None:
            check(self.book)
        if self.is_store_down:
            raise RegistryDown("no disk")
        rev = self.table.rev + 1
        if isinstance(change, EpochRaised):
            subject = subject_of(change.subject)
            self.table = self.table.raised(subject, change.epoch, rev=rev, bars=change.bars)
        else:
            self.table = self.table.enabled(ACME, rev=rev)
        return rev

    async def intent(self, action: str, subject: Subject, intent: Intent) -> None:
        self._write(f"intent {action}")

    async def outcome(self, receipt: Receipt, intent: Intent) -> None:
        self._write(f"outcome {receipt.rev}")

    async def erased(self, erasure: Erasure, intent: Intent) -> None:
        self._write(f"erased {erasure.holder} {erasure.blocks}")

    def _write(self, line: str) -> None:
        if self.is_audit_down:
            raise AuditDown("no sink")
        self.written.append(line)


@dataclass
class Scripted:
    """A holder that fails `failures` times before it acks."""

    name: str
    failures: int = 0
    failure: Exception = field(default_factory=lambda: WorkerTimeout("silent"))
    fence: Fence = Fence.WORKER
    erase: Erase = Erase.NAMESPACE
    is_told: bool = True
    told: int = 0
    asked: int = 0

    async def revoke(self, order: Order) -> HolderAck:
        self.told += 1
        await asyncio.sleep(0.002)
        if self.told <= self.failures:
            raise self.failure
        return HolderAck(
            life=f"{self.name}#1", aborted=1, condemned_blocks=2, condemned_bytes={"device": 8}
        )

    async def erased(self, rev: int) -> Erasure:
        self.asked += 1
        is_done = self.asked > 2
        return Erasure(holder=self.name, rev=rev, is_done=is_done, blocks=self.asked)


NEVER = 10**9


class Bench:
    """A revoker over scripted holders, each with a lease that was granted just now."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *holders: Scripted) -> None:
        clock = LoopClock(loop)
        self.ledger = Ledger()
        self.here: list[Order] = []
        self.grants = LeaseGrants(clock.boot(), has_earlier_life=False)
        for holder in holders:
            if holder.is_told:
                life = f"{holder.name}#1"
                self.grants.grant(life, "1:0", rev=0, epochs={}, now=clock.boot())
        self.revoker = Revoker(
            RevokerParts(
                registry=self.ledger,
                grants=self.grants,
                holders=lambda: holders,
                here=self._take,
                audit=self.ledger,
                clock=clock,
                log=LOG,
            )
        )

    def _take(self, order: Order) -> HolderAck:
        self.here.append(order)
        return HolderAck(life="")


@pytest.fixture(name="loop")
def a_virtual_loop() -> Iterator[VirtualLoop]:
    logging.disable(logging.CRITICAL)
    loop = VirtualLoop()
    yield loop
    loop.close()
    logging.disable(logging.NOTSET)


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]


def play(loop: VirtualLoop, scenario: Scenario, *holders: Scripted) -> Bench:
    bench = Bench(loop, *holders)

    async def whole() -> None:
        async with bench.revoker:
            await scenario(bench)

    loop.run_until_complete(whole())
    return bench


def test_it_is_acknowledged_as_soon_as_all_have_acked(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        receipt = await bench.revoker.revoke(ACME, ME)
        assert receipt.acked == (HERE, "w1#1", "w2#1")
        assert receipt.fenced == ()
        assert receipt.ms < 20.0
        assert (receipt.aborted, receipt.condemned_blocks) == (2, 4)
        assert receipt.condemned_bytes == {"device": 16}
        assert receipt.audit is AuditState.RECORDED
        assert (receipt.fence, receipt.erase) == (Fence.WORKER, Erase.NAMESPACE)
        assert bench.here == [Order(rev=1, subject=ACME, epoch=1, verb=Verb.REVOKE)]
        assert ACME in bench.ledger.table.barred

    play(loop, scenario, Scripted("w1"), Scripted("w2"))


def test_an_invalidation_bars_nobody(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        receipt = await bench.revoker.invalidate(ACME, ME)
        assert (receipt.verb, receipt.epoch) == (Verb.INVALIDATE, 1)
        assert not bench.ledger.table.barred

    play(loop, scenario, Scripted("w1"))


def test_a_holder_is_told_again_until_it_acks(loop: VirtualLoop) -> None:
    lost = Scripted("w1", failures=3, failure=WorkerLost("refused"))

    async def scenario(bench: Bench) -> None:
        receipt = await bench.revoker.revoke(ACME, ME)
        assert receipt.acked == (HERE, "w1#1")
        assert 100.0 < receipt.ms < 300.0

    play(loop, scenario, lost)
    assert lost.told == 4


def test_silent_holders_are_fenced_by_the_end_of_their_leases(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        receipt = await bench.revoker.revoke(ACME, ME)
        assert receipt.acked == (HERE, "w1#1")
        assert receipt.fenced == ("w2#1", "w3#1")
        assert grant_ms() - 10.0 < receipt.ms <= grant_ms() + 5.0

    play(loop, scenario, Scripted("w1"), Scripted("w2", NEVER), Scripted("w3", NEVER))


def test_a_holder_that_fails_in_an_unknown_way_counts_as_silent(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        receipt = await bench.revoker.revoke(ACME, ME)
        assert receipt.fenced == ("w1#1",)
        assert (await bench.revoker.revoke(ACME, ME)).epoch == 2

    play(loop, scenario, Scripted("w1", 1, RuntimeError("a bug")))


def test_a_stock_engine_is_not_told_and_its_fence_is_what_the_receipt_claims(
    loop: VirtualLoop,
) -> None:
    stock = Scripted("w2", fence=Fence.GATEWAY, erase=Erase.RESTART, is_told=False)

    async def scenario(bench: Bench) -> None:
        receipt = await bench.revoker.revoke(ACME, ME)
        assert receipt.acked == (HERE, "w1#1")
        assert (receipt.fence, receipt.erase) == (Fence.GATEWAY, Erase.RESTART)

    play(loop, scenario, Scripted("w1"), stock)
    assert stock.told == 0


def test_without_an_audit_log_it_is_in_force_all_the_same(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ledger.is_audit_down = True
        receipt = await bench.revoker.revoke(ACME, ME)
        assert receipt.audit is AuditState.PENDING
        assert receipt.ms < 20.0
        with pytest.raises(AuditDown):
            await bench.revoker.enable(ACME, ME)
        assert ACME in bench.ledger.table.barred
        bench.ledger.is_audit_down = False
        await asyncio.sleep(2.0)
        kept = bench.revoker.receipts.get(receipt.rev)
        assert kept is not None
        assert kept.audit is AuditState.RECORDED
        assert bench.ledger.written[:2] == ["intent revoke", "outcome 1"]

    play(loop, scenario, Scripted("w1"))


def test_what_is_enabled_again_keeps_its_new_epoch(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        assert await bench.revoker.enable(ACME, ME) is None
        await bench.revoker.revoke(ACME, ME)
        assert await bench.revoker.enable(ACME, ME) == 2
        assert bench.ledger.table.epochs == {ACME: 1}
        assert not bench.ledger.table.barred

    play(loop, scenario)


def test_a_caller_that_leaves_stops_nothing(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        caller = asyncio.create_task(bench.revoker.revoke(ACME, ME))
        await asyncio.sleep(0.0)
        caller.cancel()
        await asyncio.sleep(4.0)
        receipt = bench.revoker.receipts.get(1)
        assert receipt is not None
        assert receipt.fenced == ("w1#1",)

    play(loop, scenario, Scripted("w1", NEVER))


def test_nobody_is_told_of_what_is_not_durable(loop: VirtualLoop) -> None:
    holder = Scripted("w1")

    async def scenario(bench: Bench) -> None:
        bench.ledger.is_store_down = True
        with pytest.raises(RegistryDown):
            await bench.revoker.revoke(ACME, ME)
        await asyncio.sleep(1.0)
        assert not bench.here
        bench.ledger.is_store_down = False
        assert (await bench.revoker.revoke(ACME, ME)).rev == 1

    play(loop, scenario, holder)
    assert holder.told == 1


def test_a_restart_resumes_what_the_log_holds(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        order = Order(rev=5, subject=ACME, epoch=2, verb=Verb.REVOKE)
        receipt = await bench.revoker.resume(order, ME)
        assert (receipt.rev, receipt.acked) == (5, (HERE, "w1#1"))

    play(loop, scenario, Scripted("w1"))


def test_what_holders_erase_is_added_to_the_receipt(loop: VirtualLoop) -> None:
    late = Scripted("w2", failures=9)

    async def scenario(bench: Bench) -> None:
        await bench.revoker.revoke(ACME, ME)
        await asyncio.sleep(30.0)
        receipt = bench.revoker.receipts.get(1)
        assert receipt is not None
        assert {e.holder: (e.is_done, e.blocks) for e in receipt.erasures} == {
            "w1": (True, 3),
            "w2": (True, 3),
        }
        assert "erased w1 3" in bench.ledger.written
        assert "erased w2 3" in bench.ledger.written, "though its lease had run out before"

    play(loop, scenario, Scripted("w1"), late)


def test_one_more_than_may_run_is_told_to_come_back(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        tasks = [asyncio.create_task(bench.revoker.revoke(user(n), ME)) for n in range(MAX_RUNNING)]
        await asyncio.sleep(0.0)
        with pytest.raises(Busy):
            await bench.revoker.revoke(ACME, ME)
        receipts = await asyncio.gather(*tasks)
        assert [receipt.rev for receipt in receipts] == list(range(1, MAX_RUNNING + 1))
        assert (await bench.revoker.revoke(ACME, ME)).rev == MAX_RUNNING + 1

    play(loop, scenario, Scripted("w1", NEVER))


def test_tenants_leave_room_for_emergencies_and_one_of_them_for_the_others(
    loop: VirtualLoop,
) -> None:
    async def scenario(bench: Bench) -> None:
        revoker, numbers = bench.revoker, itertools.count()

        def begin(party: str) -> asyncio.Task[Receipt]:
            work = revoker.invalidate(user(next(numbers)), ME, party=party)
            return asyncio.create_task(work)

        one = [begin("t0") for _ in range(MAX_RUNNING_OF_ONE)]
        await asyncio.sleep(0.0)
        with pytest.raises(Busy, match="of yours"):
            await revoker.invalidate(ACME, ME, party="t0")
        others = [
            begin(f"t{1 + n // MAX_RUNNING_OF_ONE}")
            for n in range(MAX_RUNNING_OF_TENANTS - MAX_RUNNING_OF_ONE)
        ]
        await asyncio.sleep(0.0)
        with pytest.raises(Busy):
            await revoker.invalidate(ACME, ME, party="late")
        await asyncio.wait_for(revoker.revoke(ACME, ME), 3.3)
        await asyncio.gather(*one, *others)
        assert (await revoker.invalidate(ACME, ME, party="t0")).epoch == 2

    play(loop, scenario, Scripted("w1", NEVER))


def test_commands_for_one_subject_that_wait_for_their_commit_become_one(loop: VirtualLoop) -> None:
    """Those that come when it is committed need an epoch of their own: there may be new blocks."""

    async def scenario(bench: Bench) -> None:
        first = [asyncio.create_task(bench.revoker.invalidate(ACME, ME)) for _ in range(100)]
        await asyncio.sleep(0.01)
        assert bench.ledger.table.rev == 1
        second = [asyncio.create_task(bench.revoker.invalidate(ACME, ME)) for _ in range(100)]
        revoked = asyncio.create_task(bench.revoker.revoke(ACME, ME))
        assert {receipt.rev for receipt in await asyncio.gather(*first)} == {1}
        assert {receipt.rev for receipt in await asyncio.gather(*second)} == {2}
        assert (await revoked).rev == 3
        await asyncio.sleep(1.0)
        assert bench.ledger.written.count("outcome 1") == 100, "each of them is on record"

    play(loop, scenario, Scripted("w1", NEVER))


def test_who_joins_one_whose_right_ends_gets_its_own(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        def ended(_book: Book) -> None:
            raise AccessEnded("a valid bearer key is needed")

        first = asyncio.create_task(bench.revoker.invalidate(ACME, ME, ended))
        second = asyncio.create_task(bench.revoker.invalidate(ACME, ME))
        with pytest.raises(AccessEnded):
            await first
        assert (await second).rev == 1

    play(loop, scenario, Scripted("w1"))


def test_of_too_many_revocations_the_oldest_is_followed_no_longer(loop: VirtualLoop) -> None:
    async def scenario(bench: Bench) -> None:
        for _ in range(MAX_FOLLOWED + 5):
            await bench.revoker.invalidate(ACME, ME)
        assert len(bench.revoker._followed) == MAX_FOLLOWED
        assert len(bench.revoker._tasks) <= MAX_FOLLOWED + 1

    class Unfinished(Scripted):
        async def erased(self, rev: int) -> Erasure:
            return Erasure(holder=self.name, rev=rev, is_done=False)

    play(loop, scenario, Unfinished("w1"))


def test_of_too_many_receipts_the_oldest_is_forgotten() -> None:
    book = ReceiptBook()
    for rev in range(1, MAX_RECEIPTS + 2):
        book.add(
            Receipt(
                rev=rev, subject=ACME, verb=Verb.REVOKE, epoch=rev, acked=(), fenced=(),
                fence=Fence.WORKER, erase=Erase.NAMESPACE, aborted=0, condemned_blocks=0,
                condemned_bytes={}, ms=1.0,
            )
        )  # fmt: skip
    assert book.get(1) is None
    assert len(book.latest()) == MAX_RECEIPTS
    assert book.latest()[0].rev == MAX_RECEIPTS + 1
    book.erased(Erasure(holder="w", rev=1, is_done=True))
    book.recorded(1)
    assert book.get(1) is None


def test_a_full_outbox_drops_its_oldest_and_counts_it(loop: VirtualLoop) -> None:
    written: list[int] = []

    async def write(number: int) -> None:
        written.append(number)

    async def scenario() -> None:
        outbox = Outbox(LOG)
        for number in range(MAX_PENDING + 3):
            outbox.put(lambda number=number: write(number))
        assert (outbox.pending_records, outbox.dropped_records) == (MAX_PENDING, 3)
        task = asyncio.create_task(outbox.run())
        await asyncio.sleep(1.0)
        task.cancel()
        assert written == list(range(3, MAX_PENDING + 3))

    loop.run_until_complete(scenario())


def test_a_record_that_can_never_be_written_holds_up_none_behind_it(loop: VirtualLoop) -> None:
    async def broken() -> None:
        raise ValueError("too long")

    async def busy_once(tries: list[int]) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise Busy("too many wait")

    async def scenario() -> None:
        outbox = Outbox(LOG)
        outbox.put(broken)
        tries: list[int] = []
        is_written = outbox.put(lambda: busy_once(tries))
        task = asyncio.create_task(outbox.run())
        await asyncio.wait_for(is_written.wait(), 5.0)
        task.cancel()
        assert (len(tries), outbox.dropped_records) == (2, 1)

    loop.run_until_complete(scenario())
