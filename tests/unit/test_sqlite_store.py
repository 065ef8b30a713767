"""The log in a file: what it refuses, what it survives, and who may write."""

from __future__ import annotations

import asyncio
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from registry_bench import ORG, TENANT, a_key, commit_all, intent, run

from hand_clock import HandClock
from trunkline.adapters.sqlite_store import SqliteLog, SqliteStore
from trunkline.control.registry import Registry
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.errors import RegistryDown
from trunkline.ports.store import StoreBroken, StoreConflict, StoreDown, StoreTaken

FLEET = Subject(kind=SubjectKind.FLEET)
FILES = ("registry.db", "registry.db-wal", "registry.db-shm", "registry.db.high")


def at(folder: Path) -> Path:
    return folder / "registry.db"


def filled(path: Path, count: int) -> None:
    log = SqliteLog(path)
    for rev in range(count):
        log.append(rev, b"record %d" % rev)
    log.close()


def copied(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for name in FILES:
        (target / name).unlink(missing_ok=True)
        if (source / name).exists():
            shutil.copy(source / name, target / name)


def test_records_come_back_after_the_file_was_closed(tmp_path: Path) -> None:
    filled(at(tmp_path), 3)
    log = SqliteLog(at(tmp_path))
    assert log.read(1, 5) == [(2, b"record 1"), (3, b"record 2")]
    assert (log.head()[0], log.high_water()) == (3, 3)
    log.close()


def test_the_file_syncs_in_full_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    filled(at(tmp_path), 1)
    log = SqliteLog(at(tmp_path))
    assert log._database.execute("PRAGMA synchronous").fetchone() == (2,)
    assert log._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    log.close()


def test_an_append_behind_another_head_is_a_conflict(tmp_path: Path) -> None:
    log = SqliteLog(at(tmp_path))
    log.append(0, b"a")
    for wrong in (0, 2):
        with pytest.raises(StoreConflict) as caught:
            log.append(wrong, b"b")
        assert caught.value.head == 1
    assert log.append(1, b"b") == 2
    log.close()


def test_a_second_process_is_told_which_file_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await SqliteStore.open(at(tmp_path))
        code = (
            "import sys; from pathlib import Path\n"
            "from trunkline.adapters.sqlite_store import SqliteLog\n"
            "SqliteLog(Path(sys.argv[1]))"
        )
        end = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", code, str(at(tmp_path))],
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert end.returncode == 1
        assert f"another process writes to {at(tmp_path)}".encode() in end.stderr
        assert await store.append(0, b"the first still writes") == 1
        await store.close()
        again = await SqliteStore.open(at(tmp_path))
        assert await again.head() == 1
        await again.close()

    run(scenario())


def test_a_second_writer_in_the_process_is_refused_too(tmp_path: Path) -> None:
    log = SqliteLog(at(tmp_path))
    with pytest.raises(StoreTaken, match=r"registry\.db"):
        SqliteLog(at(tmp_path))
    log.close()


def test_a_full_disk_refuses_the_change_and_keeps_what_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await SqliteStore.open(at(tmp_path), max_pages=12)
        registry = await Registry.load(store, HandClock())
        await commit_all(registry, ORG, TENANT)
        keys = [a_key(number) for number in range(1, 1_000)]
        with pytest.raises(RegistryDown, match="full"):
            await commit_all(registry, *keys)
        rev = registry.rev
        assert len(registry.book.keys) == rev - 2
        await store.close()
        roomy = await SqliteStore.open(at(tmp_path))
        again = await Registry.load(roomy, HandClock())
        assert again.rev == rev
        assert await again.commit(keys[rev - 2], intent()) == rev + 1
        await roomy.close()

    run(scenario())


def test_a_file_held_by_a_shell_is_an_error_in_time_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.adapters.sqlite_store.BUSY_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        store = await SqliteStore.open(at(tmp_path))
        shell = sqlite3.connect(at(tmp_path), isolation_level=None)
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreDown, match="locked"):
            await store.append(0, b"a")
        shell.execute("ROLLBACK")
        assert await store.append(0, b"a") == 1
        shell.close()
        await store.close()

    run(scenario())


