"""Workers that take no notice of where they are told to look: found out, alarmed, left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import Gateway, Processes, processes, until
from test_pulls_routed import HEAD, PROFILE, Fleet, words

from trunkline.core.heed import MAX_UNHEEDED


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


def _alarmed(gateway: Gateway) -> bool:
    return gateway.metric("workers_ignoring_pulls") >= 1


def test_c109_workers_that_ignore_the_hint_of_where_to_pull_are_alarmed_and_nothing_is_wrong(
    started: Processes,
) -> None:
    """They are said to have a peer-to-peer tier and know nothing of one: each pull is computed."""
    workers = started.workers(3, *PROFILE, "--blocks", "32768")
    urls = [f"{worker.url}#p2p=127.0.0.1:{5_710 + i}" for i, worker in enumerate(workers)]
    gateway = started.gateway(urls, *PROFILE, "--link-gbit", "100")
    fleet = Fleet(gateway, workers)

    def crowd() -> bool:
        head = words(HEAD)
        fleet.known(head)
        fleet.crowd(head)  # every answer is checked
        return _alarmed(gateway)

    until(crowd, "an alarm")
    assert gateway.metric("plans_total", plan="pull") >= MAX_UNHEEDED
    assert gateway.metric("unheeded_pulls_total") >= MAX_UNHEEDED
    assert "worker.ignores_pulls" in gateway.process.log()
    assert gateway.metric("pulled_tokens_total") == 0
    until(lambda: gateway.metric("alarm", kind="unheeded-pulls") >= 1, "it is an alarm")
    findings = gateway.admin("/doctor").json()["findings"]
    alarms = [one for one in findings if one["what"] == "alarm"]
    assert alarms
    assert all("connector" in one["remedy"] for one in alarms)
