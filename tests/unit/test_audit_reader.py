"""Reading the audit log: pages that are bounded, and a check that looks into every sink."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from audit_bench import ORIGIN, SIGNER, WeakSink

from hand_clock import HandClock
from trunkline.adapters.audit_files import CheckpointFile
from trunkline.control import audit_reader
from trunkline.control.audit import AuditLog
from trunkline.control.audit_reader import AuditQuery, AuditReader, SinkCheck
from trunkline.core.audit import AuditEvent, Kind
from trunkline.errors import AuditDown, Busy

EVENTS = 30
TIMEOUT_S = 1.0
"""Longer than a busy disk takes for a record."""
Story = Callable[[AuditReader, AuditLog, list[WeakSink]], Awaitable[None]]


def told(root: Path, story: Story) -> None:
    """A log of 30 records of two kinds in two folders; no checkpoint among them."""

    async def tell() -> None:
        sinks = [WeakSink(root / "first"), WeakSink(root / "second")]
        keeper = CheckpointFile(root / "checkpoints.jsonl")
        log = AuditLog(
            sinks,
            signer=SIGNER,
            keeper=keeper,
            clock=HandClock(),
            origin=ORIGIN,
            sink_timeout_s=TIMEOUT_S,
        )
        assert await log.open()
        for number in range(EVENTS):
            kind = Kind.KEY if number % 10 == 0 else Kind.POLICY
            await log.write(AuditEvent(kind=kind, action=f"a{number + 1}"))
        reader = AuditReader(log, keeper=keeper, is_signed=SIGNER.is_signed)
        await story(reader, log, sinks)
        await log.close()

    asyncio.run(tell())


def seqs(page: audit_reader.AuditPage) -> list[object]:
    return [record["seq"] for record in page.records]


def everything(record: audit_reader.Record) -> audit_reader.Record:
    return record


def test_a_page_looks_at_a_bounded_part_and_says_where_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_reader, "MAX_SCANNED", 12)

    async def story(reader: AuditReader, log: AuditLog, sinks: list[WeakSink]) -> None:
        after: int | None = 0
        pages: list[list[object]] = []
        while after is not None:
            page = await reader.page(AuditQuery(limit=5, after_seq=after, kind="KEY"), everything)
            pages.append(seqs(page))
            after = page.next_after
        assert pages == [[1, 11], [21], []]
        newest = await reader.page(AuditQuery(limit=5, kind="KEY"), everything)
        assert (seqs(newest), newest.scanned_from, newest.next_after) == ([21], 19, None)

    told(tmp_path, story)


def test_a_full_page_goes_on_behind_its_last_record(tmp_path: Path) -> None:
    async def story(reader: AuditReader, log: AuditLog, sinks: list[WeakSink]) -> None:
        page = await reader.page(AuditQuery(limit=4, after_seq=7), everything)
        assert (seqs(page), page.next_after) == ([8, 9, 10, 11], 11)
        last = await reader.page(AuditQuery(limit=4, after_seq=26), everything)
        assert (seqs(last), last.next_after) == ([27, 28, 29, 30], None)
        beyond = await reader.page(AuditQuery(limit=4, after_seq=99), everything)
        assert (seqs(beyond), beyond.next_after) == ([], None)

    told(tmp_path, story)


def test_what_may_not_be_shown_does_not_count(tmp_path: Path) -> None:
    async def story(reader: AuditReader, log: AuditLog, sinks: list[WeakSink]) -> None:
        def even(record: audit_reader.Record) -> audit_reader.Record | None:
            seq = record["seq"]
            assert isinstance(seq, int)
            return {"seq": seq} if seq % 2 == 0 else None

        page = await reader.page(AuditQuery(limit=3), even)
        assert page.records == [{"seq": 26}, {"seq": 28}, {"seq": 30}]

    told(tmp_path, story)


def found_by_name(checks: list[SinkCheck]) -> dict[str, tuple[int, int | None] | None]:
    """Last position and that of the fault of each sink; None where it is out."""
    return {
        Path(check.sink).name: None
        if check.found is None
        else (check.found.head.seq, check.found.fault.seq if check.found.fault else None)
        for check in checks
    }


def test_damage_in_the_second_sink_is_found_though_the_first_is_sound(tmp_path: Path) -> None:
    async def story(reader: AuditReader, log: AuditLog, sinks: list[WeakSink]) -> None:
        assert found_by_name(await reader.verify()) == {"first": (30, None), "second": (30, None)}
        segment = sorted((tmp_path / "second").glob("audit-*"))[0]
        segment.write_bytes(segment.read_bytes().replace(b'"a17"', b'"b17"'))
        assert found_by_name(await reader.verify()) == {"first": (30, None), "second": (16, 17)}
        page = await reader.page(AuditQuery(limit=1), everything)
        assert seqs(page) == [30], "reading took no sink out"

    told(tmp_path, story)


def test_a_sink_that_is_out_is_said_to_be(tmp_path: Path) -> None:
    async def story(reader: AuditReader, log: AuditLog, sinks: list[WeakSink]) -> None:
        sinks[1].is_down = True
        await log.write(AuditEvent(kind=Kind.POLICY, action="a31"))
        assert found_by_name(await reader.verify()) == {"first": (31, None), "second": None}
        sinks[0].is_down = True
        with pytest.raises(AuditDown):
            await log.write(AuditEvent(kind=Kind.POLICY, action="a32"))
        with pytest.raises(AuditDown):
            await reader.verify()
        sinks[0].is_down = sinks[1].is_down = False

    told(tmp_path, story)


def test_a_check_of_a_stuck_sink_ends_and_leaves_the_log_as_it_is(tmp_path: Path) -> None:
    async def story(reader: AuditReader, log: AuditLog, sinks: list[WeakSink]) -> None:
        sinks[1].is_stuck = True
        async with asyncio.timeout(60 * TIMEOUT_S):
            first, second = await reader.verify()
        assert (first.found is not None, second.found) == (True, None)
        assert "did not answer" in second.why
        assert log.health().sinks_up == 2, "only what is written decides that"
        sinks[1].is_stuck = False
        assert found_by_name(await reader.verify()) == {"first": (30, None), "second": (30, None)}

    told(tmp_path, story)


def test_one_check_at_a_time(tmp_path: Path) -> None:
    async def story(reader: AuditReader, log: AuditLog, sinks: list[WeakSink]) -> None:
        first = asyncio.create_task(reader.verify())
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await reader.verify()
        assert len(await first) == 2
        assert len(await reader.verify()) == 2, "and another one afterwards"

    told(tmp_path, story)


def test_records_that_come_during_a_check_are_not_taken_for_a_fault(tmp_path: Path) -> None:
    async def story(reader: AuditReader, log: AuditLog, sinks: list[WeakSink]) -> None:
        check = asyncio.create_task(reader.verify())
        await asyncio.sleep(0)
        await log.write(AuditEvent(kind=Kind.POLICY, action="late"))
        assert all(each.found and each.found.fault is None for each in await check)

    told(tmp_path, story)