def test_a_store_that_is_closed_is_down(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await SqliteStore.open(at(tmp_path))
        await store.close()
        with pytest.raises(StoreDown, match="closed"):
            await store.append(0, b"a")

    run(scenario())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE log SET record = x'00' WHERE rev = 2",
        "DELETE FROM log WHERE rev = 2",
        "UPDATE log SET digest = x'00' WHERE rev = 3",
        "UPDATE log SET rev = 9 WHERE rev = 3",
    ],
)
def test_a_log_that_was_changed_behind_our_back_is_not_opened(
    tmp_path: Path, statement: str
) -> None:
    filled(at(tmp_path), 3)
    with sqlite3.connect(at(tmp_path)) as shell:
        shell.execute(statement)
    shell.close()
    with pytest.raises(StoreBroken, match=r"revision [23]"):
        SqliteLog(at(tmp_path))
    with pytest.raises(StoreBroken, match=r"revision [23]"):  # and the lock was let go
        SqliteLog(at(tmp_path))


def test_what_is_no_registry_is_not_touched(tmp_path: Path) -> None:
    at(tmp_path).write_bytes(b"these are my holiday photographs" * 100)
    with pytest.raises(StoreBroken, match="no registry"):
        SqliteLog(at(tmp_path))
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as shell:
        shell.execute("CREATE TABLE photographs (name)")
    shell.close()
    with pytest.raises(StoreBroken, match="something else"):
        SqliteLog(foreign)


def test_a_newer_schema_is_not_opened(tmp_path: Path) -> None:
    filled(at(tmp_path), 1)
    with sqlite3.connect(at(tmp_path)) as shell:
        shell.execute("PRAGMA user_version = 2")
    shell.close()
    with pytest.raises(StoreBroken, match="newer"):
        SqliteLog(at(tmp_path))


def test_a_folder_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(StoreDown, match="nowhere"):
        SqliteLog(tmp_path / "nowhere" / "registry.db")


def test_a_restored_backup_is_known_by_its_mark_and_raises_the_fleet(tmp_path: Path) -> None:
    async def committed(*keys: int) -> tuple[int, int, int]:
        store = await SqliteStore.open(at(tmp_path))
        registry = await Registry.load(store, HandClock())
        for number in keys:
            await registry.commit(a_key(number), intent())
        await store.close()
        return registry.rev, registry.table.epochs.get(FLEET, 0), registry.lost_revisions

    async def begin() -> None:
        store = await SqliteStore.open(at(tmp_path))
        await commit_all(await Registry.load(store, HandClock()), ORG, TENANT)
        await store.close()

    run(begin())
    copied(tmp_path, tmp_path / "backup")
    assert run(committed(1, 2, 3)) == (5, 0, 0)
    mark = (tmp_path / "registry.db.high").read_bytes()
    copied(tmp_path / "backup", tmp_path)
    (tmp_path / "registry.db.high").write_bytes(mark)
    # Three lost revisions are filled up, the fleet's epoch is the revision behind them.
    assert run(committed()) == (6, 6, 3)
    assert run(committed()) == (6, 6, 0)


def test_another_log_of_the_same_length_is_known_by_its_mark(tmp_path: Path) -> None:
    filled(at(tmp_path), 3)
    other = tmp_path / "other"
    other.mkdir()
    log = SqliteLog(at(other))
    for rev in range(4):
        log.append(rev, b"another %d" % rev)
    assert log.high_water() == 4
    log.close()
    (other / "registry.db.high").write_bytes((tmp_path / "registry.db.high").read_bytes())
    log = SqliteLog(at(other))
    assert log.high_water() == 5
    log.close()


def test_the_mark_is_never_lowered(tmp_path: Path) -> None:
    filled(at(tmp_path), 1)
    (tmp_path / "registry.db.high").write_text("9 " + "00" * 32 + "\n")
    log = SqliteLog(at(tmp_path))
    log.append(1, b"b")
    assert log.high_water() == 9
    log.close()


