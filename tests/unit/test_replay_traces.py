"""Trace files: formats are told apart; what is wrong with a line is said with file and line."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.errors import TraceError
from trunkline.replay import formats
from trunkline.replay.formats import ReadOptions, TraceFormat, read_trace
from trunkline.replay.traces import TraceRequest, pace, scale_time, spread_ticks, take
from trunkline.replay.workloads import WORKLOADS, find_workload, load_workload

TRACES = Path(__file__).parents[2] / "traces"


def written(folder: Path, *lines: Any, name: str = "trace.jsonl") -> Path:
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def mooncake(**changes: Any) -> dict[str, Any]:
    line = {"timestamp": 0, "input_length": 1_000, "output_length": 5, "hash_ids": [7, 8]}
    return {**line, **changes}


def read(path: Path, **options: Any) -> list[TraceRequest]:
    return list(read_trace(path, ReadOptions(**options)))


def complaint(path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        read(path, **options)
    return str(caught.value)


def test_a_mooncake_line_becomes_a_request(tmp_path: Path) -> None:
    line = mooncake(timestamp=1_500, session_id="s1", model="m", unheard_of={"x": 1})
    (request,) = read(written(tmp_path, line))
    assert request == TraceRequest(
        arrival_ms=1_500.0,
        input_tokens=1_000,
        output_tokens=5,
        block_ids=(7, 8),
        block_tokens=512,
        session="s1",
        model="m",
    )
    assert request.full_blocks == 1


def test_gzip_is_known_by_its_first_bytes_and_not_by_the_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.log"
    path.write_bytes(gzip.compress(json.dumps(mooncake()).encode()))
    assert len(read(path)) == 1


def test_a_cut_gzip_file_is_reported_and_not_taken_for_a_short_trace(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(mooncake(timestamp=i)) for i in range(5_000))
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-40])
    assert "cannot be read after line" in complaint(path)


def test_bailian_times_are_seconds_and_chats_become_sessions_by_their_root(tmp_path: Path) -> None:
    base = {"input_length": 40, "output_length": 3, "type": "text", "turn": 1}
    path = written(
        tmp_path,
        {**base, "chat_id": 10, "parent_chat_id": -1, "timestamp": 1.5, "hash_ids": [1, 2, 3]},
        {**base, "chat_id": 11, "parent_chat_id": 10, "timestamp": 2, "hash_ids": [1, 2, 4]},
        {**base, "chat_id": 12, "parent_chat_id": 11, "timestamp": 3, "hash_ids": [1, 2, 5]},
        {**base, "chat_id": 20, "parent_chat_id": -1, "timestamp": 4, "hash_ids": [1, 2, 6]},
    )
    requests = read(path)
    assert [request.arrival_ms for request in requests] == [1_500.0, 2_000.0, 3_000.0, 4_000.0]
    assert [request.session for request in requests] == ["10", "10", "10", "20"]
    assert {request.block_tokens for request in requests} == {16}


def test_remembered_chats_are_bounded_and_the_oldest_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_CHATS", 8)
    base = {"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1]}
    roots = [{**base, "chat_id": chat, "parent_chat_id": -1} for chat in range(3)]
    chained = {**base, "chat_id": 3, "parent_chat_id": 2}
    filler = [{**base, "chat_id": 100 + i, "parent_chat_id": -1} for i in range(8)]
    late = {**base, "chat_id": 9, "parent_chat_id": 3}
    requests = read(written(tmp_path, *roots, chained, *filler, late))
    assert requests[3].session == "2"
    assert requests[-1].session == "3", "its root is forgotten, so its parent stands for it"


def test_other_block_sizes_are_told_from_the_first_line(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake(input_length=2_916, hash_ids=list(range(46))))
    assert read(path)[0].block_tokens == 64
    assert "expected 23 ids" in complaint(path, block_tokens=128)


def test_a_time_divisor_compresses_a_week(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake(timestamp=604_603_000))
    assert read(path, time_divisor=1_000.0)[0].arrival_ms == 604_603.0


def test_openai_bodies_are_kept_less_our_own_fields(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "timestamp": 1_700_000_000.5,
            "model": "m",
            "messages": [{"role": "user", "content": "x" * 400}],
            "max_tokens": 9,
            "user": "u1",
        },
        {"timestamp": 1_700_000_002.0, "prompt": [1, 2, 3], "session_id": "s"},
    )
    first, second = read(path)
    assert (first.arrival_ms, second.arrival_ms) == (0.0, 1_500.0)
    assert first.body is not None
    assert set(first.body) == {"model", "messages", "max_tokens", "user"}
    assert (first.output_tokens, first.session, first.block_ids) == (9, "u1", None)
    assert (second.input_tokens, second.session) == (3, "s")


@pytest.mark.parametrize(
    ("times", "expected_ms"),
    [
        ([1_700_000_000_000, 1_700_000_000_250], [0.0, 250.0]),
        ([1_700_000_000, 1_700_000_001], [0.0, 1_000.0]),
        ([100, 350], [100.0, 350.0]),
    ],
)
def test_openai_times_may_be_epoch_ms_epoch_seconds_or_ms_from_the_start(
    tmp_path: Path, times: list[int], expected_ms: list[float]
) -> None:
    path = written(tmp_path, *({"timestamp": at, "prompt": "hello"} for at in times))
    assert [request.arrival_ms for request in read(path)] == expected_ms


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (mooncake(input_length=-5), ["field input_length", "from 1 to", "got -5"]),
        (mooncake(input_length=True), ["field input_length", "got bool"]),
        (mooncake(input_length=1e3), ["field input_length", "integer"]),
        (mooncake(input_length=1 << 40), ["field input_length"]),
        (mooncake(output_length=None), ["field output_length", "got NoneType"]),
        (mooncake(timestamp="soon"), ["field timestamp", "finite number", "got str"]),
        (mooncake(timestamp=-1), ["field timestamp", "got -1"]),
        (mooncake(hash_ids=[1, -2]), ["field hash_ids[1]", "got -2"]),
        (mooncake(hash_ids=[1, [2]]), ["field hash_ids[1]", "got list"]),
        (mooncake(hash_ids="1,2"), ["field hash_ids", "got str"]),
        (mooncake(hash_ids=[1, 2, 3]), ["expected 2 ids for 1000 tokens", "got 3"]),
        (mooncake(hash_ids=[1, 1 << 70]), ["field hash_ids[1]"]),
        (mooncake(session_id=["x"]), ["field session_id", "got list"]),
        ('{"timestamp": NaN, "hash_ids": [1]}', ["expected one JSON object"]),
        ('{"timestamp": 0, "hash_ids"', ["expected one JSON object"]),
        ("[1, 2]", ["expected one JSON object, got list"]),
        ("[" * 100_000, ["expected one JSON object"]),
        ('{"hash_ids": ' + "[" * 100_000 + "}", ["expected one JSON object"]),
        ('{"hash_ids": ' + "9" * 5_000 + "}", ["2: "]),
    ],
)
def test_a_bad_line_is_named_with_file_line_field_and_expectation(
    tmp_path: Path, line: Any, words: list[str]
) -> None:
    path = written(tmp_path, mooncake(), line)
    message = complaint(path)
    assert message.startswith(f"{path}:2: ")
    assert len(message) < len(str(path)) + 250
    for word in words:
        assert word in message


def test_prompt_text_never_shows_in_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "hello"}, {"prompt": "hi", "model": ["my secret diary"]})
    assert "secret" not in complaint(path)


def test_unsorted_lines_are_refused_with_the_line(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake(timestamp=9), mooncake(timestamp=10), mooncake(timestamp=4))
    assert complaint(path) == (
        f"{path}:3: time goes back from 10 to 4 ms; expected lines sorted by time"
    )


def test_a_line_at_the_limit_is_read_and_one_beyond_it_refused(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake())
    size = path.stat().st_size
    assert len(read(path, max_line_bytes=size)) == 1
    assert "longer than" in complaint(path, max_line_bytes=size - 1)


def test_empty_and_unknown_files_say_what_was_expected(tmp_path: Path) -> None:
    assert "no request" in complaint(written(tmp_path, ""))
    assert "unknown format" in complaint(written(tmp_path, {"x": 1}))
    assert "cannot be read" in complaint(tmp_path / "missing.jsonl")
    unusual = written(tmp_path, mooncake(input_length=999, hash_ids=list(range(77))))
    assert "give the block size" in complaint(unusual)


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake(), mooncake(timestamp=1), "not JSON")
    assert len(list(take(read_trace(path), 2))) == 2


@given(st.binary(max_size=300))
def test_any_bytes_give_requests_or_a_trace_error(raw: bytes) -> None:
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(raw)
        file.flush()
        for kind in TraceFormat:
            try:
                list(read_trace(Path(file.name), ReadOptions(format=kind)))
            except TraceError:
                continue


def test_ticks_are_spread_in_file_order_with_the_fixed_seed() -> None:
    requests = [
        TraceRequest(arrival_ms=at, input_tokens=index + 1, output_tokens=1)
        for index, at in enumerate([0.0, 0.0, 0.0, 3_000.0, 3_000.0])
    ]
    draw = random.Random(7)
    expected = sorted((request.arrival_ms + draw.uniform(0.0, 3_000.0)) for request in requests)
    spread = spread_ticks(requests)
    assert [request.arrival_ms for request in spread] == expected
    assert sorted(request.input_tokens for request in spread) == [1, 2, 3, 4, 5]
    assert all(request.arrival_ms < 3_000.0 for request in spread if request.input_tokens <= 3)


def test_time_can_be_scaled_paced_and_never_by_nothing() -> None:
    requests = [TraceRequest(arrival_ms=10.0, input_tokens=1, output_tokens=1)] * 3
    assert [r.arrival_ms for r in scale_time(requests, 2.0)] == [20.0] * 3
    assert [r.arrival_ms for r in pace(requests, 4.0)] == [0.0, 250.0, 500.0]
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="not above 0"):
            list(scale_time(requests, bad))
        with pytest.raises(ValueError, match="not above 0"):
            list(pace(requests, bad))


@pytest.mark.parametrize(
    ("name", "requests", "mean_tokens", "span_s"),
    [
        ("W1", 12_031, 12_035, 3_537),
        ("W2", 9_030, 77_736, 5_396 * 2),
        ("W3", 3_993, 15_325, 1_022),
        ("W4", 7_106, 2_934, 604.6),
        ("W1-smoke", 918, None, 300),
        ("W2-smoke", 600, None, None),
    ],
)
def test_the_bundled_workloads_have_the_published_figures(
    name: str, requests: int, mean_tokens: int | None, span_s: float | None
) -> None:
    loaded = load_workload(name, traces_dir=TRACES)
    arrivals_ms = [request.arrival_ms for request in loaded]
    assert len(loaded) == requests
    assert arrivals_ms == sorted(arrivals_ms)
    assert {request.block_tokens for request in loaded} == {find_workload(name).block_tokens}
    if mean_tokens is not None:
        mean = sum(request.input_tokens for request in loaded) / requests
        assert mean == pytest.approx(mean_tokens, abs=1.0)
    if span_s is not None:
        assert arrivals_ms[-1] / 1_000.0 == pytest.approx(span_s, rel=0.002)


def test_load_shortens_the_arrivals() -> None:
    calm = load_workload("W1-smoke", traces_dir=TRACES)
    busy = load_workload("w1-smoke", load=1.5, traces_dir=TRACES)
    assert busy[-1].arrival_ms == pytest.approx(calm[-1].arrival_ms / 1.5)


def test_unknown_workloads_and_missing_traces_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no workload 'W9'; known are W1, W2"):
        load_workload("W9", traces_dir=TRACES)
    with pytest.raises(TraceError, match="no such file"):
        load_workload("W1", traces_dir=tmp_path)
    with pytest.raises(TraceError, match="not above 0"):
        load_workload("W1", load=0.0, traces_dir=TRACES)


def test_the_model_of_w1_costs_what_the_reference_says() -> None:
    assert WORKLOADS["W1"].prefill_ms(3_500) == pytest.approx(1_005.0)
    assert WORKLOADS["W5"].prefill_ms(1_000) == pytest.approx(105.0)
