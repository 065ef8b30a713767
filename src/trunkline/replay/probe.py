"""Whether a target answers at all, asked before a whole trace is sent into the void.

One small request with a short time-out. Must never judge the model or its speed. Read `command.py`
next.
"""

from __future__ import annotations

import ssl

from trunkline.errors import ConfigError, WorkerLost, WorkerTimeout
from trunkline.ports.worker import Endpoint, Fetch
from trunkline.replay.client import Target

PROBE_MS = 5_000.0
_PATH = "/v1/models"


async def probe(url: str, api_key: str, fetch: Fetch) -> None:
    """Raises ConfigError, naming the address and the remedy, where a replay could only fail."""
    try:
        target = Target.parse(url)
    except ValueError as error:
        raise ConfigError(f"--target: {error}") from error
    endpoint = Endpoint(
        host=target.host,
        port=target.port,
        host_header=target.host_header,
        base_path=target.base_path,
        tls=ssl.create_default_context() if target.is_tls else None,
        api_key=api_key,
    )
    shown = f"{'https' if target.is_tls else 'http'}://{target.host_header}{target.base_path}"
    try:
        status, _ = await fetch(endpoint, "GET", _PATH, timeout_ms=PROBE_MS)
    except (WorkerLost, WorkerTimeout) as error:
        raise ConfigError(
            f"--target {shown} cannot be replayed against: {error}; is the gateway up there?"
            " Without --target a fleet is started for you"
        ) from error
    problem = _problem(status)
    if problem:
        raise ConfigError(f"--target {shown}{_PATH} answered {status}: {problem}")


def _problem(status: int) -> str:
    if status in (401, 403):
        return "give the gateway's key with --api-key"
    if status >= 500:
        return "the gateway is not ready; see /workers on its admin port"
    return "" if status == 200 else "no OpenAI server there; check the address"
