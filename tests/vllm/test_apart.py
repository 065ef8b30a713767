"""Tenants before a real engine: nothing of one is reused for another, nor after its revocation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import processes, text_of
from tenants import SHAPES, Caller, Shape, Tenants, tenants
from vllm_engines import MODEL, Engine

from conftest import Figures, Lab

WORDS = 200


@pytest.fixture(scope="module")
def fleet(
    lab: Lab, engines: list[Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tenants]:
    """A single engine, so that whatever is reused must be there."""
    folder: Path = tmp_path_factory.mktemp("apart")
    with processes() as started:
        yield tenants(started, [engines[0].url], folder, "--model-path", str(lab.model))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_tenant_reuses_its_own_and_nothing_of_another_one(
    fleet: Tenants, figures: Figures, shape: Shape
) -> None:
    prompt = text_of(WORDS, f"apart {shape}")
    acme, also_acme, zeta = (fleet.caller(name) for name in ("acme", "acme", "zeta"))
    first, again, other_key = (who.ask(shape, prompt) for who in (acme, acme, also_acme))
    stranger = zeta.ask(shape, prompt)
    own = zeta.ask(shape, prompt)
    figures.add(
        f"cached tokens of the tenant, of another tenant ({shape})",
        f"{again.cached}, {stranger.cached}",
        "above 0, 0",
    )
    assert first.cached == stranger.cached == 0
    assert again.cached == other_key.cached == own.cached > 0
    assert first.text == again.text == stranger.text == own.text


def test_an_endpoint_that_is_proxied_unread_keeps_tenants_apart_too(fleet: Tenants) -> None:
    prompt = text_of(WORDS, "responses")
    acme, zeta = (fleet.caller(name) for name in ("acme", "zeta"))
    cached = [_response_cached(who, prompt) for who in (acme, acme, zeta, zeta)]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


@pytest.mark.parametrize("verb", ["revoke", "invalidate"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)
def test_nothing_computed_before_a_raised_epoch_is_reused_after_it(
    fleet: Tenants, shape: Shape, verb: str
) -> None:
    prompt = text_of(WORDS, f"{verb} {shape}")
    acme = fleet.caller("acme")
    before = [acme.ask(shape, prompt).cached for _ in range(2)]
    fleet.raised(verb, "tenant/acme")
    if verb == "revoke":
        assert acme.answer(prompt).status == 403
        fleet.enable("tenant/acme")
    after = [acme.ask(shape, prompt).cached for _ in range(2)]
    assert before[0] == after[0] == 0
    assert before[1] == after[1] > 0


def test_a_salt_of_the_clients_own_opens_no_other_tenants_cache(fleet: Tenants) -> None:
    """Not even that of the other one, were it known: it is replaced."""
    prompt = text_of(WORDS, "stolen")
    acme, zeta = (fleet.caller(name) for name in ("acme", "zeta"))
    salted: dict[str, Any] = {"cache_salt": "one for all", "model": MODEL}
    cached = [who.answer(prompt, **salted).cached for who in (acme, acme, zeta)]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


def _response_cached(who: Caller, prompt: str) -> int:
    body = {"model": MODEL, "input": prompt, "max_output_tokens": 2, "temperature": 0}
    answer = who.gateway.client.post("/v1/responses", json=body, headers=who.headers())
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["input_tokens_details"]["cached_tokens"]
