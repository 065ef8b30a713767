"""A membership over tables: real fleet and directory, workers of canned answers, virtual time."""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from trunkline.config import BreakerConfig, HealthConfig, RoutingConfig
from trunkline.control.discovery import FleetModel
from trunkline.control.membership import Membership
from trunkline.control.parts import MemberParts
from trunkline.control.views import Heartbeat, MemberView, Mode, WorkerSpec
from trunkline.core.actions import Action
from trunkline.core.alignment import Examination
from trunkline.core.directory import Directory
from trunkline.core.events import BlocksStored, EventBatch
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import chain
from trunkline.core.records import Tier, WorkerId
from trunkline.errors import WorkerLost
from trunkline.observe import EventLog
from trunkline.ports.worker import Endpoint, EventSource, Target
from virtual_loop import LoopClock, VirtualLoop

TEST_S = 10.0
"""Of virtual time, as all here."""
W0 = WorkerId("w0:1")
GOOD = {"/v1/models": b'{"data":[{"id":"m"}]}', "/health": b""}


def metrics(block_tokens: int = 16, memory: float = 0.1, waiting: int = 0) -> bytes:
    return (
        f'vllm:cache_config_info{{block_size="{block_tokens}",num_gpu_blocks="100"}} 1\n'
        f"vllm:num_requests_running 1\nvllm:num_requests_waiting {waiting}\n"
        f"vllm:kv_cache_usage_perc {memory}\n"
    ).encode()


