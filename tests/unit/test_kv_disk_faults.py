"""The disk tier where the disk fails, hangs or is full: it costs misses, and nothing else."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from disk_desk import NEW, OLD, A, B, Planted, assert_true, desk_with_old_below

from kv_desk import SIZE, SOON, DiskDesk, chain, content, eventually
from trunkline.core.records import Instant
from trunkline.core.transfer import Reason
from trunkline.kv import Kept
from trunkline.kv.files import Files, FolderFiles


def test_a_full_disk_costs_the_block_and_nothing_else(tmp_path: Path) -> None:
    planted: list[Planted] = []

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    def no_space(name: str) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    desk = DiskDesk(root=tmp_path, host_blocks=1, wrap=plant)
    planted[0].before_write = no_space
    desk.put_through([OLD[0], NEW[0]], A)
    assert desk.pin(OLD[:1], A, load_until=SOON).reason is Reason.MISS
    assert desk.hits(NEW[:1], A) == 1
    assert desk.files() == []
    figures = desk.store.figures()
    assert (figures.moving_bytes, figures.disk_bytes) == (0, 0)
    desk.check_sums()
    desk.store.close()


def test_a_write_that_fails_half_way_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FolderFiles(tmp_path, "2" * 32)

    def fails(handle: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="input/output"):
        files.write("a" * 64, b"data")
    assert list((tmp_path / ("2" * 32)).iterdir()) == []
    files.close()


def test_d24_a_stalled_read_is_a_miss_within_its_deadline_and_opens_the_tier_to_nobody(
    tmp_path: Path,
) -> None:
    planted: list[Planted] = []
    goes_on = threading.Event()

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    desk = desk_with_old_below(tmp_path, wrap=plant)
    planted[0].before_read = lambda name: assert_true(goes_on.wait(60))
    soon = Instant(desk.clock.ms + 20.0)
    pins = desk.pin(OLD, A, load_until=soon)
    assert (pins.blocks, pins.reason) == ((), Reason.TIER)
    # It hangs for longer than an I/O may take: nothing more is handed to it, nobody waits.
    desk.clock.ms += desk.io_deadline_ms
    assert desk.disk is not None
    assert not desk.disk.is_usable
    assert desk.pin(OLD, A, load_until=SOON + 10**9).reason is Reason.TIER
    # Memory goes on without it, and what gives way is dropped instead.
    third = chain(A, 200, 1)
    assert isinstance(desk.store.put(third[0], A, content(third[0])), Kept)
    assert desk.hits(third, A) == 1
    desk.check_sums()
    goes_on.set()
    desk.settle()
    # The block was not lost: nobody knows that it is absent.
    desk.clock.ms += 100_000.0
    assert desk.hits(OLD, A, load_until=desk.clock.ms + 60_000.0) == 2
    desk.store.close()


def test_a_stalled_write_gives_up_what_waits_behind_it(tmp_path: Path) -> None:
    planted: list[Planted] = []
    goes_on, is_there = threading.Event(), threading.Event()

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    def stall(name: str) -> None:
        is_there.set()
        assert goes_on.wait(60)

    desk = DiskDesk(root=tmp_path, host_blocks=1, moving_blocks=2, wrap=plant)
    planted[0].before_write = stall
    roots = [chain(A, 1_000 * number, 1)[0] for number in range(4)]
    assert desk.put(roots[:2], A)
    assert is_there.wait(60)
    desk.put(roots[2:], A)
    assert desk.store.figures().moving_bytes == 2 * SIZE
    desk.check_sums()
    desk.clock.ms += desk.io_deadline_ms
    # The one that is being written keeps its memory, the other has it back.
    again = desk.store.put(roots[3], A, content(roots[3]))
    assert isinstance(again, Kept)
    assert desk.store.figures().moving_bytes == SIZE
    goes_on.set()
    desk.settle()
    assert desk.store.figures().moving_bytes == 0
    desk.check_sums()
    desk.store.close()


def test_as_many_reads_wait_as_may_and_a_further_one_is_a_miss_at_once(tmp_path: Path) -> None:
    planted: list[Planted] = []
    goes_on, is_there = threading.Event(), threading.Event()

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    def stall(name: str) -> None:
        is_there.set()
        assert goes_on.wait(60)

    desk = desk_with_old_below(tmp_path, wrap=plant, max_jobs=1)
    planted[0].before_read = stall
    disk, entry = desk.disk, desk.store._catalogue.find(OLD[0].key)
    assert disk is not None
    assert entry is not None
    name, manifest = entry.name, entry.manifest
    assert name is not None
    found: list[bytes | Reason] = []

    def read() -> None:
        found.append(disk.read(name, manifest, SOON))

    readers = [threading.Thread(target=read) for _ in range(2)]
    readers[0].start()
    assert is_there.wait(60)
    readers[1].start()
    eventually(lambda: len(disk._reads) == 1)
    assert disk.read(name, manifest, SOON) is Reason.TIER
    assert disk.counters.refused == 1
    goes_on.set()
    for reader in readers:
        reader.join(60)
    assert found == [content(OLD[0])] * 2
    desk.store.close()


def test_a_failing_disk_is_left_alone_and_tried_again_after_a_pause(tmp_path: Path) -> None:
    planted: list[Planted] = []
    tries: list[str] = []

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    def fails(name: str) -> None:
        tries.append(name)
        raise OSError(errno.EIO, "input/output error")

    desk = DiskDesk(root=tmp_path, host_blocks=1, wrap=plant)
    planted[0].before_write = fails
    roots = [chain(A, 1_000 * number, 1)[0] for number in range(8)]
    desk.put_through(roots, A)
    assert len(tries) == 3
    planted[0].before_write = lambda name: None
    assert desk.disk is not None
    desk.clock.ms += desk.disk.options.pause_ms
    desk.put_through(roots[:2], A)
    assert desk.disk.counters.written >= 1
    desk.store.close()


def test_a_block_revoked_on_its_way_to_disk_does_not_arrive(tmp_path: Path) -> None:
    planted: list[Planted] = []
    goes_on, is_there = threading.Event(), threading.Event()

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    def stall(name: str) -> None:
        is_there.set()
        assert goes_on.wait(60)

    desk = DiskDesk(root=tmp_path, host_blocks=1, wrap=plant)
    planted[0].before_write = stall
    desk.put(OLD[:1], A)
    desk.put(chain(B, 0, 1), B)
    assert is_there.wait(60)
    desk.judge.epochs["tenant/a"] = 1
    erasure = desk.store.condemn(desk.judge.is_stale)
    goes_on.set()
    desk.settle()
    while desk.store.erase(16):
        pass
    desk.settle()
    assert desk.store.figures().disk_bytes == 0
    assert desk.files() == []
    assert erasure.is_done
    desk.check_sums()
    desk.store.close()


def test_a_tier_that_is_tried_again_is_tried_by_one_job_at_a_time(tmp_path: Path) -> None:
    planted: list[Planted] = []
    goes_on, is_there = threading.Event(), threading.Event()

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    def fails(name: str) -> None:
        raise OSError(errno.EIO, "input/output error")

    def stall(name: str) -> None:
        is_there.set()
        assert goes_on.wait(60)

    desk = desk_with_old_below(tmp_path, wrap=plant)
    disk, entry = desk.disk, desk.store._catalogue.find(OLD[0].key)
    assert disk is not None
    assert entry is not None
    assert entry.name is not None
    planted[0].before_read = fails
    for _ in range(3):
        assert disk.read(entry.name, entry.manifest, SOON) is Reason.TIER
    assert not disk.is_usable
    desk.clock.ms += disk.options.pause_ms
    assert disk.is_usable
    planted[0].before_read = stall
    trial = threading.Thread(target=disk.read, args=(entry.name, entry.manifest, SOON))
    trial.start()
    assert is_there.wait(60)
    assert not disk.is_usable
    goes_on.set()
    trial.join(60)
    eventually(lambda: disk.is_usable)
    desk.store.close()


def test_a_request_that_is_over_while_its_blocks_come_up_holds_none_of_them(
    tmp_path: Path,
) -> None:
    planted: list[Planted] = []

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    desk = DiskDesk(root=tmp_path, host_blocks=3, wrap=plant)
    desk.put_through([*OLD, *NEW], A)
    assert desk.hits(OLD, A) == 1
    planted[0].before_read = lambda name: assert_true(desk.store.unpin_holder("request") == 1)
    keys = [place.key for place in OLD]
    pins = desk.store.pin(A.ns, keys, until=SOON, holder="request", load_until=SOON)
    assert (pins.token, pins.blocks, pins.reason) == (b"", (), Reason.TOKEN)
    figures = desk.store.figures()
    assert (figures.pins, figures.pinned_bytes) == (0, 0)
    desk.store.close()


def test_a_closed_store_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    desk = DiskDesk(root=tmp_path)
    desk.store.close()
    eventually(lambda: threading.active_count() == before)


def test_a_file_that_can_not_be_removed_is_tried_again_until_the_erasure_ends(
    tmp_path: Path,
) -> None:
    planted: list[Planted] = []
    tries: list[str] = []

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    def fails(name: str) -> None:
        tries.append(name)
        raise OSError(errno.EIO, "input/output error")

    desk = desk_with_old_below(tmp_path, wrap=plant, max_jobs=2)
    assert desk.disk is not None
    planted[0].before_remove = fails
    erasure = desk.store.condemn(lambda whose: whose == A)
    _erase_all(desk)
    assert (len(tries), erasure.is_done) == (2, False)
    # Not at once, and nothing is written while so much can not be removed.
    _erase_all(desk)
    assert len(tries) == 2
    refused = desk.disk.counters.refused
    desk.put_through([chain(B, 100 * number, 1)[0] for number in range(3)], B)
    assert desk.disk.counters.refused == refused + 1
    assert desk.store.figures().disk_bytes == 0
    desk.clock.ms += desk.disk.options.pause_ms
    _erase_all(desk)
    assert (len(tries), erasure.is_done) == (4, False)
    planted[0].before_remove = lambda name: None
    desk.clock.ms += desk.disk.options.pause_ms
    _erase_all(desk)
    assert erasure.is_done
    assert desk.files() == []
    assert desk.disk.counters.remove_failures == 4
    desk.store.close()


def test_a_block_with_two_copies_in_memory_is_wiped_in_both(tmp_path: Path) -> None:
    """It came anew while it was being written to disk, and left the index while it was pinned."""
    planted: list[Planted] = []
    goes_on, is_there = threading.Event(), threading.Event()

    def plant(files: Files) -> Files:
        planted.append(Planted(files))
        return planted[0]

    def stall(name: str) -> None:
        is_there.set()
        assert goes_on.wait(60)

    desk = DiskDesk(root=tmp_path, host_blocks=1, wrap=plant)
    planted[0].before_write = stall
    for place in (OLD[0], NEW[0], OLD[0]):
        desk.put([place], A)
    assert is_there.wait(60)
    pins = desk.pin(OLD[:1], A)
    entry = desk.store._catalogue.find(OLD[0].key)
    assert entry is not None
    assert entry.slot is not None
    assert entry.is_moving
    entry.slot.view[0] ^= 1
    assert desk.pin(OLD[:1], A).reason is Reason.DIGEST
    erasure = desk.store.condemn(lambda whose: whose == A)
    goes_on.set()
    desk.settle()
    _erase_all(desk)
    assert not erasure.is_done
    assert desk.store.unpin(pins.token)
    _erase_all(desk)
    assert erasure.is_done
    desk.check_sums()
    desk.store.close()


def _erase_all(desk: DiskDesk) -> None:
    while desk.store.erase(16):
        pass
    desk.settle()
