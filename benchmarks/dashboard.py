"""What the dashboard costs a gateway of 200 workers at 500 choices a second, and how it looks then.

    python benchmarks/dashboard.py [--workers 200] [--rate 500] [--seconds 10] [--json]
    python benchmarks/dashboard.py --browser [--shots FOLDER]     # in Debian's Chromium, too

A real gateway (`trunkline serve --auth off`); workers and clients are one process of ours: 200
paths of one listener that answer as engines do, half of the answers streamed, prompts of 200 to
2,000 token ids in 60 groups with a shared beginning. CPU is the gateway's own (utime + stime),
over spans with no watcher, one, and eight, in turns. Baseline: the spans without a watcher. With
`--browser`: first paint and first figures in ms by the page's own clock, beside the first paint of
a page of one word from no server in the same browser; looks drawn a second, the longest task of the
page's thread, complaints on the console, and whether anything sticks out at 360 and 1,440 px.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

from gateway import cpu_s, resident_kib
from processes import Whole, message
from trunkline.rehearsal import OWN_MODEL
from trunkline.replay.processes import Child, start_child

GROUPS = 60
BLOCK = 16
CONNECTIONS = 96
WATCHERS = (0, 1, 8)
SICK = 3
"""Workers that answer no health probe: there is something to see."""
MS_PER_TOKEN = 0.02
BURST_S = 0.01
SIZES = {"phone": (360, 740), "desk": (1_440, 900)}
VIEWS = ("fleet", "traffic", "prefixes", "decisions")


def shared_tokens(group: int) -> int:
    return 160 + group * 27 // BLOCK * BLOCK


class Workers(Whole):
    """All of them; the first part of the path says which."""

    known: set[tuple[bytes, object]]
    """Groups and whole prompts by worker."""
    paths: Mapping[bytes, bytes]

    def took(self, head: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        worker, _, rest = path[1:].partition(b"/")
        if method == b"post":
            self._answer(worker, self.body)
            return
        is_sick = rest == b"health" and worker[-4:] in (b"w%03d" % n for n in range(SICK))
        found = None if is_sick else self.paths.get(rest.partition(b"?")[0])
        first = b"HTTP/1.1 404 Not Found" if found is None else b"HTTP/1.1 200 OK"
        self.transport.write(message(first, found or b"{}"))

    def _answer(self, worker: bytes, body: bytes) -> None:
        prompt: list[int] = json.loads(body)["prompt"]
        group, whole_prompt = (worker, prompt[0]), (worker, tuple(prompt))
        cached = 0
        if whole_prompt in self.known:
            cached = (len(prompt) - 1) // BLOCK * BLOCK
        elif group in self.known:
            cached = shared_tokens(prompt[0])
        self.known |= {group, whole_prompt}
        later_s = (2.0 + (len(prompt) - cached) * MS_PER_TOKEN) / 1e3
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 1,
            "total_tokens": len(prompt) + 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        told = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
        choice = {"index": 0, "text": "a", "finish_reason": "stop"}
        if b'"stream": true' not in body:
            whole = json.dumps({**told, "choices": [choice], "usage": usage}).encode()
            say = message(b"HTTP/1.1 200 OK", whole)
        else:
            events = [{**told, "choices": [choice]}, {**told, "choices": [], "usage": usage}]
            lines = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
            lines += b"data: [DONE]\n\n"
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(lines), lines)
            say = head + b"transfer-encoding: chunked\r\n\r\n" + chunk
        asyncio.get_running_loop().call_later(later_s, self._say, say)

    def _say(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)


@dataclass(slots=True)
class Load:
    """Who asks, at a steady pace."""

    idle: deque[Asker] = field(default_factory=lambda: deque[Asker]())
    done: int = 0
    failed: int = 0
    behind: int = 0
    """Requests that were due and found no connection idle."""

    async def run(self, rate: float, bodies: list[bytes]) -> None:
        loop = asyncio.get_running_loop()
        began, sent = loop.time(), 0
        while True:
            due = int((loop.time() - began) * rate)
            while sent < due:
                sent += 1
                if self.idle:
                    self.idle.popleft().ask(bodies[sent % len(bodies)])
                else:
                    self.behind += 1
            await asyncio.sleep(BURST_S)


class Asker(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._data = bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # asyncio's signature is wider
        self._load.idle.append(self)

    def ask(self, request: bytes) -> None:
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._data[:end]).lower()
        _, mark, rest = head.partition(b"content-length:")
        size = end + 4 + int(rest.partition(b"\r")[0]) if mark else 0
        if len(self._data) < size or (not mark and not self._data.endswith(b"0\r\n\r\n")):
            return
        self._data.clear()
        self._load.done += 1
        self._load.failed += not head.startswith(b"http/1.1 200")
        self._load.idle.append(self)


def bodies(count: int, draw: random.Random) -> list[bytes]:
    weights = [1.0 / (1 + group) for group in range(GROUPS)]
    made: list[bytes] = []
    for number in range(count):
        [group] = draw.choices(range(GROUPS), weights)
        own = [draw.randrange(1_000, 4_000) for _ in range(draw.randrange(20, 300))]
        asked: dict[str, Any] = {"model": "m", "max_tokens": 1}
        asked["prompt"] = [group, *range(1_000, 1_000 + shared_tokens(group) - 1), *own]
        if number % 2:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(asked).encode()
        made.append(message(b"POST /v1/completions HTTP/1.1\r\nhost: g", body))
    return made


@dataclass(slots=True)
class Watcher:
    """A dashboard that draws nothing."""

    bytes_read: int = 0
    looks: int = 0

    async def watch(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        writer.write(b"GET /dashboard/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        try:
            while data := await reader.read(1 << 20):
                self.bytes_read += len(data)
                self.looks += data.count(b"event: look")
        finally:
            writer.close()


@dataclass(frozen=True, slots=True)
class Span:
    cpu: float
    """Seconds of CPU a second."""
    answers: float
    """A second."""
    looks: float
    """A second and watcher."""
    kib: float
    """A second and watcher."""


async def spanned(child: Child, load: Load, watchers: int, seconds: float) -> Span:
    loop, pid = asyncio.get_running_loop(), child.process.pid
    port = int(str(child.ready["admin_url"]).rpartition(":")[2])
    watching = [Watcher() for _ in range(watchers)]
    tasks = [asyncio.create_task(one.watch(port)) for one in watching]
    await asyncio.sleep(1.0)
    began_s, cpu, done = loop.time(), cpu_s(pid), load.done
    before = [(one.looks, one.bytes_read) for one in watching]
    await asyncio.sleep(seconds)
    took_s = loop.time() - began_s
    spent = (cpu_s(pid) - cpu) / took_s
    answers = (load.done - done) / took_s
    pairs = zip(watching, before, strict=True)
    seen = [(one.looks - looks, one.bytes_read - read) for one, (looks, read) in pairs]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    each = max(1, watchers) * took_s
    looks, read = sum(looks for looks, _ in seen), sum(read for _, read in seen)
    return Span(spent, answers, looks / each, read / each / 1_024)


async def started(stack: AsyncExitStack, words: argparse.Namespace) -> Child:
    """A gateway that has all of its workers."""
    listed = b'{"data":[{"id":"m","max_model_len":8192}]}'
    busy = b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 0.0\n"
    busy += b"vllm:gpu_cache_usage_perc 0.37\n"
    Workers.known, Workers.paths = set(), {b"v1/models": listed, b"health": b"", b"metrics": busy}
    server = await asyncio.get_running_loop().create_server(Workers, "127.0.0.1", 0, backlog=1_024)
    stack.callback(server.close)
    port = server.sockets[0].getsockname()[1]
    named = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "workers"
    named.write_text("".join(f"http://127.0.0.1:{port}/w{n:03d}\n" for n in range(words.workers)))
    flags = ["--auth", "off", "--port", "0", "--admin-port", "0", "--workers-file", str(named)]
    flags += ["--model-path", str(OWN_MODEL), "--served-model-name", "m", "--disable-self-test"]
    flags += ["--disable-gray-detection", "--queue-target-ms", "0", "--log-level", "error"]
    child = await start_child("gateway", ["serve", *flags])
    stack.push_async_callback(child.stop)
    await child.wait_ready()
    return child


async def measured(words: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        child = await started(stack, words)
        await asyncio.sleep(8.0)  # until all have joined
        host, _, port = str(child.ready["url"]).removeprefix("http://").rpartition(":")
        load = Load()
        for _ in range(CONNECTIONS):
            await loop.create_connection(lambda: Asker(load), host, int(port))
        asking = asyncio.create_task(load.run(words.rate, bodies(2_000, random.Random(5))))
        stack.callback(asking.cancel)
        await asyncio.sleep(3.0)
        spans: dict[int, list[Span]] = {count: [] for count in WATCHERS}
        for _ in range(words.rounds):
            for count in WATCHERS:
                spans[count].append(await spanned(child, load, count, words.seconds))
        seen = await looked_at(child, words) if words.browser else {}
        told = {str(count): medians(found) for count, found in spans.items()}
        return {
            "workers": words.workers,
            "rate": words.rate,
            "failed": load.failed,
            "behind": load.behind,
            "resident_kib": resident_kib(child.process.pid),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "spans": told,
            "browser": seen,
        }


def medians(found: list[Span]) -> dict[str, float]:
    return {
        name: round(statistics.median(getattr(one, name) for one in found), 4)
        for name in ("cpu", "answers", "looks", "kib")
    }


# -- in a browser ------------------------------------------------------------------------------

PAINTED = """new Promise((done) => {
  const seen = () => performance.getEntriesByName("first-contentful-paint")[0];
  const look = () => (seen() ? done(seen().startTime) : setTimeout(look, 20));
  look();
})"""
WATCH_TASKS = """
window.longest = 0;
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) window.longest = Math.max(window.longest, one.duration);
}).observe({ type: "longtask", buffered: true });
window.drawn = 0;
addEventListener("DOMContentLoaded", () => {
  new MutationObserver(() => { window.drawn += 1; window.firstAt ??= performance.now(); })
    .observe(document.getElementById("link-text"), { childList: true });
});
"""


async def looked_at(child: Child, words: argparse.Namespace) -> dict[str, Any]:
    import shutil

    from playwright.async_api import async_playwright

    seen: dict[str, Any] = {}
    async with async_playwright() as playing:
        path = shutil.which("chromium")
        browser = await playing.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                context = await browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=cast("Any", scheme)
                )
                page = await context.new_page()
                seen[f"{name} {scheme}"] = await one_visit(page, child, words, f"{name}-{scheme}")
                await context.close()
        await browser.close()
    return seen


async def one_visit(
    page: Any,  # playwright's, imported only where it is used
    child: Child,
    words: argparse.Namespace,
    name: str,
) -> dict[str, Any]:
    complaints: list[str] = []
    page.on("console", lambda m: m.type in ("error", "warning") and complaints.append(m.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto("data:text/html,<p>a page of one word")
    blank = await page.evaluate(PAINTED)
    await page.add_init_script(WATCH_TASKS)
    await page.goto(child.ready["dashboard"])
    await page.wait_for_selector("#view-fleet tbody tr")
    paint, figures = await page.evaluate(PAINTED), await page.evaluate("window.firstAt")
    overflow: list[str] = []
    for view in VIEWS:
        await page.click(f"nav a[href='#{view}']")
        await page.wait_for_selector(f"#view-{view} tbody tr")
        await page.wait_for_timeout(4_500 if view == "traffic" else 1_500)
        width, screen = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        overflow += [view] if width > screen else []
        if words.shots:
            await page.screenshot(path=f"{words.shots}/{view}-{name}.png")
    await page.click("#view-decisions tbody tr")
    await page.wait_for_selector("#detail .candidates tbody tr")
    if words.shots:
        await page.screenshot(path=f"{words.shots}/decision-{name}.png")
    await page.keyboard.press("Escape")
    await page.click("nav a[href='#fleet']")
    before = await page.evaluate("[window.drawn, performance.now()]")
    await page.wait_for_timeout(words.seconds * 1_000)
    after = await page.evaluate("[window.drawn, performance.now(), window.longest]")
    return {
        "first_paint_ms": round(paint),
        "of_one_word_ms": round(blank),
        "first_figures_ms": round(figures),
        "looks_per_s": round((after[0] - before[0]) / (after[1] - before[1]) * 1_000, 2),
        "longest_task_ms": round(after[2]),
        "sticks_out": overflow,
        "complaints": complaints,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--rate", type=float, default=500.0, help="choices a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each span")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--browser", action="store_true", help="look at it in Chromium, too")
    parser.add_argument("--shots", default="", metavar="FOLDER", help="of what is seen there")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    found = uvloop.run(measured(words))
    if words.json:
        print(json.dumps(found))
    else:
        print(f"{found['cores']} cores, load average {found['load_average']:.0f}")
        for count, span in found["spans"].items():
            print(
                f"{count} watchers: {span['cpu'] * 1e3:7.1f} ms CPU a second at"
                f" {span['answers']:.0f} answers/s; {span['looks']:.2f} looks/s and"
                f" {span['kib']:.0f} KiB/s each"
            )
        print(f"{found['failed']} failed, {found['behind']} found no connection idle")
        for name, seen in found["browser"].items():
            print(name, json.dumps(seen))
    complaints = [one for seen in found["browser"].values() for one in seen["complaints"]]
    return int(bool(complaints) or found["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
