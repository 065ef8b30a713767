"""That a reload is on record before anything is read, and that a log that is down stops it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from trunkline import observe
from trunkline.control.changes import Intent
from trunkline.core.records import WallTime
from trunkline.errors import AuditDown, ConfigError
from trunkline.reload import Reloaded
from trunkline.reload_record import MAX_NAMES_CHARS, Note, ReloadRecord

BY = Intent(actor="operator")


class Log:
    """Keeps notes, while it is up; remembers when the settings were read between them."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.is_up = True
        self.outcome = Reloaded(changed=("max_headers",))
        self.error: ConfigError | None = None
        self.record = ReloadRecord(self.keep, lambda: WallTime(7.0))

    async def keep(self, note: Note) -> None:
        if not self.is_up:
            raise AuditDown("no audit sink")
        self.told.append(f"{note.by.actor} {note.result or 'wants'} {note.reason}".rstrip())

    async def reload(self) -> Reloaded:
        self.told.append("read")
        if self.error is not None:
            raise self.error
        return self.outcome


def test_the_wish_is_kept_before_the_settings_are_read_and_then_what_came_of_it() -> None:
    log = Log()
    assert asyncio.run(log.record.recorded(BY, log.reload)) == log.outcome
    assert log.told == ["operator wants", "read", "operator done changed: max_headers"]


def test_what_is_refused_is_on_record_by_its_kind_and_not_by_its_words() -> None:
    log = Log()
    log.error = ConfigError("max_headers = 3 is below 4")
    with pytest.raises(ConfigError):
        asyncio.run(log.record.recorded(BY, log.reload))
    assert log.told == ["operator wants", "read", "operator refused config_error"]


def test_nothing_is_read_while_no_sink_keeps_the_wish_and_a_signal_ends_no_gateway(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log()
    log.is_up = False
    with pytest.raises(AuditDown):
        asyncio.run(log.record.recorded(BY, log.reload))
    with caplog.at_level(logging.ERROR, "trunkline"):
        asyncio.run(log.record.hung_up(log.reload, observe.log))
    assert [record.message for record in caplog.records] == ["config.refused"]
    assert log.told == []


def test_many_names_are_cut_to_what_a_record_takes() -> None:
    log = Log()
    log.outcome = Reloaded(needs_restart=tuple(f"setting_{number}" for number in range(100)))
    asyncio.run(log.record.recorded(BY, log.reload))
    assert log.told[-1].endswith("...")
    assert len(log.told[-1]) == len("operator done ") + MAX_NAMES_CHARS
