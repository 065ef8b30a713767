"""A fleet of real processes on this machine: simulated workers, and a gateway in front of them.

Workers are kept between the runs of one command and emptied in between; each policy gets a gateway
of its own. All listen on loopback, on ports that the kernel picks. Owns the children: what it
started it ends, by pid. Must never: import what it starts; it speaks to them as a user would. Read
`command.py` next.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from trunkline.core.profiles import profile_named
from trunkline.errors import GatewayError, WorkerLost, WorkerTimeout
from trunkline.ports.worker import Endpoint, Fetch
from trunkline.replay.counters import FleetCounters, counters_from_metrics, parse_metrics
from trunkline.replay.plan import FleetPlan
from trunkline.replay.run import Decode

START_TIMEOUT_S = 120.0
"""Sixteen interpreters starting on two busy cores take about 30 s."""

STOP_TIMEOUT_S = 15.0
READY_TIMEOUT_S = 60.0
MODEL = "trunkline-sim"
_ASK_MS = 10_000.0
_COMPLAINS = "trunkline: "
_SERVED = "trunkline_requests_total"
_COMPUTED = "vllm:prompt_tokens_by_source_total"
_PULLED = "trunkline:pull_bytes_total"


class StartFailed(GatewayError):
    """A process of the fleet did not come up. The message has the end of what it said."""

    code = "start_failed"


@dataclass(slots=True, kw_only=True)
class Child:
    """One process with its ready line."""

    name: str
    process: asyncio.subprocess.Process
    said: IO[bytes]
    ready: dict[str, Any] = field(default_factory=dict[str, Any])

    async def wait_ready(self) -> None:
        """Raises StartFailed when it ends or says nothing in time."""
        assert self.process.stdout is not None
        line = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await self.process.stdout.readline()
        if not line:
            self.said.seek(0)
            last = self.said.read()[-2_000:].decode("utf-8", "replace")
            raise StartFailed(f"{self.name} did not start: {_complaint(last)}")
        self.ready = json.loads(line)

    async def stop(self) -> None:
        """Ask it to end; end it when it does not."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        self.said.close()


async def start_child(name: str, words: Sequence[str]) -> Child:
    """Run `trunkline WORDS` with this interpreter. Its warnings go to a file that dies with it."""
    said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by Child.stop
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "trunkline",
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=said,
        start_new_session=True,  # Ctrl-C reaches us alone; we end them in order
    )
    return Child(name=name, process=process, said=said)


class ProcessFleets:
    """Starts fleets for replay; an async context manager that ends every process it started."""

    def __init__(
        self, *, fetch: Fetch, decode: Decode, vocab_size: int, draw: Callable[[int], bytes]
    ) -> None:
        """`draw(n)` gives n unguessable bytes."""
        self._draw = draw
        self._fetch = fetch
        self._decode = decode
        self._vocab_size = vocab_size
        self._workers: list[Child] = []
        self._plan: FleetPlan | None = None
        self._gateways: list[Child] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Of the transfer key, where workers pull."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await stop_all([*self._gateways, *self._workers])
        if self._folder is not None:
            self._folder.cleanup()

    def _link_words(self, plan: FleetPlan) -> list[str]:
        """What both workers and gateway must know of links; nothing where nobody pulls."""
        if plan.link_gbit is None:
            return []
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="trunkline-")
            key = Path(self._folder.name) / "transfer.key"
            key.touch(mode=0o600)
            key.write_text(self._draw(32).hex())
        key_file = str(Path(self._folder.name) / "transfer.key")
        return ["--transfer-key-file", key_file, "--link-gbit", str(plan.link_gbit)]

    async def start(self, plan: FleetPlan) -> ProcessFleet:
        """A gateway with the plan's policy in front of empty workers. Raises StartFailed."""
        same = self._plan is not None and replace(self._plan, policy=plan.policy) == plan
        admin_port = plan.admin_port or await free_port()
        if same and plan.feed != "digest":
            await asyncio.gather(*(self._empty(child) for child in self._workers))
        else:
            await stop_all(self._workers)
            self._workers = []
            self._workers = await _start_workers(plan, admin_port, self._link_words(plan))
            self._plan = plan
        worker_urls = {child.name: str(child.ready["url"]) for child in self._workers}
        words = gateway_words(plan, worker_urls.values(), admin_port) + self._link_words(plan)
        words += ["--max-copies", str(plan.max_copies)]
        gateway = await start_child("gateway", words)
        self._gateways.append(gateway)
        await gateway.wait_ready()
        fleet = ProcessFleet(
            gateway=gateway,
            worker_urls=worker_urls,
            fetch=self._fetch,
            decode=self._decode,
            vocab_size=self._vocab_size,
            token_bytes=profile_named(plan.profile).kv_bytes_per_token,
        )
        await fleet.wait_ready(plan.workers)
        return fleet

    async def _empty(self, worker: Child) -> None:
        path = "/reset_prefix_cache"
        endpoint = endpoint_of(worker.ready["url"])
        status, _ = await self._fetch(endpoint, "POST", path, timeout_ms=_ASK_MS)
        if status != 200:
            raise WorkerLost(f"{worker.name}{path} answered {status}")


