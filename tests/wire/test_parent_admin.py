"""The one admin port before processes that are played: who is asked what, and in which order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trunkline import parent_admin
from trunkline.config import Config, ListenConfig
from trunkline.control.changes import Intent
from trunkline.gateway.listener import bind_admin, serve_admin
from trunkline.parent_admin import ParentAdmin, Post
from trunkline.ports.worker import Endpoint
from trunkline.reload_record import Note
from trunkline.seat import (
    CATCH_UP,
    NOTE_RELOAD,
    SOURCE_HEADER,
    TAKE_SETTINGS,
    TOKEN_HEADER,
    FromParent,
)

Answers = Callable[[str], tuple[int, Any] | None]
"""`METHOD target` -> status and what JSON holds; None closes the connection."""


def plain(asked: str) -> tuple[int, Any] | None:
    return (404, {}) if asked == "GET /nowhere" else (200, {})


class Played:
    """One process: remembers what it was asked, and may be held up."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head.lower())
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
async def before(
    *played: Played, admin_key: str = ""
) -> AsyncIterator[tuple[httpx.AsyncClient, ParentAdmin]]:
    servers = [await asyncio.start_server(one.serve, "127.0.0.1", 0) for one in played]
    posts: list[Post] = []
    for number, server in enumerate(servers):
        port = server.sockets[0].getsockname()[1]
        endpoint = Endpoint(host="127.0.0.1", port=port, host_header="here")
        posts.append(Post(number=number, endpoint=endpoint))
    admin = ParentAdmin(lambda: posts, "token", admin_key, dict)
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


async def told(admin: ParentAdmin, request: bytes) -> bytes:
    """What the port answers to these bytes."""
    listener = bind_admin(ListenConfig(admin_port=0))
    port, stop = listener.getsockname()[1], asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_admin(admin, listener, stop))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        stop.set()
    return answer


@pytest.mark.parametrize("path", ["/config", "/workers", "/metrics", "/audit", "/decisions/some"])
def test_a_request_without_any_header_is_passed_on_as_nobodys(path: str) -> None:
    async def test() -> None:
        first = Played(lambda _: (401, {"error": {}}))
        async with before(first, admin_key="the operator's") as (_, admin):
            for method in ("GET", "POST", "HEAD"):
                answer = await told(admin, f"{method} {path} HTTP/1.0\r\n\r\n".encode())
                assert answer.startswith(b"HTTP/1.1 401 ")
        assert len(first.heads) >= 3
        assert not any(b"authorization" in head or b"host" in head for head in first.heads)

    run(test)


def test_what_the_parent_asks_for_itself_is_asked_as_the_operator() -> None:
    async def test() -> None:
        first, late = Played(plain), Played(plain)
        async with before(first, late, admin_key="theirs") as (client, admin):
            posts = admin._posts()  # pyright: ignore[reportPrivateUsage]
            new = posts.pop()  # type: ignore[attr-defined]
            await client.post("/workers/w:1/drain")
            await admin.bring_up(new, lambda: None)
        assert b"authorization" not in first.heads[-1]
        assert b"\r\nauthorization: bearer theirs\r\n" in late.heads[-1]

    run(test)


@pytest.mark.parametrize(
    "path", [CATCH_UP, TAKE_SETTINGS, NOTE_RELOAD, TAKE_SETTINGS.replace("-", "%2D")]
)
def test_what_only_the_parent_may_ask_nobody_else_can_ask_through_it(path: str) -> None:
    async def test() -> None:
        first = Played(plain)
        async with before(first) as (client, admin):
            await client.post(path, content=b"{}")
            await told(admin, f"GET {path} HTTP/1.0\r\n\r\n".encode())
            passed_on = [head for head in first.heads if path.encode().lower() in head]
        assert len(passed_on) == 2
        assert all(b"\r\nx-trunkline-source: " in head for head in passed_on)

        taken: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            taken.append("app")
            await Response(b"", 404)(scope, receive, send)

        async def catch_up() -> None:
            taken.append("catch up")

        async def apply(_config: Config) -> None:
            taken.append("apply")

        async def keep(_note: Note) -> None:
            taken.append("keep")

        seat = httpx.ASGITransport(app=FromParent(app, "token", catch_up, apply, keep))
        headers = {TOKEN_HEADER: "token"}
        async with httpx.AsyncClient(transport=seat, base_url="http://here") as child:
            note = Note(by=Intent(actor="operator"))
            body = msgspec.json.encode(note if path == NOTE_RELOAD else Config())
            for source in ("", "10.0.0.1"):
                answer = await child.post(
                    path, content=body, headers=headers | {SOURCE_HEADER: source}
                )
                assert (answer.status_code, taken.pop()) == (404, "app")
            assert (await child.post(path, content=body, headers=headers)).status_code == 200
            assert taken in (["catch up"], ["apply"], ["keep"])

    run(test)


