"""A thousand open streams and 5,000 events a second through one gateway: L1.

    python benchmarks/streams.py [--seconds 600] [--streams 1000] [--events-per-s 5000] [--json]

`trunkline serve` runs in a process of its own, under its default settings. One other process is the
worker and all the clients: it writes into each event when it was sent, and notes how much later it
comes out of the gateway, whether each event of each stream comes once and in order, and whether
each stream ends as it should. The same load without a gateway says what the load itself costs: what
the gateway adds is the difference of the 99th percentiles. Bars: 0 lost, added p99 below 25 ms,
below 1.5 GiB, and the rate is kept; and the load alone below 25 ms, or the machine is too busy to
tell. 60 s unless told; the goal is 10 min.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

from gateway import cpu_s
from trunkline.control.probe import fetch
from trunkline.replay.counters import percentile
from trunkline.replay.processes import endpoint_of, resident_bytes, start_child

STREAM_EVENTS = 50
PAD = "y" * 90
"""With it an event has about 190 bytes, as engines send them."""

MAX_ADDED_MS = 25.0
MAX_MEMORY_MIB = 1_536.0
MIN_RATE = 0.98
DIRECT_S = 15.0
WARM_UP_S = 5.0
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_PAGES = {b"/health": b"", b"/v1/models": b'{"object":"list","data":[{"id":"m"}]}'}
_TIME = b'"sent_ns":'
_INDEX = b'"event":'
_DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    """The worker's side of one connection: streams an event each `pause_s`."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._seen = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._seen += data
        end = self._seen.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._seen[:end])
        at = head.lower().find(b"content-length: ")
        length = int(head[at + 16 :].partition(b"\r\n")[0]) if at >= 0 else 0
        if len(self._seen) < end + 4 + length:
            return
        del self._seen[: end + 4 + length]
        method, path, _ = head.split(b"\r\n", 1)[0].split(b" ")
        if method == b"POST":
            self._write(_HEAD)
            self._event(0, asyncio.get_running_loop().time())
        else:
            page = _PAGES.get(path)
            status = b"404 Not Found" if page is None else b"200 OK"
            page = page or b""
            self._write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(page), page))

    def _event(self, index: int, due_s: float) -> None:
        if index == STREAM_EVENTS:
            self._write(chunk(_DONE) + b"0\r\n\r\n")
            return
        said = b'data: {"id":"cmpl-1","event":%d,"choices":[{"index":0,"text":"%b"}],"sent_ns":%d}'
        self._write(chunk(said % (index, PAD.encode(), time.monotonic_ns()) + b"\n\n"))
        due_s += self._pause_s  # and not later because this one was late
        asyncio.get_running_loop().call_at(due_s, self._event, index + 1, due_s)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    late_ms: list[float] = field(default_factory=list[float])
    events: int = 0
    streams: int = 0
    lost: int = 0
    reasons: set[str] = field(default_factory=set[str])
    counts: bool = False


