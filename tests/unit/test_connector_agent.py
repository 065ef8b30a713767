"""The agent inside an engine: leases, orders, receipts, and what it says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_desk import BLOCK, KNOWN, Engine, Request
from trunkline.connectors import weights
from trunkline.connectors.agent import Agent
from trunkline.connectors.options import read_options
from trunkline.connectors.weights import weights_digest
from trunkline.core.transfer import PullEnd, Reason
from trunkline.errors import ConfigError
from trunkline.kv.orders import Pulled

PULL = {"worker": "w", "incarnation": "i", "host": "127.0.0.1", "port": 1}


class Desk:
    """One engine's agent, asked as over HTTP."""

    def __init__(self) -> None:
        self.engine = Engine(is_leased=False)
        self._app = Agent(self.engine.keeper, self.engine.belief, pull=lambda: PULL).app()

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
                return await client.request(method, f"/trunkline/{path}", json=body)

        return asyncio.run(call())

    def lease(self) -> dict[str, Any]:
        """The ask, and the grant for it; what the second answer says."""
        told = self.ask("POST", "lease", {"grant": None}).json()
        grant = {"ask": told["ask"], "rev": 9, "ttl_ms": 3_000.0, "epochs": KNOWN}
        return self.ask("POST", "lease", {"grant": grant}).json()


@pytest.fixture
def desk() -> Generator[Desk]:
    made = Desk()
    yield made
    made.engine.close()


def _run(desk: Desk, name: str) -> int:
    tokens = list(range(6 * BLOCK + 1))
    return desk.engine.run(Request(request_id=name, tokens=tokens)).brought_blocks


def test_a_lease_arms_reuse_and_its_answer_says_where_to_pull_and_what_holds_here(
    desk: Desk,
) -> None:
    assert _run(desk, "a") == 0
    told = desk.lease()
    assert told["pull"] == PULL
    assert (told["fence"], told["erase"], told["salt_regions"]) == ("gateway", "restart", False)
    _run(desk, "b")
    assert _run(desk, "c") == 6


def test_ends_of_pulls_go_with_one_lease_and_not_with_the_next(desk: Desk) -> None:
    desk.engine.keeper._end("n1", Pulled(end=PullEnd.REJECTED, reason=Reason.BUSY))
    assert [one["name"] for one in desk.lease()["pulled"]] == []  # the first answer had it
    desk.engine.keeper._end("n2", Pulled(end=PullEnd.REJECTED, reason=Reason.BUSY))
    told = desk.ask("POST", "lease", {"grant": None}).json()
    assert [one["name"] for one in told["pulled"]] == ["n2"]
    assert desk.ask("POST", "lease", {"grant": None}).json()["pulled"] == []


def test_an_order_condemns_at_once_counts_host_memory_and_says_when_it_is_wiped(
    desk: Desk,
) -> None:
    desk.lease()
    _run(desk, "a")
    order = {"rev": 10, "subject": "tenant/t", "epoch": 4, "verb": "revoke"}
    ack = desk.ask("POST", "revoke", order).json()
    size = desk.engine.layout.block_bytes
    assert (ack["rev"], ack["condemned_blocks"]) == (10, 6)
    assert ack["condemned_bytes"] == {"host": 6 * size}
    assert desk.ask("POST", "revoke", order).json() == ack, "told again"
    desk.engine.keeper._threads.submit(lambda: None).result()
    while desk.engine.store.erase(64):
        pass
    erased = desk.ask("GET", "erased?rev=10").json()
    assert erased == {"rev": 10, "done": True, "blocks": 6, "bytes": {"host": 6 * size}}
    assert _run(desk, "b") == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "lease", {}, 400),
        ("POST", "lease", {"grant": {"ask": "x"}}, 400),
        ("POST", "revoke", {"rev": -1, "subject": "fleet", "epoch": 1, "verb": "revoke"}, 400),
        ("POST", "revoke", {"rev": 1, "subject": "nobody", "epoch": 1, "verb": "revoke"}, 400),
        ("GET", "erased?rev=x", None, 400),
        ("GET", "erased?rev=7", None, 404),
        ("GET", "lease", None, 405),
    ],
)
def test_what_is_no_lease_and_no_order_changes_nothing(
    desk: Desk, method: str, path: str, body: Any, status: int
) -> None:
    assert desk.ask(method, path, body).status_code == status


def test_figures_add_up(desk: Desk) -> None:
    desk.lease()
    _run(desk, "a")
    _run(desk, "b")
    told = desk.ask("GET", "figures").json()
    assert told["tokens"] == {"host": 6 * BLOCK, "pull": 0, "lost": 0, "saved": 6 * BLOCK}
    store = told["store"]
    parts = [store[f"{name}_bytes"] for name in ("host", "free", "dirty", "staged", "writing")]
    assert sum(parts) == store["total_bytes"]


# --- settings ---


def test_settings_have_defaults_but_for_what_an_operator_must_say() -> None:
    options = read_options({"host_gib": 1.5, "agent_port": 8_100})
    assert (options.host_bytes, options.agent_host) == (3 << 29, "127.0.0.1")
    assert options.staging_bytes == options.host_bytes // 4


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "10.0.0.300", "1:2"])
def test_c101_a_connector_tells_nobody_to_pull_from_an_address_that_is_none(host: str) -> None:
    with pytest.raises(ConfigError, match="pull_host is"):
        read_options({"host_gib": 1, "agent_port": 8_100, "pull_host": host})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host_gib": 0}, "host_gib"),
        ({"host_gib": ...}, "host_gib"),
        ({"agent_port": 70_000}, "agent_port"),
        ({"agent_port": ...}, "agent_port"),
        ({"pull_host": "a name"}, "pull_host"),
        ({"eviction": "best"}, "eviction"),
        ({"max_loads": 0}, "max_loads"),
        ({"host_gb": 1}, "host_gb"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], said: str) -> None:
    given = {"host_gib": 1, "agent_port": 8_100} | changes
    given = {name: value for name, value in given.items() if value is not ...}
    with pytest.raises(ConfigError, match=said):
        read_options(given)


# --- weights ---


def test_d19_connector_weights_differ_wherever_they_differ_in_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("WHOLE_BYTES", 64), ("EDGE_BYTES", 16), ("SAMPLE_BYTES", 4)):
        monkeypatch.setattr(weights, name, size)
    small, large = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    small.write_bytes(bytes(64))
    large.write_bytes(bytes(4_000))
    digests = {weights_digest(tmp_path)}
    for path, at in ((small, 63), (large, 0), (large, 3_999), (large, 4_000 // 65)):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        digests.add(weights_digest(tmp_path))
    large.write_bytes(bytes(4_001))
    digests.add(weights_digest(tmp_path))
    assert len(digests) == 6


def test_a_folder_without_weights_asks_for_a_digest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_digest"):
        weights_digest(tmp_path)