def test_settings_are_told_to_all_and_to_whoever_comes_later_as_the_parents_own_word() -> None:
    async def test() -> None:
        first, late = Played(plain), Played(plain)
        async with before(first, late) as (_, admin):
            posts = admin._posts()  # pyright: ignore[reportPrivateUsage]
            new = posts.pop()  # type: ignore[attr-defined]
            await admin.take_settings(b"{}", "theirs")
            await admin.bring_up(new, lambda: None)
        for one in (first, late):
            assert one.asked == [f"POST {TAKE_SETTINGS}"]
            assert one.bodies == [b"{}"]
            assert b"x-trunkline-source" not in one.heads[0]

    run(test)


def test_a_process_that_is_slow_is_not_left_with_the_old_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CATCH_UP_MS", "READ_MS"):
        monkeypatch.setattr(parent_admin, name, 1.0)

    async def test() -> None:
        slow = Played(plain)
        slow.may_answer.clear()
        async with before(slow) as (_, admin):
            taking = asyncio.create_task(admin.take_settings(b"{}", ""))
            while not slow.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await asyncio.wait([taking], timeout=0.1)
            assert not taking.done()
            slow.may_answer.set()
            await taking

    run(test)


def test_head_is_a_look_and_changes_nothing() -> None:
    async def test() -> None:
        first, other = Played(lambda _: (200, {"workers": [], "total": 0})), Played(plain)
        other.answers = first.answers
        async with before(first, other) as (client, admin):
            seen = await client.head("/workers")
            assert seen.status_code == 200
            assert (await client.head("/config")).status_code == 200
            assert admin.kept() == []
        assert first.asked == ["GET /workers", "GET /config"]
        assert other.asked == ["GET /workers"], "nobody was to catch up"

    run(test)


def test_a_target_that_is_no_path_is_nobodys() -> None:
    async def test() -> None:
        first = Played(lambda _: (404, {"error": {}}))
        async with before(first) as (_, admin):
            answer = await told(admin, b"GET * HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 404 ")

    run(test)


def test_all_but_the_process_that_made_a_change_catch_up_though_it_ended_since() -> None:
    async def test() -> None:
        first, second, third = Played(plain), Played(plain), Played(plain)
        async with before(first, second, third) as (client, admin):
            posts = admin._posts()  # pyright: ignore[reportPrivateUsage]

            def and_ends(asked: str) -> tuple[int, Any] | None:
                if asked == "POST /keys":
                    posts.pop(0)  # type: ignore[attr-defined]
                return plain(asked)

            first.answers = and_ends
            assert (await client.post("/keys", json={})).status_code == 200
        assert second.asked == third.asked == ["POST /catch-up"]

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


def test_changes_of_so_many_workers_are_kept_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent_admin, "MAX_KEPT_CHANGES", 2)

    async def test() -> None:
        async with before(Played(plain)) as (client, admin):
            for name in ("w:1", "w:2", "w:1", "w:3"):
                await client.post(f"/workers/{name}/drain")
            assert [one.target for one in admin.kept()] == [
                "/workers/w:1/drain",
                "/workers/w:3/drain",
            ]

    run(test)


def test_without_any_process_it_says_so() -> None:
    async def test() -> None:
        async with before() as (client, _):
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/workers")).status_code == 503

    run(test)


def test_an_answer_that_is_too_long_is_an_error_of_that_question_and_no_process_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent_admin, "MAX_ANSWER_BYTES", 1_000)

    def long(asked: str) -> tuple[int, Any] | None:
        return (200, {"workers": [], "more": "x" * 2_000 * ("long" in asked)})

    async def test() -> None:
        async with before(Played(long), Played(plain)) as (client, _):
            for path in ("/workers?long=1", "/revocations?long=1", "/audit?long=1", "/keys?long=1"):
                answer = await client.get(path)
                assert answer.status_code == 502, path
                error = answer.json()["error"]
                assert error["code"] == "answer_too_long"
                assert error["message"].startswith("process 0 answers more than 1000 bytes")
            assert (await client.get("/audit")).status_code == 200

    run(test)


def test_requests_of_one_id_at_several_processes_are_all_told_the_latest_first() -> None:
    def kept(*ats: str) -> Callable[[str], tuple[int, Any] | None]:
        rows = [{"at": at, "request_id": "r"} for at in ats]
        more = {"same_id": rows[1:]} if rows[1:] else {}
        return lambda asked: (200, {**rows[0], **more}) if "/decisions/r" in asked else (404, {})

    async def test() -> None:
        async with before(Played(kept("3", "1")), Played(kept("2"))) as (client, _):
            told = (await client.get("/decisions/r")).json()
            assert [row["at"] for row in (told, *told["same_id"])] == ["3", "2", "1"]
        async with before(Played(plain), Played(kept("2"))) as (client, _):
            assert "same_id" not in (await client.get("/decisions/none")).json()

    run(test)
