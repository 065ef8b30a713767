"""Logs: one line an event, without secrets, without contents, without floods."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

from trunkline import observe
from trunkline.errors import ConfigError
from trunkline.observe import log


@pytest.fixture(autouse=True)
def _logging_left_as_it_was() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("trunkline")
    kept = (root.handlers[:], root.level, own.level)
    yield
    root.handlers[:], root.level, own.level = kept


class Colour(Enum):
    RED = "red"


class Journal:
    """Lines written since `configure`."""

    def __init__(self, level: observe.Level = "debug", *, secrets: tuple[str, ...] = ()) -> None:
        self._stream = io.StringIO()
        self.redactor = observe.configure(level, "text", secrets=secrets, stream=self._stream)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


class JsonJournal(Journal):
    def __init__(self, *, secrets: tuple[str, ...] = ()) -> None:
        self._stream = io.StringIO()
        self.redactor = observe.configure("debug", "json", secrets=secrets, stream=self._stream)

    @property
    def records(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.lines]


def test_an_event_is_one_line_with_its_fields_in_order() -> None:
    journal = Journal()
    log.info("lease.expired", worker="w1", held_ms=512, share=0.123456789, is_live=False, why=None)
    stamp, rest = journal.text.split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == (
        "INFO    lease.expired worker=w1 held_ms=512 share=0.123457 is_live=False why=None\n"
    )


def test_an_event_as_json_keeps_the_types_of_its_fields() -> None:
    journal = JsonJournal()
    log.warning("lease.expired", worker="w1", held_ms=512, share=0.5, colour=Colour.RED)
    (record,) = journal.records
    assert record.pop("time")
    assert record == {
        "level": "warning",
        "event": "lease.expired",
        "worker": "w1",
        "held_ms": 512,
        "share": 0.5,
        "colour": "red",
    }


def test_json_stays_json_with_numbers_that_are_not_finite_and_fields_named_like_the_head() -> None:
    journal = JsonJournal()
    log.info("odd", share=float("nan"), high=float("inf"), time=5, level="x")
    (record,) = journal.records
    assert record["share"] == "nan"
    assert record["high"] == "inf"
    assert record["time_"] == 5
    assert record["level"] == "info"


def test_events_below_the_level_are_not_written() -> None:
    journal = Journal("warning")
    log.info("quiet")
    log.debug("quieter")
    log.warning("loud")
    assert len(journal.lines) == 1


@pytest.mark.parametrize("text", ["a\nERROR forged", "a\r\x1b[2Jb", "a b", 'say "x"', "", "k=v"])
def test_no_value_breaks_out_of_its_line_or_word(text: str) -> None:
    journal = Journal()
    log.info("seen", name=text)
    (line,) = journal.lines
    assert line.isprintable()
    assert line.endswith(f"name={json.dumps(text)}")


def test_a_secret_is_hidden_wherever_it_stands() -> None:
    secrets = ("marked-secret", "abc")
    for shape in (Journal, JsonJournal):
        journal = shape(secrets=secrets)
        log.info("a", header="Bearer marked-secret", alone="abc", within="abcdef")
        log.error("b marked-secret", cause=ValueError("key marked-secret is bad"))
        logging.getLogger("library").warning("sent %s", "marked-secret")
        assert len(journal.lines) == 3
        assert "marked-secret" not in journal.text
        assert "abcdef" in journal.text


def test_a_secret_at_the_cut_of_a_long_value_is_hidden_whole() -> None:
    journal = Journal(secrets=("marked-secret",))
    log.info("a", name="x" * 505 + "marked-secret")
    assert "marked" not in journal.text


def test_a_secret_learnt_later_is_hidden_from_then_on() -> None:
    journal = Journal()
    journal.redactor.add("worker-key")
    log.info("a", key="worker-key")
    assert "worker-key" not in journal.text


def test_the_oldest_secret_is_forgotten_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_MAX_SECRETS", 2)
    redactor = observe.Redactor(["first-key", "second-key"])
    redactor.add("second-key")
    redactor.add("third-key")
    assert redactor.clean("first-key second-key third-key") == "first-key *** ***"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"the prompt", "<bytes of 10>"),
        ([{"role": "user", "content": "the prompt"}], "<list of 1>"),
        ({"content": "the prompt"}, "<dict of 1>"),
        (object(), "<object>"),
    ],
)
def test_what_may_be_content_appears_as_its_type_and_size(value: object, shown: str) -> None:
    journal = JsonJournal()
    log.info("seen", thing=value)
    assert journal.records[0]["thing"] == shown


@pytest.mark.parametrize("name", ["prompt", "messages", "body", "authorization", "api_key"])
def test_fields_named_for_contents_or_credentials_are_withheld(name: str) -> None:
    journal = Journal()
    log.info("seen", **{name: "the prompt"})
    assert "the prompt" not in journal.text
    assert f"{name}=***" in journal.text


def test_a_long_value_is_cut_and_its_length_told() -> None:
    journal = Journal()
    log.info("seen", name="x" * 10_000)
    assert journal.lines[0].endswith("x...[10000]")
    assert len(journal.lines[0]) < 700


def test_an_error_carries_its_traceback_on_the_same_line() -> None:
    journal = JsonJournal()
    try:
        raise ValueError("line one\nline two")
    except ValueError as error:
        log.error("bug", cause=error, worker="w1")
    (record,) = journal.records
    assert record["worker"] == "w1"
    assert str(record["trace"]).endswith("ValueError: line one\nline two\n")


def test_a_long_traceback_keeps_its_end() -> None:
    journal = JsonJournal()
    log.error("bug", cause=ValueError("x" * 10_000 + "end"))
    trace = str(journal.records[0]["trace"])
    assert len(trace) == 4_096
    assert trace.endswith("end\n")


def test_another_library_is_heard_from_warnings_upward() -> None:
    journal = Journal()
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("took %d s", 3)
    (line,) = journal.lines
    assert line.endswith('WARNING library message="took 3 s"')


def record(
    event: str, at_s: float, worker: str = "w1", level: int = logging.WARNING
) -> logging.LogRecord:
    made = logging.LogRecord("trunkline", level, "", 0, event, None, None)
    made.created = at_s
    made.fields = {"worker": worker}
    return made


def test_the_same_warning_passes_once_a_second_and_says_how_many_were_held_back() -> None:
    quiet = observe.Quiet()
    assert quiet.filter(record("lost", 10.0))
    assert not quiet.filter(record("lost", 10.5))
    assert not quiet.filter(record("lost", 10.999))
    later = record("lost", 11.0)
    assert quiet.filter(later)
    assert later.__dict__["fields"] == {"worker": "w1", "suppressed_count": 2}
    again = record("lost", 12.0)
    assert quiet.filter(again)
    assert "suppressed_count" not in again.__dict__["fields"]


def test_another_event_another_worker_and_plain_news_are_not_held_back() -> None:
    quiet = observe.Quiet()
    assert quiet.filter(record("lost", 10.0))
    assert quiet.filter(record("lost", 10.0, worker="w2"))
    assert quiet.filter(record("found", 10.0))
    assert quiet.filter(record("news", 10.0, level=logging.INFO))
    assert quiet.filter(record("news", 10.0, level=logging.INFO))


def test_why_settings_were_refused_is_said_each_time() -> None:
    quiet = observe.Quiet()
    for at in (10.0, 10.1, 10.2):
        assert quiet.filter(record("config.refused", at))


def test_a_clock_set_back_silences_nothing() -> None:
    quiet = observe.Quiet()
    assert quiet.filter(record("lost", 10_000.0))
    assert quiet.filter(record("lost", 10.0))


def test_the_memory_of_held_back_warnings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_MAX_QUIET_KEYS", 2)
    quiet = observe.Quiet()
    for worker in ("w1", "w2", "w3"):
        assert quiet.filter(record("lost", 10.0, worker))
    assert not quiet.filter(record("lost", 10.1, "w3"))
    assert quiet.filter(record("lost", 10.1, "w1")), "the oldest was forgotten: it speaks again"


def test_a_flood_of_warnings_through_the_real_handler_is_a_few_lines() -> None:
    journal = Journal()
    for _ in range(1_000):
        log.warning("worker.lost", worker="w1")
    assert 1 <= len(journal.lines) <= 2


def test_every_event_is_named_as_the_operations_page_says() -> None:
    """`part.what`: so that lines can be told apart by their event alone."""
    sources = Path(observe.__file__).parent.rglob("*.py")
    said = re.compile(r"\blog\.(?:debug|info|warning|error)\(\s*\"([^\"]+)\"")
    found = {
        event
        for path in sources
        if "connectors" not in path.parts  # they write to their engine's log
        for event in said.findall(path.read_text("utf-8"))
    }
    assert len(found) > 40
    assert [event for event in found if not re.fullmatch(r"[a-z_]+\.[a-z_]+", event)] == []


def test_lines_go_into_files_too_of_bounded_size_with_secrets_hidden_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "MAX_FILE_BYTES", 2_000)
    folder, stream = tmp_path / "logs" / "here", io.StringIO()
    observe.configure(
        "info", "text", secrets=("sk-secret",), stream=stream, process=3, folder=str(folder)
    )
    for number in range(400):
        log.info("a.line", number=number, key="sk-secret")
    for handler in logging.getLogger().handlers[1:]:
        handler.close()
    files = sorted(folder.iterdir())
    assert len(files) == observe.MAX_FILES
    assert all(path.name.startswith("trunkline-3.log") for path in files)
    assert all(path.stat().st_size <= 2_000 for path in files)
    newest = (folder / "trunkline-3.log").read_text(encoding="utf-8")
    assert "number=399" in newest
    assert "process=3" in newest
    assert "sk-secret" not in newest
    assert stream.getvalue().endswith(newest.splitlines()[-1] + "\n"), "and on stderr as ever"


def test_a_folder_in_which_nothing_can_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"log_dir .*file/logs: Not a directory"):
        observe.configure("info", "text", folder=str(tmp_path / "file" / "logs"))
