"""Each fault of the simulated worker does what it says, and no more; the rest goes on."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from typing import Any

import httpx
import pytest
import zmq
from fleet import until
from single import (
    PROMPT,
    WAIT_S,
    cached,
    ids,
    replayed,
    right,
    worker,
)


def read_into(text: bytearray, answer: httpx.Response) -> None:
    for part in answer.iter_bytes():
        text += part


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
            read_into(text, answer)
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
        assert ids(running.complete(PROMPT)) == right(PROMPT)
        ((_, batch),) = replayed(running.replay)
        assert batch[1][0]["token_ids"] == [token ^ 1 for token in PROMPT[:64]]


def test_fault_late_events_come_after_their_delay() -> None:
    with worker("--fault", "late-events:500") as running:
        began_s = time.time()
        running.complete(PROMPT)
        [(_, batch)] = until(lambda: replayed(running.replay), "the late batch")
        assert batch[0] - began_s > 0.49, "when it was published"


def test_fault_drop_events_leaves_gaps_that_a_replay_fills() -> None:
    with worker("--fault", "drop-events:0.5") as running, zmq.Context() as context:
        live, first = list[int](), itertools.count()
        with context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.subscribe(b"")
            socket.connect(running.events)

            def has_gap() -> bool:
                # A subscription takes a moment; only what is missing between two counts.
                running.complete([next(first), *PROMPT])
                while socket.poll(20):
                    live.append(int.from_bytes(socket.recv_multipart()[1], "big"))
                return bool(live) and live[-1] - live[0] >= len(live)

            until(has_gap, "a batch that did not come")
        numbers = [number for number, _ in replayed(running.replay)]
        assert numbers == list(range(len(numbers)))
        assert set(live) < set(numbers)


def test_fault_no_events_publishes_nothing() -> None:
    with worker("--fault", "no-events") as running:
        running.complete(PROMPT)
        assert replayed(running.replay) == []
        assert cached(running.complete(PROMPT)) == 64


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
            assert ids(answer) == right(prompt, 40)
        until(lambda: running.metric("vllm:num_requests_running") == 0, "the end of all")
