"""No word of a client is ever an address: a canary that is named everywhere hears of nobody."""

from __future__ import annotations

import asyncio
from typing import Any

from scripted import FixedPicker, answering, json_answer, post, running, wire, worker
from test_gateway_tenancy import Lease, tenancy


def bodies(url: str) -> list[dict[str, Any]]:
    hello: Any = [{"role": "user", "content": f"see {url}"}]
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    names = ("api_base", "base_url", "user", "user_config", "model", "kv_transfer_params", "proxy")
    return [
        {"model": "m", "messages": image},
        *({"model": "m", "messages": hello, name: url} for name in names),
        *({"model": "m", "messages": hello, "metadata": {name: url}} for name in names),
        {"model": "m", "messages": hello, "kv_transfer_params": {"remote_host": url}},
    ]


@wire
async def test_a_canary_that_is_named_in_every_field_and_header_hears_of_nobody() -> None:
    heard: list[object] = []

    async def hear(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(writer.get_extra_info("peername"))
        writer.close()

    canary = await asyncio.start_server(hear, "127.0.0.1", 0)
    port = canary.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/x"
    key = "authorization: Bearer alice\r\n"
    named = "".join(
        f"{name}: {url}\r\n"
        for name in (
            "x-worker-url",
            "x-prefiller-host-port",
            "x-forwarded-host",
            "referer",
            "origin",
        )
    )
    async with (
        canary,
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy(Lease())) as gateway,
    ):
        statuses = {
            (await gateway.ask(post(body, extra=key + named))).status for body in bodies(url)
        }
        assert 200 in statuses
        right = post(extra=key)
        for host in (f"127.0.0.1:{port}", f"127.0.0.1:{port}/?", f"127.0.0.1:{port}/#"):
            asked = right.replace(b"host: gateway.test", f"host: {host}".encode(), 1)
            reply = await gateway.ask(asked)
            assert reply.status in (200, 400)
        for target in (f"{url}/v1/chat/completions", f"//127.0.0.1:{port}/v1/chat/completions"):
            asked = right.replace(b"/v1/chat/completions", target.encode(), 1)
            assert (await gateway.ask(asked)).status in (400, 404)
        # Who asks under another Host is still who it is: the decision is by the key alone.
        stranger = post(extra=key.replace("alice", "nobody"))
        foreign = stranger.replace(b"host: gateway.test", f"host: 127.0.0.1:{port}".encode(), 1)
        assert (await gateway.ask(foreign)).status == 401
        told = "".join(str(headers) for _, headers, _ in w.seen)
        assert str(port) not in told
    assert not heard
