"""A real gateway and the agent of a connector: what is told with leases arrives in its books."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Processes, processes, until

from engine_desk import Engine
from trunkline.adapters.clock import SystemClock
from trunkline.connectors.agent import Agent, AgentServer


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


def test_a_gateway_leases_a_connector_beside_its_engine_and_counts_what_it_tells(
    started: Processes, tmp_path: Path
) -> None:
    key = tmp_path / "transfer.key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    engine = Engine(clock=SystemClock(), is_leased=False)
    engine.keeper.figures.lost = 7
    server = AgentServer(
        Agent(engine.keeper, engine.belief, pull=lambda: None).app(), "127.0.0.1", 0
    )
    server.start()
    try:
        worker = started.worker("--blocks", "256")
        url = f"{worker.url}#agent=http://127.0.0.1:{server.port}"
        gateway = started.gateway([url], "--transfer-key-file", str(key))
        until(lambda: gateway.metric("recomputed_tokens_total") == 7, "a lease has told it")
        until(lambda: engine.freshness.is_valid(engine.clock.boot()), "the lease is armed")
        shown = gateway.worker(worker)["detail"]["isolation"]
        assert (shown["fence"], shown["erase"], shown["lease"]) == ("gateway", "restart", True)
    finally:
        server.close()
        engine.close()
