"""A real worker process with a disk behind its host memory: what comes back, and what is erased."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import until
from pulling import BLOCK, BLOCK_BYTES, Member, Pair, pair, pulled
from single import replayed

BLOCKS = 8
LONG = BLOCKS * BLOCK
PROMPT = [1_000 + index * 3 for index in range(LONG + 6)]
HOST_BLOCKS = 32


@pytest.fixture(name="folder")
def a_folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture(name="two")
def two_workers(tmp_path: Path, folder: Path) -> Iterator[tuple[Pair, Member, Member]]:
    sizes = ("--host-blocks", str(HOST_BLOCKS), "--disk-blocks", "256")
    with pair(tmp_path, *sizes, "--disk-dir", str(folder), "--eviction", "lru") as made:
        yield made


def sink(member: Member) -> None:
    """The prompt is in no memory any more: other prompts pushed it down to the disk."""
    until(lambda: member.cached(PROMPT) == LONG, "it has the prompt")
    for turn in range(12):
        other = [300 + turn * 31 + index % 700 for index in range(6 * BLOCK + 2)]
        member.ask(other)
    member.crowd_out()
    until(lambda: member.metric("trunkline:tier_bytes", tier="disk") >= LONG * 64, "it is there")


def test_what_went_down_to_disk_is_hit_and_the_answer_is_right(
    two: tuple[Pair, Member, Member], folder: Path
) -> None:
    _, member, _ = two

    def comes_back() -> bool:
        sink(member)
        is_whole = member.cached(PROMPT) == LONG
        name = "vllm:prompt_tokens_cached_by_source_total"
        return is_whole and member.metric(name, source="disk") > 0

    until(comes_back, "all of it comes back, however slow the disk is")
    assert member.metric("trunkline:integrity_alarms_total") == 0
    batches = replayed(member.process.ready["replay"])
    media = {event.get("medium") for _, batch in batches for event in batch[1]}
    assert media == {"GPU", "CPU", "DISK"}
    stored = [
        event
        for _, batch in batches
        for event in batch[1]
        if event["type"] == "BlockStored" and event["medium"] == "DISK"
    ]
    assert all(len(run["token_ids"]) == len(run["block_hashes"]) * BLOCK for run in stored)
    for path in folder.rglob("*"):
        if path.is_file():
            assert path.stat().st_size != BLOCK_BYTES, "nothing lies there in the clear"


def test_a_source_gives_only_what_is_in_memory_and_the_rest_is_computed(
    two: tuple[Pair, Member, Member],
) -> None:
    fleet, source, destination = two
    sink(source)
    grant = fleet.grant(source, destination, prompt=PROMPT)
    answer = destination.ask(PROMPT, fleet.order(source, grant))
    assert pulled(answer)["reason"] in (None, "tier", "miss")


def test_a_revocation_erases_what_is_on_disk_and_says_so(
    two: tuple[Pair, Member, Member], folder: Path
) -> None:
    fleet, member, _ = two
    sink(member)
    fleet.raise_epoch("tenant/t")
    receipt = member.revoke("tenant/t")
    condemned = receipt["condemned_bytes"]
    assert condemned["disk"] > 0
    assert condemned["host"] > 0

    def erased() -> Any:  # JSON
        told = member.http.get(f"/trunkline/erased?rev={fleet.rev}").json()
        return told if told["done"] else None

    told = until(erased, "all is wiped")
    assert told["bytes"] == condemned
    assert member.metric("trunkline:tier_bytes") == 0
    assert member.cached(PROMPT) == 0
    own = [path for path in folder.rglob("*") if path.is_file() and _is_of(member, path)]
    assert own == []


def _is_of(member: Member, path: Path) -> bool:
    return path.parent.name == member.pull["incarnation"] and len(path.name) == 64


def test_a_worker_that_ends_in_order_leaves_no_file(
    two: tuple[Pair, Member, Member], folder: Path
) -> None:
    fleet, member, _ = two
    sink(member)
    incarnation = member.pull["incarnation"]
    fleet.members.remove(member)
    assert member.process.stop() == 0
    left = os.listdir(folder / incarnation) if (folder / incarnation).exists() else []
    assert [name for name in left if len(name) == 64] == []
