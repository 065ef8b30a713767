"""The simulated worker as a process: its answers, its cache, the rest of its HTTP surface."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fleet import until
from single import (
    PROMPT,
    WAIT_S,
    Running,
    cached,
    events_of,
    ids,
    right,
    worker,
)

from trunkline import cli
from trunkline.adapters.event_sources import discovered_sources


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with worker() as running:
        yield running


# --- answers and cache ---


def test_a_whole_answer_is_the_expected_one_and_the_second_call_hits(shared: Running) -> None:
    prompt = [7, *PROMPT]
    first, second = shared.complete(prompt), shared.complete(prompt)
    assert ids(first) == ids(second) == right(prompt)
    assert (cached(first), cached(second)) == (0, 64)
    assert first["usage"]["prompt_tokens"] == 71
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"][0]["finish_reason"] == "length"


def test_two_salts_share_nothing_and_both_answers_are_right(shared: Running) -> None:
    prompt = [8, *PROMPT]
    answers = [shared.complete(prompt, cache_salt=salt) for salt in ("a", "b", "a", "b")]
    assert [cached(answer) for answer in answers] == [0, 0, 64, 64]
    assert all(ids(answer) == right(prompt) for answer in answers)


def test_a_batch_has_a_choice_for_each_prompt_whole_and_streamed(shared: Running) -> None:
    prompts = [[50, *PROMPT], [51, *PROMPT], [50, *PROMPT]]
    body = {"prompt": prompts, "max_tokens": 8, "return_token_ids": True}
    whole = shared.http.post("/v1/completions", json=body).json()
    expected = [right(prompt) for prompt in prompts]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in whole["choices"]] == expected
    assert whole["usage"]["prompt_tokens"] == 3 * 71
    assert whole["usage"]["completion_tokens"] == 24
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of(shared.http.post("/v1/completions", json=body).text)
    told: dict[int, list[int]] = {}
    for chunk in chunks:
        choice = chunk["choices"][0]
        told.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    assert [told[index] for index in range(3)] == expected
    assert last["usage"]["completion_tokens"] == 24
    assert cached(last) == 3 * 64, "all of them were computed before"


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
    events = events_of(answer.text)
    tokens = [one for event in events[:-2] for one in event["choices"][0]["token_ids"]]
    assert tokens == right(prompt)
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
    assert cached(second) == (known - 1) // 16 * 16


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
        events = events_of(answer.text)
        text = "".join(event["choices"][0]["text"] for event in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
        assert answer.json()["usage"]["completion_tokens"] == 4
    assert text == " " + " ".join(words[:3]) + " "
    assert reason == "stop"
    until(lambda: shared.metric("vllm:num_requests_running") == 0, "the end of the rest")


# --- the rest of the surface ---


def test_chat_and_the_equal_completion_are_the_same_tokens(shared: Running) -> None:
    chat = {
        "messages": [{"role": "user", "content": "Größe 你好 🙂"}],
        "add_generation_prompt": True,
    }
    tokenised = shared.http.post("/tokenize", json=chat).json()
    text = shared.http.post("/detokenize", json={"tokens": tokenised["tokens"]}).json()["prompt"]
    assert "Größe 你好 🙂" in text
    rendered = "<|im_start|>user\nGröße 你好 🙂<|im_end|>\n<|im_start|>assistant\n"
    same = shared.http.post("/tokenize", json={"prompt": rendered}).json()
    assert same["tokens"] == tokenised["tokens"]
    assert tokenised["count"] == len(tokenised["tokens"])
    chat_answer = shared.http.post("/v1/chat/completions", json={**chat, "max_tokens": 4}).json()
    assert chat_answer["usage"]["prompt_tokens"] == tokenised["count"]
    assert ids(shared.complete(rendered, 4)) == right(tokenised["tokens"], 4)


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
        until(lambda: running.metric("vllm:num_requests_running") == 0, "the abort")
        assert running.metric("vllm:kv_cache_usage_perc") == 0


def test_one_request_more_than_may_wait_is_answered_503() -> None:
    flags = ("--max-num-seqs", "1", "--max-waiting", "1", "--time-scale", "50")
    with worker(*flags) as running, httpx.Client(base_url=running.http.base_url) as other:
        body = {"prompt": PROMPT, "max_tokens": 500, "stream": True}
        with (
            running.http.stream("POST", "/v1/completions", json=body),
            other.stream("POST", "/v1/completions", json=body),
        ):
            until(lambda: running.metric("vllm:num_requests_waiting") == 1, "a full queue")
            answer = running.http.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert running.metric("vllm:admission_rejections_total") == 1


def test_a_term_signal_ends_it_with_status_0() -> None:
    with worker() as running:
        running.complete(PROMPT)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(WAIT_S) == 0


def test_a_worker_whose_port_is_taken_names_the_port_and_the_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["worker", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 is in use by another process" in said
    assert "--port" in said
