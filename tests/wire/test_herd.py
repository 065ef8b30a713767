"""F11: many equal cold prompts at once. One is computed at a worker; the rest wait for it there, or
go elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from fleet import Answer, Gateway, Processes, at_once, processes, text_of

BLOCK = 16
PROFILES = {"fifo": ("--profile", "fifo:60,0.2,2"), "batched": ("--profile", "tiny")}


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module", params=PROFILES)
def trio(started: Processes, request: pytest.FixtureRequest) -> Gateway:
    flags = PROFILES[request.param]
    return started.gateway([w.url for w in started.workers(3, *flags)], *flags)


def _prefills(answers: list[Answer]) -> Counter[str]:
    """By worker: answers that reused less than there was, but for the block at the end."""
    return Counter(a.worker for a in answers if a.cached + 2 * BLOCK < a.prompt_tokens)


def test_f11_of_200_equal_cold_prompts_at_most_two_are_computed_at_a_worker(trio: Gateway) -> None:
    body = {"prompt": text_of(400, f"herd {trio.process.port}"), "max_tokens": 4}
    answers = asyncio.run(at_once(trio, [dict(body) for _ in range(200)], "/v1/completions"))

    assert {answer.status for answer in answers} == {200}
    prefills = _prefills(answers)
    assert prefills.total() >= 1
    assert max(prefills.values()) <= 2
    trio.wait_quiet()
