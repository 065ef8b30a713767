"""Pulls between real worker processes that go wrong, or end in the middle: the answer is right."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import until
from pulling import (
    BLOCK,
    BLOCKS,
    LONG,
    SALT,
    Member,
    Pair,
    host_bytes,
    new_prompt,
    pair,
    pulled,
    raw,
    ready,
    staged,
)
from single import cached, ids, right

Two = tuple[Pair, Member, Member]


@pytest.fixture(name="prompt")
def a_prompt() -> list[int]:
    return new_prompt()


# --- sources that fail ---


def test_a_flipped_bit_costs_its_block_and_the_answer_is_right(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path, source=("--fault", "pull-flip")) as (fleet, source, destination):
        ready(source, prompt)
        grant = fleet.grant(source, destination, prompt=prompt)
        answer = destination.ask(prompt, fleet.order(source, grant))
        told = pulled(answer)
        assert (told["reason"], told["blocks"]) == ("digest", BLOCKS - 1)
        assert cached(answer.json()) == LONG - BLOCK
        assert staged(destination) == 0
        assert destination.metric("trunkline:pulls_total", reason="digest") == 1


def test_a_source_that_says_nothing_costs_its_deadline_d24_d25(
    tmp_path: Path, prompt: list[int]
) -> None:
    flags = ("--pull-patience-ms", "5000")
    with (
        pair(tmp_path, *flags, source=("--fault", "pull-stall")) as (fleet, source, destination),
        ThreadPoolExecutor() as threads,
    ):
        ready(source, prompt)
        grant = fleet.grant(source, destination, prompt=prompt)
        waiting = threads.submit(destination.ask, prompt, fleet.order(source, grant))
        until(lambda: destination.metric("trunkline:pulls_running") == 1, "it waits")
        other = [token + 1 for token in prompt]
        assert ids(destination.ask(other).json()) == right(other), "others run on"
        answer = waiting.result()
        assert (pulled(answer)["end"], pulled(answer)["reason"]) == ("rejected", "timeout")
        assert cached(answer.json()) == 0
        assert destination.metric("trunkline:pulls_total") == 1
        assert destination.metric("trunkline:pulls_overdue") == 0
        assert staged(destination) == 0


def test_a_source_that_is_late_is_given_up_where_computing_is_quicker(
    tmp_path: Path, prompt: list[int]
) -> None:
    """The pull should take 1.05 s and may take 3.1 s; computing takes 2 ms."""
    flags = ("--link-gbit", "0.004", "--pull-patience-ms", "1100")
    with pair(tmp_path, *flags, source=("--fault", "pull-stall")) as (fleet, source, destination):
        ready(source, prompt)
        order = fleet.order(source, fleet.grant(source, destination, prompt=prompt))
        answer = destination.ask(prompt, order)
        told = pulled(answer)
        assert (told["end"], told["reason"], told["blocks"]) == ("cancelled", "given-up", 0)
        assert (cached(answer.json()), staged(destination)) == (0, 0)
        assert destination.metric("trunkline:pulls_overdue") == 0


def test_what_the_link_brings_later_than_computing_does_is_not_asked_for(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path, "--link-gbit", "0.004", "--pull-patience-ms", "1") as two:
        fleet, source, destination = two
        ready(source, prompt)
        order = fleet.order(source, fleet.grant(source, destination, prompt=prompt))
        assert pulled(destination.ask(prompt, order))["reason"] == "given-up"
        assert source.metric("trunkline:pull_bytes_total", direction="out") == 0


SLOW = ("--link-gbit", "0.001")
"""The pull of a prompt takes 4.2 s there."""


def _begun(
    threads: ThreadPoolExecutor, two: Two, prompt: list[int], **more: Any
) -> Any:  # a future of an answer
    fleet, source, destination = two
    ready(source, prompt)
    order = fleet.order(source, fleet.grant(source, destination, prompt=prompt, **more))
    asked = threads.submit(destination.ask, prompt, order)
    until(lambda: destination.metric("trunkline:pulls_running") == 1, "the pull runs")
    return asked


def test_a_source_that_dies_in_the_middle_costs_computing(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path, *SLOW) as two, ThreadPoolExecutor() as threads:
        fleet, source, destination = two
        asked = _begun(threads, two, prompt)
        fleet.members.remove(source)
        source.process.kill()
        answer = asked.result()
        assert pulled(answer)["end"] == "rejected"
        assert pulled(answer)["reason"] in ("lost", "connect")
        assert (cached(answer.json()), staged(destination)) == (0, 0)


def test_a_source_that_stands_still_costs_a_deadline(tmp_path: Path, prompt: list[int]) -> None:
    with pair(tmp_path, "--pull-patience-ms", "700") as (fleet, source, destination):
        ready(source, prompt)
        order = fleet.order(source, fleet.grant(source, destination, prompt=prompt))
        fleet.members.remove(source)
        source.process.send(signal.SIGSTOP)
        answer = destination.ask(prompt, order)
        assert pulled(answer)["end"] == "rejected"
        assert pulled(answer)["reason"] in ("timeout", "connect")
        assert (cached(answer.json()), staged(destination)) == (0, 0)
        assert destination.metric("trunkline:pulls_overdue") == 0


def test_the_next_life_of_a_source_gives_nothing_for_the_grants_of_the_last_d30(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path) as (fleet, source, destination):
        ready(source, prompt)
        grant = fleet.grant(source, destination, prompt=prompt, blocks=(0, 2))
        answer = destination.ask(prompt[: 2 * BLOCK + 1], fleet.order(source, grant))
        assert pulled(answer)["blocks"] == 2, "a connection is warm from here on"
        late = fleet.order(source, fleet.grant(source, destination, prompt=prompt))
        again = fleet.restart(source, "--pull-port", str(source.pull["port"]))
        ready(again, prompt)
        answer = destination.ask(prompt, late)
        assert (pulled(answer)["end"], cached(answer.json())) == ("rejected", 2 * BLOCK)
        assert pulled(answer)["reason"] in ("lost", "incarnation")
        other = [token + 1 for token in prompt]
        ready(again, other)
        fresh = fleet.order(again, fleet.grant(again, destination, prompt=other))
        assert pulled(destination.ask(other, fresh))["blocks"] == BLOCKS


# --- another source ---


def _either(fleet: Pair, sources: list[Member], destination: Member, prompt: list[int]) -> Any:
    """The order to pull from the first, and where that fails from the other."""
    deadline_ms = int(time.time() * 1_000) + LATE_MS
    orders = [
        fleet.order(one, fleet.grant(one, destination, prompt=prompt, deadline_ms=deadline_ms))
        for one in sources
    ]
    first, other = (json.loads(order["x-trunkline-pull"]) for order in orders)
    return {"x-trunkline-pull": json.dumps(first | {"other": other})}


def test_where_a_source_has_gone_the_other_gives_the_blocks(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path) as (fleet, source, destination):
        other = fleet.join()
        ready(source, prompt)
        ready(other, prompt)
        order = _either(fleet, [source, other], destination, prompt)
        _kill(fleet, source)
        answer = destination.ask(prompt, order)
        told = pulled(answer)
        assert (told["end"], told["reason"], told["blocks"]) == ("published", None, BLOCKS)
        assert told["first"]["reason"] in ("connect", "lost")
        assert cached(answer.json()) == LONG
        assert destination.metric("trunkline:pulls_total") == 2
        assert staged(destination) == 0


def test_a_source_that_leaves_during_the_second_try_costs_computing(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path, *STALLED) as (fleet, source, destination), ThreadPoolExecutor() as threads:
        other = fleet.join("--fault", "pull-stall")
        ready(other, prompt)
        order = _either(fleet, [source, other], destination, prompt)  # the first has nothing
        asked = threads.submit(destination.ask, prompt, order)
        until(lambda: destination.metric("trunkline:pulls_total", reason="miss") == 1, "it asks on")
        assert destination.metric("trunkline:pulls_running") == 1
        _kill(fleet, other)
        answer = asked.result()
        told = pulled(answer)
        assert (told["end"], told["first"]["reason"]) == ("rejected", "miss")
        assert told["reason"] in ("lost", "connect")
        assert (cached(answer.json()), staged(destination)) == (0, 0)
        assert destination.metric("trunkline:pulls_running") == 0


# --- in the middle of a pull ---


def test_what_is_revoked_while_it_is_pulled_is_never_seen(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path, *SLOW) as two, ThreadPoolExecutor() as threads:
        fleet, _, destination = two
        asked = _begun(threads, two, prompt)
        fleet.raise_epoch("tenant/t")
        receipt = destination.revoke("tenant/t", "invalidate")
        assert receipt["condemned_bytes"] == {"device": 0, "host": 0}
        answer = asked.result()
        assert pulled(answer)["end"] == "rejected"
        assert pulled(answer)["reason"] in ("epoch", "lease", "miss")
        assert (cached(answer.json()), staged(destination), host_bytes(destination)) == (0, 0, 0)


def test_a_request_that_is_revoked_while_it_pulls_is_aborted(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path, *SLOW) as two, ThreadPoolExecutor() as threads:
        fleet, source, destination = two
        ready(source, prompt)
        order = fleet.order(source, fleet.grant(source, destination, prompt=prompt))
        asked = threads.submit(raw, destination, prompt, order | fleet.ticket())
        until(lambda: destination.metric("trunkline:pulls_running") == 1, "the pull runs")
        fleet.raise_epoch("tenant/t")
        assert destination.revoke("tenant/t")["aborted"] == 1
        assert asked.result().status_code == 500
        until(lambda: destination.metric("trunkline:pulls_running") == 0, "its pull ended")
        assert (staged(destination), host_bytes(destination)) == (0, 0)


def test_a_client_that_leaves_ends_its_pull(tmp_path: Path, prompt: list[int]) -> None:
    with pair(tmp_path, *SLOW) as (fleet, source, destination):
        ready(source, prompt)
        order = fleet.order(source, fleet.grant(source, destination, prompt=prompt))
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": SALT}
        asked = destination.http.build_request(
            "POST", "/v1/completions", json=body, headers=order | fleet.ticket()
        )
        head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
        with socket.create_connection(("127.0.0.1", destination.process.port)) as link:
            link.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + asked.read())
            until(lambda: destination.metric("trunkline:pulls_running") == 1, "the pull runs")
        until(lambda: destination.metric("trunkline:pulls_running") == 0, "its pull ended")
        assert destination.metric("trunkline:pulls_total", end="cancelled") == 1
        until(lambda: source.metric("trunkline:pinned_bytes") == 0, "nothing is held for it")
        assert (staged(destination), host_bytes(destination)) == (0, 0)


def test_pulls_take_turns_on_a_link(tmp_path: Path, prompt: list[int]) -> None:
    with pair(tmp_path, "--link-gbit", "0.01") as two, ThreadPoolExecutor() as threads:
        fleet, source, destination = two
        prompts = [[token + shift for token in prompt] for shift in range(3)]
        for one in prompts:
            ready(source, one)
        orders = [
            fleet.order(source, fleet.grant(source, destination, prompt=one)) for one in prompts
        ]
        answers = list(threads.map(destination.ask, prompts, orders))
        assert [pulled(answer)["blocks"] for answer in answers] == [BLOCKS] * 3
        times = sorted(pulled(answer)["ms"] for answer in answers)
        alone_ms = LONG * 4_096 * 8 / 0.01e9 * 1e3
        # The first of them takes as long as it has to, each later one as long as those before it.
        assert times[0] >= alone_ms
        assert times[2] >= 2 * alone_ms


STALLED = ("--pull-patience-ms", "60000")
"""With a source that says nothing, pulls last until it is killed."""
LATE_MS = 55_000


def _stalled(fleet: Pair, source: Member, destination: Member, prompt: list[int]) -> dict[str, str]:
    """The order of a pull that will not come to its end by itself."""
    deadline_ms = int(time.time() * 1_000) + LATE_MS
    grant = fleet.grant(source, destination, prompt=prompt, deadline_ms=deadline_ms)
    return fleet.order(source, grant)


def _kill(fleet: Pair, source: Member) -> None:
    fleet.members.remove(source)
    source.process.kill()


def test_beyond_the_bound_of_pulls_a_request_is_computed_at_once(
    tmp_path: Path, prompt: list[int]
) -> None:
    with (
        pair(tmp_path, *STALLED, source=("--fault", "pull-stall")) as two,
        ThreadPoolExecutor(16) as threads,
    ):
        fleet, source, destination = two
        prompts = [[token + shift for token in prompt] for shift in range(9)]
        for one in prompts:
            ready(source, one)
        orders = [_stalled(fleet, source, destination, one) for one in prompts]
        waiting = [
            threads.submit(destination.ask, *asked)
            for asked in zip(prompts[:8], orders[:8], strict=True)
        ]
        until(lambda: destination.metric("trunkline:pulls_running") == 8, "as many as may be")
        told = pulled(destination.ask(prompts[8], orders[8]))
        assert (told["end"], told["reason"]) == ("rejected", "busy")
        assert destination.metric("trunkline:pulls_running") == 8, "it waited for nothing"
        _kill(fleet, source)
        assert {pulled(one.result())["end"] for one in waiting} == {"rejected"}
        assert destination.metric("trunkline:pulls_running") == 0
        assert staged(destination) == 0


def test_others_wait_for_what_is_being_pulled_and_neither_compute_nor_pull_it(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path, *SLOW) as two, ThreadPoolExecutor() as threads:
        fleet, source, destination = two
        first = _begun(threads, two, prompt)
        order = fleet.order(source, fleet.grant(source, destination, prompt=prompt))
        granted = threads.submit(destination.ask, prompt, order)
        plain = threads.submit(destination.ask, prompt)
        assert pulled(first.result())["blocks"] == BLOCKS
        assert cached(plain.result().json()) == LONG
        assert cached(granted.result().json()) == LONG
        assert pulled(granted.result())["blocks"] == 0, "there was nothing left to pull"


def test_who_waits_for_a_pull_that_comes_to_nothing_is_served(
    tmp_path: Path, prompt: list[int]
) -> None:
    with (
        pair(tmp_path, *STALLED, source=("--fault", "pull-stall")) as two,
        ThreadPoolExecutor() as threads,
    ):
        fleet, source, destination = two
        ready(source, prompt)
        order = _stalled(fleet, source, destination, prompt)
        first = threads.submit(destination.ask, prompt, order)
        until(lambda: destination.metric("trunkline:pulls_running") == 1, "the pull runs")
        waiting = [threads.submit(destination.ask, prompt) for _ in range(3)]
        until(lambda: destination.http.get("/load").json()["server_load"] == 4, "they wait")
        assert cached(destination.ask([token + 1 for token in prompt]).json()) == 0
        assert not any(one.done() for one in (first, *waiting)), "another one waited for nothing"
        _kill(fleet, source)
        assert pulled(first.result())["end"] == "rejected"
        assert all(one.result().status_code == 200 for one in waiting)
        assert (staged(destination), destination.metric("trunkline:pulls_running")) == (0, 0)
