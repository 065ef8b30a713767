"""A log as an anonymised trace: nothing of what was written is in it, and it plans like the log."""

from __future__ import annotations

import argparse
import io
import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from trunkline import cli
from trunkline.adapters.clock import SystemClock
from trunkline.errors import ConfigError, TraceError
from trunkline.plan import export
from trunkline.plan.command import PlanParts
from trunkline.plan.distances import ReuseDistances
from trunkline.plan.naming import Namer
from trunkline.plan.reader import LogReader
from trunkline.plan.savings import Savings
from trunkline.replay.formats import ReadOptions, read_trace

TRACES = Path(__file__).resolve().parents[2] / "traces"
AGENTS = TRACES / "smoke_agentic_16s.jsonl.gz"
CHAT = TRACES / "smoke_conversation_300s.jsonl.gz"


def exported(log: Path, out: Path, *words: str, key: bytes = bytes(32)) -> str:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    told = io.StringIO()
    parts = PlanParts(
        clock=SystemClock(),
        out=told,
        progress_out=io.StringIO(),
        load_tokenise=lambda _path: lambda _text: [],
    )
    args = parser.parse_args([str(log), "--out", str(out), *words])
    assert export.run(args, parts, lambda _size: key) == 0
    return told.getvalue()


def saved(log: Path) -> dict[str, tuple[list[float], float]]:
    savings = Savings([1 << 14, 1 << 17, 1 << 20])
    for call in LogReader(log, Namer(b"k" * 32)).calls():
        savings.add(call)
    return {one.scope: (one.hit_tokens, one.distinct_tokens) for one in savings.found()}


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    """Sessions of bodies, with words to look for."""
    draw = random.Random(4)
    sessions: dict[int, list[dict[str, str]]] = {}
    lines: list[str] = []
    for number in range(150):
        name = draw.randrange(12)
        messages = sessions.setdefault(
            name, [{"role": "system", "content": "Heron is a secret project. " * 20}]
        )
        messages.append({"role": "user", "content": f"Ada asks {draw.random()} " * 20})
        row: dict[str, Any] = {
            "timestamp": 1_700_000_000_000 + 1_000 * number,
            "model": "llama-heron",
            "messages": messages,
            "session_id": f"heron-{name}",
            "user": f"ada-{name}",
            "team_id": "heron-team",
            "max_tokens": 5,
        }
        lines.append(json.dumps(row))
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("kind", ["mooncake", "bailian"])
def test_no_word_of_the_log_is_in_the_trace(log: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out.jsonl"
    told = exported(log, out, "--as", kind)
    text = out.read_text().lower()
    for word in ("heron", "ada", "llama", "1700000", "secret"):
        assert word not in text
    assert "wrote 150 requests" in told
    for line in text.splitlines():
        row = json.loads(line)
        assert all(type(value) is int for value in row.pop("hash_ids"))
        assert set(row) <= {
            *("timestamp", "input_length", "output_length", "session_id"),
            *("chat_id", "parent_chat_id", "turn", "type"),
        }
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["mooncake", "bailian"])
def test_a_trace_saves_what_its_log_saves(log: Path, tmp_path: Path, kind: str) -> None:
    for number, source in enumerate((log, AGENTS, CHAT)):
        out = tmp_path / f"out{number}.jsonl"
        exported(source, out, "--as", kind)
        before, after = saved(source), saved(out)
        assert after["shared"] == before["shared"]
        if source is AGENTS:
            assert after["session"] == before["session"]


def test_a_trace_can_be_replayed(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    exported(log, out)
    requests = list(read_trace(out, ReadOptions(block_tokens=16)))
    assert len(requests) == 150
    assert requests[3].arrival_ms == 3_000.0
    assert len({request.session for request in requests}) == 12


def test_chats_go_on_from_one_another_within_a_session(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    exported(log, out, "--as", "bailian")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sum(row["parent_chat_id"] == -1 for row in rows) == 12
    by_id = {row["chat_id"]: row for row in rows}
    for row in rows:
        if row["parent_chat_id"] != -1:
            assert row["turn"] == by_id[row["parent_chat_id"]]["turn"] + 1


def test_two_exports_have_nothing_in_common_unless_they_have_the_key(
    log: Path, tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(b"0123456789abcdef" * 2)
    outs = [tmp_path / f"{n}.jsonl" for n in range(4)]
    exported(log, outs[0], key=b"a" * 32)
    exported(log, outs[1], key=b"b" * 32)
    exported(log, outs[2], "--key-file", str(key_file), key=b"c" * 32)
    exported(log, outs[3], "--key-file", str(key_file), key=b"d" * 32)
    rows = [[json.loads(line) for line in out.read_text().splitlines()] for out in outs]
    names = [{name for row in one for name in row["hash_ids"]} for one in rows]
    sessions = [{row["session_id"] for row in one} for one in rows]
    assert not names[0] & names[1]
    assert not sessions[0] & sessions[1]
    assert names[2] == names[3]
    assert outs[2].read_text() == outs[3].read_text()


def test_ids_of_a_trace_are_hashed_as_well(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    exported(CHAT, out)
    ids = [name for line in out.read_text().splitlines() for name in json.loads(line)["hash_ids"]]
    assert min(ids) > 1 << 40
    assert max(ids) < 1 << 63


def test_blocks_are_taken_together(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert "in blocks of 64 tokens" in exported(log, out, "--together", "4")
    fine, coarse = (
        [call.most_hits * call.block_tokens for call in LogReader(path, Namer(bytes(32))).calls()]
        for path in (log, out)
    )
    assert all(0 <= one - other < 64 for one, other in zip(fine, coarse, strict=True))


def test_a_log_without_times_is_written_at_a_pace(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    log.write_text('{"prompt": "one"}\n' * 3)
    exported(log, out)
    assert [json.loads(line)["timestamp"] for line in out.read_text().splitlines()] == [
        *(0, 1_000, 2_000),
    ]


def test_nothing_is_overwritten_and_nothing_half_is_left(log: Path, tmp_path: Path) -> None:
    out, empty = tmp_path / "out.jsonl", tmp_path / "empty.jsonl"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        exported(log, out)
    assert out.read_text() == "mine"
    empty.write_text("nothing\n")
    with pytest.raises(TraceError, match="no request in the file"):
        exported(empty, tmp_path / "half.jsonl")
    assert not (tmp_path / "half.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--together", "0"), "--together is 0"),
        (("--key-file", "/absent"), "--key-file /absent"),
    ],
)
def test_flags_of_the_export_that_are_wrong_are_named(
    log: Path, tmp_path: Path, words: tuple[str, ...], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        exported(log, tmp_path / "out.jsonl", *words)
    short = tmp_path / "short"
    short.write_bytes(b"x" * 31)
    with pytest.raises(ConfigError, match="holds 31 bytes"):
        exported(log, tmp_path / "out.jsonl", "--key-file", str(short))


def test_the_key_is_drawn_where_the_verb_is_used(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for out in outs:
        assert cli.main(["plan", "export", str(log), "--out", str(out)]) == cli.OK
    assert "wrote 150 requests" in capsys.readouterr().out
    assert outs[0].read_text() != outs[1].read_text()


def test_hits_of_a_trace_are_those_of_its_log_at_every_size(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    exported(log, out)
    found: list[list[float]] = []
    for path in (log, out):
        counted = ReuseDistances([10, 40, 160, 640])
        for call in LogReader(path, Namer(bytes(32))).calls():
            counted.use(call.blocks, call.most_hits)
        found.append(counted.hit_blocks())
    assert found[0] == found[1]
    assert found[0][0] < found[0][-1]
