"""Revocation while it matters: open streams of two tenants, a worker that was stopped, real
processes.

What reaches a client is counted byte by byte. A byte counts as come before the acknowledgement only
where it was already in the client's socket when the operator read the receipt.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
import signal
import socket
import struct
import termios
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import WAIT_S, Processes, processes, text_of, until
from tenants import Caller, Tenants, tenants

SLOW = ("--profile", "tiny", "--time-scale", "5")
"""Five milliseconds a token."""
TOKENS = 400
ENDLESS_TOKENS = 4_000
"""Twenty seconds: what is revoked is still running, however long the rest took to begin."""
STREAMS = 6
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as made:
        yield made


@dataclass(slots=True, kw_only=True)
class Stream:
    """One open answer, read on its own socket."""

    link: socket.socket
    prompt: str
    got: bytearray = field(default_factory=bytearray)

    def unread_count(self) -> int:
        """Bytes that have reached this machine's socket and were not read yet."""
        if self.link.fileno() < 0:
            return 0  # read to its end, and closed
        told = fcntl.ioctl(self.link, termios.FIONREAD, bytes(4))
        return struct.unpack("i", told)[0]

    async def read(self, talks: asyncio.Event) -> None:
        """To its end; `talks` is set when its answer has begun."""
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self.link, 1 << 16):
            self.got += data
            if self.has_begun:
                talks.set()
        self.link.close()

    @property
    def is_whole(self) -> bool:
        return b"data: [DONE]" in self.got

    @property
    def has_begun(self) -> bool:
        return self.got.count(b'"finish_reason":null') > 3

    @property
    def token_count(self) -> int:
        """As the usage at its end tells; 0 for a stream that did not come to it."""
        found = re.search(rb'"completion_tokens": ?([0-9]+)', self.got)
        return int(found[1]) if found else 0


async def open_stream(caller: Caller, prompt: str, tokens: int = TOKENS) -> Stream:
    link = socket.create_connection(("127.0.0.1", caller.gateway.process.port))
    link.setblocking(False)
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, **STREAMED})
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {caller.key}\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    await asyncio.get_running_loop().sock_sendall(link, (head + body).encode())
    return Stream(link=link, prompt=prompt)


@dataclass(slots=True, kw_only=True)
class Load:
    """Streams of both tenants, and where those of the first stood when the receipt was read."""

    first: list[Stream]
    other: list[Stream]
    receipt: dict[str, Any]
    limits: list[int]


def prompts_of(verb: str) -> list[str]:
    return [text_of(40, f"{verb} {n}") for n in range(STREAMS)]


async def under_load(held: Tenants, first: Caller, other: Caller, verb: str) -> Load:
    """Open streams, wait until all of them talk, give the order, and read everything to its end."""
    tokens = ENDLESS_TOKENS if verb == "revoke" else TOKENS
    mine = [await open_stream(first, prompt, tokens) for prompt in prompts_of(verb)]
    theirs = [await open_stream(other, prompt) for prompt in prompts_of(verb)]
    body = {"subject": "tenant/acme", "reason": "a test"}
    async with (
        httpx.AsyncClient(base_url=held.gateway.admin_url, timeout=WAIT_S) as operator,
        asyncio.TaskGroup() as group,
    ):
        events = [asyncio.Event() for _ in (*mine, *theirs)]
        for stream, talks in zip((*mine, *theirs), events, strict=True):
            group.create_task(stream.read(talks))
        async with asyncio.timeout(WAIT_S):
            for talks in events:
                await talks.wait()
        answer = await operator.post(f"/{verb}", json=body)
        limits = [len(stream.got) + stream.unread_count() for stream in mine]
        assert answer.status_code == 200, answer.text
    return Load(first=mine, other=theirs, receipt=answer.json(), limits=limits)


def slow_fleet(started: Processes, folder: Path) -> tuple[Tenants, Caller, Caller]:
    simulated = started.workers(2, *SLOW)
    held = tenants(started, [process.url for process in simulated], folder, *SLOW)
    held.wait_leased(2)
    return held, held.caller("acme", "ann"), held.caller("globex", "eve")


def test_not_one_byte_of_a_revoked_tenant_comes_after_the_receipt(
    started: Processes, tmp_path: Path
) -> None:
    held, acme, globex = slow_fleet(started, tmp_path)
    warm(globex, prompts_of("revoke"))
    load = asyncio.run(under_load(held, acme, globex, "revoke"))

    for stream, limit in zip(load.first, load.limits, strict=True):
        assert len(stream.got) == limit, f"{len(stream.got) - limit} bytes after the receipt"
        assert not stream.is_whole
        assert b"access_revoked" in stream.got
    assert load.receipt["acked_count"] == 3
    assert load.receipt["fenced_count"] == 0
    # At the gateway and at a worker; fewer where the fence at the write was faster than the order.
    assert load.receipt["aborted"] <= 2 * STREAMS
    for stream in load.other:
        assert stream.is_whole
        assert stream.token_count == TOKENS, "the other tenant lost nothing"

    refused = acme.answer("hi")
    assert (refused.status, refused.error["code"]) == (403, "access_revoked")
    assert_kept(held, globex, prompts_of("revoke"))
    held.enable("tenant/acme")
    again = until(lambda: _served(acme, load.first[0].prompt), "the tenant is served again")
    assert again.cached == 0, "what was there before is out of reach"
    warm(acme, [load.first[0].prompt])  # and its cache begins anew
    _wait_erased(held, load.receipt["rev"])


