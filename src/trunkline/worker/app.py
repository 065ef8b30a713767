"""A simulated worker as a process: ranks, application, server, ready line.

`run_worker` is the whole of `trunkline worker`; what it may not make itself (tokenizer, template,
sockets of the events, clock, nonce) comes in as `WorkerParts`. Read `api.py` next.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import random
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from types import FrameType

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette

from trunkline.core.freshness import Freshness
from trunkline.ports.clock import Clock
from trunkline.ports.publisher import EventPublisher, PublisherFactory
from trunkline.ports.sealer import Sealer
from trunkline.ports.template import ChatTemplate
from trunkline.ports.tokenizer import Tokenizer
from trunkline.worker.agent import Agent
from trunkline.worker.api import Api, Rank, on_bad_request
from trunkline.worker.engine import Engine, EngineShape
from trunkline.worker.faults import FaultyFeed, OneMore
from trunkline.worker.fence import Fence
from trunkline.worker.heartbeat import Heart, HeartbeatTotals, Reporter
from trunkline.worker.labels import LabelBook
from trunkline.worker.metrics import Metrics
from trunkline.worker.options import Feed, Surface, WorkerOptions
from trunkline.worker.requests import BadRequest, Reader
from trunkline.worker.sglang import SglangSurface
from trunkline.worker.storage import Storage, StorageParts, build_storage
from trunkline.written import host_port

KEEP_ALIVE_S = 5  # the engine's own default
_BACKLOG = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker is given by the wiring. `boot_nonce` is hex, new at each start."""

    tokenizer: Tokenizer
    template: ChatTemplate
    make_publisher: PublisherFactory
    clock: Clock
    boot_nonce: str
    draw: Callable[[int], bytes]
    """That many bytes that nobody can guess."""
    transfer_key: bytes = b""
    """The fleet's; empty where nothing is pulled."""
    sealer: Sealer | None = None
    """Needed for a disk tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker that is built and not yet serving."""

    app: Starlette
    ranks: list[Rank]
    heart: Heart | None
    storage: Storage | None


