"""One life of a simulated worker: the real application on the virtual network.

Read `ground_truth.py` for what is written down beside its blocks, `world.py` for who starts and
kills it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from faults.kv_net import address_of
from faults.machines import Machine, MachineClock
from faults.network import FaultyNet
from faults.setting import KV_BYTES, Setting, transfer_key
from faults.streams import Air, Publisher
from uvicorn import Config as ServerConfig
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState
from victim_words import template, tokenizer

from trunkline.core.profiles import fifo_profile
from trunkline.worker.app import Worker, WorkerParts, build_app
from trunkline.worker.engine import Engine
from trunkline.worker.faults import Faults
from trunkline.worker.fence import Fence
from trunkline.worker.options import WorkerOptions

PORT = 8_000
KEEP_ALIVE_S = 5


@dataclass(slots=True)
class Switches:
    """What the application in front of the worker's does: as an engine that fails."""

    refuses: bool = False
    """Inference is answered 503."""
    hangs: bool = False
    """Inference is taken and never answered."""


class Life:
    """One life of one worker, from its start to its death."""

    def __init__(
        self,
        setting: Setting,
        net: FaultyNet,
        air: Air,
        name: str,
        life: int,
        on_call: Callable[[str], None] = lambda _number: None,
    ) -> None:
        """`on_call` is told the number of each call that comes, before it is read."""
        draw = random.Random(f"life {life} of {name} in {setting.seed}")
        self.name = name
        self.number = life
        self.machine = Machine(name)
        self.switches = Switches()
        self.clock = MachineClock(
            loop=net,
            rate=draw.choice((1.0, 1.0, draw.uniform(0.995, 1.005))),
            age_s=draw.choice((0.0, draw.uniform(0.0, 1e5))),
        )
        self.publisher: Publisher
        self.built: Worker
        self.fence: Fence
        self._setting = setting
        self._net = net
        self._air = air
        self._nonce = draw.randbytes(16).hex()
        self._draw = draw
        self._on_call = on_call
        self.machine.run(self._start)

    @property
    def engine(self) -> Engine:
        return self.built.ranks[0].engine

    @property
    def is_pulling(self) -> bool:
        """Whether a pull is open, of either direction."""
        exchange = self.built.storage.exchange if self.built.storage else None
        if exchange is None:
            return False
        return bool(exchange.server._open_pulls or exchange.pulls._puller._open)

    def slow_down(self, factor: float) -> None:
        """Everything that it computes from now on takes so many times as long."""
        schedule = self.engine._schedule
        schedule._ms *= factor  # pyright: ignore[reportAttributeAccessIssue]  # both kinds have it

    def step(self) -> None:
        """One more step of its engine, which says what its cache did since the last one (aborted
        prefills, a reset) and shows whether the batch before it was lost.
        """
        if not self.machine.is_dead:
            self.machine.run(self.engine.tell)
            self.machine.run(self.publisher.publish, ())

    def _start(self) -> None:
        setting, pulls = self._setting, self._setting.pulls
        options = WorkerOptions(
            profile=fifo_profile(setting.fixed_ms, setting.token_ms, setting.decode_ms, KV_BYTES),
            block_size=setting.block_tokens,
            blocks=setting.capacity_blocks,
            max_model_len=min(4_096, setting.capacity_blocks * setting.block_tokens),
            max_num_seqs=setting.max_running,
            max_waiting=setting.max_waiting,
            seed=setting.seed,
        )
        if pulls is not None:
            options = replace(
                options,
                worker_id=self.name,
                host_blocks=pulls.host_blocks,
                pull_host=address_of(self.name),
                link_gbit=pulls.link_gbit,
                pull_patience_ms=pulls.patience_ms,
            )
        self.publisher = self._air.open(buffer_batches=setting.ring_batches)
        parts = WorkerParts(
            tokenizer=tokenizer(),
            template=template(),
            make_publisher=lambda host, port, rank: self.publisher,
            clock=self.clock,
            boot_nonce=self._nonce,
            draw=self._draw.randbytes,
            transfer_key=transfer_key(setting) if pulls is not None else b"",
        )
        self.built = build_app(options, parts)
        if self.built.storage is not None:
            self.built.storage.start()
        guard = self.engine.cache._guard
        assert isinstance(guard, Fence)
        self.fence = guard
        config = ServerConfig(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        self._render_once_a_change()
        state = ServerState()
        self._net.listen(self.name, PORT, lambda: HttpToolsProtocol(config, state, {}, self._net))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        """The worker's application, with what its engine may suffer in front of it."""
        if scope["path"].startswith("/v1/") and scope["method"] == "POST":
            number = dict(scope["headers"]).get(b"x-correlation-id", b"").decode()
            self._on_call(number)
            api = self._api
            api.faults = replace(
                Faults(), is_unavailable=self.switches.refuses, is_hanging=self.switches.hangs
            )
        await self.built.app(scope, receive, send)

    def _render_once_a_change(self) -> None:
        """Its page of metrics is read all the time, and is the same while nothing happens, but for
        the count of leases, which no gateway reads.
        """
        metrics, engine, fence = self._api.metrics, self.engine, self.fence
        render: Callable[[], bytes] = metrics.rendered
        page: list[tuple[object, bytes]] = []

        def rendered() -> bytes:
            state = (
                *(getattr(engine.totals, name) for name in engine.totals.__slots__),
                *(engine.running, engine.waiting, engine.cache.used_share),
                *fence.refused.values(),
                fence.freshness.is_valid(fence.boot()),
            )
            if not page or page[0][0] != state:
                page[:] = [(state, render())]
            return page[0][1]

        metrics.rendered = rendered

    @property
    def _api(self) -> Any:
        """Behind its routes."""
        route: Any = self.built.app.routes[0]
        return route.endpoint.__self__
