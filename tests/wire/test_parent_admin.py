"""The one admin port before processes that are played: who is asked what, and in which order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from trunkline.parent_admin import ParentAdmin, Post
from trunkline.ports.worker import Endpoint

Answers = Callable[[str], tuple[int, Any] | None]
"""`METHOD target` -> status and what JSON holds; None closes the connection."""


def plain(asked: str) -> tuple[int, Any] | None:
    return (404, {}) if asked == "GET /nowhere" else (200, {})


class Played:
    """One process: remembers what it was asked, and may be held up."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        self.asked.append(f"{method} {target}")
        self.bodies.append(await reader.readexactly(size))
        await self.may_answer.wait()
        answer = self.answers(self.asked[-1])
        if answer is not None:
            body = json.dumps(answer[1]).encode()
            first = f"HTTP/1.1 {answer[0]} X\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(first.encode() + body)
        writer.close()


@asynccontextmanager
async def before(*played: Played) -> AsyncIterator[tuple[httpx.AsyncClient, ParentAdmin]]:
    servers = [await asyncio.start_server(one.serve, "127.0.0.1", 0) for one in played]
    posts: list[Post] = []
    for number, server in enumerate(servers):
        port = server.sockets[0].getsockname()[1]
        endpoint = Endpoint(host="127.0.0.1", port=port, host_header="here")
        posts.append(Post(number=number, endpoint=endpoint))
    admin = ParentAdmin(lambda: posts, "token", "", dict)
    transport = httpx.ASGITransport(app=admin)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            yield client, admin
    finally:
        for server in servers:
            server.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def test_a_change_of_the_registry_is_answered_when_all_others_have_taken_it_in() -> None:
    async def test() -> None:
        first, other = Played(plain), Played(plain)
        other.may_answer.clear()
        async with before(first, other) as (client, _):
            answer = asyncio.create_task(client.post("/keys", json={"tenant": "t"}))
            while not other.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert first.asked == ["GET /nowhere", "POST /keys"]
            assert json.loads(first.bodies[1]) == {"tenant": "t"}
            assert other.asked == ["POST /catch-up"]
            assert not answer.done()
            other.may_answer.set()
            assert (await answer).status_code == 200

    run(test)


def test_who_may_not_come_in_is_told_so_and_nothing_is_passed_on() -> None:
    async def test() -> None:
        first, other = Played(lambda _: (401, {"error": {}})), Played(plain)
        async with before(first, other) as (client, _):
            for path in ("/keys", "/workers", "/decisions"):
                assert (await client.post(path, content=b"x" * 4_000)).status_code == 401
        assert set(first.asked) == {"GET /nowhere"}
        assert other.asked == []

    run(test)


def test_a_change_of_workers_goes_to_all_and_to_whoever_comes_later() -> None:
    async def test() -> None:
        first, other, late = Played(plain), Played(plain), Played(plain)
        async with before(first, other, late) as (client, admin):
            posts = admin._posts()  # pyright: ignore[reportPrivateUsage]
            new = posts.pop()  # type: ignore[attr-defined]
            await client.post("/workers", json={"url": "http://w:1"})
            await client.post("/workers/w:1/drain")
            assert first.asked[1::2] == other.asked
            here: list[int] = []
            await admin.bring_up(new, lambda: here.append(len(late.asked)))
            assert late.asked == ["POST /workers", "POST /workers/w:1/drain"]
            assert json.loads(late.bodies[0]) == {"url": "http://w:1"}
            assert here == [2], "it counts as here when it knows"

    run(test)


def test_a_change_that_one_process_refused_or_may_have_missed_is_not_called_done() -> None:
    async def test() -> None:
        def refuses(asked: str) -> tuple[int, Any] | None:
            return plain(asked) if asked.startswith("GET") else (409, {"error": {}})

        def breaks(asked: str) -> tuple[int, Any] | None:
            return plain(asked) if asked.startswith("GET") else None

        async with before(Played(plain), Played(refuses)) as (client, _):
            assert (await client.post("/workers/w:1/drain")).status_code == 409
        async with before(Played(plain), Played(breaks)) as (client, admin):
            missed = await client.post("/workers/w:1/drain")
            assert (missed.status_code, missed.headers["retry-after"]) == (503, "1")
            assert [one.target for one in admin.kept()] == ["/workers/w:1/drain"]
        async with before(Played(breaks), Played(plain)) as (client, _):
            assert (await client.post("/revoke", json={})).status_code == 503, "it may be done"

    run(test)


def test_without_any_process_it_says_so() -> None:
    async def test() -> None:
        async with before() as (client, _):
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/workers")).status_code == 503

    run(test)
