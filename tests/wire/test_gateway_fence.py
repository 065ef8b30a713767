"""Nothing leaves after a revocation: neither what waits in buffers nor what still connects."""

from __future__ import annotations

import asyncio
import socket

from scripted import (
    CHAT,
    SSE_HEAD,
    STREAM,
    FixedPicker,
    Running,
    Served,
    answering,
    event,
    json_answer,
    running,
    until,
    wire,
    worker,
)
from test_gateway_tenancy import CALLERS, Lease, of, revoke, tenancy

from trunkline.config import LimitsConfig
from trunkline.gateway.client import ClientConnection
from trunkline.gateway.contracts import Endpoint
from trunkline.gateway.upstream import WorkerConnection


async def slow_client(gateway: Running, body: object) -> socket.socket:
    """One that has sent its request and fetches nothing yet."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", gateway.front.port))
    await loop.sock_sendall(client, of("alice", body=body))
    return client


def connection_of(gateway: Running) -> ClientConnection:
    return gateway.connections()[0]


async def fetched(client: socket.socket) -> bytes:
    """All that still comes."""
    loop, got = asyncio.get_running_loop(), bytearray()
    try:
        while data := await loop.sock_recv(client, 1 << 16):
            got += data
    except ConnectionError:
        pass  # reset: the rest was thrown away
    finally:
        client.close()
    return bytes(got)


@wire
async def test_a_whole_answer_that_waits_to_be_fetched_is_thrown_away() -> None:
    held = tenancy(Lease())
    limits = LimitsConfig(write_buffer_bytes=1 << 23)
    async with (
        worker(answering(json_answer(b"X" * 6_000_000))) as w,
        running(FixedPicker(w), tenancy=held, limits=limits) as gateway,
    ):
        client = await slow_client(gateway, CHAT)
        await until(lambda: gateway.picker.ends != [])
        waiting = connection_of(gateway).transport.get_write_buffer_size()
        assert waiting > 300_000

        revoke(gateway, held)

        assert len(await fetched(client)) <= 6_001_000 - waiting


@wire
async def test_a_running_answer_that_waits_to_be_fetched_is_thrown_away() -> None:
    held = tenancy(Lease())

    async def script(served: Served) -> None:
        await served.request()
        await served.send(SSE_HEAD)
        try:
            for _ in range(4_000):
                await served.send(event("X" * 4_000))
        except ConnectionError:
            return
        await served.gone()

    async with worker(script) as w, running(FixedPicker(w), tenancy=held) as gateway:
        client = await slow_client(gateway, STREAM)
        await until(lambda: bool(gateway.front._clients) and connection_of(gateway).is_paused)  # pyright: ignore[reportPrivateUsage]
        connection = connection_of(gateway)
        written = connection._written_bytes  # pyright: ignore[reportPrivateUsage]
        waiting = connection.transport.get_write_buffer_size()
        assert waiting > 0

        revoke(gateway, held)

        assert len(await fetched(client)) <= written - waiting
        await gateway.settled()


@wire
async def test_what_still_connects_is_not_sent_under_a_salt_that_was_raised() -> None:
    held = tenancy(Lease())
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=held) as gateway,
    ):
        pool, go_on = gateway.front.pool, asyncio.Event()
        connect = pool.connect

        async def slowly(endpoint: Endpoint) -> WorkerConnection:
            link = await connect(endpoint)
            await go_on.wait()
            return link

        pool.connect = slowly
        asking = asyncio.create_task(gateway.ask(of("alice", body=CHAT)))
        await gateway.picker.begun.wait()
        before = gateway.picker.requests[-1].grant.domain
        table = held.table
        tenant = next(
            s for s in gateway.picker.requests[-1].grant.admission.subjects if s.path == "t1"
        )
        held.swap(table.raised(tenant, 1, rev=1, bars=False))
        gateway.front.fence()
        go_on.set()

        assert (await asking).status == 200
        assert len(w.seen) == 1
        assert gateway.picker.requests[-1].grant.domain != before


@wire
async def test_a_key_that_ended_while_the_body_came_is_refused() -> None:
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy(Lease())) as gateway,
    ):
        raw = of("alice", body=CHAT)
        cut = raw.index(b"\r\n\r\n") + 10
        client = await gateway.client()
        await client.send(raw[:cut])
        await until(lambda: gateway.front.counters.open_clients == 1)
        kept = CALLERS.pop(b"Bearer alice")
        try:
            await client.send(raw[cut:])
            assert (await client.reply()).status == 401
        finally:
            CALLERS[b"Bearer alice"] = kept
            client.close()


@wire
async def test_two_tenants_that_choose_one_name_do_not_meet_at_a_worker() -> None:
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy(Lease())) as gateway,
    ):
        replies = [
            await gateway.ask(of(who, "x-request-id: same\r\n", CHAT)) for who in ("alice", "other")
        ]
        names = [headers["x-request-id"] for _, headers, _ in w.seen]
        assert names == [reply.headers["x-request-id"] for reply in replies]
        assert len(set(names)) == 2
        assert all(name.startswith("same-") for name in names)


@wire
async def test_tenants_are_served_only_paths_of_which_the_operator_knows_the_salt_is_kept() -> None:
    async with (
        worker(answering(json_answer())) as w,
        running(
            FixedPicker(w), tenancy=tenancy(Lease()), tenant_paths=frozenset({"/v1/embeddings"})
        ) as gateway,
    ):
        known = of("alice", body=CHAT).replace(b"/v1/chat/completions", b"/v1/embeddings", 1)
        assert (await gateway.ask(known)).status == 200
        for path in (
            b"/v1/messages/render",
            b"/v1/responses/render",
            b"/v1/embeddings/x",
            b"/v1/responses/r1?x=/v1/embeddings",
        ):
            reply = await gateway.ask(
                of("alice", body=CHAT).replace(b"/v1/chat/completions", path, 1)
            )
            assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert len(w.seen) == 1


@wire
async def test_an_answer_that_waits_is_thrown_away_though_another_tenant_asked_after_it() -> None:
    """As behind a proxy that sends everybody through one connection."""
    held = tenancy(Lease())
    limits = LimitsConfig(write_buffer_bytes=1 << 23)
    async with (
        worker(answering(json_answer(b"X" * 6_000_000))) as w,
        running(FixedPicker(w), tenancy=held, limits=limits) as gateway,
    ):
        client = await slow_client(gateway, CHAT)
        await until(lambda: len(gateway.picker.ends) == 1)
        await asyncio.get_running_loop().sock_sendall(client, of("other", body=CHAT))
        await until(lambda: len(gateway.picker.requests) == 2)
        waiting = connection_of(gateway).transport.get_write_buffer_size()
        assert waiting > 300_000

        revoke(gateway, held)

        assert len(await fetched(client)) <= 12_002_000 - waiting
