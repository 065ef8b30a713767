"""Two real worker processes, one pulling from the other: what a pull may and may not do."""

from __future__ import annotations

import itertools
import json
import secrets
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import until
from pulling import BLOCK, BLOCK_BYTES, SALT, Member, Pair, pair, pulled
from single import cached, events_of, ids, replayed, right

Two = tuple[Pair, Member, Member]
BLOCKS = 8
LONG = BLOCKS * BLOCK
OTHER_NS = "6" * 32
_numbers = itertools.count()


@pytest.fixture(scope="module", name="two")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with pair(tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest.fixture(name="prompt")
def a_prompt() -> list[int]:
    """Nobody has seen it before."""
    first = 1_000 + next(_numbers) * 7
    return [first + index * 3 % 1_000 for index in range(LONG + 6)]


def ready(source: Member, prompt: list[int]) -> None:
    """The source has the prompt's blocks in host memory, whatever its lease did meanwhile."""
    until(lambda: source.cached(prompt) == LONG, "the source has the prompt")


def staged(member: Member) -> float:
    return member.metric("trunkline:staged_bytes")


def host_bytes(member: Member) -> float:
    return member.metric("trunkline:tier_bytes", tier="host")


# --- what a pull gives ---


def test_pulled_blocks_are_hits_and_the_answer_is_the_computed_one(
    two: Two, prompt: list[int]
) -> None:
    fleet, source, destination = two
    ready(source, prompt)
    before = destination.metric("trunkline:pull_bytes_total", direction="in")
    grant = fleet.grant(source, destination, prompt=prompt)
    answer = destination.ask(prompt, fleet.order(source, grant))
    told = pulled(answer)
    assert (told["end"], told["reason"]) == ("published", None)
    assert (told["blocks"], told["tokens"], told["bytes"]) == (BLOCKS, LONG, LONG * 4_096)
    assert told["ms"] >= 1.0, "the set-up alone takes as long"
    assert cached(answer.json()) == LONG
    moved = destination.metric("trunkline:pull_bytes_total", direction="in") - before
    assert moved == LONG * 4_096
    assert source.metric("trunkline:pull_bytes_total", direction="out") >= moved
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    assert destination.metric(by_source, source="pull") >= LONG


def test_over_tcp_as_over_shared_memory(two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    ready(source, prompt)
    grant = fleet.grant(source, destination, prompt=prompt)
    answer = destination.ask(prompt, fleet.order(source, grant, local=""))
    assert pulled(answer)["blocks"] == BLOCKS
    assert cached(answer.json()) == LONG


def test_the_head_of_a_stream_says_what_became_of_the_pull(two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    ready(source, prompt)
    grant = fleet.grant(source, destination, prompt=prompt)
    answer = destination.ask(prompt, fleet.order(source, grant), stream=True)
    assert pulled(answer)["end"] == "published"
    events = events_of(answer.text)
    tokens = [one for event in events for one in event["choices"][0].get("token_ids", ())]
    assert tokens == right(prompt)


def test_only_what_is_granted_comes_and_it_goes_on_from_what_is_here(
    two: Two, prompt: list[int]
) -> None:
    fleet, source, destination = two
    ready(source, prompt)
    start = prompt[: 3 * BLOCK + 1]
    until(lambda: destination.cached(start) == 3 * BLOCK, "it has the beginning itself")
    grant = fleet.grant(source, destination, prompt=prompt, blocks=(3, 6))
    answer = destination.ask(prompt, fleet.order(source, grant))
    assert (pulled(answer)["end"], pulled(answer)["blocks"]) == ("published", 3)
    assert cached(answer.json()) == 6 * BLOCK


def test_a_run_whose_beginning_is_not_here_is_not_pulled(two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    ready(source, prompt)
    grant = fleet.grant(source, destination, prompt=prompt, blocks=(3, 6))
    answer = destination.ask(prompt, fleet.order(source, grant))
    assert (pulled(answer)["end"], pulled(answer)["reason"]) == ("rejected", "chain")
    assert cached(answer.json()) == 0


def test_what_is_here_already_is_not_pulled_again(two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    ready(source, prompt)
    ready(destination, prompt)
    grant = fleet.grant(source, destination, prompt=prompt)
    answer = destination.ask(prompt, fleet.order(source, grant))
    told = pulled(answer)
    assert (told["end"], told["reason"], told["blocks"]) == ("published", None, 0)


def test_a_block_that_the_source_lacks_ends_the_run(two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    until(lambda: source.cached(prompt[: 5 * BLOCK + 1]) == 5 * BLOCK, "it has five blocks")
    grant = fleet.grant(source, destination, prompt=prompt)
    answer = destination.ask(prompt, fleet.order(source, grant))
    told = pulled(answer)
    assert (told["end"], told["reason"], told["blocks"]) == ("published", "miss", 5)
    assert cached(answer.json()) == 5 * BLOCK


def test_pulled_blocks_are_announced_as_host_memorys_with_their_tokens(
    two: Two, prompt: list[int]
) -> None:
    fleet, source, destination = two
    ready(source, prompt)
    grant = fleet.grant(source, destination, prompt=prompt)
    destination.ask(prompt, fleet.order(source, grant))
    batches = replayed(destination.process.ready["replay"])
    events = [event for _, batch in batches for event in batch[1]]
    runs = [
        event
        for event in events
        if event["type"] == "BlockStored" and event["token_ids"] == prompt[:LONG]
    ]
    assert [run["medium"] for run in runs] == ["CPU", "GPU"], "pulled, then loaded"
    assert all(run["extra_keys"][0] == [SALT] for run in runs)


def test_what_left_the_device_is_hit_in_host_memory(two: Two, prompt: list[int]) -> None:
    _, source, _ = two
    ready(source, prompt)
    before = source.metric("vllm:prompt_tokens_cached_by_source_total", source="host")
    source.crowd_out()
    until(lambda: source.cached(prompt) == LONG, "host memory has it")
    after = source.metric("vllm:prompt_tokens_cached_by_source_total", source="host")
    assert after - before >= LONG


# --- what a grant must be ---


WRONG_GRANTS: dict[str, tuple[dict[str, Any], str]] = {
    "for another worker": ({"destination": "127.0.0.1:1"}, "grant"),
    "for another life of this one": ({"destination_incarnation": "0" * 32}, "grant"),
    "from another worker": ({"source": "127.0.0.1:1"}, "grant"),
    "from another life of the source": ({"source_incarnation": "0" * 32}, "incarnation"),
    "of another namespace": ({"ns": bytes.fromhex(OTHER_NS)}, "ns"),
    "for other blocks": ({"keys": bytes(32)}, "grant"),
    "of another layout": ({"layout": bytes(16)}, "layout"),
    "for fewer bytes": ({"max_bytes": BLOCK_BYTES}, "grant"),
    "that is over": ({"deadline_ms": 1}, "timeout"),
    "that is over in a day": ({"deadline_ms": 2**50}, "grant"),
    "of a revision not seen": ({"rev": 99}, "lease"),
    "without the tenant": ({"subjects": ("fleet", "org/o"), "epochs": (0, 0)}, "grant"),
    "of other epochs": ({"epochs": (0, 1, 0, 0)}, "grant"),
    "signed by nobody we know": ({"key": bytes(32)}, "grant"),
}


@pytest.mark.parametrize("name", WRONG_GRANTS)
def test_a_grant_that_is_not_for_this_costs_computing(
    name: str, two: Two, prompt: list[int]
) -> None:
    fleet, source, destination = two
    changes, reason = WRONG_GRANTS[name]
    ready(source, prompt)
    before = host_bytes(destination)
    grant = fleet.grant(source, destination, prompt=prompt, **changes)
    answer = destination.ask(prompt, fleet.order(source, grant))
    told = pulled(answer)
    assert (told["end"], told["reason"], told["blocks"]) == ("rejected", reason, 0)
    assert cached(answer.json()) == 0
    assert staged(destination) == 0
    assert host_bytes(destination) == before + BLOCKS * BLOCK_BYTES, "what it computed, once"


def test_a_grant_is_used_once(two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    ready(source, prompt)
    nonce = secrets.token_bytes(16)
    grant = fleet.grant(source, destination, prompt=prompt, nonce=nonce)
    assert pulled(destination.ask(prompt, fleet.order(source, grant)))["end"] == "published"
    destination.http.post("/reset_prefix_cache")
    answer = destination.ask(prompt, fleet.order(source, grant))
    assert (pulled(answer)["end"], pulled(answer)["reason"]) == ("rejected", "grant")
    assert cached(answer.json()) == 0


ODD_ORDERS: dict[str, dict[str, Any]] = {
    "a port that is none": {"port": 0},
    "a port beyond": {"port": 65_536},
    "a port as text": {"port": "80"},
    "a host with a path": {"host": "a/b"},
    "no host": {"host": ""},
    "a long socket": {"local": "l" * 108},
    "no source": {"source": ""},
    "a grant with spaces": {"grant": "a b"},
    "no grant": {"grant": ""},
    "something unknown": {"more": 1},
    "more than 4 KiB": {"grant": "a" * 4_096},
}


@pytest.mark.parametrize("name", ODD_ORDERS)
def test_an_order_that_is_odd_is_refused(name: str, two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    order = fleet.order(source, "abc", **ODD_ORDERS[name])
    answer = _raw(destination, prompt, order | fleet.ticket())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-trunkline-pull"


def test_an_order_needs_a_ticket_beside_it_and_is_given_once(two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    order = fleet.order(source, fleet.grant(source, destination, prompt=prompt))
    assert _raw(destination, prompt, order).status_code == 400
    twice = [*order.items(), *order.items(), *fleet.ticket().items()]
    assert _raw(destination, prompt, twice).status_code == 400


def _raw(member: Member, prompt: list[int], headers: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": SALT}
    return member.http.post("/v1/completions", json=body, headers=headers)


# --- two tenants ---


def test_a_tenants_blocks_are_pulled_by_itself_alone_d16(two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    ready(source, prompt)
    theirs = fleet.ticket(ns=OTHER_NS, tenant="b" * 32)
    grant = fleet.grant(source, destination, prompt=prompt)
    answer = destination.ask(prompt, fleet.order(source, grant) | theirs)
    assert pulled(answer)["end"] == "rejected"
    assert cached(answer.json()) == 0
    grant = fleet.grant(source, destination, prompt=prompt, salt="t" * 43)
    answer = destination.ask(prompt, fleet.order(source, grant) | theirs, cache_salt="t" * 43)
    assert cached(answer.json()) == 0, "another salt names nothing of the first tenant's"
    destination.http.post("/reset_prefix_cache")
    grant = fleet.grant(source, destination, prompt=prompt)
    answer = destination.ask(prompt, fleet.order(source, grant))
    assert cached(answer.json()) == LONG, "and the same one does pull"


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
        asked = threads.submit(_raw, destination, prompt, order | fleet.ticket())
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


def test_beyond_the_bound_of_pulls_a_request_is_computed_at_once(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path, "--link-gbit", "0.002") as two, ThreadPoolExecutor(16) as threads:
        fleet, source, destination = two
        ready(source, prompt)
        orders = [
            fleet.order(source, fleet.grant(source, destination, prompt=prompt)) for _ in range(9)
        ]
        answers = list(threads.map(lambda order: destination.ask(prompt, order), orders))
        reasons = [pulled(answer)["reason"] for answer in answers]
        assert reasons.count("busy") >= 1
        assert destination.metric("trunkline:pulls_running") == 0
        assert staged(destination) == 0


# --- revocation of what lies behind the device ---


def test_receipts_count_host_memory_and_are_done_when_it_is_wiped(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path) as (fleet, source, _):
        ready(source, prompt)
        source.crowd_out()
        fleet.raise_epoch("org/o")
        receipt = source.revoke("org/o")
        assert receipt["condemned_bytes"] == {"device": 0, "host": BLOCKS * BLOCK_BYTES}
        assert receipt["condemned_blocks"] == BLOCKS

        def erased() -> Any:  # JSON
            told = source.http.get(f"/trunkline/erased?rev={fleet.rev}").json()
            return told if told["done"] else None

        told = until(erased, "all is wiped")
        assert told["bytes"] == {"device": 0, "host": BLOCKS * BLOCK_BYTES}
        assert source.cached(prompt) == 0


def test_a_worker_without_the_transfer_key_says_so_and_computes(
    tmp_path: Path, prompt: list[int]
) -> None:
    with pair(tmp_path, has_key=False) as (_, source, _):
        assert "pull" not in source.told
        assert "no transfer key" in source.process.log()
        order = {"grant": "abc", "host": "127.0.0.1", "port": 1, "local": "", "source": "w"}
        answer = source.ask(prompt, {"x-trunkline-pull": json.dumps(order)})
        assert (pulled(answer)["end"], pulled(answer)["reason"]) == ("rejected", "grant")
        assert cached(answer.json()) == 0
        ready(source, prompt)
