"""A gateway in front of a worker with host memory: what it learns of it, and who hits there."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Process, Processes, processes, until
from pulling import LONG, host_bytes, new_prompt, pair, ready
from single import replayed
from tenants import Caller, Tenants, tenants

from trunkline.core.simkv import answer_tokens

BLOCK = 16
PROMPT = [1_000 + index * 3 % 900 for index in range(8 * BLOCK + 5)]
FLAGS = ("--profile", "tiny", "--blocks", "48", "--host-blocks", "512")


@pytest.fixture(name="started")
def some_processes() -> Iterator[Processes]:
    with processes() as these:
        yield these


def cached(caller: Caller, prompt: list[int]) -> int:
    """Tokens that came out of a cache; the answer is right."""
    body = {"max_tokens": 4, "return_token_ids": True}
    answer = caller.gateway.complete(prompt, caller.headers(), **body)
    assert answer.status == 200, answer.response.text
    told = answer.json
    assert told["choices"][0]["token_ids"] == answer_tokens(array("I", prompt), 4, 4_096).tolist()
    return told["usage"]["prompt_tokens_details"]["cached_tokens"]


def flood(fleet: Tenants, prefix: str = "crowd") -> None:
    """Others' prompts, until nothing of before is on the device."""
    crowd = fleet.caller(prefix)
    for turn in range(6):
        cached(crowd, [300 + turn * 97 + index % 700 for index in range(20 * BLOCK)])


def metric(worker: Process, name: str, label: str) -> float:
    page = httpx.get(f"{worker.url}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith(name) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_the_gateway_knows_what_left_the_device_and_its_own_tenant_hits_it_d16(
    started: Processes, tmp_path: Path
) -> None:
    worker = started.worker(*FLAGS)
    fleet = tenants(started, [worker.url], tmp_path)
    mine, theirs = fleet.caller("acme"), fleet.caller("bolt")
    until(lambda: cached(mine, PROMPT) == 8 * BLOCK, "it is there")
    flood(fleet)
    before = metric(worker, "vllm:prompt_tokens_cached_by_source_total", 'source="host"')

    def comes_back() -> bool:
        flood(fleet)
        return cached(mine, PROMPT) == 8 * BLOCK

    until(comes_back, "host memory has it")
    after = metric(worker, "vllm:prompt_tokens_cached_by_source_total", 'source="host"')
    assert after > before
    assert cached(theirs, PROMPT) == 0, "nothing of it is another tenant's"
    rank = fleet.gateway.rank(worker)
    assert rank["feed_state"] == "live"
    row: Any = fleet.gateway.worker(worker)
    assert row["state"] == "ready"


def test_what_a_tenant_has_in_host_memory_goes_with_its_revocation(
    started: Processes, tmp_path: Path
) -> None:
    worker = started.worker(*FLAGS)
    fleet = tenants(started, [worker.url], tmp_path)
    mine = fleet.caller("acme")
    until(lambda: cached(mine, PROMPT) == 8 * BLOCK, "it is there")
    flood(fleet)
    receipt = fleet.raised("invalidate", "tenant/acme")
    assert receipt["condemned_bytes"]["host"] >= 8 * BLOCK * 64
    assert cached(mine, PROMPT) == 0


def test_ranks_share_host_memory_and_each_tells_of_it(tmp_path: Path) -> None:
    with pair(tmp_path, "--data-parallel-size", "2") as (fleet, worker, _):
        prompt = new_prompt()
        first, second = ({"x-data-parallel-rank": rank} for rank in ("0", "1"))
        until(lambda: worker.cached(prompt, first) == LONG, "the first rank has it")
        until(lambda: worker.cached(prompt, second) == LONG, "so has the other one")
        assert worker.metric("vllm:prompt_tokens_cached_by_source_total", source="host") >= LONG
        sources = worker.http.get("/kv_event_sources").json()
        for source in sources.values():
            batches = replayed(source["replay_endpoint"])
            events = [event for _, batch in batches for event in batch[1]]
            stored = [event for event in events if event.get("medium") == "CPU"]
            assert [event["token_ids"] for event in stored] == [prompt[:LONG]]
        assert len(sources) == 2
        assert fleet.rev == 1


def test_a_reset_empties_host_memory_too(tmp_path: Path) -> None:
    with pair(tmp_path) as (_, worker, _):
        prompt = new_prompt()
        ready(worker, prompt)
        assert worker.http.post("/reset_prefix_cache").json() == {"success": True}
        assert host_bytes(worker) == 0
        assert worker.cached(prompt) == 0
        ready(worker, prompt)