def run_worker(options: WorkerOptions, parts: WorkerParts, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; one line of JSON on stdout says that it is ready, and
    where. Raises OSError for another address, or a folder, that cannot be had.
    """
    uvloop.run(_serve(options, parts, listener))


def listen(host: str, port: int) -> socket.socket:
    """What `run_worker` serves at. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def build_app(
    options: WorkerOptions, parts: WorkerParts, on_ready: Callable[[], None] = lambda: None
) -> Worker:
    """Everything but the listening socket. `on_ready` is called when the application starts."""
    faults, tokenizer = options.faults, parts.tokenizer
    if faults.has_other_tokens:
        tokenizer = OneMore(tokenizer)
    metrics = Metrics(
        options.model,
        options.data_parallel_size,
        faults.told_block_tokens,
        started=parts.clock.wall(),
    )
    fence: Fence | None = None
    if options.has_agent:
        fence = Fence(freshness=Freshness(parts.boot_nonce), boot=parts.clock.boot)
        metrics.watch_fence(fence)
    storage = _build_storage(options, parts, fence) if fence else None
    if storage is not None:
        metrics.watch_storage(storage)
    ranks = [
        _build_rank(options, parts, metrics, rank, fence, storage)
        for rank in range(options.data_parallel_size)
    ]
    engines = [rank.engine for rank in ranks]
    metrics.watch(engines)
    api = Api(
        ranks=ranks,
        reader=Reader(
            tokenizer=tokenizer,
            template=parts.template,
            model=options.model,
            context_tokens=options.context_tokens,
            default_tokens=options.default_tokens,
            has_regions=fence is not None,
        ),
        tokenizer=parts.tokenizer,
        faults=faults,
        metrics=metrics,
        clock=parts.clock,
        id_prefix=parts.boot_nonce[:12],
        takes_tickets=fence is not None,
        storage=storage,
        tells_reuse=options.tells_reuse,
    )
    routes = api.routes()
    if options.is_sglang:
        is_old = options.engine is Surface.SGLANG_0_5_18
        routes = SglangSurface(api=api, page_tokens=options.page_tokens, is_old=is_old).routes()
    if fence is not None:
        routes += Agent(engines=engines, fence=fence, storage=storage).routes()
    heart = _build_heart(options, parts, ranks) if options.feed is Feed.DIGEST else None

    app = Starlette(
        routes=routes,
        exception_handlers={BadRequest: on_bad_request},
        lifespan=_lifespan(ranks, heart, storage, on_ready),
    )
    return Worker(app=app, ranks=ranks, heart=heart, storage=storage)


def _lifespan(
    ranks: Sequence[Rank],
    heart: Heart | None,
    storage: Storage | None,
    on_ready: Callable[[], None],
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """What runs beside the application, and what is closed behind it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(heart.beat()) if heart else None
            on_ready()
            yield
            if beating is not None:
                beating.cancel()
        if storage is not None:
            storage.close()
        for rank in ranks:
            rank.engine.close()
            if rank.publisher is not None:
                rank.publisher.close()

    return lifespan


def _build_rank(
    options: WorkerOptions,
    parts: WorkerParts,
    metrics: Metrics,
    rank: int,
    fence: Fence | None,
    storage: Storage | None,
) -> Rank:
    publisher: EventPublisher | None = None
    if options.feed is Feed.EXACT:
        port = options.events_port + rank if options.events_port else 0
        publisher = parts.make_publisher(options.host, port, rank)
    faults = options.faults
    shape = EngineShape(
        profile=options.latency,
        time_factor=options.time_scale * faults.slow_factor,
        block_tokens=options.block_size,
        capacity_blocks=options.blocks,
        vocab_size=parts.tokenizer.vocab_size,
        max_running=options.max_num_seqs,
        max_waiting=options.max_waiting,
        die_after_tokens=faults.die_after_tokens,
    )
    feed = FaultyFeed(publisher, faults, random.Random(f"{options.seed}/{rank}"))
    tier = storage.tier if storage else None
    coming = storage.exchange.lent.coming if storage and storage.exchange else None
    engine = Engine(shape, feed, functools.partial(metrics.observe, rank), fence, tier, coming)
    return Rank(engine=engine, labels=LabelBook(engine.cache), publisher=publisher)


def _build_storage(options: WorkerOptions, parts: WorkerParts, fence: Fence) -> Storage | None:
    return build_storage(
        options,
        StorageParts(
            fence=fence,
            clock=parts.clock,
            draw=parts.draw,
            transfer_key=parts.transfer_key,
            vocab_size=parts.tokenizer.vocab_size,
            boot_nonce=parts.boot_nonce,
            sealer=parts.sealer,
        ),
    )


def _build_heart(options: WorkerOptions, parts: WorkerParts, ranks: list[Rank]) -> Heart:
    is_single = len(ranks) == 1
    reporters = [
        Reporter(
            worker_id=options.worker_id if is_single else f"{options.worker_id}@{index}",
            boot_nonce=parts.boot_nonce,
            engine=rank.engine,
            labels=rank.labels,
            max_running=options.max_num_seqs,
        )
        for index, rank in enumerate(ranks)
    ]
    return Heart(
        url=options.heartbeat_url,
        key=options.heartbeat_key,
        interval_s=options.heartbeat_interval_ms / 1e3,
        reporters=reporters,
        totals=HeartbeatTotals(),
    )


async def _serve(options: WorkerOptions, parts: WorkerParts, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    address = host_port(host, port)
    options = replace(options, worker_id=options.worker_id or address)

    def announce() -> None:
        gc.freeze()  # what was loaded stays: not to be looked through amid answers
        # Connections queue at the listener from here on, so "ready" is true already.
        line = {"url": f"http://{address}", "events": "", "replay": "", "ranks": len(worker.ranks)}
        first = worker.ranks[0].publisher
        if first is not None:
            line |= {"events": first.endpoint, "replay": first.replay_endpoint}
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()

    worker = build_app(options, parts, announce)
    if worker.storage is not None:
        worker.storage.start()
    faults = options.faults
    keep_alive_s = KEEP_ALIVE_S if faults.keep_alive_ms is None else faults.keep_alive_ms / 1e3
    told = format_datetime(datetime.fromtimestamp(parts.clock.wall() + faults.clock_off_s, UTC))
    config = uvicorn.Config(
        worker.app,
        http="httptools",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        # The types say whole seconds; both are handed to what takes any.
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
        date_header=not faults.clock_off_s,
        headers=[("date", told)] if faults.clock_off_s else None,
        timeout_graceful_shutdown=options.drain_grace_ms / 1e3,  # type: ignore[arg-type]
        backlog=_BACKLOG,
    )
    await _Server(config).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends with status 0 on SIGTERM, where uvicorn would raise the signal again; the first one lets
    answers end, a further one of any kind does not. Nobody is listening from the first on, which
    tells a gateway at once.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