class ProcessFleet:
    """One gateway with its workers, as replay sees them."""

    def __init__(
        self,
        *,
        gateway: Child,
        worker_urls: Mapping[str, str],
        fetch: Fetch,
        decode: Decode | None,
        vocab_size: int,
        token_bytes: int,
    ) -> None:
        """`worker_urls` are those of the workers by the names that the report calls them."""
        self.target_urls: Sequence[str] = [gateway.ready["url"]]
        self.admin_url: str = gateway.ready["admin_url"]
        self.api_key = ""
        self.model = MODEL
        self.vocab_size = vocab_size
        self.decode: Decode | None = decode
        self._gateway = gateway
        self._worker_urls = worker_urls
        self._fetch = fetch
        self._token_bytes = token_bytes
        self._before: dict[str, float] = {}
        self._moved_before = 0.0

    async def wait_ready(self, count: int) -> None:
        """Until so many workers may be chosen. Raises StartFailed."""
        path = "/workers"
        ready = -1
        for _ in range(int(READY_TIMEOUT_S / 0.1)):
            status, body = await self._ask(self.admin_url, path)
            listed: list[dict[str, Any]] = json.loads(body)["workers"] if status == 200 else []
            ready = sum(1 for worker in listed if worker["state"] == "ready")
            if ready >= count:
                self._before, self._moved_before = await self._work()
                return
            await asyncio.sleep(0.1)
        raise StartFailed(f"{ready} of {count} workers are ready after {READY_TIMEOUT_S:.0f} s")

    async def counters(self) -> FleetCounters:
        """The gateway's own figures, and the tokens each worker computed in this run."""
        _, metrics = await self._ask(self.admin_url, "/metrics")
        computed, moved_bytes = await self._work()
        work = {name: tokens - self._before.get(name, 0.0) for name, tokens in computed.items()}
        told = counters_from_metrics(metrics.decode())
        return replace(
            told,
            worker_work=work,
            gateway_memory_bytes=resident_bytes(self._gateway.process.pid),
            kv_memory_bytes=await self._kv_bytes(),
            transfer_bytes=round(moved_bytes - self._moved_before),
        )

    async def served_requests(self) -> int | None:
        """Requests that the gateway has answered so far; None when it does not say."""
        try:
            _, page = await self._ask(self.admin_url, "/metrics")
        except (WorkerLost, WorkerTimeout):
            return None
        samples = parse_metrics(page.decode())
        return round(sum(sample.value for sample in samples if sample.name == _SERVED))

    async def stop(self) -> None:
        await self._gateway.stop()

    async def _kv_bytes(self) -> int:
        """Modelled KV of all blocks that the gateway knows, or expects, to be resident."""
        _, body = await self._ask(self.admin_url, "/workers")
        tokens = sum(
            (rank["held_blocks"] or rank["predicted_blocks"]) * worker["detail"]["block_tokens"]
            for worker in json.loads(body)["workers"]
            for rank in worker["detail"]["ranks"]
        )
        return tokens * self._token_bytes

    async def _work(self) -> tuple[dict[str, float], float]:
        """Tokens that each worker computed so far, and KV bytes that they pulled."""
        pages = await asyncio.gather(
            *(self._ask(url, "/metrics") for url in self._worker_urls.values())
        )
        computed: dict[str, float] = {}
        moved_bytes = 0.0
        for name, (_, page) in zip(self._worker_urls, pages, strict=True):
            computed[name] = 0.0
            for sample in parse_metrics(page.decode()):
                if sample.name == _COMPUTED and sample.label("source") == "local_compute":
                    computed[name] += sample.value
                elif sample.name == _PULLED and sample.label("direction") == "in":
                    moved_bytes += sample.value
        return computed, moved_bytes

    async def _ask(self, url: str, path: str) -> tuple[int, bytes]:
        return await self._fetch(endpoint_of(url), "GET", path, timeout_ms=_ASK_MS)


async def free_port() -> int:
    """A loopback port that was free a moment ago; for addresses that must be known beforehand."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


def endpoint_of(url: str) -> Endpoint:
    """The endpoint of a URL that one of our own children gave."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return Endpoint(host=host, port=int(port), host_header=f"{host}:{port}")


def _complaint(said: str) -> str:
    """What a child said in the end: its own error line where there is one, without its name."""
    lines = said.strip().splitlines()
    own = [line for line in lines if line.startswith(_COMPLAINS)]
    return own[-1].removeprefix(_COMPLAINS) if own else "\n".join(lines) or "it said nothing"


def resident_bytes(pid: int) -> int | None:
    """Memory of a process, where the kernel tells."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


async def _start_workers(
    plan: FleetPlan, admin_port: int, link_words: Sequence[str]
) -> list[Child]:
    words = [
        "worker",
        *("--profile", plan.profile),
        *("--time-scale", str(plan.time_scale)),
        *("--blocks", str(plan.capacity_blocks)),
        *("--block-size", str(plan.block_tokens)),
        *("--feed", plan.feed),
        *("--model", MODEL),
        *("--host-blocks", str(plan.host_blocks)),
        *link_words,
    ]
    if plan.feed == "digest":
        words += ["--heartbeat-url", f"http://127.0.0.1:{admin_port}/heartbeat"]
    children = [await start_child(f"worker {n}", words) for n in range(plan.workers)]
    try:
        await asyncio.gather(*(child.wait_ready() for child in children))
    except BaseException:
        await stop_all(children)
        raise
    return children


def gateway_words(plan: FleetPlan, worker_urls: Iterable[str], admin_port: int) -> list[str]:
    """The plan's gateway as a command line."""
    return [
        "serve",
        "--worker-urls",
        *worker_urls,
        *("--port", str(plan.port)),
        *("--admin-port", str(admin_port)),
        *("--policy", plan.policy),
        *("--profile", plan.profile),
        *("--time-scale", str(plan.time_scale)),
        *("--block-size", str(plan.block_tokens)),
        *("--auth", "off"),
        "--no-queue-one-tenant",  # policies are compared by all of a trace, however long it waits
        "--decision-header",
    ]


async def stop_all(children: Sequence[Child]) -> None:
    """Those that still run."""
    await asyncio.gather(*(child.stop() for child in children if child.process.returncode is None))
