"""An admin port on a real socket over a backend of dicts, and what is sent to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import httpx
from fleet import WAIT_S

from trunkline.config import Config, ListenConfig
from trunkline.core.records import Instant, WorkerId
from trunkline.errors import Busy
from trunkline.gateway.admin import Beside, admin_app
from trunkline.gateway.admin_engines import Amendment
from trunkline.gateway.backend import (
    Heartbeat,
    Refused,
    WorkerCondition,
    WorkerJob,
    WorkerOrder,
    WorkerView,
)
from trunkline.gateway.foregone import Comparison, Ended
from trunkline.gateway.listener import bind_admin, serve_admin
from trunkline.gateway.live import TICK_S
from trunkline.gateway.metrics import Exposition, Sample, WorkerRow
from trunkline.gateway.overview import (
    DecisionFilter,
    DecisionShown,
    Integrity,
    Overview,
    PrefixShown,
    Traffic,
    WorkerShown,
)
from trunkline.gateway.preview import PreviewOrder
from trunkline.settings import redacted

KEY = "marked-operator-key"
WORKER_KEY = "marked-worker-key"


class FakeBackend:
    """Workers in a dict, decisions in a list."""

    def __init__(self) -> None:
        self.orders: dict[str, WorkerOrder] = {}
        self.states: dict[str, str] = {}
        self.beats: list[Heartbeat] = []
        self.log = [
            {"request_id": f"r{i}", "worker": "w1" if i % 2 else "w2", "net_gain_ms": float("inf")}
            for i in range(200)
        ]

    def samples(self) -> Iterator[Sample]:
        for name in self.orders:
            yield from WorkerRow(worker=name, is_healthy=True).samples()

    def _view(self, name: str) -> WorkerView:
        order = self.orders[name]
        return WorkerView(
            worker=WorkerId(name),
            url=order.url,
            state="draining" if self.states[name] == "draining" else "ready",
            mode="digest",
            model_id=order.model_id,
            labels=order.labels,
        )

    async def workers(self) -> Sequence[WorkerView]:
        return [self._view(name) for name in self.orders]

    async def worker(self, worker: WorkerId) -> WorkerView | None:
        return self._view(worker) if worker in self.orders else None

    async def add_worker(self, order: WorkerOrder) -> WorkerJob | Refused:
        if order.url == "http://bug:1":
            raise AssertionError("marked insides")
        if order.url == "http://busy:1":
            raise Busy("too many workers join at once")
        name = order.url.removeprefix("http://")
        if name in self.orders:
            return Refused(status=409, code="worker_exists", message=f"{name} is here already")
        self.orders[name] = order
        self.states[name] = "joining"
        return WorkerJob(worker=WorkerId(name), state="joining")

    async def remove_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        name = worker.removeprefix("http://")
        if self.orders.pop(name, None) is None:
            return None
        return WorkerJob(worker=WorkerId(name), state="removed")

    async def drain_worker(
        self, worker: WorkerId, grace_secs: int | None
    ) -> WorkerJob | Refused | None:
        return self._turned(worker, "draining")

    async def undrain_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        return self._turned(worker, "joining")

    def _turned(self, worker: WorkerId, state: WorkerCondition) -> WorkerJob | None:
        if worker not in self.orders:
            return None
        self.states[worker] = state
        return WorkerJob(worker=worker, state=state)

    async def check_worker(self, worker: WorkerId) -> WorkerView | Refused | None:
        return await self.worker(worker)

    async def reset_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        return WorkerJob(worker=worker, state="reset") if worker in self.orders else None

    async def pages(self) -> Sequence[tuple[WorkerId, bytes]]:
        page = b"# TYPE vllm:x gauge\nvllm:x 1.0\n"
        return [(WorkerId(name), page) for name in self.orders]

    async def amend(self, worker: WorkerId, amendment: Amendment) -> WorkerJob | Refused | None:
        if worker not in self.orders:
            return None
        given = {name: value for name, value in asdict(amendment).items() if value is not None}
        self.orders[worker] = replace(self.orders[worker], **given)
        return WorkerJob(worker=worker, state="joining")

    async def decisions(
        self, *, limit: int, worker: WorkerId | None
    ) -> Sequence[Mapping[str, Any]]:
        rows = [row for row in reversed(self.log) if worker in (None, row["worker"])]
        return rows[:limit]

    async def decision(self, request_id: str) -> Mapping[str, Any] | None:
        return next((row for row in self.log if row["request_id"] == request_id), None)

    async def preview(self, order: PreviewOrder) -> Mapping[str, Any] | Refused:
        return {"tenant": order.tenant, "is_chat": order.is_chat, "bytes": len(order.body)}

    async def heartbeat_key(self, worker: WorkerId) -> str | None:
        order = self.orders.get(worker)
        return None if order is None else order.api_key

    async def heartbeat(self, beat: Heartbeat) -> str | None:
        last = self.beats[-1].counter if self.beats else -1
        if beat.counter <= last:
            return f"{beat.worker}: heartbeat {beat.counter} does not follow {last}"
        self.beats.append(beat)
        return None


class FakeOverview:
    """A gateway of two workers, at which somebody looked in `ticks`."""

    def __init__(self) -> None:
        self.ticks: list[int] = []
        self.wanted: list[DecisionFilter] = []

    def overview(self) -> Overview:
        self.ticks.append(int(asyncio.get_running_loop().time() // TICK_S))
        worker = WorkerShown(worker="w1", state="ready", mode="exact", load_ms=3.5)
        return Overview(
            at_ms=1.0,
            up_ms=2.0,
            processes=1,
            workers=[worker, WorkerShown(worker="w2", state="draining", mode="blind")],
            traffic=Traffic(
                requests={"2xx": 3},
                active=1,
                waiting=0,
                refused=0,
                decisions=3,
                reasons={"cache-hit": 3},
                prompt_tokens=300,
                promised_tokens=200,
                hit_tokens=190,
                saved_prefill_ms=40.0,
                net_saved_ms=30.0,
                over_claims=1,
                ttft=None,
                ttft_count=0,
                foregone=Comparison(Ended()).look(Instant(0.0)),
            ),
            integrity=Integrity(false_hits=0, leaking=0, tested=2, workers=2, refused_pulls=0),
            prefixes=[PrefixShown(prefix="ab", tokens=64, requests=2.0, holders=1)],
            decisions=self.chosen(DecisionFilter()),
        )

    def chosen(self, wanted: DecisionFilter) -> list[DecisionShown]:
        self.wanted.append(wanted)
        return [
            DecisionShown(
                request="r1",
                at_ms=5.0,
                worker="w1",
                reason="cache-hit",
                plan="local",
                prompt_tokens=100,
                matched_tokens=64,
            )
        ]


class AdminPort:
    """An admin port in a thread with its own loop, as a client sees it."""

    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop

    def __init__(self, key: str = "") -> None:
        listen = ListenConfig(admin_port=0, admin_api_key=key, api_key="marked-client-key")
        self.backend = FakeBackend()
        self.overview = FakeOverview()
        self.listener = bind_admin(listen)
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = admin_app(
            self.backend,
            Exposition([self.backend], version="1", native="pure"),
            settings=redacted(Config(listen=listen)),
            key=key,
            beside=Beside(engines=self.backend, overview=self.overview),
        )
        started = threading.Event()

        async def run() -> None:
            self.stop = asyncio.Event()
            self.loop = asyncio.get_running_loop()
            started.set()
            await serve_admin(app, self.listener, self.stop)

        self.thread = threading.Thread(target=asyncio.run, args=(run(),))
        self.thread.start()
        assert started.wait(WAIT_S)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S)

    def fresh(self) -> AdminPort:
        """The same port with a backend that knows nothing yet."""
        self.backend.__init__()
        return self

    def close(self) -> None:
        self.client.close()
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def say(self, request: bytes) -> bytes:
        """One request as raw bytes; the whole answer, to the end of the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S) as connection:
            connection.sendall(request)
            answer = b""
            while chunk := connection.recv(65_536):
                answer += chunk
        return answer


@contextlib.contextmanager
def serving(key: str = "") -> Iterator[AdminPort]:
    """An admin port until the block ends; without a key it is open to loopback."""
    port = AdminPort(key)
    try:
        yield port
    finally:
        port.close()


def code_of(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["code"]


def order(**fields: Any) -> dict[str, Any]:
    return {"url": "http://10.0.0.1:8000", "api_key": WORKER_KEY, **fields}


def beat(**fields: Any) -> dict[str, Any]:
    return {
        "worker": "10.0.0.1:8000",
        "boot_nonce": "b1",
        "counter": 1,
        "checkpoints": [base64.b64encode(bytes(32)).decode()],
        "complete": True,
        "memory": 0.5,
        "load": 1.5,
        "block_size": 16,
    } | fields
