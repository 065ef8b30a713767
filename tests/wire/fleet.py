"""Fleets of real processes for system tests: simulated workers, a gateway, and what they said.

Each process listens on loopback, on a port that the kernel picks, and is ended by its pid. Tests
talk to them over HTTP only, as users do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
from scripted import Script, ScriptedWorker, Served, json_answer

from halting import halt
from loopback import free_port
from trunkline.adapters.tokenizer import load_tokenizer
from trunkline.ports.tokenizer import Tokenizer

SOURCE = Path(__file__).resolve().parents[2] / "src"
MODEL_FOLDER = SOURCE / "trunkline" / "worker" / "model"
START_S = 120.0
STOP_S = 30.0
TINY = ("--profile", "tiny")
KEY = "sk-clients-0123456789"
"""Of one tenant, for gateways that ask their clients for one."""
MODEL = "trunkline-sim"
WAIT_S = 60.0
"""Generous, as other processes share this machine: only a test that fails waits so long."""
QUICK = (
    "--health-check-interval-secs", "0.2", "--health-check-timeout-secs", "5",
    "--load-interval-secs", "0.2", "--connect-timeout-ms", "10000", "--decision-header",
)  # fmt: skip
"""Gateway flags under which things are noticed within a test's patience. A probe may take long, as
those on a loaded machine do: of a worker that is gone, a refused connection tells.
"""


def until(condition: Callable[[], Any], what: str, limit_s: float = WAIT_S) -> Any:
    """Wait for what can only be looked at from outside; its value."""
    ends_at = time.monotonic() + limit_s
    while not (seen := condition()):
        assert time.monotonic() < ends_at, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.02)
    return seen


@dataclass(slots=True)
class Process:
    """One child with its ready line; `log` reads what it wrote to stderr so far."""

    words: tuple[str, ...]
    child: subprocess.Popen[bytes]
    said: IO[bytes]
    ready: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def url(self) -> str:
        return self.ready["url"]

    @property
    def name(self) -> str:
        """As a gateway calls it."""
        return self.url.removeprefix("http://")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def log(self) -> str:
        self.said.seek(0)
        return self.said.read().decode("utf-8", "replace")

    def wait_ready(self) -> None:
        assert self.child.stdout is not None
        waiting = select.poll()  # and not select(): many descriptors may be open
        waiting.register(self.child.stdout, select.POLLIN)
        has_line = waiting.poll(START_S * 1_000.0)
        line = self.child.stdout.readline() if has_line else b""
        assert line, f"{' '.join(self.words)} did not start: {self.log()[-2_000:]}"
        self.ready = json.loads(line)

    def send(self, number: signal.Signals) -> None:
        if number is signal.SIGSTOP:
            halt(self.child.pid)
        else:
            self.child.send_signal(number)

    def kill(self) -> None:
        """As abrupt as a crash."""
        self.child.kill()
        self.child.wait(STOP_S)

    def begin_stop(self) -> None:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.terminate()

    def stop(self) -> int:
        """End it in order; its exit code."""
        self.begin_stop()
        if self.child.poll() is None:
            try:
                self.child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        return self.child.returncode


class Processes:
    """Starts children and ends every one of them."""

    def __init__(self) -> None:
        self._all: list[Process] = []

    def begin(self, *words: str, under: Sequence[str] = ()) -> Process:
        """Start without waiting, so that several can start at once. `under`: what runs it, in the
        same process in the end.
        """
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TRUNKLINE_") or name == "TRUNKLINE_PURE"
        }
        child = subprocess.Popen(
            [*under, sys.executable, "-m", "trunkline", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
            start_new_session=True,
        )
        process = Process(words, child, said)
        self._all.append(process)
        return process

    def workers(self, count: int, *flags: str) -> list[Process]:
        """On ports that stay theirs when they are killed, for their next lives."""
        ports = [() if "--port" in flags else ("--port", str(free_port())) for _ in range(count)]
        started = [self.begin("worker", *port, *flags) for port in ports]
        for process in started:
            process.wait_ready()
        return started

    def worker(self, *flags: str) -> Process:
        return self.workers(1, *flags)[0]

    def gateway(self, urls: Sequence[str], *flags: str, ready: int | None = None) -> Gateway:
        """A gateway of which `ready` workers (all, unless told) may be chosen. Of one tenant,
        unless the flags say who may come.
        """
        if "--admin-port" not in flags:
            flags = (*flags, "--admin-port", "0")
        if "--no-disable-self-test" not in flags:
            flags = (*flags, "--disable-self-test")  # most tests count what workers are sent
        if "--no-disable-gray-detection" not in flags:
            flags = (*flags, "--disable-gray-detection")  # a loaded machine is silent at times
        if "--queue-target-ms" not in flags:
            flags = (*flags, "--queue-target-ms", "0")  # and sheds
        if not {"--api-key", "--auth", "--state-dir"} & set(flags):
            flags = (*flags, "--auth", "off")
        named = ("--worker-urls", *urls) if urls else ()
        process = self.begin("serve", *named, "--port", "0", *QUICK, *flags)
        process.wait_ready()
        gateway = Gateway(process)
        gateway.wait_ready(len(urls) if ready is None else ready)
        return gateway

    def forget(self, ended: Process) -> None:
        """Of one that has ended: what was kept of it."""
        assert ended.child.poll() is not None
        self._all.remove(ended)
        _close(ended)

    def end(self) -> None:
        for process in self._all:
            process.begin_stop()
        for process in self._all:
            process.stop()
            _close(process)


def _close(ended: Process) -> None:
    ended.said.close()
    if ended.child.stdout is not None:
        ended.child.stdout.close()


@contextlib.contextmanager
def processes() -> Iterator[Processes]:
    started = Processes()
    try:
        yield started
    finally:
        started.end()


class Gateway:
    """A gateway as its clients and operators see it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.url: str = process.ready["url"]
        self.admin_url: str = process.ready["admin_url"]
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S)
        self._admin = httpx.Client(base_url=self.admin_url, timeout=WAIT_S)

    def chat(self, content: str, headers: dict[str, str] | None = None, **more: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **more}, headers)

    def complete(self, prompt: Any, headers: dict[str, str] | None = None, **more: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **more}, headers)

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Answer:
        body = {"max_tokens": 2, **body} if path != "/v1/embeddings" else body
        return Answer(self.client.post(path, json=body, headers=headers))

    def admin(self, path: str, method: str = "GET", **more: Any) -> httpx.Response:
        return self._admin.request(method, path, **more)

    def workers(self) -> dict[str, dict[str, Any]]:
        return {row["worker"]: row for row in self.admin("/workers").json()["workers"]}

    def worker(self, process: Process) -> dict[str, Any]:
        return self.workers()[process.name]

    def rank(self, process: Process, index: int = 0) -> dict[str, Any]:
        return self.worker(process)["detail"]["ranks"][index]

    def wait_ready(self, count: int, limit_s: float = WAIT_S) -> None:
        """Until so many workers may be chosen and know what they hold."""

        def is_ready() -> bool:
            rows = [row for row in self.workers().values() if row["state"] == "ready"]
            states = [rank["feed_state"] for row in rows for rank in row["detail"]["ranks"]]
            return len(rows) >= count and all(state in ("live", "none") for state in states)

        until(is_ready, f"{count} workers are ready", limit_s)

    def wait_quiet(self) -> None:
        """Until nothing is in flight."""

        def is_quiet() -> bool:
            return all(row["requests_active"] == 0 for row in self.workers().values())

        until(is_quiet, "no request is in flight")

    def wait_held(self, process: Process, blocks: int, index: int = 0) -> None:
        """Until events have told of so many blocks."""
        until(
            lambda: self.rank(process, index)["held_blocks"] >= blocks,
            f"{process.name} holds {blocks} blocks",
        )

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the series that have these labels; 0 where there is none."""
        total = 0.0
        for line in self.admin("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            family, _, rest = series.partition("{")
            if family == f"trunkline_{name}" and all(
                f'{label}="{wanted}"' in rest for label, wanted in labels.items()
            ):
                total += float(value)
        return total


class Answer:
    """One answer with the decision behind it."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.status = response.status_code

    @property
    def json(self) -> Any:  # whatever the answer holds
        return self.response.json()

    @property
    def decision(self) -> dict[str, str]:
        """The words of `x-trunkline-decision`."""
        header = self.response.headers["x-trunkline-decision"]
        return dict(word.split("=", 1) for word in header.split("; "))

    @property
    def worker(self) -> str:
        return self.decision["worker"]

    @property
    def predicted(self) -> int:
        return int(self.decision["matched"].partition("/")[0])

    @property
    def cached(self) -> int:
        return self.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def prompt_tokens(self) -> int:
        return self.json["usage"]["prompt_tokens"]

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