def test_a_mark_that_cannot_be_read_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    filled(at(tmp_path), 1)
    (tmp_path / "registry.db.high").write_text("soon\n")
    with pytest.raises(StoreBroken, match="remove that file"):
        SqliteLog(at(tmp_path))


def test_a_write_whose_mark_fails_is_found_in_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await SqliteStore.open(at(tmp_path))
        registry = await Registry.load(store, HandClock())
        (tmp_path / "registry.db.high.new").mkdir()  # nothing can be written there now
        assert await registry.commit(ORG, intent()) == 1
        with pytest.raises(StoreDown):
            await store.append(1, b"b")
        await store.close()

    run(scenario())


@contextmanager
def no_file_may_grow_beyond(limit_bytes: int) -> Iterator[None]:
    """The device fails under whoever writes further, as far as this process can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_after_a_failed_write_the_registry_settles_when_the_disk_takes_writes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.adapters.sqlite_store.RETRY_S", 0.01)
    told: list[str] = []

    async def scenario() -> None:
        heard = asyncio.Event()

        def hear(why: str) -> None:
            told.append(why)
            heard.set()

        store = await SqliteStore.open(at(tmp_path))
        registry = await Registry.load(store, HandClock())
        keeping = asyncio.create_task(store.keep(hear))
        await commit_all(registry, ORG)
        size_bytes = (tmp_path / "registry.db-wal").stat().st_size
        with no_file_may_grow_beyond(size_bytes):
            with pytest.raises(RegistryDown, match="disk I/O error"):
                await registry.commit(TENANT, intent())
            await asyncio.wait_for(heard.wait(), 60)
            with pytest.raises(RegistryDown, match="a write failed"):
                await registry.commit(TENANT, intent())
            heard.clear()
        await asyncio.wait_for(heard.wait(), 60)
        assert registry.rev == 1
        assert await registry.commit(TENANT, intent()) == 2
        keeping.cancel()
        await store.close()
        log = SqliteLog(at(tmp_path))
        assert (log.head()[0], log.high_water()) == (2, 2)
        log.close()

    run(scenario())
    assert ["a write failed" in why for why in told] == [True, False]
    assert told[1] == ""


def test_a_change_is_not_acknowledged_into_a_file_that_is_gone(tmp_path: Path) -> None:
    place = tmp_path / "state"
    place.mkdir()
    log = SqliteLog(at(place))
    log.append(0, b"a")
    place.rename(tmp_path / "away")
    with pytest.raises(StoreDown, match="removed or replaced"):
        log.append(1, b"b")
    (tmp_path / "away").rename(place)
    assert log.append(1, b"b") == 2, "it is back"
    with pytest.raises(StoreTaken):
        SqliteLog(at(place))
    log.close()


def test_a_lock_that_was_removed_is_taken_again_or_the_store_is_down(tmp_path: Path) -> None:
    log = SqliteLog(at(tmp_path))
    log.append(0, b"a")
    (tmp_path / "registry.db.lock").unlink()
    assert log.append(1, b"b") == 2
    with pytest.raises(StoreTaken):
        SqliteLog(at(tmp_path))
    (tmp_path / "registry.db.lock").unlink()
    second = SqliteLog(at(tmp_path))
    with pytest.raises(StoreDown, match="another process writes"):
        log.append(2, b"c")
    second.close()
    assert log.append(2, b"c") == 3
    log.close()


def test_a_file_that_was_replaced_by_another_log_is_not_gone_on_with(tmp_path: Path) -> None:
    log = SqliteLog(at(tmp_path))
    log.append(0, b"ours")
    (tmp_path / "other").mkdir()
    filled(at(tmp_path / "other"), 3)
    copied(tmp_path / "other", tmp_path)
    with pytest.raises(StoreDown, match="not the log that was written here"):
        log.append(1, b"b")
    at(tmp_path).unlink()
    with pytest.raises(StoreDown, match="put it back"):
        log.read(0, 5)
    assert not at(tmp_path).exists(), "nothing is begun anew"
    log.close()
