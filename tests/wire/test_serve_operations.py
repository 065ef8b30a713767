"""What operators meet on real processes: odd workers, names, models, silent events, shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import httpx
import pytest
from fleet import (
    MODEL_FOLDER,
    STOP_S,
    TINY,
    WAIT_S,
    Gateway,
    Process,
    Processes,
    engine_script,
    free_port,
    text_of,
    until,
)
from fleet import url_of as port_of
from scripted import json_answer, worker

pytest_plugins = ["one_worker"]


async def _ok(path: str, headers: dict[str, str], body: bytes) -> bytes:
    return json_answer(b'{"choices":[]}')


def with_odd_worker(gateway: Gateway, pages: dict[str, bytes]) -> dict[str, Any]:
    """Add an engine that answers `pages`; how it is shown once it was asked for its load."""

    async def scenario() -> dict[str, Any]:
        model = {"/v1/models": b'{"data":[{"id":"trunkline-sim"}]}'}
        async with worker(engine_script(_ok, model | pages)) as odd:
            order, name = {"url": port_of(odd)}, port_of(odd).removeprefix("http://")
            added = await asyncio.to_thread(gateway.admin, "/workers", "POST", json=order)
            assert added.status_code == 202
            asked = lambda: odd.connection_count > 4  # noqa: E731
            await asyncio.to_thread(until, asked, "it was asked everything once")
            shown = await asyncio.to_thread(lambda: gateway.workers()[name])
            await asyncio.to_thread(gateway.admin, f"/workers/{name}", "DELETE")
            return shown

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "pages",
    [
        {"/metrics": b'vllm:cache_config_info{block_size="70000",num_gpu_blocks="1"} 1\n'},
        {"/metrics": b'vllm:cache_config_info{num_gpu_blocks="' + b"9" * 5_000 + b'"} 1\n'},
        {"/metrics": b"vllm:num_requests_running 1e308\nvllm:num_requests_running 1e308\n"},
        {"/kv_event_sources": b"[" * 100_000},
        {"/kv_event_sources": b'["\xff"]'},
        {"/v1/models": b'{"data":[{"id":"\xff\xfe"}]}'},
    ],
)
def test_no_answer_of_a_worker_ends_the_gateway(gateway: Gateway, pages: dict[str, bytes]) -> None:
    shown = with_odd_worker(gateway, pages)
    assert shown["detail"]["capacity_blocks"] in (None, 1)
    assert gateway.process.child.poll() is None
    assert "Traceback" not in gateway.process.log()
    assert gateway.chat("hello").status == 200


@pytest.mark.parametrize(
    ("order", "part"),
    [
        ({"url": "http://127.0.0.1:1", "api_key": "é"}, "api_key holds"),
        ({"url": "http://127.0.0.1:1", "api_key": "a\r\nx: y"}, "api_key holds"),
        ({"url": "http://127.0.0.1:1/é"}, "beyond ASCII"),
        ({"url": "http://a..b:1"}, "empty label"),
        ({"url": "http://127.0.0.1:1#events=http://x"}, "event endpoint"),
    ],
)
def test_what_no_request_could_carry_is_refused_at_the_door(
    gateway: Gateway, order: dict[str, str], part: str
) -> None:
    reply = gateway.admin("/workers", "POST", json=order)
    assert reply.status_code == 400
    assert part in reply.json()["error"]["message"]
    assert gateway.process.child.poll() is None


def test_two_base_paths_on_one_host_are_two_workers_found_by_name_and_by_url(
    gateway: Gateway,
) -> None:
    host = f"127.0.0.1:{free_port()}"
    for base in ("w1", "w2"):
        reply = gateway.admin("/workers", "POST", json={"url": f"HTTP://{host}/{base}/"})
        assert (reply.status_code, reply.json()["worker"]) == (202, f"{host}/{base}")
    assert {f"{host}/w1", f"{host}/w2"} <= set(gateway.workers())
    assert gateway.admin(f"/workers/{host}/w1").json()["url"] == f"http://{host}/w1"
    removed = gateway.admin("/remove_worker", "POST", params={"url": f"http://{host}/w1/"})
    assert removed.status_code == 202
    assert gateway.admin(f"/workers/{host}/w1").status_code == 404
    assert gateway.admin(f"/workers/{host}/w2", "DELETE").status_code == 202


def test_a_url_in_capitals_or_without_its_port_names_the_same_worker(gateway: Gateway) -> None:
    assert gateway.admin("/add_worker", "POST", params={"url": "http://Localhost"}).json() == {
        "worker": "localhost:80", "state": "joining", "reason": ""
    }  # fmt: skip
    for url in ("http://LOCALHOST", "http://localhost:80/"):
        assert gateway.admin("/add_worker", "POST", params={"url": url}).status_code == 202
    assert gateway.admin("/workers/localhost").json()["worker"] == "localhost:80"
    gone = gateway.admin("/remove_worker", "POST", params={"url": "http://LOCALHOST"})
    assert gone.status_code == 202


def test_a_worker_of_another_model_is_shown_and_gets_nothing(
    started: Processes, gateway: Gateway
) -> None:
    stranger = started.worker(*TINY, "--model", "another")
    gateway.admin("/workers", "POST", json={"url": stranger.url})
    reason = "serves another; this gateway serves trunkline-sim"
    until(lambda: gateway.worker(stranger)["reason"] == reason, "it was asked")
    assert gateway.worker(stranger)["state"] == "joining"
    listed = gateway.client.get("/v1/models").json()["data"]
    assert [row["id"] for row in listed] == ["trunkline-sim"]
    refused = gateway.chat("hello", model="another")
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert gateway.chat("hello", model="trunkline-sim").status == 200
    gateway.admin(f"/workers/{stranger.name}", "DELETE")


def test_the_context_that_is_listed_is_that_of_the_smallest_worker(
    started: Processes, gateway: Gateway
) -> None:
    small = started.worker(*TINY, "--max-model-len", "2048")
    before = gateway.client.get("/v1/models").json()["data"][0]["max_model_len"]
    gateway.admin("/workers", "POST", json={"url": small.url, "model_id": "trunkline-sim"})
    gateway.wait_ready(2)
    assert gateway.worker(small)["detail"]["max_model_len"] == 2_048
    assert gateway.client.get("/v1/models").json()["data"][0]["max_model_len"] == 2_048 < before
    refused = gateway.chat(text_of(2_100, "too long"))
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "the context has 2048" in refused.error["message"]
    gateway.admin(f"/workers/{small.name}", "DELETE")


def test_c57_a_worker_that_announces_events_and_sends_none_is_approximate(
    started: Processes,
) -> None:
    silent = started.worker(*TINY, "--fault", "no-events")
    gateway = started.gateway([silent.url], *TINY)
    assert gateway.worker(silent)["mode"] == "exact"
    prompt = text_of(300, "silent")

    def is_found_out() -> bool:
        gateway.chat(prompt)
        return gateway.worker(silent)["mode"] != "exact"

    until(is_found_out, "its silence was noticed")
    row = gateway.worker(silent)
    assert (row["mode"], row["detail"]["degraded"]) == ("approximate", ["events"])
    assert row["reason"].startswith("no events since start")
    assert gateway.metric("worker_degraded", worker=silent.name) == 1
    assert gateway.chat(prompt).predicted > 256
    assert gateway.process.log().count("worker.no_events") == 1


def test_events_that_the_engine_does_not_announce_are_found_where_the_operator_says(
    started: Processes,
) -> None:
    events_port = free_port()
    publisher = started.worker(*TINY, "--events-port", str(events_port))
    sources = httpx.get(f"{publisher.url}/kv_event_sources").json()
    replay_port = sources["0"]["replay_endpoint"].rpartition(":")[2]

    async def scenario() -> None:
        async with worker(engine_script(_ok)) as mute:
            url = f"{port_of(mute)}#events=tcp://*:{events_port}&replay=tcp://*:{replay_port}"
            told = (*TINY, "--model-path", str(MODEL_FOLDER))
            gateway = await asyncio.to_thread(started.gateway, [url], *told)
            name = port_of(mute).removeprefix("http://")
            row = lambda: gateway.workers()[name]  # noqa: E731
            assert (await asyncio.to_thread(row))["mode"] == "exact"
            body = {"prompt": text_of(300, "events"), "max_tokens": 1}
            post = lambda: httpx.post(f"{publisher.url}/v1/completions", json=body, timeout=60)  # noqa: E731
            assert (await asyncio.to_thread(post)).status_code == 200
            heard = lambda: row()["detail"]["ranks"][0]["feed_stats"]["batches"]  # noqa: E731
            await asyncio.to_thread(until, heard, "an event came")

    asyncio.run(scenario())


def test_an_engine_whose_tokenizer_nobody_told_is_approximate_and_says_what_helps(
    started: Processes,
) -> None:
    async def scenario() -> None:
        async with worker(engine_script(_ok)) as engine:
            gateway = await asyncio.to_thread(started.gateway, [port_of(engine)], *TINY)
            name = port_of(engine).removeprefix("http://")
            row = (await asyncio.to_thread(gateway.workers))[name]
            assert (row["state"], row["mode"]) == ("ready", "approximate")
            assert "--model-path" in row["reason"]
            for _ in range(2):
                answer = await asyncio.to_thread(gateway.chat, "The same words. " * 60)
                assert answer.status == 200
            told = (await asyncio.to_thread(gateway.admin, "/decisions")).json()
            assert told["decisions"][0]["matched_tokens"] > 100, "the second was expected there"

    asyncio.run(scenario())


def test_each_request_has_a_line_at_debug_and_only_there(
    started: Processes, simulated: Process
) -> None:
    flags = ("--log-level", "debug", "--log-format", "json")
    told = started.gateway([simulated.url], *TINY, *flags)
    told.chat("a secret prompt")

    def lines() -> list[dict[str, Any]]:
        every = [json.loads(line) for line in told.process.log().splitlines()]
        return [line for line in every if line["event"] == "request.finished"]

    until(lines, "the request is in the log")
    [line] = lines()
    assert (line["status"], line["worker"], line["attempts"]) == (200, simulated.name, 1)
    assert "secret prompt" not in told.process.log()
    quiet = started.gateway([simulated.url], *TINY)
    quiet.chat("a prompt")
    quiet.process.stop()
    assert "request.finished" not in quiet.process.log()


def test_a_second_signal_ends_the_streams_that_the_first_waits_for(started: Processes) -> None:
    slow = started.worker("--profile", "fifo:5,0.01,1000")
    gateway = started.gateway([slow.url], *TINY)
    body = {"prompt": "hello", "max_tokens": 60, "stream": True}
    with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
        words = answer.iter_lines()
        next(words)
        gateway.process.send(signal.SIGTERM)
        until(lambda: _is_closed(gateway.url), "it takes nothing new")
        assert gateway.process.child.poll() is None, "the stream goes on"
        gateway.process.send(signal.SIGTERM)
        rest = "\n".join(words)  # to its end: with its 60 tokens, it would take a minute
    assert gateway.process.child.wait(STOP_S) == 0
    assert "[DONE]" not in rest
    assert '"error"' in rest


def _is_closed(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=WAIT_S)
    except httpx.NetworkError:
        return True
    return False
