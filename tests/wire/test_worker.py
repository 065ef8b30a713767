"""The simulated worker as a process: its HTTP surface, its events, and each of its faults."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import zmq

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.event_publisher import ZmqEventPublisher
from trunkline.adapters.event_sources import discovered_sources
from trunkline.core.simkv import answer_tokens
from trunkline.ports.publisher import CacheCleared
from trunkline.worker.heartbeat import post

HERE = Path(__file__).resolve().parent
VOCAB = 4_096
PROMPT = list(range(1_000, 1_070))
START_S = 30
WAIT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A worker process that has said that it is ready."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    events: str
    replay: str

    def complete(self, prompt: list[int] | str, max_tokens: int = 8, **more: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **more}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


@contextmanager
def worker(*flags: str, profile: str = "tiny") -> Iterator[Running]:
    source = str(HERE.parents[1] / "src")
    process = subprocess.Popen(
        [sys.executable, str(HERE / "launch_worker.py"), "--profile", profile, *flags],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    )
    try:
        assert process.stdout is not None
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        ready = json.loads(process.stdout.readline())
        watchdog.cancel()
        with httpx.Client(base_url=ready["url"], timeout=WAIT_S) as client:
            yield Running(
                process=process, http=client, events=ready["events"], replay=ready["replay"]
            )
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with worker() as running:
        yield running


def _cached(answer: Any) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def _ids(answer: Any) -> list[int]:
    return answer["choices"][0]["token_ids"]


def _right(prompt: list[int], count: int = 8) -> list[int]:
    return answer_tokens(array("I", prompt), count, VOCAB).tolist()


def _events_of(text: str) -> list[Any]:
    """The JSON of each server-sent event but the end mark, which must be there."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _replayed(endpoint: str, start: int = 0) -> list[tuple[int, Any]]:
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvtimeo = WAIT_S * 1_000
        socket.connect(endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, Any]] = []
        while True:
            _, _, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
    finally:
        context.destroy(linger=0)


def _read_into(text: bytearray, answer: httpx.Response) -> None:
    for part in answer.iter_bytes():
        text += part


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.01)


# --- answers and cache ---


def test_a_whole_answer_is_the_expected_one_and_the_second_call_hits(shared: Running) -> None:
    prompt = [7, *PROMPT]
    first, second = shared.complete(prompt), shared.complete(prompt)
    assert _ids(first) == _ids(second) == _right(prompt)
    assert (_cached(first), _cached(second)) == (0, 64)
    assert first["usage"]["prompt_tokens"] == 71
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"][0]["finish_reason"] == "length"


def test_two_salts_share_nothing_and_both_answers_are_right(shared: Running) -> None:
    prompt = [8, *PROMPT]
    answers = [shared.complete(prompt, cache_salt=salt) for salt in ("a", "b", "a", "b")]
    assert [_cached(answer) for answer in answers] == [0, 0, 64, 64]
    assert all(_ids(answer) == _right(prompt) for answer in answers)


