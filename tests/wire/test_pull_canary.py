"""Where pulls are configured, a prefix of the gateway's own takes the whole way (D38).

What fails on it is an alarm, and a line in the explanation of each route.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Gateway, Process, Processes, processes, text_of, until

TINY = ("--profile", "tiny")


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


def start(started: Processes, folder: Path, *faults: str) -> tuple[Gateway, list[Process]]:
    """Two workers that pull from one another; the second one has the faults."""
    key = folder / "transfer.key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    keyed = ("--transfer-key-file", str(key))
    store = ("--host-blocks", "8192", *keyed)
    workers = [started.worker(*TINY, *store), started.worker(*TINY, *store, *faults)]
    urls = [worker.url for worker in workers]
    return started.gateway(urls, *TINY, *keyed, "--no-disable-self-test"), workers


def test_d38_a_canary_that_comes_through_is_counted_and_nothing_is_degraded(
    started: Processes, tmp_path: Path
) -> None:
    gateway, workers = start(started, tmp_path)
    until(lambda: gateway.metric("pull_canaries_total", end="passed") >= 2, "each pulled once")
    assert gateway.metric("pull_canaries_total", end="failed") == 0
    assert gateway.metric("pulls_degraded") == 0
    gateway.chat(text_of(40, "all is well"))
    assert gateway.admin("/decisions?limit=1").json()["decisions"][0]["notes"] == []
    workers[1].kill()
    until(lambda: gateway.worker(workers[1])["state"] == "unhealthy", "it is gone")


def test_d38_bytes_that_are_damaged_on_their_way_are_an_alarm_and_a_line_in_each_route(
    started: Processes, tmp_path: Path
) -> None:
    gateway, workers = start(started, tmp_path, "--fault", "pull-flip")
    until(lambda: gateway.metric("pulls_degraded") == 1, "the canary was lost")
    gateway.chat(text_of(40, "while it is degraded"))
    [note] = gateway.admin("/decisions?limit=1").json()["decisions"][0]["notes"]
    assert note.startswith(f"pulls to {workers[0].name} from {workers[1].name}: ")
    assert "of 64 tokens arrived" in note
    assert "pulls.degraded" in gateway.process.log()
    until(lambda: gateway.metric("pull_canaries_total", end="passed") >= 1, "the other way is well")