def own_tokenizer() -> Tokenizer:
    """That of the simulated model."""
    return load_tokenizer(MODEL_FOLDER)


_WORDS = [
    *("river", "lantern", "copper", "window", "bridge", "harvest", "marble", "signal"),
    *("orchard", "velvet", "thunder", "canyon", "pepper", "anchor", "meadow", "pocket"),
]


def text_of(words: int, seed: object) -> str:
    """That many words, always the same for a seed."""
    dice = random.Random(str(seed))
    return " ".join(dice.choice(_WORDS) for _ in range(words))


async def at_once(
    gateway: Gateway,
    bodies: Sequence[dict[str, Any]],
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
) -> list[Answer]:
    """All bodies at the same time; their answers in the same order."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=gateway.url, timeout=WAIT_S, limits=limits, headers=headers
    ) as client:
        posted = (client.post(path, json=body) for body in bodies)
        return [Answer(response) for response in await asyncio.gather(*posted)]


def user(content: str, **more: Any) -> dict[str, Any]:
    """The body of a chat with one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def stream_usage(response: httpx.Response) -> dict[str, Any]:
    """The usage at the end of a stream."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return next(u for line in reversed(lines) if (u := json.loads(line).get("usage")))


Handler = Callable[[str, dict[str, str], bytes], Awaitable[bytes]]


def engine_script(handler: Handler, pages: dict[str, bytes] | None = None) -> Script:
    """An engine for `scripted.worker`: answers what a gateway asks, and leaves POSTs to `handler`.

    Whatever is not in `pages` is a 404.
    """
    known = {"/v1/models": b'{"data":[{"id":"m"}]}', "/health": b"", **(pages or {})}

    async def script(served: Served) -> None:
        while True:
            first, headers, body = await served.request()
            method, path, _ = first.split(" ")
            if method == "POST":
                await served.send(await handler(path, headers, body))
            elif path in known:
                await served.send(json_answer(known[path]))
            else:
                await served.send(json_answer(b"{}", "404 Not Found"))

    return script


def url_of(worker: ScriptedWorker) -> str:
    return f"http://127.0.0.1:{worker.endpoint.port}"
