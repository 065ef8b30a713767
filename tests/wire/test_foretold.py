"""What a gateway chose is known at the others before any event says so, as processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Answer, Processes, processes, text_of, until
from tenants import Caller, Tenants
from test_two_gateways import Fleet

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
        second = fleet.at("other", ann).answer(prompt)
        if is_blind(second):
            return False
        assert (second.worker, second.predicted > 0) == (first.worker, True)
        return True

    assert any(is_followed(number) for number in range(8))
    assert fleet.at("other", bob).answer(prompt).predicted == 0, "of another tenant it is nothing"
