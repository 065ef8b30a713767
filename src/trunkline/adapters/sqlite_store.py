"""The registry's log in one SQLite file: write-ahead log, full sync, one writer.

Three files beside each other: `<name>` with the log, `<name>.lock` that the one writer holds for as
long as it lives, and `<name>.high` with the newest revision that was acknowledged and the digest of
the log up to there, by which a restored backup is known. All work is done on one thread of its own.
After an error of the device, or when its files are not where they were, the file is opened again:
what the disk has counts. Must never: acknowledge before the disk has it, or repair a log. Read
`ports/store.py` for the contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from trunkline.adapters.durable import sync_directory
from trunkline.ports.store import StoreBroken, StoreConflict, StoreDown, StoreTaken, Tip

APPLICATION_ID = 0x74726B6C  # "trkl"
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 1.0
"""How long a foreign reader or shell may hold the file before a write is given up."""
MAX_RECORD_BYTES = 16 << 20
RETRY_S = 1.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS log (
    rev INTEGER PRIMARY KEY,
    record BLOB NOT NULL,
    digest BLOB NOT NULL
) STRICT
"""
_T = TypeVar("_T")


class SqliteStore:
    """`ports.store.Store` in a file. Make one with `open`."""

    def __init__(self, log: SqliteLog, thread: ThreadPoolExecutor) -> None:
        self._log = log
        self._thread = thread

    async def keep(self, told: Callable[[str], None]) -> None:
        """Until cancelled: open the file again where it is in doubt, as soon as it can be read and
        written. `told` hears why it is, and then an empty text once it is not.
        """
        last = ""
        while True:
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(StoreDown):  # `trouble` has it
                await self._on_thread(self._log.settle)
            if bool(self._log.trouble) != bool(last):
                last = self._log.trouble
                told(last)

    @classmethod
    async def open(cls, path: Path, *, max_pages: int | None = None) -> SqliteStore:
        """Open or create the log for writing, and check every record's digest. Raises StoreTaken,
        StoreBroken, StoreDown. `max_pages` caps the file.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="registry-store")
        loop = asyncio.get_running_loop()
        try:
            log = await loop.run_in_executor(thread, lambda: SqliteLog(path, max_pages))
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(log, thread)

    async def append(self, expected_rev: int, record: bytes) -> int:
        return await self._on_thread(lambda: self._log.append(expected_rev, record))

    async def read(self, after_rev: int, limit: int) -> list[tuple[int, bytes]]:
        return await self._on_thread(lambda: self._log.read(after_rev, limit))

    async def head(self) -> int:
        return await self._on_thread(lambda: self._log.head()[0])

    async def high_water(self) -> int:
        return await self._on_thread(self._log.high_water)

    async def tip(self) -> Tip:
        rev, digest = await self._on_thread(self._log.head)
        return Tip(rev=rev, digest=digest)

    async def digest_at(self, rev: int) -> bytes:
        """The digest of the log up to a revision that is there."""
        return await self._on_thread(lambda: self._log.digest_at(rev))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._log.close)
        self._thread.shutdown(wait=False)

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise StoreDown(f"{self._log.path}: {error}") from error
        except OSError as error:
            raise StoreDown(f"{self._log.path}: {error.strerror or error}") from error
        except RuntimeError as error:  # the thread is gone
            raise StoreDown(f"{self._log.path} is closed") from error


def marked_rev(path: Path) -> int:
    """The newest revision that was acknowledged in the log of this path, whoever has it open; 0
    where nothing says.
    """
    try:
        return int(path.with_name(path.name + ".high").read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


class SqliteLog:
    """The file itself. Blocking, and for one thread."""

    def __init__(self, path: Path, max_pages: int | None = None) -> None:
        self.path = path
        self._mark_path = path.with_name(path.name + ".high")
        self._lock_path = path.with_name(path.name + ".lock")
        self._max_pages = max_pages
        self.trouble = ""
        """Why what the system shows may not be what the disk has; empty where it is."""
        self._known = (0, b"")
        """The newest revision that was seen here, and the digest up to it."""
        self._lock_fd = _take_lock(path)
        try:
            self._database = _open_database(path, max_pages)
            self._file = os.stat(path)
        except BaseException:
            os.close(self._lock_fd)
            raise
        try:
            self._known = self._check()
        except sqlite3.DatabaseError as error:
            self.close()
            raise StoreBroken(f"{self.path} is damaged: {error}. Restore a backup") from error
        except OSError as error:
            self.close()
            raise StoreDown(f"{self._mark_path}: {error.strerror}") from error
        except StoreBroken:
            self.close()
            raise

    def append(self, expected_rev: int, record: bytes) -> int:
        assert len(record) <= MAX_RECORD_BYTES
        self.settle()
        self._database.execute("BEGIN IMMEDIATE")
        try:
            rev, digest = self._newest()
            if rev != expected_rev:
                raise StoreConflict(rev)
            row = (rev + 1, record, chained(digest, rev + 1, record))
            self._database.execute("INSERT INTO log VALUES (?, ?, ?)", row)
            self._commit()
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self._known = (row[0], row[2])
        self._raise_mark(row[0], row[2])
        return rev + 1

    def read(self, after_rev: int, limit: int) -> list[tuple[int, bytes]]:
        self.settle()
        query = "SELECT rev, record FROM log WHERE rev > ? ORDER BY rev LIMIT ?"
        return self._database.execute(query, (after_rev, limit)).fetchall()

    def head(self) -> tuple[int, bytes]:
        """The newest revision and the digest of the log up to it."""
        self.settle()
        return self._newest()

    def digest_at(self, rev: int) -> bytes:
        self.settle()
        query = "SELECT digest FROM log WHERE rev = ?"
        row: tuple[bytes] | None = self._database.execute(query, (rev,)).fetchone()
        if row is None:
            return b""
        return row[0]

    def settle(self) -> None:
        """Open the file again where it is in doubt. Raises StoreDown while that cannot be done."""
        if not self.trouble and not self._is_in_place():
            self.trouble = f"{self.path} or its lock was removed or replaced"
        if not self.trouble:
            return
        try:
            self._reopen()
        except (sqlite3.Error, OSError, StoreTaken, StoreBroken, StoreDown) as error:
            raise StoreDown(f"{self.trouble}, and opening it again fails: {error}") from error
        self.trouble = ""

    def _newest(self) -> tuple[int, bytes]:
        query = "SELECT rev, digest FROM log ORDER BY rev DESC LIMIT 1"
        row: tuple[int, bytes] | None = self._database.execute(query).fetchone()
        return (0, b"") if row is None else row

    def high_water(self) -> int:
        head = self.head()[0]
        mark = self._mark()
        if mark is None:
            return head
        rev, digest = mark
        if rev > head:
            return rev
        is_ours = rev == 0 or self.digest_at(rev) == digest
        return head if is_ours else head + 1

    def close(self) -> None:
        self._database.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _is_in_place(self) -> bool:
        """Whether lock and log are those that were opened."""
        try:
            is_log = os.path.samestat(os.stat(self.path), self._file)
            return is_log and os.path.samestat(os.stat(self._lock_path), os.fstat(self._lock_fd))
        except OSError:
            return False

    def _reopen(self) -> None:
        """As after a restart, and then made sure of: the disk takes what is read from it."""
        self._database.close()
        if not self._is_in_place():
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1
            if not self.path.exists():  # nothing is begun anew here
                raise StoreDown(f"{self.path} is gone: put it back")
            self._lock_fd = _take_lock(self.path)
        self._database = _open_database(self.path, self._max_pages)
        self._file = os.stat(self.path)
        rev, digest = self._check()
        query = "SELECT digest FROM log WHERE rev = ?"
        kept = self._database.execute(query, (self._known[0],)).fetchone() or (b"",)
        if kept[0] != self._known[1]:
            raise StoreBroken(f"{self.path} is not the log that was written here")
        # Pages that a failed sync left in memory alone are written once more.
        if self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] != 0:
            raise StoreDown(f"{self.path} is held by another program")
        self._raise_mark(rev, digest)
        self._known = (rev, digest)

    def _commit(self) -> None:
        try:
            self._database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            # Low eight bits: the family. Full and busy are clean refusals; after an error of the
            # device, pages that look written may never reach it.
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_IOERR:
                self.trouble = f"{self.path}: a write failed ({error})"
            raise

    def _check(self) -> tuple[int, bytes]:
        """Each record's digest; the newest revision and the digest up to it."""
        digest = b""
        wanted = 1
        for rev, record, kept in self._database.execute("SELECT * FROM log ORDER BY rev"):
            if rev != wanted:
                raise StoreBroken(f"{self.path}: revision {wanted} is missing")
            digest = chained(digest, rev, record)
            if digest != kept:
                raise StoreBroken(f"{self.path}: revision {rev} was changed behind our back")
            wanted += 1
        self._mark()
        return wanted - 1, digest

    def _mark(self) -> tuple[int, bytes] | None:
        try:
            words = self._mark_path.read_text("ascii").split()
            rev, digest = int(words[0]), bytes.fromhex(words[1])
        except FileNotFoundError:
            return None
        except (ValueError, IndexError) as error:
            raise StoreBroken(
                f"{self._mark_path} cannot be read. If the log was not restored from a backup,"
                " remove that file"
            ) from error
        return rev, digest

    def _raise_mark(self, rev: int, digest: bytes) -> None:
        """Remember, apart from the log, how far it was acknowledged; never less than before."""
        mark = self._mark()
        if mark is not None and mark[0] > rev:
            return
        fresh = self._mark_path.with_name(self._mark_path.name + ".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, f"{rev} {digest.hex()}\n".encode("ascii"))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(fresh, self._mark_path)
        sync_directory(self._mark_path.parent)


def _take_lock(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreDown(f"{lock_path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StoreTaken(
            f"another process writes to {path}. One gateway owns a registry: stop that one, or give"
            " this one its own state directory"
        ) from error
    return fd


def _open_database(path: Path, max_pages: int | None) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        sync_directory(path.parent)
    except OSError as error:
        raise StoreDown(f"{path}: {error.strerror}") from error
    database: sqlite3.Connection | None = None
    try:
        database = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        _prepare(database, path, max_pages)
    except sqlite3.OperationalError as error:
        _close(database)
        raise StoreDown(f"{path}: {error}") from error
    except sqlite3.DatabaseError as error:
        _close(database)
        raise StoreBroken(f"{path} is no registry of ours: {error}") from error
    except StoreBroken:
        _close(database)
        raise
    return database


def _prepare(database: sqlite3.Connection, path: Path, max_pages: int | None) -> None:
    application_id = database.execute("PRAGMA application_id").fetchone()[0]
    is_new = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if application_id != APPLICATION_ID and not (is_new and application_id == 0):
        raise StoreBroken(f"{path} is a database of something else")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise StoreBroken(f"{path} was written by a newer version of trunkline")
    mode = database.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise StoreBroken(f"{path}: its file system cannot keep a write-ahead log")
    database.execute("PRAGMA synchronous=FULL")
    if max_pages is not None:
        database.execute(f"PRAGMA max_page_count={int(max_pages)}")
    if is_new:
        database.execute(f"PRAGMA application_id={APPLICATION_ID}")
        database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    database.execute(_SCHEMA)


def _close(database: sqlite3.Connection | None) -> None:
    if database is not None:
        database.close()


def chained(previous: bytes, rev: int, record: bytes) -> bytes:
    """The digest of a log up to `rev`, from the digest before it and the record."""
    return hashlib.blake2b(
        previous + rev.to_bytes(8, "big") + record, digest_size=32, person=b"registry-log"
    ).digest()
