"""A gateway that begins anew learns from the one beside it what no worker's ring tells any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Processes, free_port, processes, text_of, until
from several import Fleet, cached
from tenants import Tenants

from nats_desk import NatsServer, nats_server

PROMPTS = [text_of(60, f"prompt {number}") for number in range(6)]


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as made:
        yield made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as made:
        yield made


def test_a_killed_gateway_is_told_by_the_other_one_what_the_ring_has_lost(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path, event_ring=2)
    one, other = fleet.begin("one"), fleet.begin("other")
    ann = one.caller("acme", "ann")
    there = fleet.at("other", ann)
    assert ann.answer("x").status == 200
    until(lambda: there.answer("x").status == 200, "the key is known there")
    one.wait_leased(1)
    other.wait_leased(1)
    for prompt in PROMPTS:
        until(lambda prompt=prompt: cached(there, prompt) > 0, "it is cached")
    blocks = held(other)
    until(lambda: held(one) == blocks, "both heard the same")

    one.gateway.process.kill()
    one = fleet.begin("one")
    until(lambda: one.gateway.metric("handovers_total", outcome="taken") == 1, "it was told")
    assert held(one) == held(other) == blocks
    here = fleet.at("one", ann)
    for prompt in PROMPTS:
        decision = here.answer(prompt).response.headers["x-trunkline-decision"]
        shown = one.gateway.admin(f"/decisions/{decision}").json()
        assert shown["matched_tokens"] > 0, "it knew before it was asked"
    assert other.gateway.metric("handovers_total", outcome="told") == 1
    assert "handover.taken" in one.gateway.process.log()


def test_a_gateway_that_cannot_reach_a_workers_events_hears_them_over_the_other_one(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path)
    one = fleet.begin("one")
    ann = one.caller("acme", "ann")
    one.wait_leased(1)
    for prompt in PROMPTS[:3]:
        until(lambda prompt=prompt: cached(ann, prompt) > 0, "it is cached")
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    fleet.urls = [f"{url}#events={nowhere}&replay={nowhere}" for url in fleet.urls]
    deaf = fleet.begin("deaf")
    there = fleet.at("deaf", ann)
    until(lambda: there.answer("x").status == 200, "the key is known there")
    deaf.wait_leased(1)
    until(lambda: "feed.relayed" in deaf.gateway.process.log(), "it is heard over the other one")
    assert deaf.gateway.metric("relayed_feeds_active") == 1
    for prompt in PROMPTS[3:]:
        until(lambda prompt=prompt: cached(ann, prompt) > 0, "it is cached")
    until(lambda: held(deaf) == held(one), "what comes is told, and what came before handed over")
    assert deaf.gateway.metric("handovers_total", outcome="taken") == 1
    assert deaf.gateway.metric("relayed_batches_total", way="heard") > 0
    answer = there.answer(PROMPTS[-1])
    assert (answer.status, answer.cached > 0) == (200, True)
    shown = deaf.gateway.admin(
        f"/decisions/{answer.response.headers['x-trunkline-decision']}"
    ).json()
    assert shown["matched_tokens"] > 0, "it knew before it was asked"

    one.gateway.process.kill()
    until(lambda: "feed.relay_lost" in deaf.gateway.process.log(), "nobody tells any more")
    assert there.answer(PROMPTS[0]).status == 200
    fleet.urls = [url.partition("#")[0] for url in fleet.urls]
    fleet.begin("one")
    until(lambda: deaf.gateway.process.log().count("feed.relayed") == 2, "it is told again")


def held(gateway: Tenants) -> int:
    rows = gateway.gateway.workers().values()
    return sum(rank["held_blocks"] for row in rows for rank in row["detail"]["ranks"])
