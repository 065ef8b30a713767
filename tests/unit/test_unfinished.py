"""Revocations that a crash cut off, where what tells of them cannot be read."""

from __future__ import annotations

import pytest
from registry_bench import commit_all, raised, run

from hand_clock import HandClock
from trunkline.control.audit_reader import AuditReader
from trunkline.control.memory_store import MemoryStore
from trunkline.control.registry import Registry
from trunkline.control.revocation import Revoker
from trunkline.observe import EventLog
from trunkline.unfinished import finish_revocations


@pytest.mark.parametrize("damage", ["down", "broken"])
def test_a_registry_that_cannot_be_read_resumes_nothing_and_ends_nothing(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        await commit_all(registry, raised(1, subject="model/x"))
        store.is_down = damage == "down"
        store.records[0] = b"{" if damage == "broken" else store.records[0]
        reader: AuditReader | None = None
        revoker: Revoker | None = None
        await finish_revocations(
            registry,
            reader,  # pyright: ignore[reportArgumentType]  # neither is come to
            revoker,  # pyright: ignore[reportArgumentType]
            EventLog("test-unfinished"),
        )

    run(scenario())
    assert "revocation.not_resumed" in caplog.text
