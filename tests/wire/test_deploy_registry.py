"""The registry of deploy/kubernetes on one machine: three servers of NATS, and two gateways."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet import STOP_S, Processes, processes, until, user
from tenants import Tenants, copy_secrets

from loopback import free_port
from trunkline.adapters.nats_process import nats_binary

MANIFESTS = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "trunkline.yaml"
PASSWORD = "p0123456789abcdef"
NAME = "trunkline-nats"


def manifest(kind: str) -> dict[str, Any]:  # Any: what YAML holds
    documents = yaml.safe_load_all(MANIFESTS.read_text("utf-8"))
    (found,) = (d for d in documents if d["kind"] == kind and d["metadata"]["name"] == NAME)
    return found


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """The servers of the manifests, each on ports of its own; what a gateway is told of them."""
    (container,) = manifest("StatefulSet")["spec"]["template"]["spec"]["containers"]
    text: str = manifest("ConfigMap")["data"]["nats.conf"]
    ports = [(free_port(), free_port(), free_port()) for _ in range(3)]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for index, (client, cluster, monitor) in enumerate(ports):
            page = folder / f"nats{index}.conf"
            mine = text.replace("port: 4222", f"port: {client}")
            mine = mine.replace("port: 6222", f"port: {cluster}")
            mine = mine.replace("127.0.0.1:8222", f"127.0.0.1:{monitor}")
            page.write_text(mine.replace("/data", str(folder / f"data{index}")))
            words = [word.replace("$(POD_NAME)", f"{NAME}-{index}") for word in container["args"]]
            words = [word.replace("$(NATS_PASSWORD)", PASSWORD) for word in words]
            words = [word.replace("/etc/nats/nats.conf", str(page)) for word in words]
            for other, (_, port, _) in enumerate(ports):
                host = f"{NAME}-{other}.{NAME}:6222"
                words = [word.replace(host, f"127.0.0.1:{port}") for word in words]
            with (folder / f"nats{index}.log").open("wb") as said:
                environ = os.environ | {"NATS_PASSWORD": PASSWORD}
                command = [nats_binary(), *words]
                children.append(subprocess.Popen(command, stdout=said, stderr=said, env=environ))
        yield ",".join(f"nats://gateway:{PASSWORD}@127.0.0.1:{client}" for client, _, _ in ports)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(STOP_S)


def test_a_key_that_one_gateway_makes_is_good_at_the_other(
    started: Processes, tmp_path: Path
) -> None:
    worker = started.worker("--profile", "tiny")
    with registry(tmp_path) as servers:
        states = [tmp_path / "g0", tmp_path / "g1"]
        first = started.gateway([worker.url], "--state-dir", str(states[0]), "--control", servers)
        copy_secrets(states[0], states[1])
        second = started.gateway([worker.url], "--state-dir", str(states[1]), "--control", servers)
        headers = Tenants(first).caller("acme").headers()

        def is_served() -> bool:
            path = "/v1/chat/completions"
            return second.client.post(path, json=user("hello"), headers=headers).status_code == 200

        until(is_served, "the other gateway has heard of the key")
        for gateway in (first, second):
            gateway.process.stop()  # while there is a registry still
