"""Pulls as a gateway orders them: real gateway, real workers, and the right answers."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fleet import Answer, Gateway, Process, Processes, at_once, processes, until
from single import right

PROFILE = ("--profile", "peers-w5")  # 0.1 ms a token, 128 KiB of KV a token
LINK = ("--link-gbit", "100")  # 10 us a token
BLOCK = 16
HEAD, TAIL = 4_096, 1_024
ASKED: dict[str, Any] = {"max_tokens": 4, "return_token_ids": True}


@dataclass
class Fleet:
    gateway: Gateway
    workers: list[Process]

    def ask(self, tokens: list[int]) -> Answer:
        return self.gateway.complete(tokens, **ASKED)

    def crowd(self, head: list[int], count: int = 8) -> list[Answer]:
        """As many at once that begin alike, each of a tail of its own; every answer is checked."""
        prompts = [head + words(TAIL) for _ in range(count)]
        bodies = [{"prompt": prompt, **ASKED} for prompt in prompts]
        answers = asyncio.run(at_once(self.gateway, bodies, "/v1/completions"))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.status == 200
            assert answer.json["choices"][0]["token_ids"] == right(prompt, 4)
        return answers

    def known(self, head: list[int]) -> None:
        """One worker has the head, and the gateway knows."""
        before = self.held()
        assert self.ask([*head, 7]).status == 200
        until(lambda: self.held() - before >= len(head) // BLOCK, "events have come")

    def held(self) -> int:
        return sum(self.gateway.rank(worker)["held_blocks"] for worker in self.workers)

    def pulls(self, end: str) -> float:
        return self.gateway.metric("pulls_total", end=end)


def words(count: int) -> list[int]:
    return [random.randrange(1_000, 30_000) for _ in range(count)]


def start(started: Processes, folder: Path, count: int, *flags: str) -> Fleet:
    key = folder / "transfer.key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    keyed = ("--transfer-key-file", str(key), *LINK)
    store = ("--blocks", "2048", "--host-blocks", "8192")
    workers = started.workers(count, *PROFILE, *store, *keyed, *flags)
    gateway = started.gateway([worker.url for worker in workers], *PROFILE, *keyed)
    return Fleet(gateway, workers)


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module")
def fleet(started: Processes, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return start(started, tmp_path_factory.mktemp("keys"), 3)


def test_a_crowd_on_one_prefix_makes_other_workers_pull_it(fleet: Fleet) -> None:
    head = words(HEAD)
    fleet.known(head)
    answers = until(
        lambda: [a for a in fleet.crowd(head) if a.decision["reason"] == "cache-pull"], "a pull"
    )
    for answer in answers:
        told = answer.decision
        assert told["source"] in {worker.name for worker in fleet.workers} - {answer.worker}
        assert int(told["pulled"]) > 0
        assert float(told["transfer_ms"]) >= 0.0
        assert "x-trunkline-pulled" not in answer.response.headers
    assert any(answer.cached >= HEAD for answer in answers), "and it was there to be used"
    assert fleet.pulls("published") > 0
    tokens = fleet.gateway.metric("pulled_tokens_total")
    assert tokens > 0
    assert fleet.gateway.metric("pulled_bytes_total") == tokens * (128 << 10)
    assert fleet.gateway.metric("plans_total", plan="pull") > 0
    assert fleet.gateway.metric("pulled_wrong_bytes_total") == 0
