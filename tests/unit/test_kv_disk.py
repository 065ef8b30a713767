"""The disk tier: what goes down comes up as it was, or is a miss with a reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_desk import NEW, OLD, A, B, desk_with_old_below

from kv_desk import SIZE, SOON, DiskDesk, chain, content
from trunkline.core.records import Tier
from trunkline.core.transfer import Reason
from trunkline.kv.disk import associated
from trunkline.kv.files import FolderFiles
from trunkline.kv.records import Added, Gone


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
    # Also for who compares nothing, as it sends the bytes on.
    keys = [place.key for place in OLD]
    pins = desk.store.pin(A.ns, keys, until=SOON, is_verified=False, load_until=SOON)
    assert (pins.blocks, pins.reason) == ((), Reason.DIGEST)
    assert desk.store.figures().spoilt == 1
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
    bound = [associated(manifest) for _, manifest in desk.store.resident()]

    def opened() -> int:
        return sum(
            desk.sealer.unseal(A.ns, data, one) is not None for data in kept for one in bound
        )

    assert opened() == 3
    desk.judge.epochs["tenant/a"] = 1
    erasure = desk.store.condemn(desk.judge.is_stale)
    assert desk.hits(OLD, A, load_until=SOON) == 0
    assert opened() == 0
    while desk.store.erase(16):
        pass
    desk.settle()
    assert erasure.is_done
    assert erasure.condemned_blocks >= 4
    assert erasure.erased_bytes == erasure.condemned_bytes
    assert desk.hits(theirs, B, load_until=SOON) == 1
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
