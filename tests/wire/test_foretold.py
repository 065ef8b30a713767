"""What a gateway chose is known at the others before any event says so, as processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fleet import Answer, Processes, at_once, processes, text_of, until
from several import Fleet
from tenants import Caller, Tenants

from nats_desk import NatsServer, nats_server

ROLES = ["tenant.user", "fleet.operator"]
"""Who may see decisions."""


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as made:
        yield made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as made:
        yield made


def taken(gateway: Tenants) -> float:
    return gateway.gateway.metric("foretold_blocks_total", end="taken")


def is_known(gateway: Tenants, caller: Caller) -> bool:
    """Without a prompt, which would make its namespace known as well."""
    models = gateway.gateway.client.get("/v1/models", headers=caller.headers())
    return models.status_code == 200


def wait_heard_out(gateway: Tenants, worker: str) -> None:
    """Until no word says any more that something waits there: it would cost more than it saves."""
    name = "worker_queue_seconds"
    until(lambda: gateway.gateway.metric(name, worker=worker) == 0.0, f"{worker} is idle")


def is_blind(answer: Answer) -> bool:
    """A lease of the gateway had run out, as on a loaded machine it may: nothing was looked up."""
    assert answer.status == 200, answer.response.text
    return answer.decision["reason"] == "load-only"


def test_of_workers_without_events_a_gateway_follows_what_another_one_chose(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path, 2, feed="approximate")
    one, other = fleet.begin("one"), fleet.begin("other")
    ann = one.caller("acme", "ann", roles=ROLES)
    there = fleet.at("other", ann)
    until(lambda: there.answer("x").status == 200, "the key is known there")

    def is_followed(number: int) -> bool:
        prompt = text_of(300, ("foretold", number))
        before = taken(other)
        first = ann.answer(prompt)
        if is_blind(first):
            return False
        assert first.predicted == 0
        until(lambda: taken(other) >= before + first.prompt_tokens // 16, "it is told")
        wait_heard_out(other, first.worker)
        second = there.answer(prompt)
        if is_blind(second):
            return False
        assert second.worker == first.worker
        assert second.predicted == (first.prompt_tokens - 1) // 16 * 16
        return True

    followed = [is_followed(number) for number in range(8)]
    assert sum(followed) >= 2, followed
    assert other.gateway.metric("gateway_words_refused_total") == 0


def test_a_tenant_whom_a_gateway_meets_for_the_first_time_is_followed_there_too(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path, 2, feed="approximate")
    one, other = fleet.begin("one"), fleet.begin("other")
    bob = one.caller("beta", "bob", roles=ROLES)
    until(lambda: fleet.at("other", bob).answer("x").status == 200, "a key is known there")
    prompt = text_of(300, "first met")

    def is_followed(number: int) -> bool:
        ann = one.caller(f"acme-{number}", "ann", roles=ROLES)
        until(lambda: is_known(other, ann), "the key is known there")
        before = taken(other)
        first = ann.answer(prompt)
        if is_blind(first) or is_blind(bob.answer(text_of(40, number))):
            return False
        until(lambda: taken(other) > before, "what was told later is there, and so is the first")
        wait_heard_out(other, first.worker)
        second = fleet.at("other", ann).answer(prompt)
        if is_blind(second):
            return False
        assert (second.worker, second.predicted > 0) == (first.worker, True)
        return True

    assert any(is_followed(number) for number in range(8))
    assert fleet.at("other", bob).answer(prompt).predicted == 0, "of another tenant it is nothing"


# -- F11 ----------------------------------------------------------------------------------------


async def herd(callers: Sequence[Caller], prompt: str, count: int) -> list[Answer]:
    """So many equal prompts, shared out to the callers' gateways, at the same time."""
    bodies = [{"prompt": prompt, "max_tokens": 4} for _ in range(count)]
    asked = (
        at_once(caller.gateway, bodies[place :: len(callers)], "/v1/completions", caller.headers())
        for place, caller in enumerate(callers)
    )
    return [answer for answers in await asyncio.gather(*asked) for answer in answers]


def test_f11_of_200_equal_cold_prompts_at_three_gateways_at_most_two_are_computed_at_a_worker(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path, 3, profile="fifo:60,0.2,2")
    names = ("one", "two", "three")
    gateways = [fleet.begin(name, "--queue-target-ms", "0") for name in names]
    ann = gateways[0].caller("acme", "ann", roles=ROLES)
    callers = [fleet.at(name, ann) for name in names]
    for gateway in gateways:
        until(lambda gateway=gateway: is_known(gateway, ann), "the key is known there")

    def play(attempt: int) -> list[Answer]:
        return asyncio.run(herd(callers, text_of(400, ("herd", attempt)), 200))

    answers = next(
        answers
        for answers in (gateways[0].while_leased(play) for _ in range(5))
        if not any(map(is_blind, answers))
    )
    prefills = Counter(a.worker for a in answers if a.cached + 2 * 16 < a.prompt_tokens)
    assert prefills.total() >= 1
    assert max(prefills.values()) <= 2, prefills
