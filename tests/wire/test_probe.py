"""The small requests to workers: whatever comes back is an answer, or one of two errors."""

from __future__ import annotations

import asyncio

import pytest

from trunkline.control.probe import MAX_ANSWER_BYTES, fetch
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.ports.worker import Endpoint


def asked(answer: bytes | None, timeout_ms: float = 5_000.0) -> tuple[int, bytes]:
    """What `fetch` makes of a worker that says `answer` and closes; None says nothing."""

    async def scenario() -> tuple[int, bytes]:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                if answer is None:
                    await reader.read()  # until the other end has had enough
                else:
                    writer.write(answer)
                    await writer.drain()
            except ConnectionError:
                pass  # it has seen enough
            finally:
                writer.close()

        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            endpoint = Endpoint(host="127.0.0.1", port=port, host_header="w")
            return await fetch(endpoint, "GET", "/health", timeout_ms=timeout_ms)

    return asyncio.run(scenario())


def fetched_from(host: str, **more: str) -> None:
    endpoint = Endpoint(host=host, port=9, host_header="w", **more)  # pyright: ignore[reportArgumentType]  # texts only
    asyncio.run(fetch(endpoint, "GET", "/health", timeout_ms=5_000.0))


def test_status_and_body_come_back() -> None:
    assert asked(b"HTTP/1.1 201 X\r\ncontent-length: 2\r\n\r\nhi") == (201, b"hi")
    assert asked(b"HTTP/1.1 200 OK\r\n\r\nto the end") == (200, b"to the end")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: Upgrade\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (MAX_ANSWER_BYTES + 1),
    ],
)
def test_what_is_no_answer_is_a_lost_worker(answer: bytes) -> None:
    with pytest.raises(WorkerLost):
        asked(answer)


def test_silence_is_a_timeout() -> None:
    with pytest.raises(WorkerTimeout):
        asked(None, timeout_ms=50.0)


@pytest.mark.parametrize("host", ["a..b", "ü" * 70, "a" * 64 + ".example"])
def test_a_host_that_no_name_system_knows_is_a_lost_worker(host: str) -> None:
    with pytest.raises(WorkerLost):
        fetched_from(host)


def test_a_key_or_path_that_no_header_can_carry_is_a_lost_worker_and_is_never_sent() -> None:
    async def scenario() -> int:
        connections: list[bytes] = []

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(await reader.read())
            writer.close()

        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            for key, path in [("é", ""), ("", "/é"), ("a\r\nx: y", ""), ("", "/\nx: y")]:
                endpoint = Endpoint(
                    host="127.0.0.1", port=port, host_header="w", base_path=path, api_key=key
                )
                with pytest.raises(WorkerLost):
                    await fetch(endpoint, "GET", "/health", timeout_ms=5_000.0)
        return sum(map(len, connections))

    assert asyncio.run(scenario()) == 0
