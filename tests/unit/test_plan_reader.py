"""Logs of every kind that is read, and lines that are none."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trunkline.errors import TraceError
from trunkline.plan import reader as reading
from trunkline.plan import tables
from trunkline.plan.calls import MAX_NAMED_REJECTS, Call, Reject
from trunkline.plan.engine_lines import fields_of
from trunkline.plan.naming import Namer
from trunkline.plan.reader import SORT_WINDOW, LogFormat, LogReader, ReadOptions
from trunkline.plan.shapes import Times

TRACES = Path(__file__).resolve().parents[2] / "traces"
SYSTEM = "You answer in one sentence, and you never make anything up. " * 8


def chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {"model": "llama", "messages": messages, **more}


def log(tmp_path: Path, *lines: object, name: str = "log.jsonl") -> Path:
    path = tmp_path / name
    raw = [
        line if isinstance(line, bytes) else json.dumps(line, separators=(",", ":")).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def read(path: Path, **options: Any) -> tuple[list[Call], LogReader]:
    reader = LogReader(path, Namer(bytes(32)), ReadOptions(**options))
    return list(reader.calls()), reader


def common(calls: list[Call]) -> int:
    """Leading blocks that all of them have."""
    return next(
        (n for n, row in enumerate(zip(*(call.blocks for call in calls), strict=False))
         if len(set(row)) > 1),
        min(len(call.blocks) for call in calls),
    )  # fmt: skip


# -- kinds of logs ------------------------------------------------------------------------------


def test_bodies_of_requests_share_the_blocks_of_what_they_begin_with(tmp_path: Path) -> None:
    calls, reader = read(
        log(
            tmp_path,
            chat("one", timestamp=1_700_000_000, max_tokens=7, user="ann"),
            chat("two", timestamp=1_700_000_001.5, session_id="s"),
            chat("three", timestamp=1_700_000_002, model="qwen"),
        )
    )
    assert reader.kind is LogFormat.JSON
    assert [call.at_ms for call in calls] == [1.7e12, 1.7e12 + 1_500.0, 1.7e12 + 2_000.0]
    assert (calls[0].user, calls[0].output_tokens, calls[1].session) == ("ann", 7, "s")
    assert common(calls[:2]) == 8  # 64 bytes a block
    assert common(calls) == 0, "KV of one model is none of another's"
    assert calls[0].block_tokens == 16


def test_a_turn_begins_with_the_turns_before_it(tmp_path: Path) -> None:
    first = chat("a question " * 30)
    more = [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "why?"}]
    calls, _ = read(log(tmp_path, first, {**first, "messages": first["messages"] + more}))
    assert common(calls) == len(calls[0].blocks) > 10


def test_tools_stand_in_front_of_the_messages(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "description": "x" * 300}}]
    calls, _ = read(log(tmp_path, chat("one", tools=tools), chat("one")))
    assert common(calls) == 0
    assert calls[0].tokens > calls[1].tokens


def test_prompts_of_token_ids_are_counted_exactly(tmp_path: Path) -> None:
    ids = list(range(40))
    calls, _ = read(log(tmp_path, {"prompt": ids}, {"prompt": [*ids[:33], 7, 7]}))
    assert [call.tokens for call in calls] == [40, 35]
    assert (len(calls[0].blocks), common(calls)) == (2, 2)


def test_the_last_token_of_a_prompt_is_always_computed(tmp_path: Path) -> None:
    rows = [{"prompt": list(range(count))} for count in (31, 32, 33)]
    calls, _ = read(log(tmp_path, *rows))
    assert [call.most_hits for call in calls] == [1, 1, 2]


def test_blocks_of_another_size_than_the_first_ones_are_left_out(tmp_path: Path) -> None:
    ids = {"hash_ids": [1, 2], "input_length": 1_024, "timestamp": 0, "output_length": 0}
    calls, reader = read(log(tmp_path, ids, chat("one"), ids))
    assert [call.block_tokens for call in calls] == [512, 512]
    assert reader.rejects.places == {Reject.BAD_BLOCKS: ["log.jsonl:2"]}


def test_spend_logs_of_litellm_are_read_with_the_body_that_they_wrap(tmp_path: Path) -> None:
    row = {
        "request_id": "chatcmpl-1",
        "call_type": "acompletion",
        "api_key": "88dc28d0f030c55ed4ab77ed8faf098196cb1c05df778539800c9f1243fe6b4b",
        "spend": 0.01,
        "total_tokens": 160,
        "prompt_tokens": 150,
        "completion_tokens": 10,
        "startTime": "2026-11-30T09:00:00.250Z",
        "endTime": "2026-11-30T09:00:02Z",
        "model": "gpt-x",
        "user": "default_user_id",
        "team_id": "team-7",
        "end_user": "customer-3",
        "messages": {},
        "response": {},
        "proxy_server_request": json.dumps(chat("hello", model="gpt-x")),
        "session_id": "b1c2",
    }
    stored = {**row, "messages": chat("hello")["messages"], "proxy_server_request": "{}"}
    calls, reader = read(log(tmp_path, row, stored))
    assert reader.rejects.total == 0
    for call in calls:
        assert call.at_ms == 1796029200250.0
        assert (call.tenant, call.user, call.session) == ("team-7", "customer-3", "b1c2")
        assert (call.output_tokens, call.usage_tokens, call.model) == (10, 150, "gpt-x")
    assert common(calls) == len(calls[0].blocks)


def test_batch_files_and_records_around_a_body_are_read(tmp_path: Path) -> None:
    calls, _ = read(
        log(
            tmp_path,
            {"custom_id": "1", "url": "/v1/chat/completions", "body": chat("one")},
            {"time": 5, "request": {"body": json.dumps(chat("one", user="u"))}},
            {"kwargs": chat("one"), "response": {"usage": {"completion_tokens": 3}}},
            {"metadata": {"user_api_key_team_id": "t"}, **chat("one")},
            {"instructions": SYSTEM, "input": "one", "model": "llama"},
        )
    )
    assert common(calls[:4]) == len(calls[0].blocks) > 6
    assert (calls[1].user, calls[2].output_tokens, calls[3].tenant) == ("u", 3, "t")


def test_mooncake_and_bailian_traces_are_read_in_their_units(tmp_path: Path) -> None:
    short = {"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [0]}
    long = {"timestamp": 3_000, "input_length": 1_300, "output_length": 2, "hash_ids": [0, 1, 2]}
    calls, _ = read(log(tmp_path, short, long))
    assert [(call.at_ms, len(call.blocks), call.block_tokens) for call in calls] == [
        (0.0, 0, 512),
        (3_000.0, 2, 512),
    ]
    chats = [
        {"chat_id": 5, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 33,
         "output_length": 4, "type": "text", "turn": 1, "hash_ids": [8, 9, 10]},
        {"chat_id": 6, "parent_chat_id": 5, "timestamp": 2.5, "input_length": 48,
         "output_length": 4, "type": "text", "turn": 2, "hash_ids": [8, 9, 11]},
    ]  # fmt: skip
    calls, _ = read(log(tmp_path, *chats))
    assert [(call.at_ms, call.session, call.block_tokens) for call in calls] == [
        (1_500.0, "5", 16),
        (2_500.0, "5", 16),
    ]


def test_the_size_of_blocks_is_the_one_that_fits_most_of_the_first_lines(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": tokens, "output_length": 1,
         "hash_ids": list(range(-(-tokens // 16)))}
        for tokens in (7, 100, 1_000)
    ]  # fmt: skip
    calls, reader = read(log(tmp_path, *rows))
    assert [call.block_tokens for call in calls] == [16, 16, 16]
    assert reader.rejects.total == 0


VLLM_OLD = (
    "INFO 11-30 09:00:0{second} [logger.py:43] Received request cmpl-{second}-0: prompt: {prompt!r}"
    ", params: SamplingParams(n=1, temperature=0.7, max_tokens=64, stop=[]), prompt_token_ids: "
    "{ids}, prompt_embeds shape: None, lora_request: None."
)
VLLM_NEW = (
    "(APIServer pid=7) DEBUG 11-30 09:00:0{second} [entrypoints/logger.py:51] Request cmpl-{second}"
    " details: prompt: {prompt!r}, prompt_token_ids: {ids}, prompt_embeds shape: None."
)


@pytest.mark.parametrize("spelling", [VLLM_OLD, VLLM_NEW])
def test_the_log_of_vllm_is_read_by_its_token_ids(tmp_path: Path, spelling: str) -> None:
    ids = list(range(50))
    text = 'it\'s "so": prompt_token_ids: [1, 2]\n'
    calls, reader = read(
        log(
            tmp_path,
            b"INFO 11-30 08:59:59 [api_server.py:1] Started server process [7]",
            spelling.format(second=1, prompt=text, ids=ids).encode(),
            spelling.format(second=3, prompt=text, ids=[*ids, 51]).encode(),
            b"INFO 11-30 09:00:09 [loggers.py:2] Avg prompt throughput: 5.1 tokens/s",
            name="vllm.log",
        )
    )
    assert reader.kind is LogFormat.VLLM
    assert [call.tokens for call in calls] == [50, 51]
    assert (calls[1].at_ms or 0.0) - (calls[0].at_ms or 0.0) == 2_000.0
    assert (common(calls), reader.other_lines, reader.rejects.total) == (3, 2, 0)


def test_the_log_of_vllm_is_read_by_its_text_and_bodies_as_well(tmp_path: Path) -> None:
    text = 'it\'s "so" and so on, ' * 20
    body = json.dumps(chat("x"))
    calls, reader = read(
        log(
            tmp_path,
            VLLM_OLD.format(second=1, prompt=text, ids=None).encode(),
            f"DEBUG 11-30 09:00:02 [l.py:1] Request chatcmpl-9 JSON body: {body}".encode(),
            b"DEBUG 11-30 09:00:03 [l.py:1] Request chatcmpl-9 JSON body: {cut",
            b"INFO 11-30 09:00:04 [l.py:1] Received request x: prompt: None, params: y",
            name="vllm.log",
        )
    )
    assert [call.tokens for call in calls] == [len(text) // 4, calls[1].tokens]
    assert calls[0].output_tokens == 64
    assert reader.rejects.counts == {Reject.BAD_PROMPT: 1, Reject.NO_PROMPT: 1}


def test_an_engine_that_prints_an_object_is_an_engine_still(tmp_path: Path) -> None:
    lines = [VLLM_NEW.format(second=n, prompt="x", ids=[1, 2, 3]).encode() for n in range(3)]
    calls, reader = read(log(tmp_path, {"non-default args": {}}, *lines, name="vllm.log"))
    assert (reader.kind, len(calls), reader.other_lines) == (LogFormat.VLLM, 3, 1)


def csv_line(*cells: str) -> bytes:
    return ",".join('"' + cell.replace('"', '""') + '"' for cell in cells).encode()


def test_a_table_with_a_column_of_json_is_read(tmp_path: Path) -> None:
    body = json.dumps(chat("one"), indent=1)  # over several lines
    calls, reader = read(
        log(
            tmp_path,
            b"id,Timestamp,user,request_json",
            csv_line("1", "2026-11-30 09:00:00", "ann", body),
            csv_line("2", "2026-11-30 09:00:01+00:00", "bob", json.dumps(chat("one"))),
            name="log.csv",
        )
    )
    assert reader.kind is LogFormat.CSV
    assert [call.user for call in calls] == ["ann", "bob"]
    assert (calls[1].at_ms or 0.0) - (calls[0].at_ms or 0.0) == 1_000.0
    assert common(calls) == len(calls[0].blocks) > 6


def test_a_table_with_a_column_of_text_is_read(tmp_path: Path) -> None:
    path = log(tmp_path, b"time;prompt", f"5;{SYSTEM}".encode(), f"6;{SYSTEM}!".encode())
    calls, _ = read(path)
    assert [call.at_ms for call in calls] == [5.0, 6.0]
    assert common(calls) == len(SYSTEM) // 64


def test_a_packed_log_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(json.dumps(chat("one")).encode() + b"\n"))
    assert len(read(path)[0]) == 1


# -- lines that are none ------------------------------------------------------------------------

BAD_LINES: list[tuple[bytes, Reject]] = [
    (b"nonsense", Reject.NOT_JSON),
    (b'{"messages": [', Reject.NOT_JSON),
    (b"\x00\x00\x00", Reject.NOT_JSON),
    (b'{"messages": [{"content": "\xff\xfe"}]}', Reject.NOT_JSON),
    (b'{"prompt": "x", "timestamp": NaN}', Reject.NOT_JSON),
    (b"[1, 2]", Reject.NO_OBJECT),
    (b'{"a": ' * 5_000 + b"1" + b"}" * 5_000, Reject.TOO_DEEP),
    (b"{}", Reject.NO_PROMPT),
    (b'{"messages": []}', Reject.NO_PROMPT),
    (b'{"messages": "{}", "prompt": ""}', Reject.NO_PROMPT),
    (b'{"prompt": [1, -5]}', Reject.BAD_PROMPT),
    (b'{"prompt": [1, "x"]}', Reject.BAD_PROMPT),
    (b'{"prompt": "x", "timestamp": "yesterday"}', Reject.BAD_TIME),
    (b'{"prompt": "x", "timestamp": -1}', Reject.BAD_TIME),
    (b'{"prompt": "x", "timestamp": true}', Reject.BAD_TIME),
    (b'{"prompt": "x", "timestamp": 1e300}', Reject.BAD_TIME),
    (b'{"prompt": "x", "timestamp": "nan"}', Reject.BAD_TIME),
    (b'{"prompt": "x", "max_tokens": -3}', Reject.BAD_COUNT),
    (b'{"prompt": "x", "usage": {"completion_tokens": 1e9}}', Reject.BAD_COUNT),
    (b'{"prompt": "x", "user": ["a"]}', Reject.BAD_NAME),
    (b'{"prompt": "x", "user": "' + b"u" * 300 + b'"}', Reject.BAD_NAME),
    (b'{"hash_ids": [1], "input_length": 0}', Reject.BAD_COUNT),
    (b'{"hash_ids": [1], "input_length": 5000}', Reject.BAD_BLOCKS),
    (b'{"hash_ids": [-1], "input_length": 5}', Reject.BAD_BLOCKS),
    (b'{"hash_ids": ["a"], "input_length": 5}', Reject.BAD_BLOCKS),
    (b'{"hash_ids": 3, "input_length": 5}', Reject.BAD_BLOCKS),
    (b'{"hash_ids": [1], "input_length": 5, "chat_id": "x"}', Reject.BAD_NAME),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES)
def test_a_malformed_line_is_counted_and_named_and_never_fatal(
    tmp_path: Path, bad: bytes, reason: Reject
) -> None:
    calls, reader = read(log(tmp_path, chat("one"), bad, chat("two")))
    assert len(calls) == 2
    assert reader.rejects.counts == {reason: 1}
    assert reader.rejects.places == {reason: ["log.jsonl:2"]}


def test_only_the_first_places_of_a_reason_are_named(tmp_path: Path) -> None:
    _, reader = read(log(tmp_path, chat("one"), *[b"x"] * 20))
    assert reader.rejects.counts == {Reject.NOT_JSON: 20}
    assert reader.rejects.places[Reject.NOT_JSON] == [
        f"log.jsonl:{2 + n}" for n in range(MAX_NAMED_REJECTS)
    ]


def test_a_line_beyond_the_bound_is_skipped_without_being_held(tmp_path: Path) -> None:
    path = log(tmp_path, chat("one"), b'{"prompt": "' + b"x" * 5_000_000 + b'"}', chat("two"))
    calls, reader = read(path, max_line_bytes=2_000)
    assert len(calls) == 2
    assert reader.rejects.places == {Reject.TOO_LONG: ["log.jsonl:2"]}
    at_the_bound = log(tmp_path, b'{"prompt": "' + b"x" * (2_000 - 15) + b'"}')
    assert at_the_bound.stat().st_size == 2_000
    assert len(read(at_the_bound, max_line_bytes=2_000)[0]) == 1


def test_a_packed_log_that_is_cut_off_gives_what_it_has(tmp_path: Path) -> None:
    draw = random.Random(1)
    lines = [json.dumps(chat(str(draw.random()))) for _ in range(2_000)]
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode())[:-5_000])
    calls, reader = read(path)
    assert 100 < len(calls) < 2_000
    assert reader.rejects.counts[Reject.CUT_OFF] == 1


def test_a_quote_that_never_closes_costs_its_own_row(tmp_path: Path) -> None:
    rows = [csv_line(str(n), f"{SYSTEM}{n}") for n in range(30)]
    rows[10] = b'10,"' + SYSTEM.encode()
    rows[20] = b'20,"x" y"'
    rows[25] = b"25,26,27"
    calls, reader = read(log(tmp_path, b"n,prompt", *rows, name="log.csv"))
    assert len(calls) == 27
    assert reader.rejects.total == 3


def test_rows_of_a_table_have_a_bound_and_what_follows_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_ROW_LINES", 5)
    rows = [csv_line(str(n), SYSTEM) for n in range(20)]
    rows[3] = b'3,"open'
    calls, reader = read(log(tmp_path, b"n,prompt", *rows, name="log.csv"))
    assert len(calls) == 19
    assert reader.rejects.places == {Reject.OPEN_QUOTES: ["log.csv:5"]}


def test_a_table_with_nulls_and_rubbish_is_not_fatal(tmp_path: Path) -> None:
    rows = [b"\x00\x00", b'"\x00","' + SYSTEM.encode() + b'"', b"," * 5_000, b'"""', b"\xff\xfe,y"]
    calls, reader = read(log(tmp_path, b"n,prompt", *rows, name="log.csv"))
    assert len(calls) == 2  # `y` is a prompt, too
    assert reader.rejects.total == 3


