"""What a second gateway process brings on two cores: requests a second, and CPU a request.

    python benchmarks/processes.py [--processes 2] [--seconds 3] [--rounds 3] [--json]

Real gateways (`trunkline serve --auth off`), one with `--processes 1` and one with more, measured
in turns in the same run, medians over the rounds. Clients and the one worker, which answers at
once, are a process of their own that takes its share of the cores. Every chat has a prompt of its
own, so that template, tokens, block keys, directory and decision are in it; 32 connections that
stay open.
CPU is of all processes of a gateway, its parent's too. The ratio is of requests a second; on a
machine that does other work only CPU a request means anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import uvloop

from gateway import cpu_s
from trunkline.rehearsal import OWN_MODEL
from trunkline.replay.processes import Child, start_child

CONNECTIONS = 32
WARM_UP_S = 0.5
PAGES = {b"/v1/models": b'{"data":[{"id":"m"}]}', b"/health": b"{}"}
ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,'
    b'"completion_tokens":1,"total_tokens":10}}'
)


def message(first: bytes, body: bytes) -> bytes:
    head = b"\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return first + head + body


class Whole(asyncio.Protocol, ABC):
    """Messages with a length, taken whole."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.body = b""
        """Of the message that was taken last."""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # asyncio's signature is wider

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end]).lower()
            _, mark, rest = head.partition(b"content-length:")
            size = end + 4 + (int(rest.partition(b"\r")[0]) if mark else 0)
            if len(self._data) < size:
                return
            self.body = bytes(self._data[end + 4 : size])
            del self._data[:size]
            self.took(head)

    @abstractmethod
    def took(self, head: bytes) -> None:
        """A whole message with this head, in lower case."""


class Worker(Whole):
    def took(self, head: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        found = ANSWER if method == b"post" else PAGES.get(path.partition(b"?")[0])
        first = b"HTTP/1.1 404 Not Found" if found is None else b"HTTP/1.1 200 OK"
        self.transport.write(message(first, found or b"{}"))


@dataclass
class Load:
    requests: list[bytes]
    done: int = 0
    failed: int = 0
    is_over: bool = False
    sent: int = field(default=0)

    def next(self) -> bytes:
        self.sent += 1
        return self.requests[self.sent % len(self.requests)]


class Client(Whole):
    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(self._load.next())

    def took(self, head: bytes) -> None:
        self._load.done += 1
        self._load.failed += not head.startswith(b"http/1.1 200")
        if not self._load.is_over:
            self.transport.write(self._load.next())


def chats(count: int, words: int) -> list[bytes]:
    vocabulary = json.loads((OWN_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    known = [word[1:] for word in vocabulary if word[0] == "\u0120" and word[1:].isalpha()]
    draw = random.Random(3)
    made: list[bytes] = []
    for _ in range(count):
        text = " ".join(draw.choice(known) for _ in range(words))
        asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
        made.append(
            message(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g", json.dumps(asked).encode())
        )
    return made


def family(pid: int) -> list[int]:
    """The process and those that it started."""
    mine = [pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        if parent == pid:
            mine.append(int(path.parent.name))
    return mine


@dataclass(frozen=True, kw_only=True)
class Round:
    requests_per_s: float
    cpu_ms: float
    failed: int


async def measured(child: Child, requests: list[bytes], seconds: float) -> Round:
    loop = asyncio.get_running_loop()
    host, _, port = str(child.ready["url"]).removeprefix("http://").rpartition(":")
    load = Load(requests, sent=random.randrange(len(requests)))
    links = [
        (await loop.create_connection(lambda: Client(load), host, int(port)))[0]
        for _ in range(CONNECTIONS)
    ]
    await asyncio.sleep(WARM_UP_S)
    pids = family(child.process.pid)
    began_s, before, spent_s = loop.time(), load.done, sum(map(cpu_s, pids))
    await asyncio.sleep(seconds)
    took_s, done = loop.time() - began_s, load.done - before
    spent_s = sum(map(cpu_s, pids)) - spent_s
    load.is_over = True
    for link in links:
        link.close()
    await asyncio.sleep(0.1)
    return Round(
        requests_per_s=done / took_s, cpu_ms=spent_s * 1e3 / max(1, done), failed=load.failed
    )


async def played(words: argparse.Namespace) -> dict[int, list[Round]]:
    requests = chats(400, words.words)
    async with AsyncExitStack() as stack:
        server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", 0)
        stack.callback(server.close)
        worker = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        gateways: dict[int, Child] = {}
        for count in (1, words.processes):
            flags = ["--auth", "off", "--port", "0", "--admin-port", "0", "--model-path"]
            flags += [str(OWN_MODEL), "--served-model-name", "m", "--processes", str(count)]
            flags += ["--disable-self-test", "--disable-gray-detection"]
            child = await start_child(f"{count}", ["serve", "--worker-urls", worker, *flags])
            stack.push_async_callback(child.stop)
            await child.wait_ready()
            gateways[count] = child
        await asyncio.sleep(3.0)  # until all have the worker
        found: dict[int, list[Round]] = {count: [] for count in gateways}
        for _ in range(words.rounds):
            for count, child in gateways.items():
                found[count].append(await measured(child, requests, words.seconds))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=1_000, help="of each prompt")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    if words.processes < 2:
        parser.error(f"--processes {words.processes}: one is measured anyway, give 2 or more")
    found = uvloop.run(played(words))
    rows = {
        count: {
            "requests_per_s": round(statistics.median(one.requests_per_s for one in rounds), 1),
            "cpu_ms": round(statistics.median(one.cpu_ms for one in rounds), 3),
            "failed": sum(one.failed for one in rounds),
        }
        for count, rounds in found.items()
    }
    ratio = rows[words.processes]["requests_per_s"] / max(1e-9, rows[1]["requests_per_s"])
    load = os.getloadavg()[0]
    if words.json:
        told = {"processes": rows, "ratio": round(ratio, 2), "cores": os.cpu_count(), "load": load}
        print(json.dumps(told))
    else:
        print(f"{os.cpu_count()} cores, load average {load:.0f}, {words.rounds} rounds")
        for count, row in rows.items():
            print(
                f"{count} processes: {row['requests_per_s']:8.1f} requests/s"
                f" {row['cpu_ms']:7.3f} ms CPU a request, {row['failed']} failed"
            )
        print(f"ratio {ratio:.2f}")
    return int(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