def test_an_invalidation_lets_open_streams_end_and_leaves_nothing_to_reuse(
    started: Processes, tmp_path: Path
) -> None:
    held, acme, globex = slow_fleet(started, tmp_path)
    warm(globex, prompts_of("invalidate"))
    load = asyncio.run(under_load(held, acme, globex, "invalidate"))
    for stream in (*load.first, *load.other):
        assert stream.is_whole
        assert stream.token_count == TOKENS
    assert load.receipt["aborted"] == 0
    for stream in load.first:
        assert acme.answer(stream.prompt).cached == 0, "neither what it held nor what it wrote"
    assert_kept(held, globex, prompts_of("invalidate"))


def test_orders_under_load_are_acknowledged_by_all_holders_that_live(
    started: Processes, tmp_path: Path
) -> None:
    """None waits for a lease to run out. `benchmarks/revoke.py` has the bar in ms."""
    held, acme, _ = slow_fleet(started, tmp_path)

    async def orders() -> list[dict[str, Any]]:
        streams = [await open_stream(acme, text_of(40, f"busy {n}")) for n in range(STREAMS)]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.read(asyncio.Event()))
            receipts = [
                await asyncio.to_thread(held.raised, "invalidate", "tenant/globex")
                for _ in range(20)
            ]
        for stream in streams:
            assert stream.is_whole
        return receipts

    counts = [(each["acked_count"], each["fenced_count"]) for each in asyncio.run(orders())]
    assert counts == [(3, 0)] * 20


def test_a_stopped_worker_is_fenced_and_uses_nothing_old_when_it_wakes(
    started: Processes, tmp_path: Path
) -> None:
    """The receipt comes while it is stopped. `benchmarks/revoke.py` has the bar in ms."""
    quick = ("--profile", "tiny")
    simulated = started.workers(2, *quick)
    held = tenants(started, [process.url for process in simulated], tmp_path, *quick)
    held.wait_leased(2)
    acme, globex = held.caller("acme", "ann"), held.caller("globex", "eve")
    prompts = [text_of(40, f"stopped {n}") for n in range(12)]
    warm(acme, prompts)
    stopped, alive = simulated
    held.gateway.wait_held(stopped, 1)
    held.wait_leased(2)  # else there is nobody to fence

    stopped.send(signal.SIGSTOP)
    try:
        receipt = held.raised("revoke", "tenant/acme")
    finally:
        stopped.send(signal.SIGCONT)
    assert receipt["fenced_count"] == 1
    assert receipt["fenced"][0].startswith(stopped.name)
    assert any(name.startswith(alive.name) for name in receipt["acked"])

    held.enable("tenant/acme")
    held.gateway.wait_ready(2)
    for prompt in prompts:
        answer = until(lambda prompt=prompt: _served(acme, prompt), "it is served again")
        assert answer.cached == 0, "not one block of the old epoch is used"
    assert globex.answer(prompts[0]).cached == 0
    held.wait_leased(2)
    fresh = text_of(40, "after it woke")
    until(lambda: acme.answer(fresh).cached > 0, "cache is used again")


def warm(caller: Caller, prompts: Sequence[str]) -> None:
    """Until each of these is met again."""
    for prompt in prompts:
        until(lambda prompt=prompt: caller.answer(prompt).cached > 0, "its cache is used")


def assert_kept(held: Tenants, caller: Caller, prompts: Sequence[str]) -> None:
    """What was warm before is met again with the first request."""
    for prompt in prompts:
        met = held.while_leased(lambda _, prompt=prompt: caller.answer(prompt).cached)
        assert met > 0, "another tenant lost its cache"


def _served(caller: Caller, prompt: str) -> Any:
    answer = caller.answer(prompt)
    return answer if answer.status == 200 else None


def _wait_erased(held: Tenants, rev: int) -> None:
    """The receipts of what was overwritten follow."""

    def is_erased() -> bool:
        told = held.gateway.admin(f"/revocations/{rev}").json()
        done = [row for row in told["erasures"] if row["done"]]
        return sum(row["blocks"] for row in done) >= told["condemned_blocks"] > 0

    until(is_erased, "everything condemned is overwritten, and told")
