"""The disk tier: what goes down comes up as it was, or is a miss with a reason."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_desk import SIZE, SOON, DiskDesk, chain, content, eventually, owner
from trunkline.core.records import Instant, Tier
from trunkline.core.transfer import Reason
from trunkline.kv import Kept
from trunkline.kv.files import Files, FolderFiles
from trunkline.kv.records import Added, Gone

A = owner("a")
B = owner("b")
OLD = chain(A, 0, 2)
NEW = chain(A, 100, 2)


class Planted:
    """Files with a fault that a test sets."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.before_write: Callable[[str], None] = lambda name: None
        self.before_read: Callable[[str], None] = lambda name: None
        self.before_remove: Callable[[str], None] = lambda name: None
        self.on_read: Callable[[bytes], bytes] = lambda data: data

    def write(self, name: str, data: bytes) -> None:
        self.before_write(name)
        self._files.write(name, data)

    def read(self, name: str, size_bytes: int) -> bytes | None:
        self.before_read(name)
        data = self._files.read(name, size_bytes)
        return data if data is None else self.on_read(data)

    def remove(self, name: str) -> None:
        self.before_remove(name)
        self._files.remove(name)

    def sweep(self) -> int:
        return self._files.sweep()

    def close(self) -> None:
        self._files.close()


def desk_with_old_below(root: Path, **options: object) -> DiskDesk:
    """Two blocks in memory that pushed two older ones to disk."""
    desk = DiskDesk(root=root, host_blocks=2, **options)  # type: ignore[arg-type]
    desk.put_through(OLD, A)
    desk.put_through(NEW, A)
    assert desk.store.figures().disk_bytes == 2 * SIZE
    return desk


def test_what_gives_way_goes_to_disk_and_comes_up_again(tmp_path: Path) -> None:
    desk = desk_with_old_below(tmp_path)
    assert desk.pin(OLD, A).reason is Reason.TIER
    assert desk.hits(OLD, A, load_until=SOON) == 2
    desk.settle()
    assert desk.hits(NEW, A, load_until=SOON) == 2
    desk.check_sums()
    desk.store.close()
    assert list(tmp_path.iterdir()) == []


def test_each_tier_is_told_of_in_order(tmp_path: Path) -> None:
    desk = DiskDesk(root=tmp_path, host_blocks=1)
    desk.put_through([OLD[0], NEW[0]], A)
    told = [
        (type(event), event.tier)
        for event in desk.store.take_events()
        if isinstance(event, Added | Gone)
    ]
    assert told == [(Added, Tier.HOST), (Gone, Tier.HOST), (Added, Tier.HOST), (Added, Tier.DISK)]
    assert {tier for tier, manifest in desk.store.resident() if manifest.place == OLD[0]} == {
        Tier.DISK
    }
    desk.store.close()


def test_nothing_on_disk_is_plain_or_named_after_a_key(tmp_path: Path) -> None:
    desk = desk_with_old_below(tmp_path)
    for path in desk.files():
        written = path.read_bytes()
        for place in OLD:
            assert content(place)[:16] not in written
            assert place.key.hex()[:16] not in path.name
        assert path.stat().st_mode & 0o077 == 0
    desk.store.close()


def _flip(path: Path, position: int) -> None:
    written = bytearray(path.read_bytes())
    written[position] ^= 1
    path.write_bytes(written)


