"""Known mistakes of gateways, checked on real processes: restarts, and workers that want a key."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import (
    MODEL_FOLDER,
    WAIT_S,
    Processes,
    free_port,
    processes,
    text_of,
    until,
    url_of,
)
from scripted import Script, Served, json_answer, worker

TINY = ("--profile", "tiny")
KEY = "sk-worker-0123456789"


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


def test_c25_a_gateway_that_is_killed_under_load_serves_again_and_learns_what_is_there(
    started: Processes, tmp_path: Path
) -> None:
    key = tmp_path / "root.key"  # else its next life would have other salts
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    rooted = ("--root-key-file", str(key))
    workers = started.workers(2, *TINY)
    urls = [process.url for process in workers]
    prompts = [text_of(120, f"c25 {number}") for number in range(4)]
    first = started.gateway(urls, *TINY, *rooted)
    with ThreadPoolExecutor(8) as pool:
        load = [pool.submit(first.chat, prompts[n % 4], max_tokens=64) for n in range(40)]
        until(lambda: any(one.done() for one in load), "the load is under way")
        first.process.kill()
        ends = [one.exception() for one in load]
    assert any(isinstance(end, httpx.TransportError) for end in ends), "it died under load"

    again = started.gateway(urls, *TINY, *rooted)  # waits until both may be chosen
    held = lambda: sum(again.rank(process)["held_blocks"] for process in workers)  # noqa: E731
    until(lambda: held() > 7, "what its first life had computed is told again")
    answers = [again.chat(prompt) for prompt in prompts]
    assert [answer.status for answer in answers] == [200] * 4
    assert any(answer.predicted > 0 for answer in answers), "before it was asked for anything"
    texts = [answer.json["choices"][0]["message"]["content"] for answer in answers]
    until(lambda: all(again.chat(prompt).predicted > 0 for prompt in prompts), "all is known again")
    for prompt, text in zip(prompts, texts, strict=True):
        answer = again.chat(prompt)
        assert answer.json["choices"][0]["message"]["content"] == text, "a false hit says otherwise"
        assert answer.cached >= answer.predicted > 0


def keyed_engine(asked: list[tuple[str, str]]) -> Script:
    """An engine that wants its key on every path; it notes what came without."""
    metrics = (
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
        b"vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n"
    )
    usage: dict[str, Any] = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
    pages = {
        "/v1/models": b'{"data":[{"id":"trunkline-sim"}]}',
        "/health": b"",
        "/metrics": metrics,
        "/kv_event_sources": json.dumps(
            {"sources": [{"data_parallel_rank": 0, "endpoint": f"tcp://*:{free_port()}"}]}
        ).encode(),
    }

    async def script(served: Served) -> None:
        while True:
            first, headers, _ = await served.request()
            method, path, _ = first.split(" ")
            told = headers.get("authorization", "")
            asked.append((path, told))
            if told != f"Bearer {KEY}":
                await served.send(json_answer(b"{}", "401 Unauthorized"))
            elif method == "POST":
                body = {"choices": [{"text": "x"}], "usage": usage}
                await served.send(json_answer(json.dumps(body).encode()))
            elif path in pages:
                await served.send(json_answer(pages[path]))
            else:
                await served.send(json_answer(b"{}", "404 Not Found"))

    return script


def test_c87_a_worker_that_wants_its_key_on_every_path_is_ready_followed_and_tested(
    started: Processes,
) -> None:
    asked: list[tuple[str, str]] = []

    async def scenario() -> None:
        async with worker(keyed_engine(asked)) as engine:
            name = url_of(engine).removeprefix("http://")
            gateway = await asyncio.to_thread(
                started.gateway,
                [],
                *TINY,
                "--model-path",
                str(MODEL_FOLDER),
                "--no-disable-self-test",
            )
            order = {"url": url_of(engine), "api_key": KEY}
            added = await asyncio.to_thread(gateway.admin, "/workers", "POST", json=order)
            assert added.status_code == 202
            row = lambda: gateway.workers()[name]  # noqa: E731
            await asyncio.to_thread(until, lambda: row()["state"] == "ready", "it is ready")
            checked = await asyncio.to_thread(
                lambda: gateway.admin(f"/workers/{name}/check", "POST", timeout=2 * WAIT_S).json()
            )
            assert checked["detail"]["degraded"] == [], "its load is read"
            assert checked["detail"]["ranks"][0]["feed_state"] != "none", "its events are followed"
            answer = await asyncio.to_thread(gateway.complete, "hello")
            assert answer.status == 200
            assert KEY not in gateway.process.log()
            assert KEY not in await asyncio.to_thread(lambda: gateway.admin("/workers").text)
            assert KEY not in await asyncio.to_thread(lambda: gateway.admin("/config").text)
            assert KEY not in await asyncio.to_thread(lambda: gateway.admin("/doctor").text)

    asyncio.run(scenario())
    assert {told for _, told in asked} == {f"Bearer {KEY}"}, "nothing was asked without it"
    paths = {path.partition("?")[0] for path, _ in asked}
    assert {"/v1/models", "/health", "/metrics", "/kv_event_sources", "/tokenize"} <= paths
    assert {"/v1/completions", "/version"} <= paths, "the doctor visits it, too"
