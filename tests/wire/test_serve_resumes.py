"""Real workers killed under running streams: each answer is the one that nothing happened to."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fleet import WAIT_S, Gateway, Processes, processes, text_of, until

PROFILE = ("--profile", "fifo:2,0.001,20")
"""A token each 20 ms."""
KILLS = 6
STREAMS = 64
TOKENS = 60
PATIENT = (
    "--retry-max-retries", "8", "--retry-budget-floor-per-s", "1000",
    "--cb-failure-threshold", "1000",
)  # fmt: skip


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as running:
        yield running


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """Chats and completions, by text and by ids, with shared beginnings."""
    text = f"{text_of(80, number % 5)} {text_of(20, number)}"
    more: dict[str, Any] = {
        "stream": True, "max_tokens": TOKENS, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if number % 2:
        more["return_token_ids"] = True
    if number % 4 < 2:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more}
    return "/v1/completions", {"prompt": text, **more}


async def stream(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """What one client makes of its stream."""
    path, body = body_of(number)
    reply = await client.post(path, json=body)
    assert reply.status_code == 200
    text, ids, names, usage = "", list[int](), set[str](), {}
    assert reply.text.endswith("data: [DONE]\n\n"), (number, reply.text[-300:])
    for line in reply.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        names.add(f"{event['id']} {event['created']} {event['object']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice.get("text", "") + choice.get("delta", {}).get("content", "")
            ids += choice.get("token_ids") or []
    assert len(names) == 1
    seams = reply.text.count(": resumed n=")
    assert usage.get("x_resumes", 0) == seams
    counts = [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]
    return {"text": text, "ids": ids, "counts": counts, "seams": seams}


async def streams(gateway: Gateway) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S, limits=limits) as client:
        return await asyncio.gather(*(stream(client, number) for number in range(STREAMS)))


def test_f1_streams_of_workers_that_are_killed_are_those_that_nothing_happened_to(
    started: Processes,
) -> None:
    """F1, bounded; all of it is `make chaos`."""
    workers = started.workers(4, *PROFILE)
    gateway = started.gateway([w.url for w in workers], *PROFILE, *PATIENT)
    dice, alive = random.Random(1), list(workers)

    def kill_one() -> None:
        """One that has something to lose; its next life is back before the next one is killed."""
        rows = gateway.workers()
        busy = [one for one in alive if rows[one.name]["requests_active"]]
        if busy:
            victim = dice.choice(busy)
            victim.kill()
            alive.remove(victim)
            alive.append(started.worker(*PROFILE, "--port", str(victim.port)))
            # Else there would be nowhere to go on after some more kills.
            until(lambda: gateway.worker(victim)["state"] == "ready", "it may be chosen again")

    async def under_fire() -> list[dict[str, Any]]:
        told = asyncio.create_task(streams(gateway))
        for _ in range(KILLS):
            if told.done():
                break
            await asyncio.sleep(dice.uniform(0.0, 0.3))
            await asyncio.to_thread(kill_one)
        return await told

    hit: list[dict[str, Any]] = []
    rounds = 0
    while sum(one["seams"] for one in hit) < STREAMS // 4 and rounds < 5:
        hit += asyncio.run(under_fire())
        rounds += 1
    spared = asyncio.run(streams(gateway))
    assert sum(one["seams"] for one in spared) == 0
    assert sum(one["seams"] for one in hit) >= STREAMS // 4
    for index, one in enumerate(hit):
        right = spared[index % STREAMS]
        assert {**one, "seams": 0} == right, f"stream {index % STREAMS} of round {index // STREAMS}"
        assert one["counts"][1] == TOKENS
    gateway.wait_quiet()
    assert gateway.metric("broken_streams_total") == 0
    assert gateway.metric("resumed_streams_total") >= STREAMS // 4
