"""The server for external processing by itself: clients that leave at the worst moment.

What its messages are is tested in `tests/unit/test_ext_proc_wire.py`; a real Envoy asks in
`test_envoy.py`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet import until
from scripted import wire

from trunkline.adapters.ext_proc_server import ExtProcServer
from trunkline.adapters.ext_proc_wire import METHOD
from trunkline.ports.proxy import Asked, Fields, Headed, Said, Send

grpc: Any = pytest.importorskip("grpc", reason="gRPC is not here; `trunkline[picker]`")


def block(field: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    assert len(content) < 128, "one byte of length"
    return bytes([field << 3 | 2, len(content)]) + content


def header(name: bytes, value: bytes) -> bytes:
    return block(1, block(1, name), block(3, value))


FIELDS = header(b":method", b"GET"), header(b":path", b"/v1/models"), header(b":authority", b"x")
HEAD = block(2, block(1, *FIELDS), b"\x18\x01")


def waits_for_the_loop() -> bool:
    """Whether the server's one thread has asked for something, and waits for it."""
    (serving,) = (one for one in threading.enumerate() if one.name.startswith("ext-proc"))
    assert serving.ident is not None, "a thread that runs"
    frame = sys._current_frames().get(serving.ident)
    return frame is not None and frame.f_code.co_name == "heard"


class Guest:
    """Says what became of it."""

    def __init__(self, stream: Any, over: asyncio.Event) -> None:  # Any: gRPC's
        self.stream = stream
        self.has_begun = False
        self.is_over = over

    async def begin(self, asked: Asked) -> Send | Said:
        self.has_begun = True
        return Said(status=200, put=(), body=b"")

    def headed(self, status: int, fields: Fields) -> Headed | Said:
        raise AssertionError("nothing was sent on")

    def whole(self, body: bytes) -> Said | None:
        raise AssertionError("nothing was sent on")

    def over(self) -> None:
        self.is_over.set()


def test_a_client_that_leaves_before_its_request_begins_holds_no_thread() -> None:
    @wire
    async def scenario() -> None:
        guests: list[Guest] = []
        over, left = asyncio.Event(), threading.Event()

        def make(cut: Callable[[], None]) -> Guest:
            bound: Any = cut  # gRPC's own `cancel`, of the stream that it would end
            guests.append(Guest(bound.__self__, over))
            return guests[-1]

        def messages() -> Iterator[bytes]:
            yield HEAD
            left.wait()

        server = ExtProcServer(host="127.0.0.1", port=0, streams=1, max_body_bytes=9, make=make)
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            asked = channel.stream_stream("/{}/{}".format(*METHOD))(messages())
            # The loop stands still meanwhile: nothing that is asked of it has begun.
            until(lambda: guests, "the stream is open")
            until(waits_for_the_loop, "its thread waits for the loop")
            asked.cancel()
            until(lambda: not guests[0].stream.is_active(), "the server knows that it is not")
            left.set()
            await over.wait()
        assert not guests[0].has_begun
        await asyncio.to_thread(server.stop)

    scenario()


def test_streams_beyond_those_served_are_answered_until_sixteen_of_them_are_open() -> None:
    """What is refused has a stream until it is over: it takes none of those that are served."""
    over, go_on = asyncio.Event(), threading.Event()

    def messages() -> Iterator[bytes]:
        yield HEAD
        go_on.wait()

    def asked(channel: Any) -> Any:  # Any: gRPC's
        return channel.stream_stream("/{}/{}".format(*METHOD))(messages())

    def ask(port: int) -> None:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                kept = [asked(channel) for _ in range(1 + 16)]
                assert all(next(one) for one in kept)
                with pytest.raises(grpc.RpcError) as refused:
                    next(asked(channel))
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        finally:
            go_on.set()

    @wire
    async def scenario() -> None:
        def make(cut: Callable[[], None]) -> Guest:
            return Guest(None, over)

        server = ExtProcServer(host="127.0.0.1", port=0, streams=1, max_body_bytes=9, make=make)
        server.start()
        try:
            await asyncio.to_thread(ask, server.port)
        finally:
            await asyncio.to_thread(server.stop)

    scenario()
