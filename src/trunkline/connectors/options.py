"""What `kv_connector_extra_config` may hold, checked before anything is made of it.

Every value has a bound and a default but the memory, which an operator has to say. Read
`docs/connector.md` for what each is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from trunkline.core.eviction import Policy
from trunkline.core.transfer import MAX_GRANT_LIFE_MS, MAX_NAME_BYTES
from trunkline.errors import ConfigError
from trunkline.written import require_pull_host

_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Address = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Fa-f.:]{2,45}\Z")]


class _Wire(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    host_gib: Annotated[float, msgspec.Meta(gt=0, le=16_384)]
    agent_port: _Port
    agent_host: _Address = "127.0.0.1"
    pull_host: _Address = "127.0.0.1"
    pull_port: _Port = 0
    transfer_key_file: str = ""
    worker: Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)] = ""
    model_digest: Annotated[str, msgspec.Meta(max_length=128)] = ""
    eviction: Policy = Policy.TOURNAMENT
    staging_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    max_loads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    max_pull_ms: Annotated[float, msgspec.Meta(ge=10, le=MAX_GRANT_LIFE_MS)] = 10_000.0
    prefill_ms_per_token: Annotated[float, msgspec.Meta(gt=0, le=1_000)] = 0.1
    allow_untested_devices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """The checked settings."""

    host_bytes: int
    """Memory for blocks."""
    staging_bytes: int
    """Beside it, for what is being pulled."""
    agent_host: str
    agent_port: int
    pull_host: str
    pull_port: int
    transfer_key_file: str
    """Empty where nothing is pulled, from here or to here."""
    worker: str
    """What this engine is called in grants; empty for a name made at start."""
    model_digest: str
    """Of the weights; empty takes one from a sample of their files."""
    eviction: Policy
    max_loads: int
    max_pull_ms: float
    prefill_ms_per_token: float
    """About what computing a token takes: what a block is worth."""
    allow_untested_devices: bool


def read_options(given: Mapping[str, Any]) -> ConnectorOptions:
    """Raises ConfigError, with the name of what is wrong."""
    try:
        wire = msgspec.convert(dict(given), _Wire)
        require_pull_host(wire.pull_host)
    except ValueError as error:  # msgspec's is one
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
    host_bytes = int(wire.host_gib * 2**30)
    return ConnectorOptions(
        host_bytes=host_bytes,
        staging_bytes=int(host_bytes * wire.staging_share),
        agent_host=wire.agent_host,
        agent_port=wire.agent_port,
        pull_host=wire.pull_host,
        pull_port=wire.pull_port,
        transfer_key_file=wire.transfer_key_file,
        worker=wire.worker,
        model_digest=wire.model_digest,
        eviction=wire.eviction,
        max_loads=wire.max_loads,
        max_pull_ms=wire.max_pull_ms,
        prefill_ms_per_token=wire.prefill_ms_per_token,
        allow_untested_devices=wire.allow_untested_devices,
    )