def test_a_log_without_a_request_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"2 x not JSON \(log.jsonl:1 first\)"):
        read(log(tmp_path, b"x", b"y"))
    with pytest.raises(TraceError, match="no request in the file: no line"):
        read(log(tmp_path, b""))
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "missing")


def test_no_complaint_holds_what_a_line_says(tmp_path: Path) -> None:
    path = log(
        tmp_path, {"prompt": "ok"}, *[line.replace(b"x", b"SECRET") for line, _ in BAD_LINES]
    )
    _, reader = read(path)
    assert "SECRET" not in repr((reader.rejects.counts, reader.rejects.places))


@given(st.lists(st.binary(max_size=60), max_size=20))
@example([b"{}"])
def test_any_bytes_behind_one_good_line_are_read_or_counted(lines: list[bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for first in (json.dumps(chat("one")).encode(), b"n,prompt\n1,hello"):
            path = Path(folder) / "log"
            path.write_bytes(b"\n".join([first, *lines]))
            assert read(path)[0]


# -- memory -------------------------------------------------------------------------------------


def test_the_first_lines_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of JSON that is as long as all may be tells the format, whatever comes behind it."""
    engine = b"INFO 11-30 12:00:00 Received request a: prompt: 'hello', params: x"
    path = log(tmp_path, chat("one"), engine, engine)
    assert read(path)[1].kind is LogFormat.VLLM
    size = len(json.dumps(chat("one"), separators=(",", ":"))) + 1
    for first_bytes, kind in ((size, LogFormat.JSON), (size + 1, LogFormat.JSON)):
        monkeypatch.setattr(reading, "FIRST_BYTES", first_bytes)
        assert read(path)[1].kind is kind
    monkeypatch.setattr(reading, "FIRST_BYTES", size + len(engine) + 2)
    assert read(path)[1].kind is LogFormat.VLLM


def test_calls_that_wait_to_be_put_in_order_are_bounded_by_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"hash_ids": [1, 2, 3], "input_length": 3 * 512, "timestamp": at} for at in (3, 2, 1, 0)
    ]
    path = log(tmp_path, *rows)
    assert read(path)[1].late == 0
    for uses, late in ((12, 0), (9, 0), (8, 1), (5, 2), (2, 3), (0, 3)):
        monkeypatch.setattr(reading, "SORT_USES", uses)
        calls, found = read(path)
        assert (len(calls), found.late) == (4, late), uses


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_long_prompt_in_the_log_of_vllm_takes_a_few_times_its_length(quote: str) -> None:
    text = "ab c" * 100_000
    line = f"Received request a: prompt: {quote}{text}\\n{quote}, params: x".encode()
    tracemalloc.start()
    try:
        found = fields_of(line)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(text)
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found["prompt"] == text + "\n"


# -- time ---------------------------------------------------------------------------------------


def test_times_of_every_usual_kind_are_understood() -> None:
    at_ms = 1_700_000_000_000.0
    for value in (1_700_000_000, "1700000000", 1.7e12, 1.7e15, 1.7e18, "2023-11-14T22:13:20Z"):
        assert Times(1.0).ms(value) == at_ms
    assert Times(1.0).ms("2023-11-14 22:13:20") == at_ms
    assert Times(1.0).ms("2023-11-14T23:13:20+01:00") == at_ms
    assert Times(1_000.0).ms(12.5) == 12_500.0


def test_the_first_time_tells_the_unit_of_all() -> None:
    """A week in ms ends where seconds since 1970 begin."""
    times = Times(1.0)
    assert [times.ms(value) for value in (0, 3_000, 604_603_000)] == [0.0, 3_000.0, 604_603_000.0]
    week = LogReader(TRACES / "ragpulse_week.jsonl.gz", Namer(bytes(32)))
    assert [call.at_ms for call in week.calls()][-1] == 604_603_000.0


def test_lines_out_of_order_are_sorted_within_the_window_and_counted_beyond_it(
    tmp_path: Path,
) -> None:
    times = list(range(2 * SORT_WINDOW))
    random.Random(1).shuffle(times)
    near = [time // 64 * 64 + position % 64 for position, time in enumerate(sorted(times))]
    shuffled = [near[at ^ 1] for at in range(len(near))]
    late = [*shuffled, 0]
    calls, reader = read(log(tmp_path, *({"prompt": "x", "timestamp": at} for at in late)))
    found = [call.at_ms for call in calls]
    assert found == sorted(found, key=lambda at: at or 0.0)
    assert (reader.late, len(calls)) == (1, len(late))


def test_a_log_without_times_keeps_its_order(tmp_path: Path) -> None:
    calls, reader = read(log(tmp_path, *({"prompt": "x" * n} for n in (400, 40, 4_000))))
    assert [call.tokens for call in calls] == [100, 10, 1_000]
    assert reader.without_time == 3
