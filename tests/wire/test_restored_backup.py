"""A state folder that was restored as a whole: only the workers remember what came after it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Processes, processes, text_of, until
from tenants import tenants


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as made:
        yield made


def test_a_state_folder_that_was_restored_as_a_whole_is_noticed_by_what_workers_know(
    started: Processes, tmp_path: Path
) -> None:
    urls = [worker.url for worker in started.workers(1, "--profile", "tiny")]
    held = tenants(started, urls, tmp_path, "--profile", "tiny")
    held.wait_leased(1)
    caller = held.caller("acme", "ann")
    prompt = text_of(40, "x")
    caller.answer(prompt)
    held.gateway.process.stop()
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    held = tenants(started, urls, tmp_path, "--profile", "tiny")
    held.wait_leased(1)
    held.raised("revoke", "tenant/acme")
    held.gateway.process.stop()
    shutil.rmtree(tmp_path / "state")
    shutil.copytree(tmp_path / "backup", tmp_path / "state")
    held = tenants(started, urls, tmp_path, "--profile", "tiny")
    until(lambda: "registry.restored" in held.gateway.process.log(), "it is said")
    held.wait_leased(1)
    answer = held.gateway.complete(prompt, {"authorization": f"Bearer {caller.key}"})
    assert (answer.status, answer.cached) == (200, 0), "the tenant is back, its cache is not"

    def subjects() -> list[str]:
        rows = held.gateway.admin("/revocations").json()["revocations"]
        return [row["subject"] for row in rows]

    until(lambda: subjects() == ["fleet"], "the receipt of the mending")
