"""An admin port on a real socket over a backend of dicts, and what is sent to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
from fleet import WAIT_S

from trunkline.config import Config, ListenConfig
from trunkline.core.records import WorkerId
from trunkline.errors import Busy
from trunkline.gateway.admin import admin_app
from trunkline.gateway.backend import (
    Heartbeat,
    Refused,
    WorkerCondition,
    WorkerJob,
    WorkerOrder,
    WorkerView,
)
from trunkline.gateway.listener import bind_admin, serve_admin
from trunkline.gateway.metrics import Exposition, Sample, WorkerRow
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


class AdminPort:
    """An admin port in a thread with its own loop, as a client sees it."""

    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop

    def __init__(self, key: str = "") -> None:
        listen = ListenConfig(admin_port=0, admin_api_key=key, api_key="marked-client-key")
        self.backend = FakeBackend()
        self.listener = bind_admin(listen)
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = admin_app(
            self.backend,
            Exposition([self.backend], version="1", native="pure"),
            settings=redacted(Config(listen=listen)),
            key=key,
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
