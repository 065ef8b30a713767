"""One folder of the audit log: what counts, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from registry_bench import run

from trunkline.adapters.audit_files import (
    MAX_ASIDE,
    CheckpointFile,
    FileSink,
    SegmentFiles,
    log_lines,
    read_checkpoints,
    segment_paths,
)
from trunkline.core.audit import AuditEvent, Checkpoint, Head, Kind, Stamp, seal
from trunkline.ports.audit import SinkBroken, SinkDown

STAMP = Stamp(wall_ms=0, boot_ms=0, boot_id="b", host="h")


def appended(files: SegmentFiles, head: Head, count: int) -> list[Head]:
    heads: list[Head] = []
    for number in range(count):
        event = AuditEvent(kind=Kind.LOGIN, action=f"n{number}")
        if head.seq % 4 == 3:
            proof = Checkpoint(head=head, wall_ms=0).proof()
            event = AuditEvent(kind=Kind.CHECKPOINT, action="audit.checkpoint", proof=proof)
        line, head = seal(event, head, STAMP)
        files.append([line], head)
        heads.append(head)
    return heads


def test_a_record_is_not_acknowledged_when_the_disk_does_not_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FileSink(tmp_path)

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    async def scenario() -> None:
        head = await sink.open()
        line, after = seal(AuditEvent(kind=Kind.LOGIN, action="n"), head, STAMP)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(SinkDown, match="Input/output error"):
                await sink.append([line], after)
        await sink.rewind(head)
        assert await sink.open() == head
        await sink.append([line], after)
        assert await sink.read(0, 5) == [line]
        await sink.close()
        with pytest.raises(SinkDown, match="closed"):
            await sink.open()

    run(scenario())


def test_lines_are_read_across_segments_from_any_position(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 4)
    appended(files, files.open(), 11)
    assert len(segment_paths(tmp_path)) == 3
    lines = list(log_lines(tmp_path))
    for after in range(12):
        assert list(log_lines(tmp_path, after)) == lines[after:]
        assert files.read(after, 3) == lines[after : after + 3]
    assert [segment.last.seq for segment in files.closed_segments()] == [4, 8]
    files.close()


def test_rewinding_goes_to_a_known_record_and_no_further(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 4)
    heads = appended(files, files.open(), 7)
    files.rewind(heads[5])
    assert files.open() == heads[5]
    with pytest.raises(SinkDown, match="not in its last segment"):
        files.rewind(heads[2])
    with pytest.raises(SinkBroken, match="another record"):
        files.rewind(Head(seq=5, hash=bytes(32)))
    assert files.open() == heads[5]
    files.close()


def test_rewinding_reopens_a_segment_that_was_closed_with_what_is_cut_off(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 4)
    heads = appended(files, files.open(), 4)
    files.rewind(heads[2])
    appended(files, heads[2], 2)
    assert len(list(log_lines(tmp_path))) == 5
    files.close()


def test_a_segment_whose_name_is_not_its_position_is_refused(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 4)
    appended(files, files.open(), 2)
    files.close()
    path = segment_paths(tmp_path)[0]
    path.rename(tmp_path / "audit-0000000000000007.jsonl")
    with pytest.raises(SinkBroken, match="begins with record 1"):
        SegmentFiles(tmp_path).open()


def test_where_there_is_no_folder_to_be_the_sink_is_down(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sink = FileSink(tmp_path / "file" / "audit")
    with pytest.raises(SinkDown, match="file/audit"):
        run(sink.open())


def test_checkpoints_are_kept_behind_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "checkpoints.jsonl"
    first, second = (Checkpoint(head=Head(seq=n), wall_ms=n) for n in (1, 2))

    async def scenario() -> None:
        keeper = CheckpointFile(path)
        assert await keeper.recent(9) == []
        await keeper.keep(first)
        path.write_bytes(path.read_bytes() + b'{"hash":"torn')
        assert await keeper.recent(9) == [first]
        await keeper.keep(second)
        assert await keeper.recent(9) == [first, second]
        assert await keeper.recent(1) == [second]
        path.write_bytes(b"no checkpoint\n")
        with pytest.raises(SinkBroken):
            await keeper.recent(9)
        await keeper.close()

    run(scenario())
    assert path.exists()
    with pytest.raises(SinkBroken):
        read_checkpoints(path)


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_folder_that_was_taken_away_is_noticed_and_its_lock_taken_again(
    tmp_path: Path, is_moved: bool
) -> None:
    place = tmp_path / "audit"
    files = SegmentFiles(place, 4)
    head = appended(files, files.open(), 2)[-1]
    if is_moved:
        place.rename(tmp_path / "away")
    else:
        shutil.rmtree(place)
    with pytest.raises(SinkDown, match="removed or replaced"):
        files.check()
    with pytest.raises(SinkDown, match="removed or replaced"):
        appended(files, head, 1)
    assert files.open() == Head()
    with pytest.raises(SinkDown, match="another process"):
        SegmentFiles(place).open()
    appended(files, Head(), 3)
    files.check()
    files.close()


def test_a_lock_file_that_was_removed_is_made_again_before_the_next_record(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 4)
    head = appended(files, files.open(), 2)[-1]
    (tmp_path / "lock").unlink()
    with pytest.raises(SinkDown, match="lock was removed"):
        appended(files, head, 1)
    assert files.open() == head
    with pytest.raises(SinkDown, match="another process"):
        SegmentFiles(tmp_path).open()
    files.close()


def test_evidence_is_kept_up_to_a_bound(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 4)
    for _ in range(MAX_ASIDE):
        appended(files, files.open(), 1)
        assert files.set_aside() == Head()
    head = appended(files, files.open(), 1)[-1]
    with pytest.raises(SinkDown, match="set aside 8 times: look why"):
        files.set_aside()
    assert files.open() == head
    assert len(list(tmp_path.glob("diverged-*/audit-*.jsonl"))) == MAX_ASIDE
    files.close()
