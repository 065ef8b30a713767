"""A source lends what it is computing: who pulls waits there, and for no longer than it comes."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fleet import until
from pulling import BLOCKS, LONG, SALT, Member, Pair, host_bytes, new_prompt, pair, pulled, staged
from single import cached

A_SECOND = ("--fault", "slow:1000")
"""A prompt of the tests takes this source so long to compute."""
LONGER_THAN_A_TEST = ("--fault", "slow:10000")


def order(fleet: Pair, source: Member, destination: Member, prompt: list[int]) -> dict[str, str]:
    return fleet.order(source, fleet.grant(source, destination, prompt=prompt), ready_ms=1_700.0)


def test_what_is_being_computed_is_pulled_when_it_is(tmp_path: Path) -> None:
    with pair(tmp_path, source=A_SECOND) as two, ThreadPoolExecutor() as threads:
        fleet, source, destination = two
        assert source.pull["lends_owed"]
        prompt = new_prompt()
        computing = threads.submit(source.ask, prompt)
        until(lambda: source.metric("vllm:num_requests_running") == 1, "the source computes it")
        answer = destination.ask(prompt, order(fleet, source, destination, prompt))
        assert cached(answer.json()) == LONG
        assert pulled(answer) | {"ms": 0} == {
            "end": "published",
            "reason": None,
            "blocks": BLOCKS,
            "tokens": LONG,
            "bytes": LONG * 4_096,
            "ms": 0,
        }
        assert cached(computing.result().json()) == 0


def test_who_waits_for_a_prompt_whose_client_leaves_computes(tmp_path: Path) -> None:
    with pair(tmp_path, source=LONGER_THAN_A_TEST) as two, ThreadPoolExecutor() as threads:
        fleet, source, destination = two
        prompt = new_prompt()
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": SALT}
        asked = source.http.build_request(
            "POST", "/v1/completions", json=body, headers=fleet.ticket()
        )
        head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
        with socket.create_connection(("127.0.0.1", source.process.port)) as link:
            link.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + asked.read())
            until(lambda: source.metric("vllm:num_requests_running") == 1, "it computes")
            headers = order(fleet, source, destination, prompt)
            waiting = threads.submit(destination.ask, prompt, headers)
            until(lambda: source.metric("trunkline:pulls_waiting") == 1, "it is waited for")
        answer = waiting.result()
        assert cached(answer.json()) == 0
        assert (pulled(answer)["end"], pulled(answer)["reason"]) == ("rejected", "miss")
        assert source.metric("trunkline:pulls_waiting") == 0
        assert (staged(destination), host_bytes(source)) == (0, 0)
