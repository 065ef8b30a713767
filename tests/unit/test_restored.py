"""A registry that its workers know to be behind: said, mended, and only so far as is believable."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest
from registry_bench import ORG, TENANT, commit_all, intent, raised, run

from hand_clock import HandClock
from trunkline.adapters.state_dir import is_one_place
from trunkline.control.memory_store import MemoryStore
from trunkline.control.receipts import Erasure, HolderAck, Receipt
from trunkline.control.registry import Registry
from trunkline.control.restored import MAX_MENDINGS, MAX_TOLD_AHEAD, BackupWatch
from trunkline.control.revocation import HERE, Revoker, RevokerParts
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.freshness import LeaseGrants
from trunkline.observe import EventLog

FLEET = Subject(kind=SubjectKind.FLEET)


class NoAudit:
    async def intent(self, action: str, subject: Subject, intent: object) -> None: ...
    async def outcome(self, receipt: Receipt, intent: object) -> None: ...
    async def erased(self, erasure: Erasure, intent: object) -> None: ...


@dataclass
class Bench:
    registry: Registry
    revoker: Revoker
    watch: BackupWatch

    async def tell(self, rev: int, worker: str = "w") -> None:
        self.watch.tell(worker, rev)
        for _ in range(1_000):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def restored() -> AsyncGenerator[Bench]:
    clock, log = HandClock(), EventLog("trunkline.test-restored")
    registry = await Registry.load(MemoryStore(), clock)
    await commit_all(registry, ORG, TENANT, raised(1))
    parts = RevokerParts(
        registry=registry,
        grants=LeaseGrants(clock.boot(), has_earlier_life=False),
        holders=list,
        here=lambda order: HolderAck(life=HERE),
        audit=NoAudit(),
        clock=clock,
        log=log,
    )
    watch = BackupWatch(clock, log)
    async with Revoker(parts) as revoker:
        task = asyncio.create_task(watch.run(registry, revoker))
        yield Bench(registry, revoker, watch)
        task.cancel()


def test_what_a_worker_was_told_and_the_registry_forgot_is_mended_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with restored() as bench:
            await bench.tell(9)
            assert bench.registry.rev == 10
            assert bench.registry.table.epochs[FLEET] == 10, "above every epoch that was lost"
            assert bench.registry.lost_revisions == 6
            receipt = bench.revoker.receipts.get(10)
            assert receipt is not None
            assert receipt.subject == FLEET
            await bench.registry.commit(raised(2), intent())
            await bench.tell(9)
            await bench.tell(11)
            assert bench.registry.rev == 11, "nobody knows more than it"

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert len([r for r in caplog.records if "registry.restored" in r.getMessage()]) == 1


def test_one_workers_word_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with restored() as bench:
            for _ in range(3):
                await bench.tell(3 + MAX_TOLD_AHEAD + 1)
            assert bench.registry.rev == 3
            for number in range(3 * MAX_MENDINGS):
                await bench.tell(bench.registry.rev + 1, f"w{number}")
            assert bench.registry.rev == 3 + 2 * MAX_MENDINGS

    with caplog.at_level(logging.ERROR):
        run(scenario())
    refused = [r for r in caplog.records if "registry.behind" in r.getMessage()]
    assert len(refused) == 1 + 2 * MAX_MENDINGS, "each worker is named once"


def test_two_folders_of_one_disk_are_one_place(tmp_path: Path) -> None:
    assert is_one_place(tmp_path / "state" / "audit", tmp_path / "elsewhere" / "copy")
    assert not is_one_place(tmp_path / "audit", Path("/proc/self"))