class Answers:
    """What one worker answers; a missing path is a 404."""

    def __init__(self, **more: bytes) -> None:
        self.pages: dict[str, bytes] = {**GOOD, **{f"/{n}": body for n, body in more.items()}}
        self.failure: Callable[[], Exception] | None = None
        self.asked: list[str] = []
        self.sources: list[EventSource] = []

    def answer(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        if self.failure is not None:
            raise self.failure()
        page = self.pages.get(path)
        return (404, b"") if page is None else (200, page)


def refused() -> Exception:
    error = WorkerLost("refused")
    error.__cause__ = ConnectionRefusedError()
    return error


class Lines(EventLog):
    """Remembers the events that were logged."""

    def __init__(self) -> None:
        super().__init__("test")
        self.events: list[tuple[str, dict[str, object]]] = []
        self.levels: list[tuple[str, int]] = []

    def _write(self, level: int, event: str, fields: dict[str, object], cause: Any) -> None:
        self.events.append((event, fields))
        self.levels.append((event, level))

    def count(self, event: str) -> int:
        return sum(name == event for name, _ in self.events)


class Table:
    """The data plane's targets."""

    def __init__(self) -> None:
        self.targets: dict[WorkerId, Target] = {}

    def add_target(self, target: Target) -> None:
        self.targets[target.worker] = target

    def remove_target(self, worker: WorkerId) -> None:
        self.targets.pop(worker, None)


class Bench:
    """A membership whose workers answer from tables."""

    def __init__(self, **breaker: Any) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.directory = Directory(max_blocks=10_000)
        self.fleet = Fleet(virtual_nodes=8, now=self.clock.now())
        self.table = Table()
        self.log = Lines()
        self.answers: dict[int, Answers] = {}
        self.feed_actions: dict[WorkerId, Callable[[Action], None]] = {}
        self.feed_error: Exception | None = None
        self.make_feed_error: Exception | None = None
        self.feeds: dict[WorkerId, WorkerFeed] = {}
        self.followed: list[EventSource] = []
        self.parts = MemberParts(
            fleet=self.fleet,
            directory=self.directory,
            targets=self.table,
            clock=self.clock,
            fetch=self.fetch,
            make_feed=self.make_feed,
            run_feed=self.run_feed,
            find_sources=lambda body, host: self.answers[int(body)].sources,
            model=FleetModel(),
            health=HealthConfig(health_check_interval_secs=0.05, load_interval_secs=0.05),
            breaker=BreakerConfig(**breaker),
            routing=RoutingConfig(),
            default_block_tokens=16,
            log=self.log,
            examine=self.examine,
        )
        self.examinations: list[Examination] = []
        """What self-tests come to, one after the other; the last one stays."""
        self.examined: list[tuple[list[WorkerId], list[str]]] = []
        """Whom they looked at, and with which adapters."""
        self.examiner_waits: asyncio.Event | None = None
        self.membership = Membership(self.parts, heartbeat_ttl_ms=100.0)

    async def examine(
        self, ranks: Sequence[tuple[WorkerId, WorkerFeed | None]], adapters: Sequence[str]
    ) -> Examination:
        self.examined.append(([worker for worker, _ in ranks], list(adapters)))
        if self.examiner_waits is not None:
            await self.examiner_waits.wait()
        if len(self.examinations) > 1:
            return self.examinations.pop(0)
        return self.examinations[0] if self.examinations else Examination()

    async def fetch(
        self, endpoint: Endpoint, method: str, path: str, *, timeout_ms: float
    ) -> tuple[int, bytes]:
        await asyncio.sleep(0)
        return self.answers[endpoint.port].answer(path)

    def make_feed(self, worker: WorkerId, source: EventSource) -> WorkerFeed:
        if self.make_feed_error is not None:
            error, self.make_feed_error = self.make_feed_error, None
            raise error
        feed = self.feeds[worker] = WorkerFeed(worker, self.directory, rank=source.rank)
        return feed

    async def run_feed(
        self, source: EventSource, feed: WorkerFeed, on_action: Callable[[Action], None]
    ) -> None:
        self.feed_actions[feed.worker] = on_action
        self.followed.append(source)
        if self.feed_error is not None:
            error, self.feed_error = self.feed_error, None
            raise error
        await asyncio.Event().wait()

    def add(self, port: int = 1, answers: Answers | None = None, **spec: Any) -> Answers:
        """Add `w<port - 1>`."""
        self.answers[port] = answers or Answers(metrics=metrics())
        self.membership.add(named(port, **spec))
        return self.answers[port]

    def state(self, worker: WorkerId = W0) -> WorkerState:
        found = self.fleet.get(worker)
        assert found is not None
        return found

    async def joined(self, port: int = 1, answers: Answers | None = None, **spec: Any) -> Answers:
        made = self.add(port, answers, **spec)
        await until(lambda: self.fleet.get(WorkerId(f"w{port - 1}:{port}")) is not None)
        return made

    def view(self, name: str = "w0:1") -> MemberView:
        view = self.membership.view(name)
        assert view is not None
        return view

    def mode(self, name: str = "w0:1") -> Mode:
        return self.view(name).mode

    def beat(self, counter: int, **more: Any) -> str | None:
        fields: dict[str, Any] = {
            "name": "w0:1", "boot_nonce": "a", "counter": counter, "checkpoints": frozenset(),
            "is_complete": True, "memory_ratio": 0.1, "load_ratio": 0.1, "block_tokens": 16,
        }  # fmt: skip
        return self.membership.heartbeat(Heartbeat(**{**fields, **more}))


def named(port: int, **more: Any) -> WorkerSpec:
    endpoint = Endpoint(host=f"w{port - 1}", port=port, host_header=f"w{port - 1}:{port}")
    return WorkerSpec(name=endpoint.host_header, endpoint=endpoint, **more)


def bench_test(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    """Run a coroutine with a bench whose membership is open, under a deadline."""

    @functools.wraps(test)
    def run() -> None:
        async def scenario() -> None:
            bench = Bench()
            async with asyncio.timeout(TEST_S), bench.membership:
                await test(bench)

        play(scenario)

    del run.__wrapped__
    return run


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    """To its end, on a loop of its own."""

    async def whole() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(whole())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.005)


def some_chain(blocks: int = 20, block_tokens: int = 16) -> Any:
    namespace = derive_namespace(
        b"k" * 32,
        Scope(kind=ScopeKind.TENANT, org="o", tenant="t"),
        ModelIdentity(model_id="m", block_tokens=block_tokens),
    )
    return chain(namespace, array("I", range(blocks * block_tokens)))


def stored_batch(seq: int, keys: Any, count: int, first: int = 0) -> EventBatch:
    """Blocks that are there, each a prompt of its own."""
    events = tuple(
        BlocksStored(
            hashes=array("Q", [number]),
            parent=None,
            tokens=array("I", [number] * 16),
            block_tokens=16,
            tier=Tier.DEVICE,
            salt=keys.namespace.salt,
        )
        for number in range(first, first + count)
    )
    return EventBatch(seq=seq, events=events, fingerprint=seq)


def with_events(*ranks: int) -> Answers:
    answers = Answers(metrics=metrics(), kv_event_sources=b"1")
    answers.sources = [EventSource(endpoint=f"tcp://w0:{9 + rank}", rank=rank) for rank in ranks]
    return answers
