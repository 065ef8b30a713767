"""The client port while the gateway starts: every message gets its answer, and the bounds hold."""

from __future__ import annotations

import asyncio

import pytest

from trunkline.config import ListenConfig
from trunkline.gateway import waiting_room
from trunkline.gateway.waiting_room import MAX_HEAD_BYTES, WaitingRoom


async def ask(room: WaitingRoom, raw: bytes) -> bytes:
    host, port = room.sockets()[0].getsockname()[:2]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(raw)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def answers(*raw: bytes) -> list[bytes]:
    async def run() -> list[bytes]:
        room = WaitingRoom(ListenConfig(port=0))
        await room.open()
        try:
            return [await ask(room, one) for one in raw]
        finally:
            room.close()

    return asyncio.run(run())


def test_probes_are_answered_and_all_else_is_to_come_again() -> None:
    paths = [b"/health", b"/readyz", b"/v1/models", b"/v1/completions"]
    said = answers(*(b"GET %b HTTP/1.1\r\nhost: h\r\n\r\n" % path for path in paths))

    assert [one[9:12] for one in said] == [b"200", b"503", b"503", b"503"]
    assert b"starting" in said[1]
    assert b"retry-after: 1" in said[2]
    assert all(b"connection: close" in one for one in said)


def test_a_head_request_gets_no_body_and_a_broken_one_its_refusal() -> None:
    head, broken = answers(b"HEAD /health HTTP/1.1\r\nhost: h\r\n\r\n", b"GET\r\n\r\n")

    assert head.endswith(b"\r\n\r\n")
    assert broken.startswith(b"HTTP/1.1 400")


def test_a_head_without_an_end_is_cut_off() -> None:
    assert answers(b"GET / HTTP/1.1\r\nx: " + b"a" * (2 * MAX_HEAD_BYTES)) == [b""]


def test_visitors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "MAX_VISITORS", 2)

    async def run() -> None:
        room = WaitingRoom(ListenConfig(port=0))
        await room.open()
        host, port = room.sockets()[0].getsockname()[:2]
        staying = [await asyncio.open_connection(host, port) for _ in range(2)]
        await asyncio.sleep(0.01)  # accepted, whoever comes next

        assert await ask(room, b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n") == b""

        room.close()
        assert [await reader.read() for reader, _ in staying] == [b"", b""]

    asyncio.run(run())


def test_who_comes_after_it_has_the_same_sockets_and_loses_no_connection() -> None:
    async def run() -> None:
        room = WaitingRoom(ListenConfig(port=0))
        await room.open()
        after = await asyncio.get_running_loop().create_server(Echo, sock=room.sockets()[0])
        port = after.sockets[0].getsockname()[1]
        room.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b"after"
        writer.close()
        after.close()

    asyncio.run(run())


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"after")
        transport.close()
