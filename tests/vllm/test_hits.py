"""What the gateway expects to find in a real engine's cache is what the engine reuses; what it
reuses is right; and it is what users wait less for.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import WAIT_S, Gateway, processes
from tenants import Caller, Tenants, tenants
from traffic import Ask, ids, mixed
from vllm_engines import BLOCK_TOKENS, MODEL, Engine

from conftest import Figures, Lab

REQUESTS = 200
BURST = 5
BURSTS = 8
"""The last of the requests come several at once."""
LEAST_EQUAL = 0.98
PREFIX_TOKENS = 4_096
ROUNDS = 5
MOST_OF_COLD = 0.25


@dataclass(slots=True)
class Told:
    """One answer, with what was expected of it."""

    ask: Ask
    text: str
    prompt_tokens: int
    predicted: int
    cached: int


@pytest.fixture(scope="module")
def told(
    lab: Lab, engines: list[Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Told]]:
    """Mixed traffic of three callers in two tenants."""
    folder: Path = tmp_path_factory.mktemp("mixed")
    with processes() as started:
        urls = [engine.url for engine in engines]
        fleet = tenants(started, urls, folder, "--model-path", str(lab.model))
        whose = (("acme", "ann"), ("acme", "bob"), ("zeta", "zoe"))
        callers = [fleet.caller(tenant, user) for tenant, user in whose]
        asks = itertools.islice(mixed(1, len(callers)), REQUESTS)
        answers = [_send(fleet, callers, ask) for ask in itertools.islice(asks, REQUESTS - 40)]
        with ThreadPoolExecutor(BURST) as pool:
            for _ in range(BURSTS):
                burst = list(itertools.islice(asks, BURST))
                answers += pool.map(lambda ask: _send(fleet, callers, ask), burst)
        yield answers


def test_what_is_predicted_is_what_the_engines_reuse(told: list[Told], figures: Figures) -> None:
    equal = [one for one in told if one.predicted == one.cached]
    over = [one for one in told if one.predicted > one.cached]
    differing = [
        (one.predicted, one.cached, one.prompt_tokens)
        for one in told
        if one.predicted != one.cached
    ]
    reused = sum(one.cached for one in told) / sum(one.prompt_tokens for one in told)
    figures.add(
        f"predicted = reused tokens, {len(told)} mixed requests",
        f"{len(equal) / len(told):.1%} ({len(over)} over-claims, {reused:.0%} of tokens reused)",
        f"at least {LEAST_EQUAL:.0%}",
    )
    assert len(told) == REQUESTS
    assert reused > 0.3, "nothing is shown where hardly anything is reused"
    assert len(equal) >= LEAST_EQUAL * len(told), f"(predicted, reused, prompt): {differing}"


def test_what_is_reused_changes_no_answer(
    told: list[Told], engines: list[Engine], figures: Figures
) -> None:
    """Greedy text, computed anew under a salt that nothing was stored with."""
    numbered = list(enumerate(told))
    with ThreadPoolExecutor(len(engines)) as pool:
        cold = list(
            pool.map(lambda one: _cold_text(engines[one[0] % len(engines)], *one), numbered)
        )
    hits = sum(one.cached > 0 for one in told)
    wrong = [
        (one.cached, one.text, text)
        for one, text in zip(told, cold, strict=True)
        if one.text != text
    ]
    figures.add(f"false hits in {hits} hits, by greedy text", str(len(wrong)), "0")
    assert hits > REQUESTS // 3
    assert wrong == []


def test_a_hit_takes_a_fraction_of_the_time_to_the_first_token(
    gateway: Gateway, figures: Figures
) -> None:
    dice = random.Random(time.monotonic_ns())
    shared = ids(dice, PREFIX_TOKENS)
    _ttft_s(gateway, shared + ids(dice, 8))
    gateway.wait_quiet()
    cold_s: list[float] = []
    hit_s: list[float] = []
    for _ in range(ROUNDS):
        cold_s.append(_ttft_s(gateway, ids(dice, PREFIX_TOKENS + 8)))
        hit_s.append(_ttft_s(gateway, shared + ids(dice, 8)))
    cold, hit = statistics.median(cold_s), statistics.median(hit_s)
    figures.add(
        f"TTFT at {PREFIX_TOKENS} tokens of shared prefix: cold, hit (medians of {ROUNDS})",
        f"{cold * 1e3:.0f} ms, {hit * 1e3:.0f} ms: {hit / cold:.2f}",
        f"at most {MOST_OF_COLD} of cold",
    )
    assert hit <= MOST_OF_COLD * cold


# -- how it is asked and compared ------------------------------------------------------------------


def _send(fleet: Tenants, callers: Sequence[Caller], ask: Ask) -> Told:
    body = {"model": MODEL, "temperature": 0, **ask.body}
    headers = callers[ask.caller].headers(scope=ask.scope)
    answer = fleet.gateway.client.post(ask.path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    decision = fleet.gateway.admin(f"/decisions/{answer.headers['x-trunkline-decision']}").json()
    usage = answer.json()["usage"]
    text = _text(answer)
    ask.take_answer(text)
    return Told(
        ask=ask,
        text=text,
        prompt_tokens=usage["prompt_tokens"],
        predicted=decision["matched_tokens"],
        cached=(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
    )


def _cold_text(engine: Engine, number: int, told: Told) -> str:
    salt = f"cold {number} {time.monotonic_ns()}"
    body = {"model": MODEL, "temperature": 0, "cache_salt": salt, **told.ask.body}
    answer = httpx.post(f"{engine.url}{told.ask.path}", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert not details or not details["cached_tokens"], "cold it is not"
    return _text(answer)


def _text(answer: httpx.Response) -> str:
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def _ttft_s(gateway: Gateway, prompt: list[int]) -> float:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    began = time.monotonic()
    with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                return time.monotonic() - began
    raise AssertionError("no token came")


assert PREFIX_TOKENS % BLOCK_TOKENS == 0
