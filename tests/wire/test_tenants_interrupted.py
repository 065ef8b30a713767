"""A revocation whose gateway was killed before the outcome: in force, and proven after a start."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fleet import Processes, until
from tenants import tenants


@pytest.fixture
def started() -> Iterator[Processes]:
    these = Processes()
    try:
        yield these
    finally:
        these.end()


def test_a_revocation_that_a_crash_cut_off_has_its_outcome_after_the_start(
    started: Processes, tmp_path: Path
) -> None:
    worker = started.worker()
    held = tenants(started, [worker.url], tmp_path)
    key = held.caller("acme")
    held.wait_leased(1)
    worker.send(signal.SIGSTOP)  # so that the ack takes its 3 s
    order = {"subject": "tenant/acme", "reason": "cut off"}

    def revoke() -> None:
        with pytest.raises(httpx.HTTPError):
            held.gateway.admin("/revoke", "POST", json=order)

    asking = threading.Thread(target=revoke)
    asking.start()
    refused = key.headers()
    body = {"model": "trunkline-sim", "prompt": [1, 2, 3], "max_tokens": 1}
    until(
        lambda: held.gateway.post("/v1/completions", body, refused).status == 403, "it is in force"
    )
    held.gateway.process.kill()
    asking.join()
    worker.send(signal.SIGCONT)

    again = tenants(started, [worker.url], tmp_path)
    assert again.gateway.post("/v1/completions", body, refused).status == 403

    def receipts() -> list[str]:
        rows = again.gateway.admin("/revocations").json()["revocations"]
        return [row["subject"] for row in rows]

    until(lambda: receipts() == ["tenant/acme"], "its receipt")

    def outcomes() -> list[object]:
        page = again.gateway.admin("/audit", params={"kind": "OUTCOME"}).json()
        return [r for r in page["records"] if r["action"] == "revoke" and r["counts"]]

    until(outcomes, "its outcome in the audit log")