class Reader(asyncio.Protocol):
    """The client's side of one connection: one stream after the other."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request = request
        self._tally = tally
        self._rest = b""
        self._next = 0
        self._is_done = False
        self._is_over = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def close(self) -> None:
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_over:
            self._lost(f"closed after {self._next} events: {exc}")

    def data_received(self, data: bytes) -> None:
        now_ns, tally = time.monotonic_ns(), self._tally
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data: {"):
                index = int(line[line.index(_INDEX) + len(_INDEX) :].partition(b",")[0])
                if index != self._next:
                    self._lost(f"event {index} came in place of {self._next}")
                self._next = index + 1
                if tally.counts:
                    tally.events += 1
                    sent_ns = int(line[line.index(_TIME) + len(_TIME) : -1])
                    tally.late_ms.append((now_ns - sent_ns) / 1e6)
            elif line.startswith(b"data: [DONE]"):
                self._is_done = True
            elif line == b"0\r" or (line.startswith(b"HTTP/1.1 ") and line[9:12] != b"200"):
                self._ended(line)

    def _ended(self, line: bytes) -> None:
        if not self._is_done or self._next != STREAM_EVENTS:
            self._lost(f"ended after {self._next} events: {line[:60]!r}")
        self._tally.streams += 1
        self._next, self._is_done = 0, False
        if self._transport is not None and not self._is_over:
            self._transport.write(self._request)

    def _lost(self, why: str) -> None:
        self._tally.lost += 1
        if len(self._tally.reasons) < 5:
            self._tally.reasons.add(why)


def request_of(number: int) -> bytes:
    prompt = [1_000 + number, 7, 8, 9] * 20
    body = json.dumps({"model": "m", "prompt": prompt, "stream": True, "max_tokens": 50}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    tally: Tally
    seconds: float
    cpu_share: float
    memory_mib: float
    """Of the gateway, the most that was seen."""


async def run(port: int, streams: int, pause_s: float, seconds: float, pid: int) -> Measured:
    """So many clients against one port, their streams spread over a pause."""
    loop, tally = asyncio.get_running_loop(), Tally()
    readers: list[Reader] = []
    begin_s = loop.time()
    for number in range(streams):
        await asyncio.sleep(begin_s + 2.0 * number / streams - loop.time())
        reader = Reader(request_of(number), tally)
        await loop.create_connection(lambda r=reader: r, "127.0.0.1", port)
        readers.append(reader)
    await asyncio.sleep(WARM_UP_S)
    tally.counts = True
    began_cpu_s, began_s, memory = cpu_s(pid), loop.time(), 0
    while loop.time() < began_s + seconds:
        await asyncio.sleep(min(1.0, began_s + seconds - loop.time()))
        memory = max(memory, resident_bytes(pid) or 0)
    tally.counts = False
    spent_s = loop.time() - began_s
    cpu_share = (cpu_s(pid) - began_cpu_s) / spent_s
    for reader in readers:
        reader.close()
    await asyncio.sleep(0.5)
    return Measured(
        tally=tally, seconds=spent_s, cpu_share=cpu_share, memory_mib=memory / (1 << 20)
    )


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    pause_s = args.streams / args.events_per_s
    server = await loop.create_server(lambda: Engine(pause_s), "127.0.0.1", 0, backlog=4_096)
    port = int(server.sockets[0].getsockname()[1])
    direct_s = min(DIRECT_S, args.seconds)
    direct = await run(port, args.streams, pause_s, direct_s, os.getpid())
    words = ["serve", "--worker-urls", f"http://127.0.0.1:{port}", "--auth", "off"]
    gateway = await start_child(
        "gateway", [*words, "--port", "0", "--admin-port", "0", "--disable-self-test"]
    )
    try:
        await gateway.wait_ready()
        address = endpoint_of(gateway.ready["url"])
        for _ in range(300):
            if (await fetch(address, "GET", "/readiness", timeout_ms=5e3))[0] == 200:
                break
            await asyncio.sleep(0.1)
        pid = gateway.process.pid
        through = await run(address.port, args.streams, pause_s, args.seconds, pid)
        is_alive = gateway.process.returncode is None
    finally:
        await gateway.stop()
        server.close()
    return report(args, direct, through, is_alive=is_alive)


def report(
    args: argparse.Namespace, direct: Measured, through: Measured, *, is_alive: bool
) -> dict[str, Any]:
    alone, beside = sorted(direct.tally.late_ms), sorted(through.tally.late_ms)
    rate = through.tally.events / through.seconds
    added_ms = percentile(beside, 0.99) - percentile(alone, 0.99)
    lost = through.tally.lost
    missed = [
        name
        for name, is_met in (
            ("lost", lost == 0 and is_alive),
            ("added p99", added_ms < MAX_ADDED_MS),
            ("a quiet machine", percentile(alone, 0.99) < MAX_ADDED_MS),
            ("memory", through.memory_mib < MAX_MEMORY_MIB),
            ("rate", rate >= MIN_RATE * args.events_per_s),
        )
        if not is_met
    ]
    return {
        "benchmark": "streams",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "streams": args.streams,
        "seconds": round(through.seconds, 1),
        "events_per_s": round(rate),
        "streams_complete": through.tally.streams,
        "lost": lost,
        "lost_because": sorted(through.tally.reasons),
        "direct_p50_ms": round(percentile(alone, 0.5), 3),
        "direct_p99_ms": round(percentile(alone, 0.99), 3),
        "through_p50_ms": round(percentile(beside, 0.5), 3),
        "through_p99_ms": round(percentile(beside, 0.99), 3),
        "added_p99_ms": round(added_ms, 3),
        "gateway_cpu_share": round(through.cpu_share, 3),
        "gateway_memory_mib": round(through.memory_mib, 1),
        "missed": missed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="under load; the goal is 600")
    parser.add_argument("--streams", type=int, default=1_000, help="open at a time")
    parser.add_argument("--events-per-s", type=float, default=5_000.0, help="of all together")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    words = parser.parse_args()
    found = uvloop.run(measure(words))
    if words.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:22} {value}")
    return int(bool(found["missed"]))


if __name__ == "__main__":
    raise SystemExit(main())
