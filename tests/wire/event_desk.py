"""A publisher of events on real sockets, and a feed that follows it: for the subscriber's tests."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.zmq_events import (
    event_context,
    run_feed,
)
from trunkline.core.actions import Action
from trunkline.core.directory import Directory
from trunkline.core.events import BlocksRemoved, BlocksStored, CacheEvent
from trunkline.core.feed import FeedLimits, FeedState, WorkerFeed
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.records import Tier, WorkerId
from trunkline.ports.worker import EventSource

WORKER = WorkerId("w")
MODEL = ModelIdentity(model_id="m", block_tokens=2)
NAMESPACE = derive_namespace(bytes(32), Scope(kind=ScopeKind.TENANT, org="o", tenant="t"), MODEL)


def block(number: int) -> CacheEvent:
    """A block of its own at the root."""
    return BlocksStored(
        hashes=array("Q", [number]),
        parent=None,
        tokens=array("I", [number, 0]),
        block_tokens=2,
        tier=Tier.DEVICE,
        salt=NAMESPACE.salt,
    )


def payload(*events: CacheEvent, ts: float = 0.0) -> bytes:
    return msgspec.msgpack.encode([ts, [on_the_wire(event) for event in events], 0])


def on_the_wire(event: CacheEvent) -> dict[str, Any]:
    match event:
        case BlocksStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.hashes.tolist(),
                "parent_block_hash": event.parent,
                "token_ids": event.tokens.tolist(),
                "block_size": event.block_tokens,
                "extra_keys": [[event.salt], *[None] * (len(event.hashes) - 1)],
            }
        case BlocksRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.hashes.tolist()}
        case _:
            raise AssertionError(event)


def gone(number: int) -> CacheEvent:
    return BlocksRemoved(hashes=array("Q", [number]), tier=Tier.DEVICE)


class WirePublisher:
    """Publishes payloads as an engine does. `skip` loses a batch on the live stream only."""

    def __init__(
        self,
        *,
        ring: int = 100,
        ports: tuple[int, int] | None = None,
        topic: bytes = b"",
        is_mute: bool = False,
    ) -> None:
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self.asked: list[int] = []
        self.next_seq = 0
        self._topic = topic
        self._is_mute = is_mute
        # A context of its own: ending it waits until the ports are free again.
        self._context = context = zmq.asyncio.Context()
        self._live = context.socket(zmq.PUB)
        self._replays = context.socket(zmq.ROUTER)
        for made in (self._live, self._replays):
            made.setsockopt(zmq.LINGER, 0)
        self.ports = (self._bind(self._live, ports and ports[0]), 0)
        self.ports = (self.ports[0], self._bind(self._replays, ports and ports[1]))
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @staticmethod
    def _bind(made: Any, port: int | None) -> int:
        if port is None:
            return made.bind_to_random_port("tcp://127.0.0.1")
        made.bind(f"tcp://127.0.0.1:{port}")
        return port

    def source(self, **changes: Any) -> EventSource:
        fields: dict[str, Any] = {
            "endpoint": f"tcp://127.0.0.1:{self.ports[0]}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.ports[1]}",
        }
        return EventSource(**(fields | changes))

    async def publish(self, payload: bytes, *, skip: bool = False) -> int:
        seq = self.next_seq
        self.next_seq += 1
        self.ring.append((seq, payload))
        if not skip:
            await self.send(self._topic, seq.to_bytes(8, "big"), payload)
        return seq

    async def send(self, *frames: bytes) -> None:
        await self._live.send_multipart(list(frames))

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._replays.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            if self._is_mute:
                continue
            for seq, payload in list(self.ring):
                if seq >= first:
                    frames = [client, b"", self._topic, seq.to_bytes(8, "big"), payload]
                    await self._replays.send_multipart(frames)
            await self._replays.send_multipart([client, b"", b"", b"\xff" * 8, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


class Bench:
    """A directory, a feed, and what the feed's task did."""

    def __init__(self, **limits: Any) -> None:
        self.directory = Directory(max_blocks=1_000_000)
        self.directory.admit_namespace(NAMESPACE)
        self.directory.join(WORKER, block_tokens=2)
        self.feed = WorkerFeed(WORKER, self.directory, limits=FeedLimits(**limits))
        self.actions: list[Action] = []
        self.context = event_context(8)
        self.publishers = zmq.asyncio.Context()

    @contextlib.asynccontextmanager
    async def following(self, source: EventSource) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(
                run_feed(
                    source, self.feed, SystemClock(), self.actions.append, context=self.context
                )
            )
            yield
            task.cancel()

    def held(self) -> int:
        return self.directory.held_count(WORKER)

    def has(self, kind: type[Action]) -> bool:
        return any(isinstance(action, kind) for action in self.actions)

    async def until(self, is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_true():  # noqa: ASYNC110 - what is awaited is state of a pure object
                await asyncio.sleep(0.005)

    async def subscribed(self, publisher: WirePublisher) -> None:
        """Publish until a batch comes through live: subscribing takes a moment."""
        before = self.feed.stats.batches
        while self.feed.stats.batches == before:
            await publisher.publish(payload())
            await asyncio.sleep(0.01)
        await self.until(lambda: self.feed.state is FeedState.LIVE)


def run(main: Callable[[Bench], Coroutine[Any, Any, None]], **limits: Any) -> None:
    async def whole() -> None:
        bench = Bench(**limits)
        try:
            async with asyncio.timeout(120.0):
                await main(bench)
        finally:
            bench.context.term()
            bench.publishers.destroy(linger=0)

    asyncio.run(whole())