def _swap(path: Path) -> None:
    """Each file has the content of the other; done with the first of the two."""
    first, second = sorted(path.parent.iterdir())
    if path != first:
        return
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def _as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_link(path: Path) -> None:
    moved = path.parent.parent / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.unlink(),
        lambda path: _flip(path, 0),
        lambda path: _flip(path, SIZE // 2),
        lambda path: _flip(path, -1),
        lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
        _swap,
        _as_fifo,
    ],
    ids=[
        *("empty", "short", "long", "missing", "nonce", "middle", "tag", "other-bytes"),
        *("another-blocks-file", "fifo"),
    ],
)
def test_d03_d23_a_file_that_is_not_what_was_written_is_a_miss_and_its_entry_goes(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    desk = desk_with_old_below(tmp_path)
    for path in desk.files():
        damage(path)
    pins = desk.pin(OLD, A, load_until=SOON)
    assert pins.blocks == ()
    assert pins.reason in (Reason.MISS, Reason.DIGEST)
    desk.settle()
    # The entry is gone, and with it the block that stands on it.
    assert desk.pin(OLD, A).reason is Reason.MISS
    assert not {place.key for place in OLD} & {
        manifest.place.key for _, manifest in desk.store.resident()
    }
    assert Gone(key=OLD[0].key, tier=Tier.DISK) in desk.store.take_events()
    assert desk.disk is not None
    assert desk.disk.counters.phantoms + desk.disk.counters.spoilt == 1
    desk.check_sums()
    desk.store.close()


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    desk = desk_with_old_below(tmp_path)
    for path in desk.files():
        _as_link(path)
    assert desk.hits(OLD, A, load_until=SOON) == 0
    desk.store.close()


def test_bytes_that_decrypt_but_are_not_the_announced_ones_are_a_miss(tmp_path: Path) -> None:
    class Lying:
        """A sealer that says yes to anything."""

        overhead_bytes = 0

        def seal(self, ns: bytes, data: memoryview, associated: bytes) -> bytes | None:
            return bytes(data)

        def unseal(self, ns: bytes, sealed: bytes, associated: bytes) -> bytes | None:
            return sealed

        def destroy(self, ns: bytes) -> None:
            pass

    desk = desk_with_old_below(tmp_path, sealer=Lying())
    for path in desk.files():
        _flip(path, 5)
    assert desk.pin(OLD, A, load_until=SOON).reason is Reason.DIGEST
    assert desk.store.figures().spoilt == 1
    desk.store.close()


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


def assert_true(is_so: bool) -> None:
    assert is_so


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


def test_a_destroyed_key_makes_everything_of_its_namespace_unreadable(tmp_path: Path) -> None:
    desk = desk_with_old_below(tmp_path)
    desk.sealer.destroy(A.ns)
    assert desk.pin(OLD, A, load_until=SOON).reason is Reason.DIGEST
    assert desk.pin(OLD, A).reason is Reason.MISS
    desk.store.close()


def test_a_revocation_destroys_the_key_removes_the_files_and_says_when_that_is_done(
    tmp_path: Path,
) -> None:
    desk = desk_with_old_below(tmp_path)
    theirs = chain(B, 0, 1)
    desk.put_through(theirs, B)
    kept = [path.read_bytes() for path in desk.files()]
    desk.judge.epochs["tenant/a"] = 1
    erasure = desk.store.condemn(desk.judge.is_stale)
    assert desk.hits(OLD, A, load_until=SOON) == 0
    assert desk.sealer.unseal(A.ns, kept[0], b"") is None
    while desk.store.erase(16):
        pass
    desk.settle()
    assert erasure.is_done
    assert erasure.condemned_blocks >= 4
    assert erasure.erased_bytes == erasure.condemned_bytes
    assert desk.hits(theirs, B, load_until=SOON) == 1
    desk.check_sums()
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


def test_the_disk_keeps_to_its_bytes_and_drops_tails_first(tmp_path: Path) -> None:
    desk = DiskDesk(root=tmp_path, host_blocks=1, disk_blocks=3)
    roots = [chain(A, 1_000 * number, 1)[0] for number in range(7)]
    desk.put_through(roots, A)
    assert desk.store.figures().disk_bytes == 3 * SIZE
    assert len(desk.files()) == 3
    assert desk.hits([roots[5]], A, load_until=SOON) == 1
    assert desk.hits([roots[0]], A, load_until=SOON) == 0
    desk.check_sums()
    desk.store.close()


def test_what_saves_too_little_is_not_written(tmp_path: Path) -> None:
    desk = DiskDesk(root=tmp_path, host_blocks=1, min_saved_ms=5.0)
    desk.store.put(OLD[0], A, content(OLD[0]), saved_ms=4.0)
    desk.store.put(NEW[0], A, content(NEW[0]), saved_ms=6.0)
    third = chain(A, 200, 1)[0]
    desk.store.put(third, A, content(third), saved_ms=1.0)
    desk.settle()
    assert desk.hits(OLD[:1], A, load_until=SOON) == 0
    assert desk.hits(NEW[:1], A, load_until=SOON) == 1
    desk.store.close()


def test_d07_leftovers_of_a_dead_process_go_at_start_and_those_of_a_living_one_stay(
    tmp_path: Path,
) -> None:
    desk = desk_with_old_below(tmp_path)
    dead = tmp_path / ("d" * 32)
    dead.mkdir()
    (dead / ("e" * 64)).write_bytes(b"sealed")
    (dead / ("f" * 64 + ".part")).write_bytes(b"half")
    foreign = tmp_path / "not-ours"
    foreign.write_text("stays")
    other = DiskDesk(root=tmp_path, incarnation="2" * 32)
    other.settle()
    assert not dead.exists()
    assert foreign.exists()
    assert other.disk is not None
    assert other.disk.counters.swept == 1
    assert desk.hits(OLD, A, load_until=SOON) == 2
    desk.store.close()
    other.store.close()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    first = FolderFiles(tmp_path, "3" * 32)
    with pytest.raises(OSError, match="somebody else holds"):
        FolderFiles(tmp_path, "3" * 32)
    first.close()


def test_a_closed_store_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    desk = DiskDesk(root=tmp_path)
    desk.store.close()
    eventually(lambda: threading.active_count() == before)
