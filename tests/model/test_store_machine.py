"""The store in memory and the one in a file, side by side with a list."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trunkline.adapters.sqlite_store import SqliteStore
from trunkline.control.memory_store import MemoryStore
from trunkline.ports.store import Store, StoreConflict

records = st.binary(max_size=64)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "registry.db"
        self.loop = asyncio.new_event_loop()
        self.kept: list[bytes] = []
        self.memory = MemoryStore()
        self.file = self.loop.run_until_complete(SqliteStore.open(self.path))

    def stores(self) -> list[Store]:
        return [self.memory, self.file]

    @rule(record=records, behind=st.integers(-2, 2))
    def append(self, record: bytes, behind: int) -> None:
        expected = len(self.kept) + behind
        for store in self.stores():
            append = store.append(expected, record)
            if behind == 0:
                assert self.loop.run_until_complete(append) == len(self.kept) + 1
                continue
            with pytest.raises(StoreConflict) as caught:
                self.loop.run_until_complete(append)
            assert caught.value.head == len(self.kept)
        if behind == 0:
            self.kept.append(record)

    @rule(after_rev=st.integers(0, 12), limit=st.integers(1, 5))
    def read(self, after_rev: int, limit: int) -> None:
        wanted = list(enumerate(self.kept, start=1))[after_rev : after_rev + limit]
        for store in self.stores():
            assert self.loop.run_until_complete(store.read(after_rev, limit)) == wanted

    @rule()
    def reopen(self) -> None:
        self.loop.run_until_complete(self.file.close())
        self.file = self.loop.run_until_complete(SqliteStore.open(self.path))
        self.memory = MemoryStore(self.memory.records)

    @invariant()
    def heads_agree(self) -> None:
        for store in self.stores():
            assert self.loop.run_until_complete(store.head()) == len(self.kept)
            assert self.loop.run_until_complete(store.high_water()) == len(self.kept)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.file.close())
        self.loop.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestStoreMachine = StoreMachine.TestCase
