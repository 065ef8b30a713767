"""Registered public prefixes end to end: two approvers, one filler, everybody in the audience."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Gateway, Process, Processes, until

PREFIX = list(range(100, 164))
"""Four blocks."""


@pytest.fixture
def started() -> Iterator[Processes]:
    these = Processes()
    try:
        yield these
    finally:
        these.end()


def made(gateway: Gateway, **order: Any) -> str:
    """A new key."""
    reply = gateway.admin("/keys", "POST", json={"create_tenant": True, **order})
    assert reply.status_code in (200, 201), reply.text
    return reply.json()["key"]


def cached(gateway: Gateway, key: str, prompt: list[int]) -> int:
    """Tokens of a prompt that came out of a cache."""
    body = {"model": "trunkline-sim", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    reply = gateway.post("/v1/completions", body, {"authorization": f"Bearer {key}"})
    assert reply.status == 200, reply.response.text
    return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def register(gateway: Gateway, audience: Any) -> str:
    """Proposed by the operator, approved by two officers; the prefix's name."""
    order = {
        "name": "house-prompt", "owner": "acme", "model": "trunkline-sim", "tokens": PREFIX,
        "block_tokens": 16, "audience": audience, "expires_in_s": 3_600, "reason": "shared by all",
    }  # fmt: skip
    proposed = gateway.admin("/public", "POST", json=order)
    assert proposed.status_code in (200, 201, 202), proposed.text
    for user in ("ann", "ben"):
        officer = made(gateway, tenant="acme", user=user, roles=["security.officer"])
        reply = gateway.admin(
            "/public/house-prompt/approve", "POST", headers={"authorization": f"Bearer {officer}"}
        )
        assert reply.status_code == 200, reply.text
    return "house-prompt"


def lies_ready(gateway: Gateway, worker: Process) -> None:
    """Until the filler has written the prefix, and the directory has heard of it."""

    def held() -> int:
        ranks = gateway.admin(f"/workers/{worker.name}").json()["detail"]["ranks"]
        return sum(rank["held_blocks"] for rank in ranks)

    until(lambda: held() >= len(PREFIX) // 16, "the public prefix lies at the worker")


def test_a_registered_prefix_is_warm_for_its_audience_and_for_nobody_else(
    started: Processes, tmp_path: Path
) -> None:
    worker = started.worker()
    gateway = started.gateway([worker.url], "--state-dir", str(tmp_path))
    acme, bolt, cord = (made(gateway, tenant=tenant) for tenant in ("acme", "bolt", "cord"))

    # Nothing is shared before, however popular it is.
    assert cached(gateway, acme, [*PREFIX, 1]) == 0
    assert cached(gateway, made(gateway, tenant="ante", org="bolt"), [*PREFIX, 2]) == 0
    register(gateway, ["acme", "bolt"])
    lies_ready(gateway, worker)

    def first_use(name: str, org: str) -> int:
        """By a tenant that has never sent anything."""
        return cached(gateway, made(gateway, tenant=name, org=org), [*PREFIX, 3])

    names = iter(f"bolt-{n}" for n in range(1_000))
    until(lambda: first_use(next(names), "bolt") == len(PREFIX), "the audience hits it")
    assert cached(gateway, cord, [*PREFIX, 4]) == 0, "another organisation does not"
    # What is behind the prefix stays the tenant's own.
    longer = [*PREFIX, *range(1_000, 1_032)]
    until(lambda: cached(gateway, bolt, [*longer, 7]) == len(longer), "its own lies on top")

    def late_use(name: str) -> int:
        """By a tenant that has never sent anything."""
        found = cached(gateway, made(gateway, tenant=name, org="bolt"), [*longer, 7])
        assert found <= len(PREFIX)
        return found

    late = iter(f"late-{n}" for n in range(1_000))
    until(lambda: late_use(next(late)) == len(PREFIX), "and no more than the prefix is met")

    gone = gateway.admin("/public/house-prompt", "DELETE", json={"reason": "over"})
    assert gone.status_code == 200, gone.text
    assert first_use("after", "bolt") == 0


def test_a_revoked_prefix_is_gone_at_once(started: Processes, tmp_path: Path) -> None:
    worker = started.worker()
    gateway = started.gateway([worker.url], "--state-dir", str(tmp_path))
    made(gateway, tenant="acme")
    bolt = made(gateway, tenant="bolt")
    register(gateway, "all")
    lies_ready(gateway, worker)
    until(lambda: cached(gateway, bolt, [*PREFIX, 5]) == len(PREFIX), "it is shared")

    order = {"subject": "public/house-prompt", "reason": "leaked"}
    receipt = gateway.admin("/revoke", "POST", json=order)

    assert receipt.status_code == 200, receipt.text
    assert receipt.json()["condemned_blocks"] >= len(PREFIX) // 16
    fresh = made(gateway, tenant="cord")
    assert cached(gateway, fresh, [*PREFIX, 6]) == 0
