"""What an Envoy asks that carries the requests itself: `--ext-proc-port`, put together.

Read `gateway/delegated.py` for what is decided, `adapters/ext_proc_server.py` for how it is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trunkline import observe
from trunkline.config import Config
from trunkline.core.records import WorkerId
from trunkline.ports.worker import Endpoint
from trunkline.written import host_port, is_loopback

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from trunkline.assembly import Core
    from trunkline.gateway.front import Front


@asynccontextmanager
async def decides_for_envoy(
    config: Config, front: Front, cores: Sequence[Core]
) -> AsyncGenerator[None]:
    """Answers Envoy for as long as it is entered; nothing where no port is given. Raises
    ConfigError.
    """
    envoy = config.envoy
    if not envoy.ext_proc_port:
        yield
        return
    from trunkline.adapters.ext_proc_server import ExtProcServer
    from trunkline.gateway.delegated import Delegated
    from trunkline.gateway.places import Places

    places = Places()

    def workers() -> Iterable[tuple[WorkerId, Endpoint]]:
        for core in cores:
            for state in core.fleet.states():
                target = core.picker.target(state.worker)
                if target is not None:
                    yield state.worker, target.endpoint

    def make(cut: Callable[[], None]) -> Delegated:
        return Delegated(front, workers, cut, places=places, streams=envoy.ext_proc_streams)

    server = ExtProcServer(
        host=envoy.ext_proc_host,
        port=envoy.ext_proc_port,
        streams=envoy.ext_proc_streams,
        max_body_bytes=config.limits.max_payload_size,
        make=make,
    )
    server.start()
    if not is_loopback(envoy.ext_proc_host):
        observe.log.warning(
            "ext_proc.open",
            at=host_port(envoy.ext_proc_host, server.port),
            meaning="whoever reaches it and has a client's key learns the salts of that client",
            remedy="let nobody but Envoy reach it",
        )
    try:
        yield
    finally:
        await asyncio.to_thread(server.stop)
