"""Pulls as a gateway orders them: real gateway, real workers, and the right answers."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Answer, Gateway, Process, Processes, at_once, processes, until
from single import VOCAB, right

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
    return [random.randrange(VOCAB) for _ in range(count)]


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
    def pulled() -> list[Answer]:
        head = words(HEAD)
        fleet.known(head)
        return [a for a in fleet.crowd(head) if a.decision["reason"] == "cache-pull"]

    answers = until(pulled, "a pull")
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


def test_a_worker_that_comes_later_takes_over_what_is_hot_before_it_serves(
    started: Processes, tmp_path: Path
) -> None:
    fleet = start(started, tmp_path, 2)
    head = words(HEAD)
    fleet.known(head)
    for _ in range(3):
        fleet.crowd(head, 4)
    pulled = fleet.pulls("published")
    key = str(tmp_path / "transfer.key")
    store = ("--blocks", "2048", "--host-blocks", "8192", "--transfer-key-file", key, *LINK)
    late = started.worker(*PROFILE, *store)
    fleet.gateway.admin("/workers", "POST", json={"url": late.url})
    fleet.gateway.wait_ready(3)
    until(lambda: fleet.gateway.rank(late)["held_blocks"] >= HEAD // BLOCK, "it has what is hot")
    assert fleet.pulls("published") == pulled, "no request of a client made it pull"
    fleet.workers.append(late)

    def served() -> list[Answer]:
        return [answer for answer in fleet.crowd(head, 9) if answer.worker == late.name]

    answers = until(served, "it is chosen")
    assert all(answer.cached == HEAD for answer in answers)


def test_wrong_bytes_cost_time_and_no_answer(started: Processes, tmp_path: Path) -> None:
    fleet = start(started, tmp_path, 2, "--fault", "pull-flip")

    def crowd() -> bool:
        head = words(HEAD)
        fleet.known(head)
        fleet.crowd(head)  # checks each answer
        return fleet.gateway.metric("pulled_wrong_bytes_total") > 0

    until(crowd, "a pull of wrong bytes")
    assert fleet.gateway.metric("pulls_total", reason="digest") > 0
    pulls = fleet.gateway.metric("pulls_total", reason="digest")
    assert fleet.gateway.metric("pulled_tokens_total") <= pulls * (HEAD - BLOCK)


def test_a_gateway_with_another_key_makes_nobody_pull(started: Processes, tmp_path: Path) -> None:
    fleet = start(started, tmp_path, 2)
    other = tmp_path / "other.key"
    other.write_text(secrets.token_hex(32))
    other.chmod(0o600)
    urls = [worker.url for worker in fleet.workers]
    keyed = ("--transfer-key-file", str(other), *LINK)
    wrong = Fleet(started.gateway(urls, *PROFILE, *keyed), fleet.workers)

    def crowd() -> bool:
        head = words(HEAD)
        wrong.known(head)
        assert all(a.cached < HEAD for a in wrong.crowd(head) if "pulled" in a.decision)
        return wrong.gateway.metric("pulls_total", reason="grant") > 0

    until(crowd, "a grant is refused")
    assert wrong.gateway.metric("pulls_total", end="published") == 0


@pytest.mark.parametrize("ending", [signal.SIGSTOP, signal.SIGKILL])
def test_d11_a_source_that_is_stopped_or_killed_costs_no_request(
    started: Processes, tmp_path: Path, ending: signal.Signals
) -> None:
    fleet = start(started, tmp_path, 3)
    head = words(HEAD)
    fleet.known(head)
    holder = max(fleet.workers, key=lambda one: fleet.gateway.rank(one)["held_blocks"])
    with ThreadPoolExecutor(1) as pool:
        crowd = pool.submit(fleet.crowd, head, 6)
        try:
            others = [one for one in fleet.workers if one is not holder]
            until(lambda: crowd.done() or sum(map(busy, others)) > 0, "it is under way")
            holder.send(ending)
            if ending is signal.SIGKILL:
                crowd.result()
            else:
                until(lambda: crowd.done() or sum(map(busy, others)) == 0, "the others go on")
        finally:
            holder.send(signal.SIGCONT)
        answers = crowd.result()  # which checked every answer
        assert [answer.status for answer in answers] == [200] * 6


def test_d05_d31_what_starts_anew_on_either_side_agrees_with_the_other_again(
    started: Processes, tmp_path: Path
) -> None:
    """The directory, which is the gateway's, and the caches, which are the workers'."""
    root = tmp_path / "root.key"
    root.write_text(secrets.token_hex(32))
    root.chmod(0o600)
    rooted = ("--root-key-file", str(root))
    workers = started.workers(2, *PROFILE)
    urls = [worker.url for worker in workers]
    fleet = Fleet(started.gateway(urls, *PROFILE, *rooted), workers)
    heads = [words(HEAD) for _ in range(4)]
    for head in heads:
        fleet.known(head)
    held = fleet.held()
    fleet.gateway.process.kill()
    fleet = Fleet(started.gateway(urls, *PROFILE, *rooted), workers)
    assert fleet.ask([*heads[0], 8]).status == 200, "it serves while it learns"
    until(lambda: fleet.held() >= held, "the new directory knows what the workers hold")
    assert all(fleet.ask([*head, 9]).cached == HEAD for head in heads)

    lost = max(workers, key=lambda one: fleet.gateway.rank(one)["held_blocks"])
    before = fleet.gateway.rank(lost)["incarnation"]
    lost.kill()
    started.worker(*PROFILE, "--port", str(lost.port))
    until(lambda: fleet.gateway.rank(lost)["incarnation"] > before, "its next life is noticed")
    fleet.gateway.wait_ready(2)
    for head in heads:
        answer = fleet.ask([*head, 10])
        assert answer.predicted == answer.cached, "nothing of the earlier life is counted on"


def busy(worker: Process) -> int:
    text = httpx.get(worker.url + "/metrics", timeout=30.0).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_")]
    return sum(round(float(line.rpartition(" ")[2])) for line in lines)