def test_a_stream_has_one_event_a_token_and_ends_with_usage_and_done(shared: Running) -> None:
    prompt = [9, *PROMPT]
    body = {
        "prompt": prompt,
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    answer = shared.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = _events_of(answer.text)
    tokens = [one for event in events[:-2] for one in event["choices"][0]["token_ids"]]
    assert tokens == _right(prompt)
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert len({event["id"] for event in events}) == 1
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == shared.complete(prompt)["choices"][0]["text"]


def test_the_openai_client_can_chat_streamed_and_whole(shared: Running) -> None:
    client = openai.OpenAI(
        base_url=str(shared.http.base_url.join("v1")), api_key="x", max_retries=0
    )
    messages: Any = [{"role": "user", "content": "Tell me of water."}]
    whole = client.chat.completions.create(model="trunkline-sim", messages=messages, max_tokens=12)
    stream = client.chat.completions.create(
        model="trunkline-sim",
        messages=messages,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(text.split()) == 12
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 16


def test_the_next_turn_of_a_chat_hits_what_was_generated(shared: Running) -> None:
    messages = [{"role": "user", "content": "A first turn " * 10}]
    body = {"messages": messages, "max_tokens": 40}
    first = shared.http.post("/v1/chat/completions", json=body).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = shared.http.post("/v1/chat/completions", json=body).json()
    known = first["usage"]["total_tokens"]
    # All but the last generated token went through the model.
    assert _cached(second) == (known - 1) // 16 * 16


def test_without_max_tokens_the_answer_ends_by_itself(shared: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Go on"}]}
    answer = shared.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 64


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_text_ends_the_answer_before_it(shared: Running, is_stream: bool) -> None:
    words = shared.complete(PROMPT)["choices"][0]["text"].split()
    body = {"prompt": PROMPT, "max_tokens": 8, "stop": [words[3]], "stream": is_stream}
    answer = shared.http.post("/v1/completions", json=body)
    if is_stream:
        events = _events_of(answer.text)
        text = "".join(event["choices"][0]["text"] for event in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
        assert answer.json()["usage"]["completion_tokens"] == 4
    assert text == " " + " ".join(words[:3]) + " "
    assert reason == "stop"
    assert shared.metric("vllm:num_requests_running") == 0


# --- the rest of the surface ---


def test_chat_and_the_equal_completion_are_the_same_tokens(shared: Running) -> None:
    chat = {
        "messages": [{"role": "user", "content": "Größe 你好 🙂"}],
        "add_generation_prompt": True,
    }
    ids = shared.http.post("/tokenize", json=chat).json()
    text = shared.http.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"]
    assert "Größe 你好 🙂" in text
    rendered = "<|im_start|>user\nGröße 你好 🙂<|im_end|>\n<|im_start|>assistant\n"
    same = shared.http.post("/tokenize", json={"prompt": rendered}).json()
    assert same["tokens"] == ids["tokens"]
    assert ids["count"] == len(ids["tokens"])
    chat_answer = shared.http.post("/v1/chat/completions", json={**chat, "max_tokens": 4}).json()
    assert chat_answer["usage"]["prompt_tokens"] == ids["count"]
    assert _ids(shared.complete(rendered, 4)) == _right(ids["tokens"], 4)


def test_small_endpoints_answer_as_the_engine_does(shared: Running) -> None:
    get = shared.http.get
    assert get("/health").content == b""
    assert get("/health").status_code == get("/ping").status_code == 200
    assert get("/version").json()["version"]
    assert get("/load").json() == {"server_load": 0}
    (model,) = get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("trunkline-sim", 65_536)
    (source,) = discovered_sources(get("/kv_event_sources").json(), worker_host="127.0.0.1")
    assert (source.endpoint, source.replay_endpoint) == (shared.events, shared.replay)
    assert not source.is_bound_by_us
    vectors = [
        shared.http.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"]
        for text in ("a", "a", "b")
    ]
    assert vectors[0] == vectors[1] != vectors[2]
    assert get("/nothing").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b'{"prompt": "a"', 400, None),
        (b"[1]", 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"prompt": "\\ud800"}', 400, None),
        (json.dumps({"prompt": "a", "n": 2}).encode(), 400, "n"),
        (json.dumps({"prompt": [5] * 65_536}).encode(), 400, "prompt"),
        (json.dumps({"prompt": "a", "max_tokens": 65_536}).encode(), 400, "max_tokens"),
        (json.dumps({"prompt": "a", "cache_salt": ""}).encode(), 400, "cache_salt"),
        (json.dumps({"prompt": "a", "model": "other"}).encode(), 404, "model"),
    ],
)
def test_a_bad_request_is_refused_in_the_shape_of_openai(
    shared: Running, body: bytes, status: int, param: str | None
) -> None:
    answer = shared.http.post("/v1/completions", content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == status
    assert error["param"] == param
    assert error["message"]


def test_a_client_that_leaves_frees_the_worker() -> None:
    with worker("--time-scale", "100") as running:
        body = {"prompt": PROMPT, "max_tokens": 500, "stream": True}
        with running.http.stream("POST", "/v1/completions", json=body) as answer:
            parts = answer.iter_bytes()  # closes the answer when it is dropped
            next(parts)
            assert running.metric("vllm:num_requests_running") == 1
        _until(lambda: running.metric("vllm:num_requests_running") == 0, "the abort")
        assert running.metric("vllm:kv_cache_usage_perc") == 0


def test_one_request_more_than_may_wait_is_answered_503() -> None:
    flags = ("--max-num-seqs", "1", "--max-waiting", "1", "--time-scale", "50")
    with worker(*flags) as running, httpx.Client(base_url=running.http.base_url) as other:
        body = {"prompt": PROMPT, "max_tokens": 500, "stream": True}
        with (
            running.http.stream("POST", "/v1/completions", json=body),
            other.stream("POST", "/v1/completions", json=body),
        ):
            _until(lambda: running.metric("vllm:num_requests_waiting") == 1, "a full queue")
            answer = running.http.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert running.metric("vllm:admission_rejections_total") == 1


def test_a_term_signal_ends_it_with_status_0() -> None:
    with worker() as running:
        running.complete(PROMPT)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(WAIT_S) == 0


# --- events ---


def test_live_events_carry_the_tokens_and_the_salt_of_what_was_cached() -> None:
    with worker() as running:
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(running.events)
        received: list[list[bytes]] = []

        def try_again() -> bool:
            # A subscription takes a moment; what is published before it is not received.
            running.complete([len(received), time.monotonic_ns() % VOCAB, *PROMPT], cache_salt="s")
            if socket.poll(50):
                received.append(socket.recv_multipart())
            return bool(received)

        _until(try_again, "an event")
        context.destroy(linger=0)
        topic, number, payload = received[0]
        seconds, (event,), rank = msgspec.msgpack.decode(payload)
        assert topic == b"kv-events"
        assert len(number) == 8
        assert (rank, event["type"], event["block_size"]) == (0, "BlockStored", 16)
        assert abs(seconds - time.time()) < 60
        assert event["token_ids"][2:] == PROMPT[: len(event["token_ids"]) - 2]
        assert len(event["token_ids"]) == 16 * len(event["block_hashes"])
        assert event["extra_keys"][0] == ["s"]
        assert event["parent_block_hash"] is None


def test_a_replay_begins_at_the_number_asked_for() -> None:
    with worker("--wide-hashes") as running:
        for first in range(5):
            running.complete([first, *PROMPT])
        batches = _replayed(running.replay)
        assert [number for number, _ in batches] == list(range(5))
        assert [event["token_ids"][0] for _, (_, (event,), _) in batches] == list(range(5))
        assert {len(name) for _, b in batches for name in b[1][0]["block_hashes"]} == {32}
        assert _replayed(running.replay, 3) == batches[3:]
        assert _replayed(running.replay, 9) == []


def test_a_replay_of_more_than_is_kept_begins_later() -> None:
    publisher = ZmqEventPublisher(SystemClock(), buffer_batches=3)
    for _ in range(5):
        publisher.publish([CacheCleared()])
    numbers = [number for number, _ in _replayed(publisher.replay_endpoint)]
    publisher.close()
    assert numbers == [2, 3, 4]


def test_nonsense_on_the_replay_socket_is_ignored() -> None:
    publisher = ZmqEventPublisher(SystemClock())
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    for frames in ([b""], [b"", b"short"], [b"", b"1" * 8, b"more"], [b"x"] * 40):
        socket.send_multipart(frames)
    publisher.publish([CacheCleared()])
    assert len(_replayed(publisher.replay_endpoint)) == 1
    assert socket.poll(0) == 0
    context.destroy(linger=0)
    publisher.close()


def test_a_reset_is_told_with_the_next_batch_and_refused_while_busy() -> None:
    with worker("--time-scale", "20") as running:
        running.complete(PROMPT)
        assert running.http.post("/reset_prefix_cache").json() == {"success": True}
        assert len(_replayed(running.replay)) == 1
        assert _cached(running.complete(PROMPT)) == 0
        kinds = [[event["type"] for event in batch[1]] for _, batch in _replayed(running.replay)]
        assert kinds == [["BlockStored"], ["AllBlocksCleared", "BlockStored"]]
        body = {"prompt": PROMPT, "max_tokens": 500, "stream": True}
        with running.http.stream("POST", "/v1/completions", json=body) as answer:
            parts = answer.iter_bytes()  # closes the answer when it is dropped
            next(parts)
            assert running.http.post("/reset_prefix_cache").json() == {"success": False}


def test_evictions_are_told_block_by_block() -> None:
    with worker("--blocks", "8") as running:
        for first in range(4):
            running.complete([first, *PROMPT], 1)
        stored: list[int] = []
        removed: list[int] = []
        for _, batch in _replayed(running.replay):
            for event in batch[1]:
                into = stored if event["type"] == "BlockStored" else removed
                into += event["block_hashes"]
        assert len(stored) - len(removed) == 8
        assert set(removed) < set(stored)
        # The tail of the oldest prefix goes first.
        assert removed[0] == stored[3]


def test_ranks_have_caches_and_event_streams_of_their_own() -> None:
    with worker("--data-parallel-size", "2") as running:

        def cached_on(rank: str) -> int:
            body = {"prompt": PROMPT, "max_tokens": 1}
            headers = {"X-data-parallel-rank": rank}
            return _cached(running.http.post("/v1/completions", json=body, headers=headers).json())

        assert [cached_on(rank) for rank in "1101"] == [0, 64, 0, 64]
        body = {"prompt": PROMPT}
        for bad in ("2", "-1", "x"):
            answer = running.http.post(
                "/v1/completions", json=body, headers={"X-data-parallel-rank": bad}
            )
            assert answer.status_code == 400
        sources = running.http.get("/kv_event_sources").json()["sources"]
        assert [source["data_parallel_rank"] for source in sources] == [0, 1]
        assert len({source["endpoint"] for source in sources}) == 2


# --- digest feed ---


class Gateway(http.server.BaseHTTPRequestHandler):
    """Takes heartbeats."""

    received: queue.Queue[tuple[str | None, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.put((self.headers["authorization"], json.loads(body)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002  the library's name


def test_heartbeats_report_labels_while_their_blocks_are_resident() -> None:
    handler = type("Handler", (Gateway,), {"received": queue.Queue()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    received: queue.Queue[tuple[str | None, Any]] = handler.received  # pyright: ignore[reportAttributeAccessIssue]
    label = base64.b64encode(b"k" * 32).decode()
    flags = ("--heartbeat-url", f"http://127.0.0.1:{server.server_port}/beat", "--worker-id", "w1")
    more = ("--heartbeat-key", "sesame", "--heartbeat-interval-ms", "50", "--feed", "digest")
    try:
        with worker(*flags, *more) as running:
            assert running.events == ""
            assert running.http.get("/kv_event_sources").json() == {"sources": []}
            key, first = received.get(timeout=WAIT_S)
            assert key == "Bearer sesame"
            assert (first["worker"], first["counter"], first["checkpoints"]) == ("w1", 1, [])
            assert (first["complete"], first["block_size"]) == (True, 16)
            hint = {"trunkline": {"checkpoints": [[64, label], [1024, "deeper"]]}}
            running.complete(PROMPT, kv_transfer_params=hint)
            beats = iter(lambda: received.get(timeout=WAIT_S)[1], None)
            told = next(beat for beat in beats if beat["checkpoints"])
            assert told["checkpoints"] == [label]
            assert told["boot_nonce"] == first["boot_nonce"]
            assert told["counter"] > first["counter"]
            assert 0 <= told["memory"] <= 1
            assert 0 <= told["load"] <= 1
            running.http.post("/reset_prefix_cache")
            assert next(beat for beat in beats if not beat["checkpoints"])["complete"]
    finally:
        server.shutdown()
        server.server_close()


def test_a_gateway_that_is_away_does_not_stop_the_worker() -> None:
    flags = ("--feed", "digest", "--heartbeat-interval-ms", "10")
    with worker(*flags, "--heartbeat-url", "http://127.0.0.1:9/beat") as running:
        for first in range(10):
            prompt = [first, *PROMPT]
            assert _ids(running.complete(prompt)) == _right(prompt)


def test_a_heartbeat_counts_as_accepted_with_a_status_below_300_only() -> None:
    with worker() as running:
        url = str(running.http.base_url)
        assert asyncio.run(post(f"{url}/health", "key", b"{}", WAIT_S)) is False
        assert asyncio.run(post(f"{url}/ping?a=b", "key", b"{}", WAIT_S)) is True
    assert asyncio.run(post(f"{url}/ping", "key", b"{}", WAIT_S)) is False


# --- faults ---


def test_fault_slow_stretches_all_times() -> None:
    with worker("--fault", "slow:40") as running:
        running.complete(PROMPT, 2)
        # 1 ms + 70 x 0.005 ms, forty times.
        assert running.metric("vllm:request_prefill_time_seconds_sum") == pytest.approx(0.054)


def test_fault_hang_accepts_and_never_answers_but_says_it_is_healthy() -> None:
    with worker("--fault", "hang") as running:
        with pytest.raises(httpx.ReadTimeout):
            running.http.post("/v1/completions", json={"prompt": PROMPT}, timeout=0.3)
        assert running.http.get("/health").status_code == 200


def test_fault_die_after_kills_the_process_in_the_middle_of_a_stream() -> None:
    with worker("--fault", "die-after:5", "--time-scale", "100") as running:
        body = {"prompt": PROMPT, "max_tokens": 20, "stream": True, "return_token_ids": True}
        text = bytearray()
        with (
            running.http.stream("POST", "/v1/completions", json=body) as answer,
            pytest.raises(httpx.RemoteProtocolError),
        ):
            _read_into(text, answer)
        assert text.count(b'"token_ids"') == 5
        assert b"[DONE]" not in text
        assert running.process.wait(WAIT_S) == -signal.SIGKILL


def test_fault_http_503_refuses_work_but_says_it_is_healthy() -> None:
    with worker("--fault", "http-503") as running:
        answer = running.http.post("/v1/completions", json={"prompt": PROMPT})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == 503
        assert running.http.get("/health").status_code == 200


def test_fault_wrong_events_names_other_tokens_and_answers_right() -> None:
    with worker("--fault", "wrong-events") as running:
        assert _ids(running.complete(PROMPT)) == _right(PROMPT)
        ((_, batch),) = _replayed(running.replay)
        assert batch[1][0]["token_ids"] == [token ^ 1 for token in PROMPT[:64]]


def test_fault_late_events_come_after_their_delay() -> None:
    with worker("--fault", "late-events:500") as running:
        running.complete(PROMPT)
        assert _replayed(running.replay) == []
        _until(lambda: len(_replayed(running.replay)) == 1, "the late batch")


def test_fault_drop_events_leaves_gaps_that_a_replay_fills() -> None:
    with worker("--fault", "drop-events:1") as running:
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(running.events)
        for first in range(4):
            running.complete([first, *PROMPT])
        assert socket.poll(100) == 0
        context.destroy(linger=0)
        assert len(_replayed(running.replay)) == 4


def test_fault_no_events_publishes_nothing() -> None:
    with worker("--fault", "no-events") as running:
        running.complete(PROMPT)
        assert _replayed(running.replay) == []
        assert _cached(running.complete(PROMPT)) == 64


def test_the_batched_profile_answers_right_under_concurrent_load() -> None:
    with worker("--time-scale", "0.2", profile="llama-3.1-8b-h100") as running:
        prompts = [[number, *PROMPT] * 3 for number in range(12)]
        answers: list[Any] = [None] * len(prompts)

        def ask(index: int) -> None:
            answers[index] = running.complete(prompts[index], 40)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert _ids(answer) == _right(prompt, 40)
        assert running.metric("vllm:num_requests_running") == 0
