"""The registry: the one log of who exists, who may what, and which epochs hold.

One process writes, or several that share a log, behind one another. A change is checked against the
book, made durable in the store, and only then becomes part of the book that everybody reads;
subscribers hear of it in order. A write whose end is unknown is looked up before anything else is
written. A log that is behind what it once acknowledged was restored from a backup: loading fills it
up and raises the fleet's epoch, so that no block of the lost time can be named. Must never: show a
change that is not durable. Read `ledger.py` next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from trunkline.control.book import Book, Check, Limits
from trunkline.control.changes import (
    Change,
    Entry,
    EpochRaised,
    Intent,
    RevisionLost,
    decode_entry,
    encode_entry,
)
from trunkline.control.draft import Draft
from trunkline.control.unbroken import unbroken
from trunkline.core.credentials import RandomBytes
from trunkline.core.epochs import EpochTable
from trunkline.errors import Busy, ChangeRefused, RegistryBroken, RegistryDown
from trunkline.ports.clock import Clock
from trunkline.ports.store import Store, StoreBroken, StoreConflict, StoreDown

READ_BATCH = 500
MAX_WAITING_COMMITS = 256
KEPT_FOR_EPOCHS = 64
"""Of those places, so many are for revocations alone."""

MAX_SUBSCRIBERS = 64
MAX_LOST_REVISIONS = 100_000
"""More between a backup and what was acknowledged is no backup of this log."""

_ATTEMPTS = 8
"""Of one commit, against gateways that write to the same log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """One durable change, and the book as of it."""

    rev: int
    change: Change
    intent: Intent
    book: Book
    is_foreign: bool = False
    """It was found in the log, not committed here."""


Subscriber = Callable[[Committed], None]


