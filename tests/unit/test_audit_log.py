"""The audit log over two folders: what is durable, what waits, and what comes level again."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path

import pytest
from audit_bench import SMALL, AuditBench, login, played

from trunkline.adapters.audit_files import segment_paths
from trunkline.control import audit as audit_module
from trunkline.core.audit import read_head
from trunkline.errors import AuditDown, Busy


def test_a_record_is_in_both_places_when_it_is_acknowledged(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(3):
            await audit.write(login(number))
            assert len(bench.actions("a")) == len(bench.actions("b")) == number + 1

    bench = played(scenario, tmp_path)
    assert bench.actions("a") == ["login.0", "login.1", "login.2"]
    assert bench.verified("b").fault is None


def test_the_next_process_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        for life in range(3):
            audit = bench.begin()
            for number in range(7):
                await audit.write(login(10 * life + number))
            await bench.die()

    bench = played(scenario, tmp_path)
    assert len(bench.actions("a")) == 21
    assert bench.verified("a").fault is None


def test_every_so_many_records_a_checkpoint_is_signed_and_copied(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(3 * SMALL - 1):
            await audit.write(login(number))

    bench = played(scenario, tmp_path)
    report = bench.verified("a")
    assert report.fault is None
    assert report.checkpoints == 4  # two in the log, and the copy of each
    assert [path.name for path in segment_paths(bench.folder("a"))] == [
        "audit-0000000000000001.jsonl",
        "audit-0000000000000012.jsonl",
        "audit-0000000000000023.jsonl",
    ]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in segment_paths(bench.folder("a"))]
    assert modes == [0o400, 0o400, 0o600]


def test_after_a_minute_the_head_is_signed_and_then_not_again(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        await audit.write(login())
        bench.clock.ms += 59_000.0
        await audit.tick()
        assert bench.verified("a").checkpoints == 0
        bench.clock.ms += 1_000.0
        for _ in range(3):
            await audit.tick()
            bench.clock.ms += 60_000.0

    assert played(scenario, tmp_path).verified("a").checkpoints == 2


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_log_that_lost_its_tail_is_not_gone_on_with(tmp_path: Path, cut: int) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(SMALL):
            await audit.write(login(number))
        await audit.close()
        for name in ("a", "b"):
            path = segment_paths(bench.folder(name))[-1]
            path.chmod(0o600)
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-cut]))
        fault = bench.verified("a").fault
        assert fault is not None
        assert fault.seq == SMALL + 2 - cut
        with pytest.raises(AuditDown, match="is not what was signed at 11"):
            await bench.begin().write(login())

    played(scenario, tmp_path)


def test_with_one_sink_down_records_are_kept_and_filled_in_later(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        await audit.write(login(0))
        bench.sinks[0].is_down = True
        for number in range(1, 2 * SMALL):
            await audit.write(login(number))
        assert audit.health().sinks_up == 1
        assert "the disk is gone" in audit.health().trouble
        bench.sinks[0].is_down = False
        await bench.retry(audit)
        assert audit.health().sinks_up == 2

    bench = played(scenario, tmp_path)
    assert bench.records("a") == bench.records("b")
    assert bench.verified("a").fault is None


def test_a_new_folder_is_filled_from_the_beginning(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(2 * SMALL):
            await audit.write(login(number))
        await bench.die()
        shutil.rmtree(bench.folder("a"))
        await bench.begin().open()

    bench = played(scenario, tmp_path)
    assert bench.records("a") == bench.records("b")


def test_a_folder_that_is_removed_under_way_comes_back_whole(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(5):
            await audit.write(login(number))
        shutil.rmtree(bench.folder("a"))
        await audit.write(login(5))
        assert audit.health().sinks_up == 1
        await bench.die()
        audit = bench.begin()
        await audit.write(login(6))

    bench = played(scenario, tmp_path)
    assert bench.actions("a") == [f"login.{number}" for number in range(7)]
    assert bench.verified("a").fault is None


def test_without_any_sink_a_record_is_refused_and_a_note_waits(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        await audit.write(login(0))
        for sink in bench.sinks:
            sink.is_down = True
        with pytest.raises(AuditDown, match="the disk is gone"):
            await audit.write(login(1))
        assert await audit.note(login(2)) is False
        assert audit.health().pending == 1
        for sink in bench.sinks:
            sink.is_down = False
        await bench.retry(audit)
        assert audit.health().pending == 0
        assert await audit.note(login(3)) is True

    bench = played(scenario, tmp_path)
    assert bench.actions("a") == ["login.0", "login.2", "login.3"]
    assert bench.records("a") == bench.records("b")


def test_a_log_that_could_not_be_opened_at_the_start_is_opened_later(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        await audit.write(login(0))
        await bench.die()
        audit = bench.begin()
        for sink in bench.sinks:
            sink.is_down = True
        assert await audit.open() is False
        for sink in bench.sinks:
            sink.is_down = False
        await audit.write(login(1))

    bench = played(scenario, tmp_path)
    assert bench.actions("a") == ["login.0", "login.1"]


def test_a_full_queue_of_notes_drops_the_newest_and_the_log_says_how_many(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin(max_pending=2)
        for sink in bench.sinks:
            sink.is_down = True
        for number in range(5):
            await audit.note(login(number))
        assert (audit.health().pending, audit.health().dropped) == (2, 3)
        for sink in bench.sinks:
            sink.is_down = False
        await bench.retry(audit)

    bench = played(scenario, tmp_path)
    assert bench.actions("a") == ["login.0", "login.1", "audit.dropped"]
    assert bench.records("a")[-1]["counts"] == {"records": 3}


def test_writes_beyond_the_bound_of_waiting_ones_are_told_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "MAX_WAITING_WRITES", 2)

    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        ends = await asyncio.gather(
            *(audit.write(login(number)) for number in range(3)), return_exceptions=True
        )
        assert isinstance(ends[2], Busy)
        assert await audit.write(login(3))

    assert len(played(scenario, tmp_path).actions("a")) == 3


def test_a_record_that_was_written_but_not_acknowledged_is_taken_back(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        await audit.write(login(0))
        bench.sinks[0].fails_after_write = True
        bench.sinks[1].is_down = True
        with pytest.raises(AuditDown):
            await audit.write(login(1))
        bench.sinks[0].fails_after_write = bench.sinks[1].is_down = False
        await bench.retry(audit)
        await audit.write(login(2))

    bench = played(scenario, tmp_path)
    assert bench.actions("a") == bench.actions("b") == ["login.0", "login.2"]
    assert bench.verified("a").fault is None


def test_a_sink_that_hangs_costs_one_time_out_and_not_one_a_record(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin(timeout_s=1.0)
        await audit.write(login(0))
        gate = bench.sinks[0].gate = asyncio.Event()
        for number in range(1, 4):
            await audit.write(login(number))
        assert audit.health().sinks_up == 1
        await bench.retry(audit)
        assert "has not answered" in audit.health().trouble
        bench.sinks[0].gate = None
        gate.set()
        while audit.health().sinks_up == 1:
            await asyncio.sleep(0)
            await bench.retry(audit)

    bench = played(scenario, tmp_path)
    assert bench.actions("a") == bench.actions("b")
    assert bench.verified("a").fault is None


def test_a_cancelled_write_leaves_the_chain_whole(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        await audit.write(login(0))
        gate = bench.sinks[0].gate = asyncio.Event()
        bench.sinks[0].begun.clear()
        task = asyncio.ensure_future(audit.write(login(1)))
        await bench.sinks[0].begun.wait()
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await audit.write(login(2))

    bench = played(scenario, tmp_path)
    assert bench.actions("a") == ["login.0", "login.1", "login.2"]
    assert bench.verified("a").fault is None


def test_a_sink_with_another_chain_is_set_aside_and_the_log_says_so(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        other = AuditBench(bench.root / "other")
        stranger = other.begin()
        await stranger.write(login(99))
        await other.die()
        audit = bench.begin()
        for number in range(3):
            await audit.write(login(number))
        await bench.die()
        shutil.rmtree(bench.folder("b"))
        shutil.copytree(other.folder("a"), bench.folder("b"))
        audit = bench.begin()
        await audit.write(login(3))

    bench = played(scenario, tmp_path)
    wanted = ["login.0", "login.1", "login.2", "audit.diverged", "login.3"]
    assert bench.actions("a") == bench.actions("b") == wanted
    kept = list((bench.folder("b") / "diverged-1").iterdir())
    assert [path.name for path in kept] == ["audit-0000000000000001.jsonl"]


def test_old_segments_go_behind_a_tombstone_and_the_rest_verifies(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(3 * SMALL):
            bench.clock.ms += 1_000.0
            await audit.write(login(number))
        cutoff = round(bench.clock.wall() * 1_000) - 15_000
        assert await audit.prune(cutoff, "400 days") == SMALL + 1
        assert await audit.prune(cutoff, "400 days") == 0
        await bench.die()
        await bench.begin().write(login(99))

    bench = played(scenario, tmp_path)
    for name in ("a", "b"):
        report = bench.verified(name)
        assert report.fault is None
        assert report.start.seq == SMALL + 1
        tombstone = next(r for r in bench.records(name) if r["kind"] == "TOMBSTONE")
        assert tombstone["counts"] == {"records": SMALL + 1}
    # Without the copies nobody could tell that the beginning is not simply missing.
    os.remove(bench.copies)
    fault = bench.verified("a").fault
    assert fault is not None
    assert fault.seq == 1


def test_a_second_place_that_is_away_gets_its_checkpoint_later(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        (bench.root / "elsewhere").write_text("not a folder")
        audit = bench.begin()
        for number in range(SMALL):
            await audit.write(login(number))
        assert audit.health().checkpoint_failures > 0
        os.remove(bench.root / "elsewhere")
        await bench.retry(audit)

    bench = played(scenario, tmp_path)
    report = bench.verified("a")
    assert (report.fault, report.checkpoints) == (None, 2)
    assert read_head(b"".join(_last_line(bench))).seq == SMALL + 1


def _last_line(bench: AuditBench) -> list[bytes]:
    return [segment_paths(bench.folder("a"))[-1].read_bytes().splitlines()[-1]]


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        first = bench.begin()
        await first.write(login(0))
        sinks = bench.sinks
        second = bench.begin()
        with pytest.raises(AuditDown, match="another process"):
            await second.write(login(1))
        for sink in sinks:
            await sink.close()
        bench.clock.ms += 1_000.0
        await second.write(login(2))

    assert played(scenario, tmp_path).actions("a") == ["login.0", "login.2"]
