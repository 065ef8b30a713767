"""Two real worker processes, one pulling from the other: what a pull may and may not do."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import until
from pulling import (
    BLOCK,
    BLOCK_BYTES,
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
from single import cached, events_of, replayed, right

Two = tuple[Pair, Member, Member]
OTHER_NS = "6" * 32


@pytest.fixture(scope="module", name="two")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with pair(tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest.fixture(name="prompt")
def a_prompt() -> list[int]:
    return new_prompt()


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
    "that is over": ({"deadline_ms": 1}, "grant"),
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
    "a port as text": {"port": "80"},
    "something unknown": {"more": 1},
    "more than 16 KiB": {"grant": "a" * 16_384},
}


@pytest.mark.parametrize("name", ODD_ORDERS)
def test_an_order_that_is_odd_is_refused(name: str, two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    order = fleet.order(source, "abc", **ODD_ORDERS[name])
    answer = raw(destination, prompt, order | fleet.ticket())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-trunkline-pull"


USELESS_ORDERS: dict[str, tuple[dict[str, Any], str]] = {
    "a port that is none": ({"port": 0}, "connect"),
    "a host with a path": ({"host": "a/b"}, "connect"),
    "a long socket": ({"local": "l" * 108}, "connect"),
    "no source": ({"source": ""}, "grant"),
    "a grant with spaces": ({"grant": "a b"}, "grant"),
    "no grant": ({"grant": ""}, "grant"),
    "a grant that is too long": ({"grant": "a" * 12_000}, "grant"),
}


@pytest.mark.parametrize("name", USELESS_ORDERS)
def test_an_order_that_is_of_no_use_is_rejected_and_the_request_computed(
    name: str, two: Two, prompt: list[int]
) -> None:
    fleet, source, destination = two
    changes, reason = USELESS_ORDERS[name]
    grant = fleet.grant(source, destination, prompt=prompt)
    answer = destination.ask(prompt, fleet.order(source, grant, **changes))
    told = pulled(answer)
    assert (told["end"], told["reason"], told["blocks"]) == ("rejected", reason, 0)
    assert cached(answer.json()) == 0


def test_an_order_needs_a_ticket_beside_it_and_is_given_once(two: Two, prompt: list[int]) -> None:
    fleet, source, destination = two
    order = fleet.order(source, fleet.grant(source, destination, prompt=prompt))
    assert raw(destination, prompt, order).status_code == 400
    twice = [*order.items(), *order.items(), *fleet.ticket().items()]
    assert raw(destination, prompt, twice).status_code == 400


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


@pytest.mark.parametrize("what", ["port", "key", "folder"])
def test_a_worker_that_cannot_have_what_it_needs_says_so_in_one_line(
    what: str, tmp_path: Path
) -> None:
    key_file = tmp_path / "transfer.key"
    key_file.write_text("ab" * (31 if what == "key" else 32))
    key_file.chmod(0o600)
    flags = ["--host-blocks", "8", "--transfer-key-file", str(key_file)]
    if what == "folder":
        flags += ["--disk-blocks", "8", "--disk-dir", str(key_file)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags += ["--pull-port", str(taken.getsockname()[1])] if what == "port" else []
        words = [sys.executable, "-m", "trunkline", "worker", *flags]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert {"port": "in use", "key": "64 hex digits", "folder": str(key_file)}[what] in ended.stderr