class Registry:
    """Make one with `load`. Belongs to the event loop that made it."""

    def __init__(self, store: Store, limits: Limits | None = None) -> None:
        self._store = store
        self._limits = limits or Limits()
        self._book = Book()
        self._subscribers: list[Subscriber] = []
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._is_unsure = False
        """A write ended without a word: the log may be ahead of the book."""
        self.lost_revisions = 0
        """How many acknowledged changes a restored backup had forgotten. Above 0: say it loudly;
        keys and tenants that were revoked in them are as they were before.
        """

    @classmethod
    async def load(
        cls,
        store: Store,
        clock: Clock,
        *,
        acknowledged_rev: int = 0,
        limits: Limits | None = None,
    ) -> Registry:
        """Replay the log. Raises RegistryBroken for a gap, an unknown record or a change that does
        not fit; RegistryDown.

        `acknowledged_rev` is what somebody else remembers of it: the audit log's `audited_rev`
        shows a restored backup also where the store's own memory was restored with it.
        """
        registry = cls(store, limits)
        try:
            is_unfinished = await registry._replay()
            high_water = max(await store.high_water(), acknowledged_rev)
            if high_water > registry.book.rev or is_unfinished:
                await registry.mend(high_water, round(clock.wall() * 1_000))
        except StoreDown as error:
            raise RegistryDown(f"the registry cannot be read: {error}") from error
        except (StoreBroken, StoreConflict) as error:
            raise RegistryBroken(str(error)) from error
        return registry

    @property
    def book(self) -> Book:
        return self._book

    @property
    def table(self) -> EpochTable:
        return self._book.table

    @property
    def rev(self) -> int:
        return self._book.rev

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on it is called after each durable change, in order; it must not raise."""
        assert len(self._subscribers) < MAX_SUBSCRIBERS
        self._subscribers.append(subscriber)

    def new_id(self, random_bytes: RandomBytes) -> str:
        """An id for an organisation, a tenant or a public prefix: 128 bits in hex."""
        return random_bytes(16).hex()

    async def commit(self, change: Change, intent: Intent, check: Check | None = None) -> int:
        """Make a change durable and part of the book; its revision.

        `check` is asked of the very book that the change is made to. Runs to its end when
        cancelled: what is durable takes effect. Raises ChangeRefused, RegistryDown, Busy, and what
        `check` raises.
        """
        kept = 0 if isinstance(change, EpochRaised) else KEPT_FOR_EPOCHS
        if self._waiting >= MAX_WAITING_COMMITS - kept:
            raise Busy(f"{self._waiting} changes wait for the registry, at most that many may")
        self._waiting += 1
        try:
            async with self._lock:
                return await unbroken(self._commit(change, intent, check))
        finally:
            self._waiting -= 1

    async def catch_up(self) -> None:
        """Take in what another gateway wrote to a shared log. Raises RegistryDown, RegistryBroken
        for what does not fit.
        """
        async with self._lock:
            await unbroken(self._settle())

    async def entries(self, after_rev: int, limit: int) -> list[tuple[int, Entry]]:
        """Durable changes behind a revision, from the log itself. Raises RegistryDown."""
        try:
            rows = await self._store.read(after_rev, limit)
        except StoreDown as error:
            raise RegistryDown(str(error)) from error
        return [(rev, _decoded(rev, record)) for rev, record in rows if rev <= self.rev]

    async def _commit(self, change: Change, intent: Intent, check: Check | None) -> int:
        for _ in range(_ATTEMPTS):
            if self._is_unsure:
                await self._settle()
            if check is not None:
                check(self._book)
            entry = Entry(change=change, intent=intent)
            record, book = self._prepared(entry)
            try:
                rev = await self._store.append(self.rev, record)
            except StoreConflict:
                # Somebody wrote to our log. What they wrote counts; ours is checked again.
                self._is_unsure = True
                continue
            except StoreDown as error:
                self._is_unsure = True
                wanted = book.rev
                await self._settle()
                rows = await self._entries_at(wanted)
                if rows == [record]:
                    return wanted
                raise RegistryDown(f"the change was not kept: {error}") from error
            except StoreBroken as error:
                raise RegistryBroken(str(error)) from error
            assert rev == book.rev
            self._publish(Committed(rev=rev, change=entry.change, intent=intent, book=book))
            return rev
        raise RegistryDown("another writer is at the registry's log")

    def _prepared(self, entry: Entry) -> tuple[bytes, Book]:
        draft = Draft(self._book, self._limits)
        try:
            record = encode_entry(entry)
            draft.apply(entry)
            return record, draft.book()
        except ValueError as error:
            raise ChangeRefused(str(error)) from error

    def _publish(self, committed: Committed) -> None:
        self._book = committed.book
        # Each hears of it, also when one before it breaks its word and raises.
        with ExitStack() as calls:
            for subscriber in reversed(self._subscribers):
                calls.callback(subscriber, committed)

    async def _settle(self) -> None:
        """Take in what the log has and the book does not."""
        try:
            while rows := await self._store.read(self.rev, READ_BATCH):
                for rev, record in rows:
                    self._take(rev, record)
        except StoreDown as error:
            raise RegistryDown(f"whether the last change was kept is unknown: {error}") from error
        except StoreBroken as error:
            raise RegistryBroken(str(error)) from error
        self._is_unsure = False

    async def _entries_at(self, rev: int) -> list[bytes]:
        try:
            return [record for _, record in await self._store.read(rev - 1, 1)]
        except StoreDown as error:
            raise RegistryDown(str(error)) from error

    def _take(self, rev: int, record: bytes) -> None:
        entry = _decoded(rev, record)
        draft = Draft(self._book, None)
        _replayed(draft, rev, entry)
        book = draft.book()
        committed = Committed(
            rev=rev, change=entry.change, intent=entry.intent, book=book, is_foreign=True
        )
        self._publish(committed)

    async def _replay(self) -> bool:
        """Read the whole log; whether it ends in the middle of mending a restored backup."""
        draft = Draft(Book(), None)
        is_unfinished = False
        while rows := await self._store.read(draft.rev, READ_BATCH):
            for rev, record in rows:
                entry = _decoded(rev, record)
                _replayed(draft, rev, entry)
                is_unfinished = isinstance(entry.change, RevisionLost)
        self._book = draft.book()
        replayed_rev, head = self.rev, await self._store.head()
        if head > replayed_rev:  # a gateway that shares the log has written to it since
            await self._settle()
        if not replayed_rev <= head <= self.rev:
            raise RegistryBroken(f"the registry's log ends at {self.rev}, its head is {head}")
        return is_unfinished

    async def mend(self, high_water: int, wall_ms: int) -> Committed:
        """Fill a restored log up to what was acknowledged, then raise the fleet's epoch above any
        that was lost: an epoch is never above its revision. What it ends with. Raises
        RegistryBroken where that is too much, RegistryDown, Busy.
        """
        lost = max(1, high_water - self.rev)
        if lost > MAX_LOST_REVISIONS:
            raise RegistryBroken(
                f"the log ends at {self.rev} and {high_water} was acknowledged: no backup of it"
            )
        intent = Intent(
            actor="registry",
            auth_method="system",
            reason=f"restored from a backup that ends at revision {self.rev}",
            wall_ms=wall_ms,
        )
        self.lost_revisions += lost
        while self.rev < high_water:
            await self.commit(RevisionLost(), intent)
        raised = EpochRaised(subject="fleet", epoch=self.rev + 1, verb="invalidate", bars=False)
        rev = await self.commit(raised, intent)
        return Committed(rev=rev, change=raised, intent=intent, book=self._book)


def _decoded(rev: int, record: bytes) -> Entry:
    try:
        return decode_entry(record)
    except ValueError as error:
        raise RegistryBroken(
            f"revision {rev} of the registry cannot be read: {error}. It was written by a newer"
            " version, or the log is damaged: restore a backup"
        ) from error


def _replayed(draft: Draft, rev: int, entry: Entry) -> None:
    if rev != draft.rev + 1:
        raise RegistryBroken(f"revision {draft.rev + 1} is missing: behind {draft.rev} comes {rev}")
    try:
        draft.apply(entry)
    except ValueError as error:
        raise RegistryBroken(f"revision {rev} does not fit what is before it: {error}") from error
