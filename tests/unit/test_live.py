"""A watcher that is told each second: its place, its end, and one that takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import Message, Scope

from trunkline.gateway.lasting import Lasting
from trunkline.gateway.live import Room

Send = Callable[[Message], Any]


async def one_look() -> bytes | None:
    return b"{}"


class Watcher:
    """A caller on no socket; `takes` says how many frames it fetches before it stops."""

    def __init__(self, takes: int = 1_000) -> None:
        self.frames: list[bytes] = []
        self.is_ended = False
        self.has_one = asyncio.Event()
        self.was_cut = False
        self.left = asyncio.Event()
        self.stop = asyncio.Event()
        self._takes = takes

    def request(self, method: str = "GET") -> Request:
        return Request(self.scope(method))

    def scope(self, method: str = "GET") -> Scope:
        lasting = Lasting(self.stop, lambda: setattr(self, "was_cut", True))
        return {"type": "http", "method": method, "headers": [], "trunkline.lasting": lasting}

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            return
        if message.get("more_body"):
            if len(self.frames) >= self._takes:
                await asyncio.Event().wait()
            self.frames.append(message["body"])
            self.has_one.set()
        else:
            self.is_ended = True


async def watch(room: Room, watcher: Watcher, looks: Callable[[], Any] = one_look) -> None:
    response = room.stream(watcher.request(), looks)
    await response(watcher.scope(), watcher.receive, watcher.send)


def test_a_port_that_closes_ends_its_streams_in_order_and_their_places_are_free() -> None:
    async def scenario() -> None:
        room, watcher = Room(), Watcher()
        watching = asyncio.create_task(watch(room, watcher))
        await watcher.has_one.wait()
        assert room.taken == 1
        watcher.stop.set()
        await watching
        assert watcher.frames == [b"event: look\ndata: {}\n\n"]
        assert (watcher.is_ended, watcher.was_cut, room.taken) == (True, False, 0)

    asyncio.run(scenario())


def test_a_watcher_that_leaves_frees_its_place() -> None:
    async def scenario() -> None:
        room, watcher = Room(), Watcher()
        watching = asyncio.create_task(watch(room, watcher))
        await watcher.has_one.wait()
        watcher.left.set()
        await watching
        assert room.taken == 0

    asyncio.run(scenario())


def test_a_watcher_that_takes_nothing_is_cut_off() -> None:
    async def scenario() -> None:
        room, watcher = Room(slow_s=0.01), Watcher(takes=0)
        await watch(room, watcher)
        assert (watcher.was_cut, watcher.is_ended, room.taken) == (True, False, 0)

    asyncio.run(scenario())


def test_who_may_not_watch_any_more_is_told_that_it_is_over() -> None:
    async def scenario() -> None:
        room, watcher = Room(), Watcher()

        async def nothing() -> bytes | None:
            return None

        await watch(room, watcher, nothing)
        assert watcher.frames == [b"event: over\ndata: {}\n\n"]
        assert (watcher.is_ended, room.taken) == (True, 0)

    asyncio.run(scenario())


def test_beyond_the_bound_nobody_is_let_in_and_a_head_takes_no_place() -> None:
    async def scenario() -> None:
        room, first, second = Room(places=1), Watcher(), Watcher()
        assert room.stream(first.request("HEAD"), one_look).status_code == 200
        watching = asyncio.create_task(watch(room, first))
        await first.has_one.wait()
        refused = room.stream(second.request(), one_look)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        first.stop.set()
        await watching
        assert room.stream(second.request(), one_look).status_code == 200

    asyncio.run(scenario())


def test_who_does_not_see_the_fleet_has_half_of_the_places_and_shuts_no_operator_out() -> None:
    async def scenario() -> None:
        room, tenant, operator = Room(places=2), Watcher(), Watcher()
        response = room.stream(tenant.request(), one_look, sees_fleet=False)
        watching = asyncio.create_task(response(tenant.scope(), tenant.receive, tenant.send))
        await tenant.has_one.wait()
        again = room.stream(tenant.request(), one_look, sees_fleet=False)
        assert again.status_code == 503
        beside = asyncio.create_task(watch(room, operator))
        await operator.has_one.wait()
        for one in (tenant, operator):
            one.stop.set()
        await asyncio.gather(watching, beside)
        assert (room.taken, room.taken_below) == (0, 0)

    asyncio.run(scenario())
