"""What any store keeps to: a machine that drives stores side by side with a list.

For the store in a file (`model/test_store_machine.py`), the shared one and its copy
(`wire/test_nats_store.py`); the one in memory is always beside them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from trunkline.control.memory_store import MemoryStore
from trunkline.ports.store import Store, StoreConflict

Lasting = Callable[[Path], Awaitable[Sequence[Store]]]
"""Opens the stores of a folder; the same logs each time for the same folder."""


def assert_they_agree_with_a_list(lasting: Lasting, *, examples: int, steps: int) -> None:
    class Machine(_StoreMachine):
        def __init__(self) -> None:
            super().__init__(lasting)

    bounds = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(Machine, settings=bounds)


class _StoreMachine(RuleBasedStateMachine):
    """One log in several stores; any of them but the one in memory may be opened again."""

    def __init__(self, lasting: Lasting) -> None:
        super().__init__()
        self._lasting = lasting
        self._folder = tempfile.TemporaryDirectory()
        self._runner = asyncio.Runner()
        self._kept: list[bytes] = []
        self._memory = MemoryStore()
        self._opened = self._open()

    def _open(self) -> Sequence[Store]:
        async def opened() -> Sequence[Store]:
            return await self._lasting(Path(self._folder.name))

        return self._runner.run(opened())

    def _close(self) -> None:
        for store in self._opened:
            self._runner.run(store.close())

    def _stores(self) -> list[Store]:
        return [self._memory, *self._opened]

    @rule(record=st.binary(max_size=64), behind=st.sampled_from([0, 0, 0, 0, -2, -1, 1, 2]))
    def append(self, record: bytes, behind: int) -> None:
        expected = len(self._kept) + behind
        for store in self._stores():
            if behind == 0:
                assert self._runner.run(store.append(expected, record)) == expected + 1
                continue
            with pytest.raises(StoreConflict) as caught:
                self._runner.run(store.append(expected, record))
            assert caught.value.head == len(self._kept)
        if behind == 0:
            self._kept.append(record)

    @rule(after_rev=st.integers(0, 6), limit=st.integers(1, 5))
    def read(self, after_rev: int, limit: int) -> None:
        wanted = list(enumerate(self._kept, start=1))[after_rev : after_rev + limit]
        for store in self._stores():
            assert self._runner.run(store.read(after_rev, limit)) == wanted

    @rule()
    def reopen(self) -> None:
        self._close()
        self._opened = self._open()
        self._memory = MemoryStore(self._memory.records)

    @invariant()
    def all_is_kept_and_heads_agree(self) -> None:
        for store in self._stores():
            assert self._runner.run(store.read(0, 100)) == list(enumerate(self._kept, start=1))
            assert self._runner.run(store.head()) == len(self._kept)
            assert self._runner.run(store.high_water()) == len(self._kept)

    def teardown(self) -> None:
        self._close()
        self._runner.close()
        self._folder.cleanup()
