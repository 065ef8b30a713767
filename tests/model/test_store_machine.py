"""The store in memory and the one in a file keep to what any store keeps to."""

from __future__ import annotations

from pathlib import Path

from store_machine import assert_they_agree_with_a_list
from trunkline.adapters.sqlite_store import SqliteStore


def test_the_store_in_a_file_and_the_one_in_memory_agree_with_a_list() -> None:
    async def lasting(folder: Path) -> list[SqliteStore]:
        return [await SqliteStore.open(folder / "registry.db")]

    assert_they_agree_with_a_list(lasting, examples=30, steps=20)
