"""The audit log when a place of it is bad: what is set aside, what is rebuilt, what is refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from audit_bench import SIGNER, SMALL, AuditBench, login, played

from trunkline.adapters.audit_files import read_checkpoints, segment_paths
from trunkline.core.audit import Checkpoint, Head
from trunkline.errors import AuditDown


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_sink_that_was_tampered_with_is_set_aside_and_rebuilt_from_the_sound_one(
    tmp_path: Path, name: str, is_running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(4):
            await audit.write(login(number))
        path = segment_paths(bench.folder(name))[-1]
        path.write_bytes(path.read_bytes().replace(b"login.1", b"login.7"))
        if is_running:
            bench.sinks["ab".index(name)].is_down = True
            await audit.write(login(4))
            bench.sinks["ab".index(name)].is_down = False
            await bench.retry(audit)
        else:
            await bench.die()
            audit = bench.begin()
            await audit.write(login(4))
        assert audit.health().sinks_up == 2

    bench = played(scenario, tmp_path)
    assert bench.records("a") == bench.records("b")
    assert bench.verified(name).fault is None
    (told,) = [r for r in bench.records("a") if r["action"] == "audit.diverged"]
    assert told["result"] == str(bench.folder(name))
    assert "position 2: the record is not what its hash says" in str(told["reason"])
    (kept,) = (bench.folder(name) / "diverged-1").iterdir()
    assert b"login.7" in kept.read_bytes()
    assert "audit.set_aside" in caplog.messages


def test_an_end_that_another_process_wrote_is_set_aside_if_it_is_not_what_was_signed(
    tmp_path: Path,
) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(SMALL + 2):
            await audit.write(login(number))
        await audit.close()
        # A longer chain that does not have the record that was signed.
        shutil.rmtree(bench.folder("b"))
        other = AuditBench(bench.root / "other")
        stranger = other.begin()
        for number in range(3 * SMALL):
            await stranger.write(login(100 + number))
        await other.die()
        shutil.copytree(other.folder("a"), bench.folder("b"))
        audit = bench.begin()
        assert await audit.open()
        await audit.write(login(99))
        assert audit.health().sinks_up == 2

    bench = played(scenario, tmp_path)
    assert bench.actions("a")[-2:] == ["audit.diverged", "login.99"]
    assert bench.records("a") == bench.records("b")
    assert bench.verified("b").fault is None


def test_a_log_that_all_checkpoints_contradict_says_what_to_do_and_that_helps(
    tmp_path: Path,
) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        await audit.write(login(0))
        await audit.close()
        newest = read_checkpoints(bench.copies)[-1]
        lie = Checkpoint(head=Head(seq=newest.head.seq, hash=bytes(32)), wall_ms=1, rev=0)
        lie = replace(lie, key_id=SIGNER.key_id, signature=SIGNER.sign(lie.message()))
        with bench.copies.open("ab") as file:
            file.write(lie.line() + b"\n")
        audit = bench.begin()
        assert not await audit.open()
        health = audit.health()
        assert (health.sinks_up, health.trouble != "") == (0, True)
        with pytest.raises(AuditDown, match="that contradict one another"):
            await audit.write(login(99))
        assert "put a copy" not in health.trouble, "none can agree with both"
        remedy = health.trouble.rpartition("that proof: ")[2].partition(". No restart")[0]
        assert remedy == f"mv {bench.copies} {bench.copies}.disputed"
        os.rename(*remedy.split()[1:])
        await bench.retry(audit)
        assert (audit.health().sinks_up, audit.health().trouble) == (2, "")
        await audit.write(login(100))

    bench = played(scenario, tmp_path)
    assert bench.actions("b")[-2:] == ["audit.checkpoints_gone", "login.100"]
    assert bench.verified("b").fault is None


def test_a_cut_log_goes_on_when_a_whole_copy_is_put_back(tmp_path: Path) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        for number in range(SMALL):
            await audit.write(login(number))
        await audit.close()
        shutil.copytree(bench.folder("a"), bench.root / "kept")
        for name in ("a", "b"):
            path = segment_paths(bench.folder(name))[-1]
            path.chmod(0o600)
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
        audit = bench.begin()
        assert not await audit.open()
        assert "put a copy of the log back that has record 11" in audit.health().trouble
        shutil.rmtree(bench.folder("b"))
        shutil.copytree(bench.root / "kept", bench.folder("b"))
        await audit.write(login(99))
        assert audit.health().sinks_up == 2

    bench = played(scenario, tmp_path)
    assert bench.records("a") == bench.records("b")
    assert bench.verified("a").fault is None


def test_a_folder_that_is_removed_while_nothing_is_written_is_back_with_its_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        await audit.write(login(0))
        shutil.rmtree(bench.folder("b"))
        await bench.retry(audit)
        await bench.retry(audit)
        assert (audit.health().sinks_up, audit.health().trouble) == (2, "")
        assert (bench.folder("b") / "lock").exists()

    bench = played(scenario, tmp_path)
    assert bench.records("a") == bench.records("b")
    told = [m for m in caplog.messages if m.startswith("audit.")]
    assert told == ["audit.sink_out", "audit.sink_back"]


def test_a_sink_that_is_out_is_said_once_with_the_reason_and_once_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(bench: AuditBench) -> None:
        audit = bench.begin()
        bench.sinks[1].is_down = True
        assert await audit.open()
        for number in range(3):
            await audit.write(login(number))
            await bench.retry(audit)
        bench.sinks[1].is_down = False
        await bench.retry(audit)
        await audit.write(login(4))

    bench = played(scenario, tmp_path)
    told = [(r.msg, r.fields) for r in caplog.records]  # pyright: ignore[reportAttributeAccessIssue]  # `observe` adds it
    sink = str(bench.folder("b"))
    assert told == [
        ("audit.sink_out", {"sink": sink, "why": "the disk is gone"}),
        ("audit.sink_back", {"sink": sink}),
    ]
